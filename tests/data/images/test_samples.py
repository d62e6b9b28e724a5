"""Samples with images are cut where no image is split, whatever the layout of their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from data.chat.messages import Said
from data.chat.prompts import Prompts
from data.errors import DataError
from data.images.image import Image
from data.images.marks import mark_of
from data.images.pictures import Pictures
from data.sample_set import IGNORED, Sample, documents
from data.settings import Wanted
from data.tokenized.tokenize import encode_question
from data.tokenized.tokenizer import load_tokenizer
from tests.data.images.conftest import LoadSeen
from tests.data.images.dialogues import TWO, A, B, C, check, check_places, image_token, talk


def test_a_long_dialogue_is_cut_before_the_image_that_does_not_fit(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    (whole,) = load_seen([TWO]).samples
    check(whole, token)
    first, second = whole["images"]
    last = numpy.flatnonzero(numpy.asarray(whole["labels"]) != IGNORED)[-1]
    for limit in (second.begin + 2, second.begin, int(last)):
        dataset = load_seen([TWO], limit=limit)
        (sample,) = dataset.samples
        check(sample, token)
        assert sample["images"] == [first]
        assert len(sample["input_ids"]) < second.begin
        assert dataset.total.cut == dataset.total.cut_at_turn == 1


@pytest.mark.parametrize("within", [True, False])
def test_an_image_before_the_first_answer_has_to_fit(within: bool, vision: Path, load_seen: LoadSeen) -> None:
    (whole,) = load_seen([TWO]).samples
    first = whole["images"][0]
    with pytest.raises(DataError, match=r"record 1: an image .* max_seq_len, \d+, by a larger limit or by fewer pix"):
        load_seen([TWO], limit=first.begin + 2 if within else first.tokens - 1)


def test_the_oldest_turns_go_with_their_images(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    (whole,) = load_seen([TWO]).samples
    (sample,) = load_seen([TWO], limit=len(whole["input_ids"]) - 1, truncate="oldest").samples
    check(sample, token)
    assert [image[:5] for image in sample["images"]] == [whole["images"][1][:5]]
    with pytest.raises(DataError, match="truncate: refuse"):
        load_seen([TWO], limit=len(whole["input_ids"]) - 1, truncate="refuse")


def test_a_long_text_is_split_beside_its_images(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    record = {"images": [A, B, C], "text": "Once there was <image> and then <image> and at last <image>, the end."}
    (whole,) = load_seen([record]).samples
    check(whole, token)
    trained = numpy.asarray(whole["labels"]) != IGNORED
    assert (trained == (numpy.asarray(whole["input_ids"]) != token)).all()
    longest = max(image.tokens for image in whole["images"])
    for limit in range(longest, len(whole["input_ids"]), 3):
        pieces = list(load_seen([record], limit=limit).samples)
        assert max(len(piece["input_ids"]) for piece in pieces) <= limit
        for piece in pieces:
            check(piece, token)
        if limit > longest + 5:  # else some pieces are an image alone, of which nothing is trained
            assert sum(len(piece.get("images", [])) for piece in pieces) == 3
    with pytest.raises(DataError, match=f"an image of {longest} tokens; expected it within max_seq_len"):
        load_seen([record], limit=longest - 1)


def test_pairs_have_the_images_of_both_documents(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    pair = {"images": [A], "prompt": "What is <image>?", "chosen": "A red box.", "rejected": "No idea, sorry."}
    dataset = load_seen([pair, pair | {"images": [B]}], preference=Wanted("pairs"))
    for sample, path in zip(dataset.samples, ("a.png", "b.png"), strict=True):
        check(sample, token)
        assert [Path(image.path).name for image in sample["images"]] == [path, path]
        for document in documents(sample):
            check(document, token)
            assert len(document["images"]) == 1
    assert dataset.image_tokens.tolist() == [2 * each["images"][0].tokens for each in dataset.samples]
    with pytest.raises(DataError, match=r"chosen|an image before the end of the first answer ends at token"):
        load_seen([pair], preference=Wanted("pairs"), limit=dataset.samples[0]["images"][0].begin + 2)


def test_the_prompts_of_a_pair_may_differ_in_an_image_alone(vision: Path, load_seen: LoadSeen) -> None:
    model, token = "llava-tiny", image_token(vision, "llava-tiny")
    chosen, rejected, other = (talk(("What?", "A box."))["messages"] for _ in "ABA")
    for messages, path in ((chosen, A), (rejected, B), (other, A)):
        messages[0]["content"] = [{"type": "image", "image": path}, {"type": "text", "text": "What?"}]
    pairs = [{"chosen": chosen, "rejected": rejected}, {"chosen": chosen, "rejected": other}]
    dataset = load_seen(pairs, model, preference=Wanted("pairs"))
    assert dataset.total.equal == 1
    (sample,) = dataset.samples
    first, second = documents(sample)
    check(sample, token)
    assert list(first["input_ids"]) == list(second["input_ids"])
    assert [Path(each["images"][0].path).name for each in (first, second)] == ["a.png", "b.png"]


def test_an_image_in_an_answer_is_not_trained_and_the_words_around_it_are(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    (sample,) = load_seen([talk(("Draw!", "Here: <image> So."), images=[A])]).samples
    check(sample, token)
    labels = numpy.asarray(sample["labels"])
    image = sample["images"][0]
    around = labels[image.begin - 1], labels[image.begin + image.tokens]
    assert around == (IGNORED, IGNORED), "what the template writes around it"
    before, behind = labels[: image.begin - 1], labels[image.begin + image.tokens + 1 :]
    assert (before[-3:] != IGNORED).all() and (behind[:3] != IGNORED).all()
    everything = Prompts("chat_template", mask="all")
    (whole,) = load_seen([talk(("Draw!", "Here: <image> So."), images=[A])], prompt_format=everything).samples
    check(whole, token)


def test_the_plain_format_has_the_processors_word_where_the_image_is(vision: Path, load_seen: LoadSeen) -> None:
    token = image_token(vision)
    (sample,) = load_seen([TWO], prompt_format="plain").samples
    check(sample, token)
    assert len(sample["images"]) == 2
    with pytest.raises(DataError, match="gdgpt has no place for images"):
        load_seen([TWO], prompt_format="gdgpt")


def test_documents_of_a_sample_have_their_own_images() -> None:
    images = [Image("a", "", 1, 1, 2, 1), Image("b", "", 1, 1, 1, 4), Image("c", "", 1, 1, 1, 6)]
    sample: Sample = {"input_ids": list(range(8)), "labels": list(range(8)), "first": 4, "images": images}
    first, second = documents(sample)
    assert first["images"] == images[:1]
    assert [image.begin for image in second["images"]] == [0, 2]
    assert "images" not in documents({"input_ids": [1], "labels": [1]})[0]


@pytest.mark.parametrize(
    "record",
    [
        {"image": A, "question": "<image>What?", "answer": "This."},
        {"image": A, "instruction": "What?", "input": "<image>", "output": "This."},
        {"image": A, "prompt": "<image>What?", "completion": "This.", "system": "Be brief."},
        {"image": A, "context": "Look: <image>", "question": "What?", "answer": "This."},
        {"image": A, "type": "conversation", "rounds": [["ask", "<image>"], ["ask", "What?"], ["ans", "This."]]},
        {"image": A, "segments": [{"text": "<image>What?", "label": False}, {"text": "This.", "label": True}]},
    ],
)
@pytest.mark.parametrize("prompt_format", ["chat_template", "plain"])
def test_every_layout_may_have_images(
    record: dict[str, Any], prompt_format: str, vision: Path, load_seen: LoadSeen
) -> None:
    (sample,) = load_seen([record], prompt_format=prompt_format).samples
    check(sample, image_token(vision))
    assert [Path(image.path).name for image in sample["images"]] == ["a.png"]


@pytest.mark.parametrize("prompt_format", ["chat_template", "plain"])
def test_texts_and_dialogues_of_classes_may_have_images(prompt_format: str, vision: Path, load_seen: LoadSeen) -> None:
    question = {"messages": [{"role": "user", "content": "<image>?"}], "images": [A], "label": 1}
    texts = [{"text": f"{word} <image>", "images": [A], "label": number} for number, word in enumerate("abc")]
    for records in ([question], texts):
        for sample in load_seen(records, prompt_format=prompt_format, preference=Wanted("classes")).samples:
            check_places(sample, image_token(vision))
            assert len(sample["images"]) == 1
    with pytest.raises(DataError, match="an image before the end of the first answer ends at token"):
        load_seen([question], preference=Wanted("classes"), limit=8)


@pytest.mark.parametrize("model", ["llava-tiny", "qwen2_5_vl-tiny", "gemma3-tiny"])
@pytest.mark.parametrize("prompt_format", ["chat_template", "plain"])
def test_a_question_is_asked_as_it_was_trained(
    prompt_format: str, model: str, tmp_path: Path, vision: Path, load_seen: LoadSeen
) -> None:
    (sample,) = load_seen([TWO], model, prompt_format=prompt_format).samples
    said = [
        Said("user", f"{mark_of(0)}One?"),
        Said("assistant", "First.", supervised=True),
        Said("user", f"{mark_of(1)}Two?"),
    ]
    pictures = Pictures(vision / model)
    images = [pictures.look(tmp_path / "data" / path, tmp_path) for path in (A, B)]
    ids = encode_question(said, load_tokenizer(vision / model), prompt_format, None, images, pictures)
    assert ids == list(sample["input_ids"])[: len(ids)]
    labels = numpy.asarray(sample["labels"])
    assert (labels[len(ids) + 1 :] != IGNORED).any() and (labels[: len(ids)] != IGNORED).any()


def test_ids_that_are_ready_made_have_no_place_for_images(load_seen: LoadSeen, vision: Path) -> None:
    with pytest.raises(DataError, match="record 1: the tokens hold 1 in whose place features of images go, and its im"):
        load_seen([{"input_ids": [7, image_token(vision), 8], "labels": [7, image_token(vision), 8]}])
