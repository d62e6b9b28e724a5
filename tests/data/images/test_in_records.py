"""Images are found in every shape of record that people have, each in its place; what is odd is one line."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from data.errors import DataError
from data.images.marks import MARK, mark_of, numbers_in, parts_of, replaced, words_in
from data.records.chat import Chat
from data.records.formats import convert
from data.records.record import Instruct, Pretrain, RefQA
from data.settings import Wanted
from tests.data.images.dialogues import look

PNG = b"\x89PNG\r\n"
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
ANTHROPIC = {"type": "base64", "media_type": "image/png", "data": URI.partition(",")[2]}
ASKED = {"role": "user", "content": "<image>\nWhat?"}
ANSWERED = {"role": "assistant", "content": "That."}
A, B = ({"type": "image", "image": name} for name in ("a.png", "b.png"))
WORDS = {"type": "text", "text": "What?"}


def seen(raw: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The texts of a record, an image in each mark's place, and the images in order."""
    (record,) = convert(raw, look=look).records
    if isinstance(record, Chat):
        texts = [message.content for message in record.messages]
    elif isinstance(record, RefQA):
        texts = [record.reference, *(str(words) for _, words in record.rounds)]
    else:
        assert isinstance(record, (Instruct, Pretrain))
        texts = [record.text] if isinstance(record, Pretrain) else [record.instruct, record.output]
    paths = [image.path for image in record.images]
    return [MARK.sub(lambda found: f"[{paths[int(found[1])]}]", text) for text in texts], paths


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        ({"images": ["a.png"], "messages": [ASKED, ANSWERED]}, ["[a.png]\nWhat?", "That."]),
        ({"image": "a.png", "messages": [ASKED, ANSWERED]}, ["[a.png]\nWhat?", "That."]),
        ({"image": ["a.png"], "messages": [ASKED, ANSWERED]}, ["[a.png]\nWhat?", "That."]),
        (
            {
                "images": ["a.png", "b.png"],
                "conversations": [
                    {"from": "human", "value": "<image> or <image>?"},
                    {"from": "gpt", "value": "This."},
                ],
            },
            ["[a.png] or [b.png]?", "This."],
        ),
        ({"messages": [{"role": "user", "content": [A, WORDS]}, ANSWERED]}, ["[a.png]What?", "That."]),
        ({"messages": [{"role": "user", "content": [A, WORDS, B]}, ANSWERED]}, ["[a.png]What?[b.png]", "That."]),
        ({"messages": [{"role": "user", "content": A}, ANSWERED]}, ["[a.png]", "That."]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}, ANSWERED]},
            [f"[{PNG!r}]", "That."],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}, ANSWERED]},
            ["[a.png]", "That."],
        ),
        (
            {"images": [{"bytes": PNG, "path": "a.png"}], "messages": [ASKED, ANSWERED]},
            [f"[{PNG!r}]\nWhat?", "That."],
        ),
        ({"image": {"path": "a.png"}, "messages": [ASKED, ANSWERED]}, ["[a.png]\nWhat?", "That."]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": ANTHROPIC}, WORDS]}, ANSWERED]},
            [f"[{PNG!r}]What?", "That."],
        ),
        ({"image": PNG, "messages": [ASKED, ANSWERED]}, [f"[{PNG!r}]\nWhat?", "That."]),
        ({"images": '["a.png"]', "messages": json.dumps([ASKED, ANSWERED])}, ["[a.png]\nWhat?", "That."]),
        (
            {
                "images": ["a.png", {"path": "b.png"}],
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, WORDS]},
                    {"role": "assistant", "content": [WORDS]},
                    {"role": "user", "content": [WORDS, {"type": "image", "text": None, "index": 1}]},
                    ANSWERED,
                ],
            },
            ["[a.png]What?", "What?", "What?[b.png]", "That."],
        ),
        ({"messages": json.dumps([{"role": "user", "content": [A]}, ANSWERED])}, ["[a.png]", "That."]),
        ({"image": "file:///a%20b.png", "messages": [ASKED, ANSWERED]}, ["[/a b.png]\nWhat?", "That."]),
        ({"image": "a.png", "question": "<image>What?", "answer": "That."}, ["[a.png]What?", "That."]),
        ({"image_path": "a.png", "instruction": "<image>", "output": "That."}, ["[a.png]", "That."]),
        ({"image": "a.png", "text": "<image> A red box."}, ["[a.png] A red box."]),
        ({"images": ["a.png"], "prompt": "<image>?", "completion": "That."}, ["[a.png]?", "That."]),
        ({"image": "a.png", "type": "pretrain", "text": "This: <image>"}, ["This: [a.png]"]),
        # Where there are parts for images, or none beside the texts, the word is a word.
        (
            {"messages": [{"role": "user", "content": [A, {"type": "text", "text": "Why <image>?"}]}, ANSWERED]},
            ["[a.png]Why <image>?", "That."],
        ),
        ({"messages": [ASKED, ANSWERED], "images": []}, ["<image>\nWhat?", "That."]),
    ],
)
def test_images_stand_where_the_record_has_them(raw: dict[str, Any], texts: list[str]) -> None:
    found, paths = seen(raw)
    assert found == texts
    assert "".join(found).count("[") == len(paths)


def test_a_record_without_images_is_the_same_with_and_without_a_model_of_images() -> None:
    raw = {"messages": [{"role": "user", "content": [WORDS]}, ANSWERED], "images": None, "id": 7}
    assert convert(raw, look=look) == convert(raw)
    assert convert(raw).records[0].images == ()


