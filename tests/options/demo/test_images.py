"""Questions about images: what transformers generates of the same folder, and what is refused in a line."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from data.errors import DataError
from data.settings import Pixels
from models.attention.cache import KeyValueCache
from options.demo.chat import ChatSession
from options.demo.chat_model import AnswerOptions, ChatModel
from options.demo.generation import GREEDY, Request, generate_many
from options.demo.prompts_file import answer_file
from tests.models.images.conftest import golden, golden_of
from tests.models.images.golden import Golden
from tests.options.demo.conftest import RunDemo

__all__ = ["golden"]

NEW = 12
SAMPLES = range(4)  # with one image, one in front of two turns, none, and two
SHORT = AnswerOptions(NEW, GREEDY)
STEEP = "qwen3_5-tiny"  # whose linear attention enlarges rounding
QUICK = ("--greedy", "--max-new-tokens", str(NEW))


class Noted(Request):
    """A request that keeps the logits of every step."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen: list[Tensor] = []

    def take(self, logits: Tensor) -> int | None:
        self.seen.append(logits.clone())
        return super().take(logits)


def prompt_of(golden: Golden, sample: int) -> list[int]:
    """A sample up to its last answer."""
    trained = (golden.tensors[f"s{sample}.labels"] >= 0).tolist()
    begin = max(place for place in range(1, len(trained)) if trained[place] and not trained[place - 1])
    ids: list[int] = golden.ids(sample).tolist()[:begin]
    return ids


def asked(golden: Golden, *samples: int) -> list[Noted]:
    """Generate behind samples, all at once."""
    requests = []
    for sample in samples:
        images = golden.images(sample)
        requests.append(Noted(prompt_of(golden, sample), NEW, set(), see=lambda images=images: images))
    for _ in generate_many(golden.model, requests):
        pass
    return requests


