"""The config's keys for prompts: template_args, template_fallback, mask; and the notes on what they changed."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from data.chat.chat_template import MOST_TEMPLATES
from data.chat.fitting import NEEDS_TOOLS
from data.chat.prompts import Prompts
from data.chat.template_check import NO_THOUGHTS, OTHER_ANSWER, OTHER_PROMPT
from data.errors import DataError
from data.settings import Mask, TemplateArguments
from data.tokenized.tokenize import Tokens, encode_many, encode_tokens
from data.tokenized.writer import NO_TEMPLATE
from tests.data.helpers import chat, rendered, runs_of, supervised, whole_text
from tests.data.template_styles import CHATGLM3, DEEPSEEK, GEMMA, LLAMA31, QWEN3, QWEN25, SMOLLM2, Style

JSON = dict[str, Any]
END = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "look", "arguments": {"up": "it"}}}
TALK: list[JSON] = [
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
    {"role": "assistant", "content": "D"},
]
CALLING: list[JSON] = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "E"},
    TALK[3],
]
ARGUED = Style(
    "{{ '<|im_start|>system\\n' + (language | default('en')) + '<|im_end|>\\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def learnt(record: Any, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    return supervised(runs_of(encode_tokens(record, tokenizer, prompts).sample(), tokenizer))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_trained_whatever_their_field_is_called(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    thinking = [*TALK[:3], TALK[3] | {name: "Hm."}]
    assert learnt(chat(thinking), tokenizer, Prompts()) == [f"B{END}", f"<think>\nHm.\n</think>\n\nD{END}"]
    SMOLLM2.put_on(tokenizer)
    with pytest.raises(DataError, match="takes no thoughts; template_fallback: rewrite says it at the beginning of"):
        encode_tokens(chat(thinking), tokenizer)
    rewriting = Prompts(template_fallback="rewrite")
    assert learnt(chat(thinking), tokenizer, rewriting)[-1] == f"<think>\nHm.\n</think>\n\nD{END}"


def test_thoughts_that_a_template_leaves_out_on_purpose_are_noted(tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    thinking = [TALK[0], TALK[1] | {"reasoning_content": "Hm."}, TALK[2], TALK[3] | {"reasoning_content": "So."}]
    tokens = encode_tokens(chat(thinking), tokenizer, Prompts())
    assert tokens.notes[NO_THOUGHTS] == "Hm."
    # A server writes the first answer with its thought, and sends the second question behind one without.
    assert OTHER_ANSWER in tokens.notes
    assert learnt(chat(thinking), tokenizer, Prompts(mask="last_turn")) == [f"<think>\nSo.\n</think>\n\nD{END}"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2024, 7, 26), "2024-07-26"),
        ([datetime.datetime(2024, 7, 26, 1, 2)], ["2024-07-26T01:02:00"]),
        ({"a": [1, None, True, "x"]}, {"a": [1, None, True, "x"]}),
        *((value, None) for value in ({1, 2}, b"x", float("nan"), {(1, 2): 3}, [object()])),
    ],
)
def test_an_argument_is_a_value_of_json_or_a_date_as_yaml_has_it(value: Any, expected: Any) -> None:
    check = TypeAdapter(TemplateArguments).validate_python
    if expected is not None:
        assert check({"when": value}) == {"when": expected}
        return
    with pytest.raises(ValidationError) as caught:
        check({"a": 1, "when": value})
    assert [error["msg"] for error in caught.value.errors()] == ["when: expected a value of JSON or a date"]


def test_arguments_go_to_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    ARGUED.put_on(tokenizer)
    plain = encode_tokens(chat(TALK), tokenizer, Prompts())
    chinese = encode_tokens(chat(TALK), tokenizer, Prompts(template_args={"language": "zh"}))
    text = whole_text(runs_of(chinese.sample(), tokenizer))
    assert text == str(tokenizer.apply_chat_template(TALK, tokenize=False, language="zh"))
    assert "zh" in text and "zh" not in whole_text(runs_of(plain.sample(), tokenizer))
    # With this one, the template's prompts end with what its dialogues do not have.
    silent = encode_tokens(chat(TALK), tokenizer, Prompts(template_args={"enable_thinking": False}))
    assert OTHER_PROMPT in silent.notes and "served '" in silent.notes[OTHER_PROMPT]
    assert not plain.notes


def test_a_records_own_arguments_go_to_the_template_over_the_configs(tokenizer: PreTrainedTokenizerBase) -> None:
    ARGUED.put_on(tokenizer)
    own = {"messages": TALK, "chat_template_kwargs": {"language": "zh"}}
    prompts = Prompts(template_args={"language": "fr"})
    zh, fr, again = (encode_tokens(record, tokenizer, prompts) for record in (own, {"messages": TALK}, own))
    for tokens, language in ((zh, "zh"), (fr, "fr"), (again, "zh")):
        written = str(tokenizer.apply_chat_template(TALK, tokenize=False, language=language))
        assert whole_text(runs_of(tokens.sample(), tokenizer)) == written
    assert NO_TEMPLATE in encode_tokens(own, tokenizer, Prompts("plain")).notes
    many = [own | {"chat_template_kwargs": {"language": str(number)}} for number in range(MOST_TEMPLATES + 5)]
    assert all(isinstance(each, Tokens) for each in encode_many(many, tokenizer))


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize(
    ("mask", "expected"), [("assistant", ["B", "D"]), ("last_turn", ["D"]), ("all", ["A", "B", "C", "D"])]
)
def test_a_mask_decides_which_tokens_are_trained(
    mask: Mask, expected: list[str], prompt_format: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    SMOLLM2.put_on(tokenizer)
    words = [each | {"content": f"word{each['content']}"} for each in TALK]
    found = "".join(learnt(chat(words), tokenizer, Prompts(prompt_format, mask=mask)))
    assert [letter for letter in "ABCD" if f"word{letter}" in found] == expected
    conversation = {
        "type": "conversation",
        "rounds": [["ask", "wordA"], ["ans", "wordB"], ["ask", "wordC"], ["ans", "wordD"]],
    }
    assert "".join(learnt(conversation, tokenizer, Prompts(prompt_format, mask=mask))) == found


def test_calls_belong_to_the_last_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    call, answer = learnt(chat(TALK[:2] + CALLING, [TOOL]), tokenizer, Prompts(mask="last_turn"))
    assert "look" in call and "D" in answer


@pytest.mark.parametrize(
    ("style", "messages", "tools", "said"),
    [
        (GEMMA, [{"role": "system", "content": "S"}, *TALK], [], "takes no system message"),
        (GEMMA, [TALK[0], *TALK], [], "takes no two messages of one role in a row"),
        (GEMMA, TALK[1:], [], "takes no answer without a question"),
        (GEMMA, CALLING, [], "takes no calls of tools"),
        (SMOLLM2, TALK, [TOOL], "takes no tools"),
        (CHATGLM3, CALLING, [TOOL], "takes no tools"),
        (LLAMA31, [TALK[0], TALK[1] | {"reasoning_content": "Hm."}], [], "takes no thoughts"),
    ],
)
def test_what_a_template_does_not_take_is_refused_or_rewritten(
    style: Style, messages: list[JSON], tools: list[JSON], said: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    style.put_on(tokenizer)
    (refused,) = encode_many([chat(messages, tools)], tokenizer, Prompts(template_fallback="refuse"))
    assert isinstance(refused, DataError) and said in str(refused)
    rewritten = encode_tokens(chat(messages, tools), tokenizer, Prompts(template_fallback="rewrite"))
    (note,) = [note for note in rewritten.notes if note.startswith("rewritten: ")]
    assert said.removeprefix("takes no ") in note and rewritten.notes[note]
    text = whole_text(runs_of(rewritten.sample(), tokenizer))
    assert all(each["content"] in text for each in messages)


def test_a_template_that_takes_calls_never_mixes_them_with_text(tokenizer: PreTrainedTokenizerBase) -> None:
    LLAMA31.put_on(tokenizer)
    beside = [CALLING[0], CALLING[1] | {"content": "Let me see."}, *CALLING[2:]]
    for fallback in ("rewrite", "refuse", None):
        good, bad = encode_many(
            [chat(CALLING, [TOOL]), chat(beside, [TOOL])], tokenizer, Prompts(template_fallback=fallback)
        )
        assert isinstance(good, Tokens) and not good.notes
        assert str(bad).startswith("the chat template leaves out the words beside a call (message 2); expected ")


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_calls_come_in_the_form_that_a_template_expects(
    text: bool, none: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The first DeepSeek-V3 joins the arguments as a text, and looks for calls where there is no content."""
    calls = "m.content is none" if none else "m.tool_calls"
    arguments = "'' + c.arguments" if text else "'up=' + c.arguments.up"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' and " + calls + " %}{% for t in m.tool_calls %}"
        "{% set c = t.function %}{{ '<call>' + c.name + '\\n' }}{{ " + arguments + " }}{% endfor %}{{ eos_token }}"
        "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}{{ m.role + ': ' + m.content + '\\n' }}"
        "{% endif %}{% endfor %}"
    )
    found = learnt(chat(CALLING), tokenizer, Prompts())
    assert found == ["<call>look\n" + ('{"up": "it"}' if text else "up=it") + END, "D" + END]


