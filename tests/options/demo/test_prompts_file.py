"""A file of prompts: each gets the answer that it gets alone, in order, and only once however often it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.chat.messages import Said
from data.errors import DataError
from options.demo import prompts_file
from options.demo.chat import ChatSession
from options.demo.chat_model import AnswerOptions, ChatModel
from options.demo.generation import GREEDY, Sampling
from options.demo.prompts_file import answer_file

GREEDILY = AnswerOptions(12, GREEDY)
QUESTION = {"role": "user", "content": "?"}
LINES: list[dict[str, Any]] = [
    {"prompt": "What is Pipetune?", "id": 7},
    {"prompt": "怎样开始训练？"},
    {
        "messages": [
            {"role": "user", "content": "Hi."},
            {"from": "gpt", "value": "Yes?"},
            {"from": "human", "value": "Go."},
        ]
    },
    {"prompt": "Why? " * 20},
    {"prompt": "Why?", "note": [1.5, None, "é"]},
]


@pytest.fixture(scope="module")
def model(folder: Path) -> ChatModel:
    return ChatModel(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", LINES)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(
    model: ChatModel,
    source: Path,
    target: Path,
    options: AnswerOptions = GREEDILY,
    opening: Any = (),
    raw: bool = False,
) -> list[str]:
    lines: list[str] = []
    answer_file(model, options, source, target, opening, 2, lines.append, raw)
    return lines


@pytest.mark.parametrize(
    "options", [GREEDILY, AnswerOptions(12, GREEDY, ("e", "th")), AnswerOptions(12, Sampling(1.0, seed=5))]
)
def test_every_prompt_gets_the_answer_that_it_gets_alone(
    options: AnswerOptions, model: ChatModel, source: Path, tmp_path: Path
) -> None:
    answer(model, source, tmp_path / "out.jsonl", options)
    written = read(tmp_path / "out.jsonl")
    assert [{name: value for name, value in line.items() if name != "answer"} for line in written] == LINES
    for place, line in enumerate(LINES):
        seed = options.sampling.seed
        alone = replace(options, sampling=replace(options.sampling, seed=None if seed is None else seed + place))
        chat = ChatSession(model, alone, pytest.fail)
        if "messages" in line:
            chat.said = (Said("user", "Hi."), Said("assistant", "Yes?", supervised=True))
        assert written[place]["answer"] == "".join(chat.ask(line.get("prompt", "Go.")))


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_second_start_asks_only_what_has_no_answer(
    cut: int, model: ChatModel, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    answer(model, source, target)
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    halves = [b"".join(lines[:2]) + lines[2][:9], b"".join(lines[:2]), lines[0][:-1]]  # of a character, and of a line
    target.write_bytes(halves[cut])
    asked: list[int] = []
    generate = model.generate

    def noting(requests: list[Any], rows: int) -> Any:
        asked.append(len(requests))
        return generate(requests, rows)

    monkeypatch.setattr(model, "generate", noting)
    log = answer(model, source, target)
    assert target.read_bytes() == whole
    assert asked == [[3, 3, 5][cut]]
    kept = [f"{target}: 2 of 5 answers are there already and stay as they are"] if cut < 2 else []
    assert log == [*kept, f"{target}: 5 answers"]
    assert answer(model, source, target)[0].startswith(f"{target}: 5 of 5 ")
    assert target.read_bytes() == whole


def test_answers_are_in_the_file_before_the_next_one_is_complete(
    model: ChatModel, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "out.jsonl", list[int]()
    answers = prompts_file._answers

    def watched(*given: Any) -> Any:
        for text in answers(*given):
            seen.append(len(read(target)))
            yield text

    monkeypatch.setattr(prompts_file, "_answers", watched)
    answer(model, source, target)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "other", [[LINES[1], LINES[0], *LINES[2:]], [LINES[0] | {"id": 8}, *LINES[1:]], [{"prompt": "?"}], LINES[:3]]
)
def test_answers_to_other_prompts_are_left_alone(
    other: list[Any], model: ChatModel, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    answer(model, source, target)
    whole = target.read_bytes()
    with pytest.raises(DataError, match=r"line \d answers no prompt of .*; expected another --output$"):
        answer(model, write(tmp_path / "changed.jsonl", other), target)
    assert target.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "raw", "complaint"),
    [
        ("{", False, "no JSON: "),
        ("[1]", False, "expected an object with a prompt or messages, found a list"),
        ('{"text": "?"}', False, "expected either prompt or messages"),
        ('{"prompt": "?", "messages": []}', False, "expected either prompt or messages"),
        ({"prompt": 3}, False, "field prompt: expected a string, found a number"),
        ({"prompt": "?", "answer": "!"}, False, "field answer: expected it absent, as the answer is written there"),
        ({"messages": [QUESTION | {"role": "assistant"}]}, False, "field messages: expected a question or a result at"),
        ({"messages": [QUESTION | {"role": "nobody"}]}, False, "field messages[0].role: expected one of"),
        ({"prompt": "Why? " * 300}, False, "the prompt has "),
        ({"prompt": "?", "input": 3}, False, "field input: expected a string, found a number"),
        ({"messages": [QUESTION], "input": "!"}, False, "field input: expected it beside a prompt"),
        ({"messages": [QUESTION]}, True, "field messages: expected a prompt alone, as --raw continues its text"),
        ({"prompt": "?", "input": "!"}, True, "field input: expected a prompt alone, as --raw continues its text"),
        ({"prompt": ""}, True, "expected a text to go on with, found none"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_answered(
    line: Any, raw: bool, complaint: str, model: ChatModel, source: Path, tmp_path: Path
) -> None:
    write(source, LINES[:2])
    with source.open("a", encoding="utf-8") as file:
        file.write("\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(DataError) as refused:
        answer(model, source, tmp_path / "out.jsonl", raw=raw)
    assert str(refused.value).startswith(f"{source}: line 4: {complaint}")
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


def test_a_byte_order_mark_is_no_part_of_a_line(model: ChatModel, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "Why?"}\n', encoding="utf-8-sig")
    answer(model, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[0]["prompt"] == "Why?"


def test_unusable_files_are_named(model: ChatModel, source: Path, tmp_path: Path) -> None:
    empty, out = write(tmp_path / "empty.jsonl", []), tmp_path / "out"
    for first, second, complaint in (
        (tmp_path / "none", out, f"{tmp_path / 'none'}: cannot be read: "),
        (empty, out, f"{empty}: expected at least one prompt, found none"),
        (source, tmp_path, f"{tmp_path}: cannot be written: "),
    ):
        with pytest.raises(DataError) as refused:
            answer(model, first, second)
        assert str(refused.value).startswith(complaint)
    with prompts_file._locked(out), pytest.raises(DataError, match="another process writes it"):
        answer(model, source, out)


def test_an_opening_stands_before_every_prompt(model: ChatModel, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    plain = write(tmp_path / "plain", [{"prompt": "Why?"}])
    own = write(tmp_path / "own", [{"messages": [system, QUESTION | {"content": "Why?"}]}])
    opening = [Said("system", "Be brief.")]
    answer(model, plain, tmp_path / "one", opening=opening)
    answer(model, own, tmp_path / "other")
    assert read(tmp_path / "one")[0]["answer"] == read(tmp_path / "other")[0]["answer"]
    with pytest.raises(DataError, match="has a system message; expected none beside --system"):
        answer(model, own, tmp_path / "third", opening=opening)
