"""Models that were trained on a record each, and are then asked by demo.py: what they write is what they learnt.

So the demo asks as the training does: with a reference, and in dialogues with tools, whose calls are text or in a
template's own form.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import demo
from data.chat.answer_form import CallForm
from data.chat.chat_template import EXAMPLE_TOOL, QUESTION, chat_template
from data.chat.messages import Call, Said
from data.chat.prompts import Prompts
from data.errors import DataError
from data.records.raw_records import read_file
from data.records.reading import parse
from data.records.record import Record
from data.tokenized.tokenize import encode, load_tokenizer
from tests.data.helpers import parse_record
from tests.data.template_styles import STYLES, Style
from training.demo.chat import schemas_in

REFERENCE = {
    "type": "ref_qa",
    "reference": "Lion keeps one state.",
    "rounds": [["ask", "How many?"], ["ans", "One."], ["ask", "And AdamW?"], ["ans", "两个。"]],
}
NATIVE = {
    "tools": [EXAMPLE_TOOL],
    "messages": [
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "look", "arguments": {"up": word}}} for word in "ab"],
        },
        {"role": "tool", "content": "north"},
        {"role": "tool", "content": '{"there": 1}'},
        {"role": "assistant", "content": "North, 一."},
    ],
}

Ask = Callable[..., tuple[str, list[str]]]


def taught(folder: Path, record: Record, prompts: Prompts) -> None:
    """Train a tiny model until it knows a record by heart."""
    sample = encode(record, load_tokenizer(folder), 1000, prompts)
    ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor([sample["labels"]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(ids, labels=labels).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """A function that types questions into a chat of demo.py; what it prints and tells."""

    def ask(folder: Path, *words: str, typed: list[str]) -> tuple[str, list[str]]:
        lines = iter(typed)
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines, ""))
        monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(folder), "--greedy", *words])
        capsys.readouterr()
        demo.main()
        out, told = capsys.readouterr()
        return out.partition("\n")[2], told.splitlines()

    return ask


def model_of(make_checkpoint: Callable[..., Path], style: Style | None = None) -> Path:
    folder = make_checkpoint("llama", vocab_size=560, max_position_embeddings=1024)
    if style:
        style.put_on(load_tokenizer(folder)).save_pretrained(folder)
    return folder


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return str(path)


def test_calls_in_a_templates_own_form_get_their_results_and_an_answer_follows(
    make_checkpoint: Callable[..., Path], tmp_path: Path, ask: Ask
) -> None:
    folder = model_of(make_checkpoint, STYLES["qwen2.5"])
    (record,) = parse_chat(NATIVE)
    taught(folder, record, Prompts())
    words = ("--tools", write(tmp_path / "tools", [EXAMPLE_TOOL]))
    typed = ["Where is it?", "north", '{"there": 1}', f"/save {tmp_path / 'saved'}"]
    out, told = ask(folder, *words, typed=typed)
    assert out.endswith("North, 一.\n") and out.count("<tool_call>") == 2
    assert told == ['call: look {"up": "a"}', 'call: look {"up": "b"}']
    (raw,) = read_file(tmp_path / "saved")
    (saved,) = parse(raw, None, {}).records
    tokenizer = load_tokenizer(folder)
    assert encode(saved, tokenizer, 1000) == encode(record, tokenizer, 1000)


def test_a_call_whose_result_nobody_types_ends_the_answer(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_of(make_checkpoint, STYLES["qwen2.5"])
    taught(folder, parse_chat(NATIVE)[0], Prompts())
    words = ("--tools", write(tmp_path / "tools", [EXAMPLE_TOOL]), "--prompt", "Where is it?")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(folder), "--greedy", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    demo.main()
    out, told = capsys.readouterr()
    assert out.count("<tool_call>") == 2 and 'call: look {"up": "a"}' in told.splitlines()


def test_tools_of_a_model_whose_template_takes_none_are_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--tools", write(tmp_path / "tools", [EXAMPLE_TOOL]), "--prompt", "?", "--prompt-format", "plain")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(model_of(make_checkpoint)), *words])
    with pytest.raises(SystemExit, match="2"):
        demo.main()


def test_a_reference_is_asked_about_as_in_training(
    make_checkpoint: Callable[..., Path], tmp_path: Path, ask: Ask
) -> None:
    folder = model_of(make_checkpoint)
    taught(folder, parse_record(REFERENCE), Prompts())
    reference = write(tmp_path / "reference", "Lion keeps one state.\n")
    out, told = ask(folder, "--reference", reference, typed=["How many?", "And AdamW?"])
    assert (out, told) == ("One.\n两个。\n", [])


def parse_chat(record: dict[str, Any]) -> list[Record]:
    from data.records.formats import convert

    return convert(record).records


CALLS = [
    Call(f"call0000{number}", f"tool_{number}", {"a": [1, {"b": 'x"}\n'}], "c": None, "名": "块"}) for number in (1, 2)
]


@pytest.mark.parametrize("style", ["qwen2.5", "qwen3", "llama3.1", "mistral"])
@pytest.mark.parametrize("words", ["", "Let me see."])
def test_calls_are_read_back_as_a_template_writes_them(style: str, words: str, tokenizer_folder: Path) -> None:
    template = chat_template(STYLES[style].put_on(load_tokenizer(tokenizer_folder)), Prompts(), tools=True)
    form = template.call_form()
    assert isinstance(form, CallForm)
    for count in (1, 1 if style == "llama3.1" else 2):  # which takes one call at a time
        said = [QUESTION, Said("assistant", words, calls=tuple(CALLS[:count]))]
        written = template._render(said, [EXAMPLE_TOOL])
        answer = written[len(template._render([QUESTION], [EXAMPLE_TOOL], asking=True)) :]
        found, calls = form.read(answer, 1)
        assert list(calls) == CALLS[:count]
        assert found.endswith(words) or style in ("llama3.1", "mistral")  # which leave out words beside a call


@pytest.mark.parametrize("style", ["smollm2", "chatglm3", "gemma"])
def test_a_template_without_tools_has_calls_as_text(style: str, tokenizer_folder: Path) -> None:
    tokenizer = STYLES[style].put_on(load_tokenizer(tokenizer_folder))
    assert chat_template(tokenizer, Prompts(template_fallback="rewrite"), tools=True).call_form() is None


@pytest.mark.parametrize(
    "text", ['{"name": "look", "arguments": {"up"', '{"name": "look"}', '{"name": "a b", "arguments"']
)
def test_a_call_that_breaks_off_is_no_call(text: str, tokenizer_folder: Path) -> None:
    template = chat_template(STYLES["qwen2.5"].put_on(load_tokenizer(tokenizer_folder)), Prompts(), tools=True)
    form = template.call_form()
    assert form is not None
    with pytest.raises(ValueError, match=r"no name with arguments|no JSON object"):
        form.read(f"<tool_call>\n{text}\n</tool_call>", 1)
    assert form.read("Nothing to call.", 1) == ("Nothing to call.", ())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "expected at least one tool, found none"),
        ("{", "no JSON: "),
        ('{"a": 1}', "field tools: expected a list"),
        ('[{"type": "function"}]', "tool 1: expected an object with a function that has a name"),
        ("", "expected a text, found none"),
    ],
)
def test_a_file_without_tools_is_named(content: str, told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tools.json", content)
    with pytest.raises(DataError) as refused:
        schemas_in(path)
    assert str(refused.value).startswith(f"{path}: {told}")