def by_transformers(golden: Golden, sample: int) -> tuple[list[int], Tensor]:
    """The tokens and logits [NEW, V] of transformers' `generate`."""
    auto: Any = transformers.AutoModelForImageTextToText
    whole: Any = auto.from_pretrained(golden.folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = torch.tensor([prompt_of(golden, sample)])
    given = dict(zip(golden.sees.inputs, golden.images(sample), strict=False))
    types = (ids == whole.config.image_token_id).long()
    if golden.sees.both_ways:
        given["token_type_ids"] = types
    elif given and golden.sees.axes:
        given["mm_token_type_ids"] = types
    greedy = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}
    told = {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    found = whole.generate(input_ids=ids, **given, **greedy, **told)
    return found.sequences[0].tolist(), torch.cat(found.logits)


def test_every_step_is_that_of_transformers(golden: Golden) -> None:
    """Of questions about one image, none and two, all at once."""
    atol = 1e-4 if golden.folder.name == STEEP else golden.bound("logits")
    for sample, request in zip(SAMPLES, asked(golden, *SAMPLES), strict=True):
        text, logits = by_transformers(golden, sample)
        assert request.text == text
        torch.testing.assert_close(torch.stack(request.seen), logits, rtol=0, atol=atol)


def test_an_image_token_that_the_model_writes_is_a_word(golden: Golden) -> None:
    ids, model = prompt_of(golden, 0), golden.model
    cache, token = KeyValueCache(), torch.tensor([[golden.sees.image_token]])
    with torch.inference_mode():
        model(torch.tensor([ids]), cache=cache, images=golden.images(0))
        assert model(token, cache=cache).isfinite().all()
        with pytest.raises(ValueError, match=r"image tokens .* and no images"):
            model(token)


@pytest.mark.parametrize("name", ["qwen2_5_vl-tiny", "qwen3_vl-tiny", STEEP])
def test_plain_positions_behind_an_image_are_seen(name: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_of(shared, name)
    (right,) = asked(golden, 3)
    monkeypatch.setattr(KeyValueCache, "along_axes", lambda *_: None)
    (wrong,) = asked(golden, 3)
    torch.testing.assert_close(right.seen[0], wrong.seen[0])  # of the prompt itself
    assert (right.seen[1] - wrong.seen[1]).abs().max() > 1e-2


def test_images_in_the_middle_of_begun_rows_are_refused(shared: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    model, cache = golden.model, KeyValueCache()
    ids = torch.tensor([prompt_of(golden, 0)])
    with torch.inference_mode():
        model(ids, cache=cache, images=golden.images(0))
        with pytest.raises(ValueError, match="images with rows that are begun"):
            model(ids, cache=cache, images=golden.images(0))


def question(golden: Golden, sample: int) -> tuple[str, list[str]]:
    """What a record in LLaVA's shape asks, and the paths of its images."""
    record = json.loads((golden.folder / "records.json").read_text(encoding="utf-8"))[sample]
    return record["conversations"][0]["value"], [str(golden.folder / path) for path in record["images"]]


@pytest.mark.parametrize("sample", [0, 3])
def test_a_question_is_asked_as_its_record_was_trained(
    sample: int, golden: Golden, run_demo: RunDemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Request] = []
    request = ChatModel.request

    def noting(*given: Any, **named: Any) -> Request:
        made.append(request(*given, **named))
        return made[-1]

    monkeypatch.setattr(ChatModel, "request", noting)
    text, paths = question(golden, sample)
    images = [word for path in paths for word in ("--image", path)]
    code, _, error = run_demo(golden.folder, "--prompt", text, *images, *QUICK)
    assert (code, error) == (0, "")
    (alone,), prompt = asked(golden, sample), prompt_of(golden, sample)
    written = len(made[0].text)
    assert made[0].text == alone.text[:written]
    assert made[0].text[: len(prompt)] == prompt
    assert written == len(alone.text) or made[0].chosen == alone.text[written]  # which ended it


@pytest.fixture(scope="module")
def model(shared: Path) -> ChatModel:
    return ChatModel(golden_of(shared, "gemma3-tiny").folder, pixels=Pixels())


def answer_to(model: ChatModel, text: str, *paths: str) -> str:
    return "".join(ChatSession(model, SHORT, pytest.fail, pictures=paths).ask(text))


def test_a_file_of_prompts_has_images_as_records_have(model: ChatModel, shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, "gemma3-tiny")
    a, c = (str(golden.folder / "images" / f"{name}.png") for name in "ac")
    inside = "data:image/png;base64," + base64.b64encode(Path(a).read_bytes()).decode()
    parts = [{"type": "text", "text": "This: "}, {"type": "image_url", "image_url": {"url": inside}}]
    (tmp_path / "near.png").write_bytes(Path(c).read_bytes())
    lines: list[dict[str, Any]] = [
        {"prompt": "<image>\nWhat?", "images": ["near.png"], "id": 1},
        {"prompt": "And?"},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "<image> or <image>?", "images": [a, c]},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    answer_file(model, SHORT, source, target, (), 3, lambda line: None)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    alone = [
        answer_to(model, "<image>\nWhat?", c),
        answer_to(model, "And?"),
        answer_to(model, "This: <image>", a),
        answer_to(model, "<image> or <image>?", a, c),
    ]
    assert [each.pop("answer") for each in found] == alone
    assert found == lines


def test_an_image_stays_in_the_dialogue(model: ChatModel, shared: Path, tmp_path: Path) -> None:
    picture = str(golden_of(shared, "gemma3-tiny").folder / "images" / "a.png")
    chat = ChatSession(model, SHORT, pytest.fail, pictures=[picture])
    for text in ("What?", "Why?"):
        assert "".join(chat.ask(text)) is not None
    assert model.pictures is not None
    sees = model.model.spec.family.sees
    assert sees is not None
    assert model.encode(chat.said, images=chat.images).count(sees.image_token) == chat.images[0].tokens

    chat.save(tmp_path / "said.jsonl")
    record = json.loads((tmp_path / "said.jsonl").read_text(encoding="utf-8"))
    assert record["images"] == [picture]
    assert record["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert record["messages"][2]["content"] == "Why?"

    chat.reset()
    assert "".join(chat.ask("What?")) == answer_to(model, "What?", picture)


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "missing": (lambda folder: ["--image", str(folder / "no.png")], "image 1: .*no.png: no usable image: No such file"),
    "no image": (lambda folder: ["--image", str(folder / "config.json")], "image 1: .*: no usable image: expected PNG"),
    "address": (lambda _: ["--image", "https://x.org/a.png"], "image 1: https://x.org/a.png: expected a file"),
    "places": (
        lambda folder: ["--image", str(folder / "images" / "a.png"), "--prompt", "<image> <image>?"],
        "images: 1 image, but 2 places for them",
    ),
    "raw": (lambda _: ["--image", "x", "--raw"], "--raw: the text stands alone; expected no --image"),
    "drafts": (lambda _: ["--image", "x", "--draft"], "images: need the whole model in one process, which drafts"),
    "token": (
        lambda folder: ["--image", str(folder / "images" / "a.png"), "--prompt", "<start_of_image>?"],
        "the chat template writes 2 images where there are 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_refused_in_a_line(name: str, shared: Path, run_demo: RunDemo) -> None:
    folder = golden_of(shared, "gemma3-tiny").folder
    words, line = BAD[name]
    code, out, error = run_demo(folder, "--prompt", "?", *words(folder), *QUICK)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert re.search(line, error), error


def test_a_model_of_text_sees_no_image(folder: Path, run_demo: RunDemo, shared: Path, tmp_path: Path) -> None:
    picture = golden_of(shared, "llava-tiny").folder / "images" / "a.png"
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "<image>?", "image": str(picture)}) + "\n", encoding="utf-8")
    for words in (["--prompt", "?", "--image", str(picture)], ["--prompts-file", source, "--output", tmp_path / "out"]):
        code, out, error = run_demo(folder, *words, *QUICK)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert "expected a model of images and text" in error
    with pytest.raises(DataError, match="expected records without images"):
        answer_file(ChatModel(folder), SHORT, source, tmp_path / "out", (), 1, pytest.fail)


def test_sizes_are_those_of_the_training(shared: Path, tmp_path: Path, run_demo: RunDemo) -> None:
    from tests.models.images.test_seeing import as_run_writes

    golden = golden_of(shared, "qwen2_5_vl-tiny")
    step = as_run_writes(golden, tmp_path / "step-1")
    (step / "checkpoint.json").touch()
    path = tmp_path / "run.json"
    words = ("--prompt", "?", "--image", golden.folder / "images" / "a.png", *QUICK)
    answers = []
    for limits in ({}, {"max_pixels": 28 * 28}):
        path.write_text(json.dumps({"config": {"vision": limits}}), encoding="utf-8")
        code, out, error = run_demo(step, *words)
        assert (code, error) == (0, f"images as in training: max_pixels: {28 * 28}\n" if limits else "")
        answers.append(out)
    assert answers[0] != answers[1]
