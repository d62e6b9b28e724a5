"""Prompts of a file: the answers that they get one by one, in order, and only once however often it is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.chat.messages import Said
from data.errors import DataError
from models.generation import GREEDY, Sampling
from training.demo import prompts_file
from training.demo.chat import Chat
from training.demo.prompts_file import answer_all
from training.demo.speaker import Speaker, Wishes

WISHES = Wishes(12, GREEDY)
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
def speaker(make_checkpoint: Callable[..., Path]) -> Speaker:
    return Speaker(make_checkpoint("llama", initializer_range=0.3, tie_word_embeddings=False))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", LINES)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(speaker: Speaker, source: Path, target: Path, wishes: Wishes = WISHES, rows: int = 2) -> list[str]:
    told: list[str] = []
    answer_all(speaker, wishes, source, target, [], rows, told.append)
    return told


@pytest.mark.parametrize("wishes", [WISHES, Wishes(12, GREEDY, ("e", "th")), Wishes(12, Sampling(1.0, seed=5))])
def test_every_prompt_gets_the_answer_that_it_gets_alone(
    wishes: Wishes, speaker: Speaker, source: Path, tmp_path: Path
) -> None:
    answer(speaker, source, tmp_path / "out.jsonl", wishes)
    written = read(tmp_path / "out.jsonl")
    assert [{name: value for name, value in line.items() if name != "answer"} for line in written] == LINES
    for place, line in enumerate(LINES):
        alone = Wishes(wishes.max_new_tokens, wishes.sampling, wishes.stop)
        if wishes.sampling.seed is not None:
            alone = Wishes(wishes.max_new_tokens, replace(wishes.sampling, seed=wishes.sampling.seed + place))
        chat = Chat(speaker, alone, pytest.fail)
        if "messages" in line:
            chat.said = (Said("user", "Hi."), Said("assistant", "Yes?", supervised=True))
        assert written[place]["answer"] == "".join(chat.ask(line.get("prompt", "Go.")))


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_second_start_asks_only_what_has_no_answer(
    cut: int, speaker: Speaker, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    answer(speaker, source, target)
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    halves = [b"".join(lines[:2]) + lines[2][:9], b"".join(lines[:2]), lines[0][:-1]]  # of a character, and of a line
    target.write_bytes(halves[cut])
    asked: list[int] = []
    generate_many = prompts_file.generate_many

    def noting(model: Any, requests: list[Any], rows: int) -> Any:
        asked.append(len(requests))
        return generate_many(model, requests, rows)

    monkeypatch.setattr(prompts_file, "generate_many", noting)
    told = answer(speaker, source, target)
    assert target.read_bytes() == whole
    assert asked == [[3, 3, 5][cut]]
    kept = [f"{target}: 2 of 5 answers are there already and stay as they are"] if cut < 2 else []
    assert told == [*kept, f"{target}: 5 answers"]
    assert answer(speaker, source, target)[0].startswith(f"{target}: 5 of 5 ")
    assert target.read_bytes() == whole


def test_what_is_written_is_there_when_the_process_is_killed(
    speaker: Speaker, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    seen: list[int] = []
    in_order = prompts_file._in_order

    def watched(*given: Any) -> Any:
        for text in in_order(*given):
            seen.append(len(read(target)))
            yield text

    monkeypatch.setattr(prompts_file, "_in_order", watched)
    answer(speaker, source, target)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "other",
    [
        [LINES[1], LINES[0], *LINES[2:]],
        [LINES[0] | {"id": 8}, *LINES[1:]],
        [{"prompt": "What is Pipetune?"}, *LINES[1:]],
        LINES[:3],
    ],
)
def test_answers_to_other_prompts_are_left_alone(
    other: list[Any], speaker: Speaker, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    answer(speaker, source, target)
    whole = target.read_bytes()
    changed = write(tmp_path / "changed.jsonl", other)
    with pytest.raises(DataError, match=r"line \d answers no prompt of .*; expected another --output$"):
        answer(speaker, changed, target)
    assert target.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "no JSON: "),
        ("[1]", "expected an object with a prompt or messages, found a list"),
        ('{"text": "?"}', "expected either prompt or messages"),
        ('{"prompt": "?", "messages": []}', "expected either prompt or messages"),
        ('{"prompt": 3}', "field prompt: expected a string, found a number"),
        ('{"prompt": "?", "answer": "!"}', "field answer: expected it absent, as the answer is written there"),
        ('{"messages": [{"role": "assistant", "content": "!"}]}', "field messages: expected a question or a result at"),
        ('{"messages": [{"role": "nobody", "content": "!"}]}', "field messages[0].role: expected one of"),
        (json.dumps({"prompt": "Why? " * 300}), "the prompt has "),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_answered(
    line: str, told: str, speaker: Speaker, source: Path, tmp_path: Path
) -> None:
    with source.open("a", encoding="utf-8") as file:
        file.write("\n" + line + "\n")
    with pytest.raises(DataError) as refused:
        answer(speaker, source, tmp_path / "out.jsonl")
    assert str(refused.value).startswith(f"{source}: line 7: {told}")
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("line", "raw", "told"),
    [
        ({"prompt": "?", "input": 3}, False, "field input: expected a string, found a number"),
        (
            {"messages": [{"role": "user", "content": "?"}], "input": "!"},
            False,
            "field input: expected it beside a prompt",
        ),
        (
            {"messages": [{"role": "user", "content": "?"}]},
            True,
            "field messages: expected a prompt alone, as --raw goes",
        ),
        ({"prompt": "?", "input": "!"}, True, "field input: expected a prompt alone, as --raw goes on with its text"),
        ({"prompt": ""}, True, "expected a text to go on with, found none"),
    ],
)
def test_a_line_that_asks_for_two_things_is_named(
    line: dict[str, Any], raw: bool, told: str, speaker: Speaker, tmp_path: Path
) -> None:
    source = write(tmp_path / "prompts.jsonl", [line])
    with pytest.raises(DataError) as refused:
        answer_all(speaker, WISHES, source, tmp_path / "out.jsonl", [], 1, print, raw)
    assert str(refused.value).startswith(f"{source}: line 1: {told}")


def test_a_byte_order_mark_is_no_part_of_a_line(speaker: Speaker, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "Why?"}\n', encoding="utf-8-sig")
    answer(speaker, source, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[0]["prompt"] == "Why?"


def test_files_that_cannot_be_used_are_named(speaker: Speaker, source: Path, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    for first, second, told in (
        (tmp_path / "none", tmp_path / "out", f"{tmp_path / 'none'}: cannot be read: "),
        (empty, tmp_path / "out", f"{empty}: expected at least one prompt, found none"),
        (source, tmp_path, f"{tmp_path}: cannot be written: "),
    ):
        with pytest.raises(DataError) as refused:
            answer(speaker, first, second)
        assert str(refused.value).startswith(told)


def test_one_process_writes_a_file(speaker: Speaker, source: Path, tmp_path: Path) -> None:
    with prompts_file._writing(tmp_path / "out"), pytest.raises(DataError, match="another process writes it"):
        answer(speaker, source, tmp_path / "out")


def test_an_opening_stands_before_every_prompt(speaker: Speaker, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    plain = write(tmp_path / "plain", [{"prompt": "Why?"}])
    own = write(tmp_path / "own", [{"messages": [system, {"role": "user", "content": "Why?"}]}])
    opening = [Said("system", "Be brief.")]
    answer_all(speaker, WISHES, plain, tmp_path / "one", opening, 1, print)
    answer(speaker, own, tmp_path / "other")
    assert read(tmp_path / "one")[0]["answer"] == read(tmp_path / "other")[0]["answer"]
    with pytest.raises(DataError, match="has a system message; expected none beside --system"):
        answer_all(speaker, WISHES, own, tmp_path / "third", opening, 1, print)
