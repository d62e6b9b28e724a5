"""Samples with images are cut, kept and found again with these; samples without are what they were."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import pyarrow
import pytest
from pyarrow import ipc, parquet

from data.chat.messages import Said
from data.chat.prompts import Prompts
from data.errors import DataError
from data.images.beside_samples import IMAGES
from data.images.image import Image
from data.images.marks import mark_of
from data.images.pictures import Pictures
from data.records import raw_records
from data.sample_set import IGNORED, InMemory, Sample, documents
from data.settings import Pixels, Wanted
from data.tokenized.parallel import _chunks
from data.tokenized.recipe import DataFile, Recipe
from data.tokenized.sample_file import INDEX_FILE, SAMPLES
from data.tokenized.tokenize import encode_question
from data.tokenized.tokenizer import load_tokenizer
from options.streamed_data.stream import open_stream
from tests.data.images.conftest import LoadSeen

TEXT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello!"}]}


def talk(*turns: tuple[str, str], images: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A dialogue of questions and answers."""
    messages = []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages, **({"images": images} if images else {}), **fields}


A, B, C = (f"images/{name}.png" for name in "abc")
TWO = talk(("<image>One?", "First."), ("<image>Two?", "Second."), images=[A, B])


def image_token(vision: Path, model: str = "qwen2_5_vl-tiny") -> int:
    return int(json.loads((vision / model / "config.json").read_text())["image_token_id"])


def check(sample: Sample, token: int) -> None:
    """As `check_places`, and no token of an image is trained."""
    check_places(sample, token)
    assert (numpy.asarray(sample["labels"])[numpy.asarray(sample["input_ids"]) == token] == IGNORED).all()


def check_places(sample: Sample, token: int) -> None:
    """Each image has its tokens from `begin` on, in order, and no other token is one."""
    places = numpy.flatnonzero(numpy.asarray(sample["input_ids"]) == token).tolist()
    for image in sample.get("images", []):
        assert image.begin == places[0]
        places = places[image.tokens :]
    assert not places


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


def test_samples_without_images_are_the_same_bytes_beside_some_with_images(load_seen: LoadSeen) -> None:
    alone = load_seen([TEXT, TEXT])
    assert not alone.has_images and alone.image_tokens.tolist() == [0, 0]
    assert not (alone.folder / IMAGES).exists()
    mixed = load_seen([TEXT, TWO, TEXT])
    assert mixed.image_tokens.tolist() == [0, sum(image.tokens for image in mixed.samples[1]["images"]), 0]
    assert alone.digests.tolist() == mixed.digests[[0, 2]].tolist()
    ids = (alone.folder / SAMPLES).read_bytes()
    assert (mixed.folder / SAMPLES).read_bytes().startswith(ids[: len(ids) // 2])
    assert (mixed.folder / INDEX_FILE).stat().st_size == (alone.folder / INDEX_FILE).stat().st_size // 2 * 3


def test_samples_are_chosen_and_sent_to_processes_with_their_images(load_seen: LoadSeen) -> None:
    dataset = load_seen([TEXT, TWO, talk(("<image>", "Red."), images=[C])])
    chosen = dataset.select([2, 0, 2, 1])
    names = [[Path(image.path).stem for image in sample.get("images", [])] for sample in chosen.samples]
    assert names == [["c"], [], ["c"], ["a", "b"]]
    assert chosen.image_tokens.tolist() == dataset.image_tokens[[2, 0, 2, 1]].tolist()
    again = pickle.loads(pickle.dumps(chosen.samples))
    assert [sample.get("images") for sample in again] == [sample.get("images") for sample in chosen.samples]
    assert dataset.samples[-2].get("images") == dataset.samples[1]["images"]
    memory = InMemory([dict(sample) for sample in chosen.samples])  # type: ignore[misc]
    assert memory.image_tokens.tolist() == chosen.image_tokens.tolist()


def test_another_image_of_the_same_size_is_another_sample(tmp_path: Path, load_seen: LoadSeen) -> None:
    record = talk(("<image>", "Red."), images=[A])
    before = load_seen([record])
    file = tmp_path / "data" / A
    with PIL.Image.open(file) as picture:
        PIL.Image.new("RGB", picture.size, "blue").save(file)
    shutil.rmtree(tmp_path / "cache" / "datasets")
    after = load_seen([record])
    assert list(before.samples[0]["input_ids"]) == list(after.samples[0]["input_ids"])
    assert before.fingerprint() != after.fingerprint()


def test_data_that_were_moved_have_their_images_where_they_are_now(tmp_path: Path, load_seen: LoadSeen) -> None:
    before = load_seen([TWO])
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    moved = load_seen([], name="../elsewhere/records.json")
    assert moved.folder == before.folder, "nothing was tokenized anew"
    paths = [Path(image.path) for image in moved.samples[0]["images"]]
    assert [path.parent.parent.name for path in paths] == ["elsewhere"] * 2
    assert all(path.is_file() for path in paths)


def test_images_in_records_are_kept_once_as_they_are(tmp_path: Path, vision: Path, load_seen: LoadSeen) -> None:
    content = {name: (vision / "qwen2_5_vl-tiny" / "images" / f"{name}.png").read_bytes() for name in "ab"}
    uri = f"data:image/png;base64,{base64.b64encode(content['a']).decode()}"
    part = {"type": "image_url", "image_url": {"url": uri}}
    answer = TEXT["messages"][1]
    rows = [
        {"messages": [{"role": "user", "content": "<image><image>?"}, answer], "images": list(content.values())},
        {"messages": [{"role": "user", "content": "Hello?"}, answer], "images": None},
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    dataset = load_seen([], name="a.parquet")
    other = load_seen([{"messages": [{"role": "user", "content": [part]}, answer]}])
    kept = [Path(image.path) for image in dataset.samples[0]["images"]]
    assert [path.read_bytes() for path in kept] == list(content.values())
    assert other.samples[0]["images"][0].path == str(kept[0])
    assert len([path for path in (tmp_path / "cache" / "images").rglob("*") if path.is_file()]) == 2
    assert dataset.image_tokens[1] == 0

    shutil.rmtree(tmp_path / "cache" / "images")
    again = load_seen([], name="a.parquet")
    assert [Path(image.path).read_bytes() for image in again.samples[0]["images"]] == list(content.values())
    assert again.folder == dataset.folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_few_rows_with_large_images_are_in_memory_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    rows_of = raw_records._rows_of

    def counted(batch: Any) -> Any:
        made.append(batch.num_rows)
        return rows_of(batch)

    monkeypatch.setattr(raw_records, "_rows_of", counted)
    monkeypatch.setattr(raw_records, "ROWS_BYTES", 100_000)
    rows = [{"text": f"<image> {n}", "images": [{"bytes": bytes([n]) * 10_000, "path": None}]} for n in range(50)]
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path, compression="none", use_dictionary=False)
    else:
        with ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    chunks = list(_chunks(Recipe((DataFile(str(path)),), "", Prompts("plain"), 10), lambda *_: None))
    assert sum(len(chunk.records) for chunk in chunks) == sum(made) == 50
    assert max(made) <= 10
    assert max(len(chunk.records) for chunk in chunks) == 27  # 2**18 bytes and one more


def test_a_data_set_of_the_hub_with_an_image_column(tmp_path: Path, vision: Path, load_seen: LoadSeen) -> None:
    content = (vision / "qwen2_5_vl-tiny" / "images" / "a.png").read_bytes()
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    row = {
        "images": [{"bytes": content, "path": "a.png"}],
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [parts[1]]}],
    }
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "a.parquet")
    (sample,) = load_seen([], name="a.parquet").samples
    assert Path(sample["images"][0].path).read_bytes() == content