def test_both_documents_of_a_pair_have_the_images_of_their_prompt() -> None:
    other = {"role": "assistant", "content": "This."}
    whole = {"images": ["a.png"], "chosen": [ASKED, ANSWERED], "rejected": [ASKED, other]}
    beside = {"images": ["a.png"], "prompt": [ASKED], "chosen": [ANSWERED], "rejected": [other]}
    plain = {"images": ["a.png"], "prompt": "<image>\nWhat?", "chosen": "That.", "rejected": "This."}
    in_parts = {
        "messages": [{"role": "user", "content": [A, WORDS]}],
        "chosen": ANSWERED,
        "rejected": other,
    }
    for raw in (whole, beside, plain, in_parts):
        (judged,) = convert(raw, preference=Wanted("pairs"), look=look).judged
        assert [[image.path for image in each.images] for each in judged.documents] == [["a.png"], ["a.png"]]
        assert all(mark_of(0) in each.model_dump_json() for each in judged.documents)


def test_a_text_of_a_class_keeps_its_images() -> None:
    raw = {"image": "a.png", "text": "<image>", "label": 1}
    (judged,) = convert(raw, preference=Wanted("classes"), look=look).judged
    assert [image.path for image in judged.documents[0].images] == ["a.png"]


def test_columns_may_name_the_images() -> None:
    raw = {"pic": ["a.png"], "q": "<image>?", "a": "That.", "note": "n"}
    converted = convert(raw, columns={"images": "pic", "prompt": "q", "completion": "a"}, look=look)
    assert [image.path for image in converted.records[0].images] == ["a.png"]
    assert converted.unused == ["note"]
    assert set(converted.columns) == {"pic", "q", "a"}


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", **fields}, WORDS]}, ANSWERED]}


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"images": ["a", "b"], "messages": [ASKED, ANSWERED]}, "field images: 2 images, but 1 place for them"),
        ({"image": "a", "question": "What?", "answer": "That."}, "field image: 1 image, but 0 places for them"),
        (part(), "field images: 0 images, but 1 place for them"),
        (part() | {"images": ["a", "b"]}, "field images: 2 images, but 1 place for them"),
        (
            {"images": ["a"], "image": "b", "messages": [ASKED, ANSWERED]},
            "field images: expected it alone, found",
        ),
        (part(image="http://a/b.png"), "image 1: http://a/b.png: expected a file, as nothing is fetched from the net"),
        (part(image_url={"url": "https://a/b.png"}), "image 1: https://a/b.png: expected a file"),
        (part(image="a", max_pixels=100), "field content: a part of type image has 'max_pixels', which is not used"),
        (part(index=1) | {"images": ["a"]}, "field content: a part has the index 1; expected 0, in order"),
        (part(image=7), "image 1: expected a path, a data URI or the bytes of a file, found 7"),
        (part(image="data:image/png;base64,a"), "image 1: data:image/png;base64: no base64: "),
        (part(image="a" * 5000), "image 1: aaaa"),
        (part(image="a\0b"), "image 1: expected a path, a data URI"),
        ({"images": "[1", "messages": [ASKED, ANSWERED]}, "field images: expected a path, a list or the JSON of one"),
        (
            {"images": ["a"], "messages": [{"role": "user", "content": "<image>\ufdd00\ufdd1"}, ANSWERED]},
            r"a text has the character '\ufdd0', which no text may hold",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWERED]},
            "field messages[0].content: expected a text or a list of parts with a text each, found one of type 'video'",
        ),
        (
            {"messages": [{"role": "user", "content": [A, {"type": "input_audio", "input_audio": {}}]}, ANSWERED]},
            "field messages[0].content: expected a text or a list of parts with a text each, found one of type 'inp",
        ),
        ({"messages": [ASKED, ANSWERED], "videos": ["a.mp4"]}, "field videos: expected records without it"),
        (
            {"images": ["a"], "question": "What?", "answer": "That.", "difficulty": "<image>"},
            "images: expected a place in what is said for 1 image, found 0",
        ),
        (
            {
                "images": ["a"],
                "instruction": "<image>",
                "instances": [{"output": "b"}, {"output": "c"}],
            },
            "images: expected an object that makes one record, found one that makes 2",
        ),
    ],
)
def test_what_is_odd_is_refused_in_one_line(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(raw, look=look)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_without_a_model_of_images_none_may_be_there() -> None:
    for raw in ({"images": ["a"], "messages": [ASKED, ANSWERED]}, part(image="a.png")):
        with pytest.raises(DataError, match="expected records without images, as nothing here opens any"):
            convert(raw)


def test_marks_are_parted_from_words_and_replaced_with_what_moves_along() -> None:
    text = f"a{mark_of(0)}{mark_of(11)}b c"
    assert numbers_in(text) == [0, 11]
    assert words_in(text) == ["a", "", "b c"]
    assert parts_of(text) == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "b c"},
    ]
    places = [found.span() for found in MARK.finditer(text)]
    whole, after = (0, len(text)), (places[1][1], places[1][1] + 1)
    new, ranges, stand = replaced(text, [whole, (0, 1), after], places, ["XYZ", ""])
    assert new == "aXYZb c"
    assert [new[slice(*each)] for each in ranges] == [new, "a", "b"]
    assert [new[slice(*each)] for each in stand] == ["XYZ", ""]
