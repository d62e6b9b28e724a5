"""The config's keys for prompts: template_args, template_fallback, mask, truncate; and what a run says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.chat_template import MOST_TEMPLATES, NEEDS_TOOLS, NEW_IDS, NO_TOKEN
from data.chat.prompts import Mask, Prompts, Truncate
from data.chat.template_check import NO_THOUGHTS, OTHER_ANSWER, OTHER_PROMPT
from data.errors import DataError
from data.inspection.summary import warnings
from data.sample_set import Sample
from data.tokenized.columns import OLDEST
from data.tokenized.dataset import Dataset, load_dataset
from data.tokenized.tokenize import JOINED, NO_TEMPLATE, Tokens, encode_many, encode_tokens
from tests.data.helpers import chat, rendered, runs_of, supervised, whole_text
from tests.data.template_styles import CHATGLM3, DEEPSEEK, GEMMA, LLAMA31, MISTRAL, QWEN3, QWEN25, SMOLLM2, Style

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


def tokens_of(record: Any, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> Tokens:
    (tokens,) = encode_many([record], tokenizer, prompts)
    assert isinstance(tokens, Tokens), tokens
    return tokens


def learnt(record: Any, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[str]:
    return supervised(runs_of(tokens_of(record, tokenizer, prompts).sample(), tokenizer))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_trained_whatever_their_field_is_called(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    thinking = [*TALK[:3], TALK[3] | {name: "Hm."}]
    assert learnt(chat(thinking), tokenizer, Prompts())[-1] == f"<think>\nHm.\n</think>\n\nD{END}"
    SMOLLM2.put_on(tokenizer)
    with pytest.raises(DataError, match="takes no thoughts; template_fallback: rewrite says it at the beginning of"):
        encode_tokens(chat(thinking), tokenizer)
    rewriting = Prompts(template_fallback="rewrite")
    assert learnt(chat(thinking), tokenizer, rewriting)[-1] == f"<think>\nHm.\n</think>\n\nD{END}"


def test_thoughts_that_a_template_leaves_out_on_purpose_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    thinking = [TALK[0], TALK[1] | {"reasoning_content": "Hm."}, TALK[2], TALK[3] | {"reasoning_content": "So."}]
    tokens = tokens_of(chat(thinking), tokenizer, Prompts())
    assert tokens.notes[NO_THOUGHTS] == "Hm."
    # A server writes the first answer with its thought, and sends the second question behind one without.
    assert OTHER_ANSWER in tokens.notes
    assert learnt(chat(thinking), tokenizer, Prompts(mask="last_turn")) == [f"<think>\nSo.\n</think>\n\nD{END}"]


def test_arguments_go_to_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    ARGUED.put_on(tokenizer)
    plain = tokens_of(chat(TALK), tokenizer, Prompts())
    chinese = tokens_of(chat(TALK), tokenizer, Prompts(template_args={"language": "zh"}))
    text = whole_text(runs_of(chinese.sample(), tokenizer))
    assert text == str(tokenizer.apply_chat_template(TALK, tokenize=False, language="zh"))
    assert "zh" in text and "zh" not in whole_text(runs_of(plain.sample(), tokenizer))
    # With this one, the template's prompts end with what its dialogues do not have.
    silent = tokens_of(chat(TALK), tokenizer, Prompts(template_args={"enable_thinking": False}))
    assert OTHER_PROMPT in silent.notes and "served '" in silent.notes[OTHER_PROMPT]
    assert not plain.notes


def test_a_records_own_arguments_go_to_the_template_over_the_configs(tokenizer: PreTrainedTokenizerBase) -> None:
    ARGUED.put_on(tokenizer)
    own = {"messages": TALK, "chat_template_kwargs": {"language": "zh"}}
    prompts = Prompts(template_args={"language": "fr"})
    zh, fr, again = (tokens_of(record, tokenizer, prompts) for record in (own, {"messages": TALK}, own))
    for tokens, language in ((zh, "zh"), (fr, "fr"), (again, "zh")):
        written = str(tokenizer.apply_chat_template(TALK, tokenize=False, language=language))
        assert whole_text(runs_of(tokens.sample(), tokenizer)) == written
    assert NO_TEMPLATE in tokens_of(own, tokenizer, Prompts("plain")).notes
    many = [own | {"chat_template_kwargs": {"language": str(number)}} for number in range(MOST_TEMPLATES + 5)]
    assert all(isinstance(each, Tokens) for each in encode_many(many, tokenizer))


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize(
    ("mask", "expected"), [("assistant", ["B", "D"]), ("last_turn", ["D"]), ("all", ["A", "B", "C", "D"])]
)
def test_a_mask_decides_which_tokens_bear_loss(
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


def test_runs_with_other_masks_share_a_template_and_no_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    SMOLLM2.put_on(tokenizer)
    masks: list[Mask] = ["all", "assistant", "last_turn", "all"]
    found = [len("".join(learnt(chat(TALK), tokenizer, Prompts(mask=mask)))) for mask in masks]
    assert found[0] == found[3] > found[1] > found[2]


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
    rewritten = tokens_of(chat(messages, tools), tokenizer, Prompts(template_fallback="rewrite"))
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
        tokens = tokens_of(record, tokenizer, Prompts())
        assert whole_text(runs_of(tokens.sample(), tokenizer)) == rendered(tokenizer, parts)
        assert learnt(record, tokenizer, Prompts()) == ["B" + END, "D" + END]


def test_a_template_for_tools_says_so(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + QWEN25.template
    (refused,) = encode_many([chat(TALK)], tokenizer)
    assert str(refused) == NEEDS_TOOLS
    assert isinstance(encode_many([chat(TALK, [TOOL])], tokenizer)[0], Tokens)


def test_new_ids_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    MISTRAL.put_on(tokenizer)
    messages = [CALLING[0], CALLING[1] | {"tool_calls": [CALL | {"id": "call-7"}]}, *CALLING[2:]]
    assert NEW_IDS in tokens_of(chat(messages), tokenizer, Prompts()).notes


def test_a_template_of_another_tokenizer_is_refused_by_its_end(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "gemma.jinja"
    path.write_text(GEMMA.template)
    with pytest.raises(DataError, match="^" + NO_TOKEN.format(token="<end_of_turn>")):
        encode_tokens(chat(TALK), tokenizer, str(path))


def test_two_tokens_may_end_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["<|end_response|>", "<|end_of_turn|>"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':\\n' + m.content + '<|end_response|><|end_of_turn|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    ends = "<|end_response|><|end_of_turn|>"
    assert learnt(chat(TALK), tokenizer, Prompts()) == [f"B{ends}", f"D{ends}"]


def test_a_token_over_the_end_of_a_prompt_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokens = tokens_of(chat(TALK), tokenizer, Prompts())
    assert tokens.notes[JOINED] in ("' B'", "' D'")


def test_a_prompt_that_cannot_be_served_as_it_is_trained_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    DEEPSEEK.put_on(tokenizer)
    tokens = tokens_of(chat(TALK), tokenizer, Prompts())
    served, trained = tokens.notes[OTHER_PROMPT].removeprefix("served ").split(", trained ")
    assert "<think>" in served and "<think>" not in trained


LONG: list[JSON] = [
    {"role": "system", "content": "Be brief."},
    *(
        {"role": role, "content": f"{role} {number}: " + "word " * 20}
        for number in range(8)
        for role in ("user", "assistant")
    ),
]


def as_lists(sample: Sample) -> Sample:
    return {"input_ids": list(map(int, sample["input_ids"])), "labels": list(map(int, sample["labels"]))}


def load(path: Path, folder: Path, truncate: Truncate, limit: int, records: list[Any]) -> Dataset:
    path.write_text("\n".join(map(json.dumps, records)))
    return load_dataset(str(path), folder, limit, "chat_template", truncate=truncate, cache_dir=path.parent / truncate)


def test_dialogues_are_cut_as_it_is_asked_for(tmp_path: Path, tokenizer_folder: Path) -> None:
    from data.tokenized.tokenize import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    rounds = [["ask" if each["role"] == "user" else "ans", each["content"]] for each in LONG[1:]]
    records = [{"messages": LONG}, {"type": "conversation", "rounds": rounds}, {"messages": TALK}]
    whole = len(encode_tokens(chat(LONG), tokenizer).ids)
    limit = whole // 2
    texts = {
        how: [
            whole_text(runs_of(as_lists(sample), tokenizer))
            for sample in load(tmp_path / "a.jsonl", tokenizer_folder, how, limit, records).samples
        ]
        for how in ("turns", "oldest")
    }
    for first in texts["turns"][:2]:
        assert "assistant 0:" in first and "assistant 7:" not in first
    for number, last in enumerate(texts["oldest"][:2]):
        assert "assistant 0:" not in last and "assistant 7:" in last
        assert ("Be brief." in last) == (number == 0)
        kept = [each for each in LONG[1:] if each["content"] in last]
        assert kept == LONG[-len(kept) :] and kept[0]["role"] == "user"
        longer = LONG[-len(kept) - 2 :]
        assert len(encode_tokens(chat(LONG[:1] * (not number) + longer), tokenizer).ids) > limit
    assert texts["oldest"][2] == texts["turns"][2] == rendered(tokenizer, TALK)
    dataset = load(tmp_path / "a.jsonl", tokenizer_folder, "oldest", limit, records)
    assert [(note, count) for note, count, _ in dataset.notes] == [(OLDEST, 2)]
    assert any(f"2 records: {OLDEST}" in line for line in warnings(dataset, limit))
    with pytest.raises(
        DataError, match=rf"record 1: .*tokens; expected at most max_seq_len, {limit} \(truncate: refuse\)"
    ):
        load(tmp_path / "a.jsonl", tokenizer_folder, "refuse", limit, records)
    # Where not even the last turn fits, it is cut like a text, and what was left out before it is told all the same.
    longest = [*LONG[:-1], {"role": "assistant", "content": "word " * 400}]
    cut = load(tmp_path / "b.jsonl", tokenizer_folder, "oldest", limit, [{"messages": longest}])
    assert [(note, count) for note, count, _ in cut.notes] == [(OLDEST, 1)]
    last = whole_text(runs_of(as_lists(cut.samples[0]), tokenizer))
    assert "user 7:" in last and "user 6:" not in last and len(cut.samples[0]["input_ids"]) == limit
