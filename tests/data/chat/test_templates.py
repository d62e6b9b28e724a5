"""Chat templates of users and of models: what of them is trained, and what is refused in one line."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat import rendering
from data.chat.chat_template import DATED, NO_TOKEN
from data.chat.prompts import Prompts, check_prompt_format
from data.errors import DataError
from data.tokenized.tokenize import JOINED, encode, encode_tokens
from tests.data.helpers import question_ids, runs_of, supervised, supervised_texts, whole_text
from tests.data.template_styles import GEMMA, SMOLLM2

END = "<|im_end|>"
RECORD: dict[str, Any] = {
    "type": "conversation",
    "rounds": [["ask", "Which family?"], ["ask", "Say it."], ["ans", "Beta 好 🤗"], ["ask", "And?"], ["ans", "Delta"]],
}
ONE_TURN = {"type": "instruct", "instruct": "Which family?", "output": "Beta"}

TRIMMING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
)
MISTRAL = ALTERNATING + "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NAMED = (
    "{% for m in messages %}{{ m.role | upper + ':' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (MISTRAL, ["Beta 好 🤗</s>", "Delta</s>"]),
        (LLAMA2, [" Beta 好 🤗 </s>", " Delta </s>"]),
    ],
)
def test_a_first_word_that_sentencepiece_joins_with_a_space_is_trained(
    template: str, expected: list[str], sentencepiece: PreTrainedTokenizerBase
) -> None:
    sentencepiece.chat_template = template
    assert supervised_texts(RECORD, sentencepiece) == expected


def test_a_word_that_the_tokenizer_joins_with_the_end_of_the_prompt_is_trained_and_noted(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = NAMED.replace("':'", "': '").replace("NT:", "NT: ")
    tokens = encode_tokens(ONE_TURN | {"output": "the run"}, tokenizer)
    assert supervised(runs_of(tokens.sample(), tokenizer)) == [" the run" + END]
    assert tokens.notes == {JOINED: "' the'"}


def test_an_answer_that_the_template_trims_is_trained_as_it_is_written(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TRIMMING
    assert supervised_texts(ONE_TURN | {"output": " Beta \n"}, tokenizer) == ["Beta" + END]
    action = {"inner_thought": "Look.", "api_name": "find", "api_param": {}, "api_res": "found"}
    rounds = [["ask", "Where?"], ["ans-api", {"actions": [action], "ans": "Here. "}]]
    assert supervised_texts({"type": "conver_has_api", "api_desc": "find()", "rounds": rounds}, tokenizer) == [
        "Thought: Look.\nAction: find\nAction Input: {}\nObservation:",
        "Final Answer: Here." + END,
    ]


def test_a_template_without_end_of_turn_gets_the_end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    tokenizer.chat_template = template + "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    (answer,) = supervised_texts(ONE_TURN, tokenizer)
    assert answer.strip() == "Beta" + END


def test_two_tokens_may_end_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    ends = "<|end_response|><|end_of_turn|>"
    tokenizer.add_tokens(["<|end_response|>", "<|end_of_turn|>"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':\\n' + m.content + '<|end_response|><|end_of_turn|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    assert supervised_texts(RECORD, tokenizer) == [f"Beta 好 🤗{ends}", f"Delta{ends}"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TRIMMING.replace("| trim", "| upper"), "changes the words of an answer"),
        (TRIMMING.replace("message['content'] | trim", "''"), "leaves out what the user says"),
        (ALTERNATING.replace("!=", "==") + "{% endif %}{% endfor %}", "refuses the record: roles must alternate"),
        ("{{ raise_exception('no\\nchat') }}", "refuses the record: no chat"),
        ("{% for %}", "refuses the record"),
        (GEMMA.template, "^" + NO_TOKEN.format(token="<end_of_turn>")),  # of another tokenizer
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    template: str, reason: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=reason) as caught:
        encode(RECORD, tokenizer, 1000)
    assert "\n" not in str(caught.value)


def test_a_template_from_a_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(NAMED, encoding="utf-8")
    assert check_prompt_format(str(path)) == str(path)
    record = {"type": "conversation", "rounds": [["ask", "A"], ["ans", "B"], ["ask", "C"], ["ans", "D"]]}
    sample = encode_tokens(record, tokenizer, str(path)).sample()
    assert runs_of(sample, tokenizer) == [
        (False, "USER:A\nASSISTANT:"),
        (True, "B" + END),
        (False, "USER:C\nASSISTANT:"),
        (True, "D" + END),
    ]
    for turns in (1, 2):  # as demo.py asks
        asked = question_ids(record, tokenizer, str(path), turns)
        assert asked == sample["input_ids"][: len(asked)]
        assert sample["labels"][len(asked) - 1 : len(asked) + 1] == [-100, sample["input_ids"][len(asked)]]
    path.write_text(NAMED.replace("':'", "'> '"), encoding="utf-8")  # it is read anew
    assert whole_text(runs_of(encode_tokens(record, tokenizer, str(path)).sample(), tokenizer)).startswith("USER> A\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not found; expected a Jinja file"),
        (b"{% for m in messages %}", "line 1: .*; expected a Jinja template"),
        (b"\xff", "byte 0: not UTF-8; expected a Jinja file in UTF-8"),
        (b"", "cannot be read: "),
    ],
)
def test_a_file_that_is_no_template_is_refused(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    if content:
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: {reason}") as caught:
        check_prompt_format(str(path))
    assert "\n" not in str(caught.value)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.datetime(2026, 1, 2)


def test_a_template_that_writes_todays_date_is_noted(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "datetime", Clock)
    default = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer.chat_template = default + "{{ 'Today: ' + date_string + '\\n' }}" + SMOLLM2.template
    for _ in range(2):
        tokens = encode_tokens(RECORD, tokenizer)
        assert tokens.notes == {DATED: "02 Jan 2026"}
        assert "Today: 02 Jan 2026" in tokenizer.decode(tokens.ids)
    fixed = Prompts(template_args={"date_string": "26 Jul 2024"})
    assert not encode_tokens(RECORD, tokenizer, fixed).notes
    tokenizer.chat_template = default + "{% if tools %}{{ date_string }}{% endif %}" + SMOLLM2.template
    assert not encode_tokens(RECORD, tokenizer).notes, "asked for, but not written"