CALLED_AT_ONCE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
    "{% else %}{{ m.content or '  ' }}{% for c in m.tool_calls %}{{ '<|call|>' + c.function.name }}"
    "{{ ' up=' + c.function.arguments.up }}{% endfor %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_calls_alone_are_trained_though_a_prompt_ends_with_other_white_space(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As in vLLM's template for DeepSeek-V3; Command R+ ends every text with an order that no dialogue has."""
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    tokenizer.chat_template = CALLED_AT_ONCE + "{{ '\n' }}"
    assert learnt(chat(CALLING), tokenizer, Prompts()) == [f"<|call|>look up=it{END}", f"D{END}"]
    tokenizer.chat_template = CALLED_AT_ONCE + "{{ '<|im_start|>Call now.<|im_end|>' }}"
    with pytest.raises(DataError, match="what stands before it is not how a server's prompt ends"):
        encode_tokens(chat(CALLING), tokenizer)


@pytest.mark.parametrize(
    ("written", "answer", "line"),
    [
        ("m.content | replace('\n\n', '\n')", "<think>\nHm.\n</think>\n\nSo.", "changes the words of an answer; use"),
        ("m.content", "", r"leaves out an answer \(message 2\)"),
    ],
    ids=["Falcon: lines", "Nemotron Nano 2: an empty answer"],
)
def test_what_a_template_cannot_write_of_an_answer_is_refused(
    written: str, answer: str, line: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages if m.content %}{{ '<|im_start|>' + m.role + '\n' + " + written + " + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(DataError, match=line):
        encode_tokens(chat([TALK[0], {"role": "assistant", "content": answer}]), tokenizer)


def test_a_template_may_expect_the_words_in_parts(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% for part in m.content %}"
        "{% if part.type == 'image' %}{{ '<image>' }}{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in TALK]
    for record in (chat(TALK), chat(parts)):
        tokens = encode_tokens(record, tokenizer, Prompts())
        assert whole_text(runs_of(tokens.sample(), tokenizer)) == rendered(tokenizer, parts)
        assert learnt(record, tokenizer, Prompts()) == ["B" + END, "D" + END]


def test_a_template_that_needs_tools_refuses_records_without(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + QWEN25.template
    (refused,) = encode_many([chat(TALK)], tokenizer)
    assert str(refused) == NEEDS_TOOLS
    assert isinstance(encode_many([chat(TALK, [TOOL])], tokenizer)[0], Tokens)


def test_a_prompt_that_cannot_be_served_as_it_is_trained_is_noted(tokenizer: PreTrainedTokenizerBase) -> None:
    DEEPSEEK.put_on(tokenizer)
    tokens = encode_tokens(chat(TALK), tokenizer, Prompts())
    served, trained = tokens.notes[OTHER_PROMPT].removeprefix("served ").split(", trained ")
    assert "<think>" in served and "<think>" not in trained