def test_pixels_and_the_processors_settings_are_in_the_key(
    tmp_path: Path, vision: Path, load_seen: LoadSeen, builds: list[str]
) -> None:
    model = shutil.copytree(vision / "qwen2_5_vl-tiny", tmp_path / "model", copy_function=shutil.copyfile)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755)
    first = load_seen([TWO], tokenizer=model)
    fewer = load_seen([], tokenizer=model, pixels=Pixels(most=400))
    assert fewer.image_tokens[0] < first.image_tokens[0]
    assert len(builds) == 2
    load_seen([], tokenizer=model)
    load_seen([], tokenizer=model, pixels=Pixels(most=400))
    assert len(builds) == 2
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.5, 0.5, 0.5]}))
    load_seen([], tokenizer=model)
    assert len(builds) == 3


def test_several_processes_make_the_same_samples(
    tmp_path: Path, load_seen: LoadSeen, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [TEXT, TWO, talk(("<image>", "Red."), images=[C])] * 200
    alone = load_seen(records)
    monkeypatch.setattr("data.tokenized.store.SMALL", 0)
    monkeypatch.setattr("data.tokenized.parallel.CHUNK_RECORDS", 64)
    forked = load_seen(records, cache_dir=tmp_path / "other")
    assert forked.folder != alone.folder
    assert forked.fingerprint() == alone.fingerprint()
    assert forked.image_tokens.tolist() == alone.image_tokens.tolist()
    assert [sample.get("images") for sample in forked.samples] == [sample.get("images") for sample in alone.samples]


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


def test_a_stream_takes_no_images(tmp_path: Path, vision: Path, load_seen: LoadSeen) -> None:
    load_seen([TWO])
    sources = str(tmp_path / "data" / "records.json"), vision / "qwen2_5_vl-tiny", 512, "chat_template"
    stream = open_stream(*sources, gigabytes=0.1, folder=tmp_path / "stream")
    with pytest.raises(DataError, match="record 1: stream_gb: not with images in the records; expected it absent"):
        stream.take(0, 1)


def test_ids_that_are_ready_made_have_no_place_for_images(load_seen: LoadSeen, vision: Path) -> None:
    with pytest.raises(DataError, match="record 1: the tokens hold 1 in whose place features of images go, and its im"):
        load_seen([{"input_ids": [7, image_token(vision), 8], "labels": [7, image_token(vision), 8]}])
