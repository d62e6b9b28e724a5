"""Only what the model has to say itself is trained: no result of a tool, and no end where it has no answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.errors import DataError
from data.tokenized.tokenize import encode_tokens
from tests.data.helpers import REWRITING, chat, runs_under, supervised
from tests.data.template_styles import ASK_CHATML, IN_PAIRS, QWEN25, SMOLLM2, WORDS_LAST, Style

JSON = dict[str, Any]
QUESTION: JSON = {"role": "user", "content": "Warm in Lima?"}
FINAL: JSON = {"role": "assistant", "content": "It is mild."}
END = "<|im_end|>"
PLAIN = Prompts("plain")


def call(words: str, *ids: str, **more: Any) -> JSON:
    calls = [{"id": each, "function": {"name": "weather", "arguments": {"city": each}}} for each in ids]
    return {"role": "assistant", "content": words, "tool_calls": calls, **more}


def result(call_id: str, text: str = "18 degrees") -> JSON:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def step(words: str, *ids: str, **more: Any) -> list[JSON]:
    return [call(words, *ids, **more), *(result(each, more.get("text", "18 degrees")) for each in ids)]


WITHIN = {
    "one call": (WORDS_LAST, step("Let me look.", "a")),
    "two calls": (WORDS_LAST, step("Let me look.", "a", "b")),
    "the second step": (WORDS_LAST, step("", "a") + step("And there?", "b")),
    "an empty result": (WORDS_LAST, [call("Let me look.", "a"), result("a", "")]),
    "a result that the template looks at": (WORDS_LAST, [call("Let me look.", "a"), result("a", '{"t": 18}')]),
    "two calls in pairs": (IN_PAIRS, step("", "a", "b")),
    "words, and two calls in pairs": (IN_PAIRS, step("Let me look.", "a", "b")),
}


@pytest.mark.parametrize("mask", ["assistant", "last_turn"])
@pytest.mark.parametrize("name", WITHIN)
def test_an_answer_with_a_result_in_its_middle_is_refused(
    name: str, mask: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    style, steps = WITHIN[name]
    with pytest.raises(
        DataError, match=r"writes the result of a call into the middle of the answer .*\(message [24]\)"
    ):
        runs_under(style, chat([QUESTION, *steps, FINAL]), tokenizer, Prompts("chat_template", mask=mask))


BESIDE = {
    "no words": (WORDS_LAST, step("", "a", "b")),
    "words without loss": (WORDS_LAST, step("Let me look.", "a", weight=0)),
    "pairs without loss": (IN_PAIRS, step("", "a", "b", weight=0)),
    "one pair": (IN_PAIRS, step("Let me look.", "a")),
    "no result": (WORDS_LAST, [call("Let me look.", "a")]),
    "words before their calls": (QWEN25, step("Let me look.", "a", "b")),
}


@pytest.mark.parametrize("name", BESIDE)
def test_no_result_is_trained_in_other_answers_with_calls(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    style, steps = BESIDE[name]
    trained = supervised(runs_under(style, chat([QUESTION, *steps, FINAL]), tokenizer))
    assert trained[-1] == FINAL["content"] + END
    assert "18" not in "".join(trained)
    assert any('"a"' in text for text in trained) is ("weight" not in steps[0])


def test_a_result_within_an_answer_before_the_last_question_does_not_matter_to_the_last_turn(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [QUESTION, *step("Let me look.", "a"), FINAL, QUESTION, FINAL]
    prompts = Prompts("chat_template", mask="last_turn")
    assert supervised(runs_under(WORDS_LAST, chat(messages), tokenizer, prompts)) == [FINAL["content"] + END]


CALLED = 'Action: weather\nAction Input: {"city": "a"}\nObservation:'
UNANSWERED: dict[str, list[JSON]] = {
    "a result": step("", "a"),
    "a call": [call("", "a")],
    "an empty answer": [*step("", "a"), {"role": "assistant", "content": ""}],
    "white space": [*step("", "a"), {"role": "assistant", "content": " \n"}],
    "two results": [*step("", "a"), result("a", "19")],
}


@pytest.mark.parametrize("behind", [[], [QUESTION, FINAL], [QUESTION, FINAL, QUESTION, FINAL]], ids=["0", "1", "2"])
@pytest.mark.parametrize("prompts", [PLAIN, REWRITING], ids=["plain", "rewritten"])
@pytest.mark.parametrize("name", UNANSWERED)
def test_nothing_is_trained_behind_calls_as_text_without_an_answer(
    name: str, prompts: Prompts, behind: list[JSON], tokenizer: PreTrainedTokenizerBase
) -> None:
    trained = supervised(runs_under(SMOLLM2, chat([QUESTION, *UNANSWERED[name], *behind]), tokenizer, prompts))
    assert trained == [CALLED] + [FINAL["content"] + END] * (len(behind) // 2)


THOUGHT = "<think>Hm.</think>"
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}HERE{{- m.content }}{{- '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
)
BEGIN = "{% generation %}"
THINKING = "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}"
MARKS = {
    "the whole answer": (BEGIN + THINKING, "", ""),  # fits
    "a thought": (THINKING + BEGIN, "", "leave a part of an answer without loss"),
    "an empty line": ("{{ '\\n\\n' }}" + BEGIN, "", "leave a part of an answer without loss"),
    "an opened thought": (BEGIN + "{{ '<think>' }}", "<think>", "put loss on the end of the prompt"),
    "a line of the prompt": (BEGIN + "{{ '\\n' }}", "\\n", "put loss on the end of the prompt"),
}


@pytest.mark.parametrize("name", MARKS)
def test_generation_marks_that_are_not_what_the_model_writes_are_noted(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    here, asked, noted = MARKS[name]
    template = MARKED.replace("HERE", here) + ASK_CHATML.replace("assistant\\n", "assistant\\n" + asked)
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "Hm." if "reasoning" in here else None}
    tokenizer.chat_template = template
    notes = encode_tokens(chat([QUESTION, answer]), tokenizer).notes
    assert [noted in note for note in notes if "generation marks" in note] == [True] * bool(noted)


@pytest.mark.parametrize("behind", ["system", "user"])
def test_a_word_that_took_the_blank_behind_an_answer_is_not_trained(
    behind: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    blank = "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' }}{{ m.content + ' ' }}{% endfor %}"
    style = Style(blank + "{% if add_generation_prompt %}A: {% endif %}")
    word = next(token[1:] for token in tokenizer.get_vocab() if token[:1] == "\u0120" and len(token) > 3)
    between: list[JSON] = [{"role": behind, "content": word}] + [QUESTION] * (behind == "system")
    trained = supervised(runs_under(style, chat([QUESTION, FINAL, *between, FINAL]), tokenizer))
    assert trained[0].strip() == FINAL["content"]


@pytest.mark.parametrize("lacking", [["<|call>"], ["<call|>"], ["<|call>", "<|result>"], []], ids=str)
def test_control_tokens_that_the_tokenizer_lacks_are_noted(
    lacking: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    style = replace(WORDS_LAST, special=tuple(token for token in WORDS_LAST.special if token not in lacking))
    style.put_on(tokenizer)

    def named(messages: list[JSON]) -> list[str]:
        return [note for note in encode_tokens(chat(messages), tokenizer).notes if "in pieces" in note]

    found = named([QUESTION, *step("", "a"), FINAL])
    assert len(found) == bool(lacking)
    assert all(f"writes {', '.join(sorted(lacking))}, no tokens of this tokenizer" in note for note in found)
    assert not named([QUESTION, FINAL])  # none stands there
