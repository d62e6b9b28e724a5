"""Chats with system prompts, tools, calls and thoughts under templates in the styles of real models.

What is supervised is exactly what the assistant says, as the template writes it, and the token that ends its turn.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.fitting import NEW_IDS
from data.chat.template_check import NO_THOUGHTS
from data.errors import DataError
from data.tokenized.tokenize import Tokens, encode_many, encode_tokens
from tests.data.helpers import RECORDS, chat, rendered, runs_of, runs_under, supervised, whole_text
from tests.data.template_styles import (
    DEEPSEEK,
    GEMMA,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN25,
    SMOLLM2,
    STYLES,
)

JSON = dict[str, Any]

END = "<|im_end|>"
TOOLS: list[JSON] = [
    {"type": "function", "function": {"name": name, "description": "查 " + name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
ARGUMENTS = {"city": '北京 "x"\n', "days": 2}
WRITTEN_ARGUMENTS = '{"city": "北京 \\"x\\"\\n", "days": 2}'
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES: list[JSON] = [
    {"role": "user", "content": "Hi 🤗"},
    {"role": "assistant", "content": "Hello. "},
    {"role": "user", "content": "北京?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 3}', "tool_call_id": "abcdefgh1"},
    {"role": "assistant", "content": "3 度"},
]
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": ' + WRITTEN_ARGUMENTS + "}\n</tool_call>"
TEXT_CALL = f"Action: weather\nAction Input: {WRITTEN_ARGUMENTS}\nObservation:"
TEXT_ANSWER = "Final Answer: 3 度"
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "weather", "arguments": ' + WRITTEN_ARGUMENTS + ', "id": "abcdefgh1"}]'

# What is supervised of MESSAGES.
EXPECTED: dict[str, list[str]] = {
    "smollm2": ["Hello. " + END, TEXT_CALL, TEXT_ANSWER + END],
    "qwen2.5": ["Hello. " + END, QWEN_CALL + END, "3 度" + END],
    "qwen3": ["Hello. " + END, QWEN_CALL + END, "<think>\n\n</think>\n\n3 度" + END],
    "llama3.1": [
        "Hello.<|eot_id|>",
        '{"name": "weather", "parameters": ' + WRITTEN_ARGUMENTS + "}<|eot_id|>",
        "3 度<|eot_id|>",
    ],
    "mistral": [" Hello." + END, MISTRAL_CALL + END, " 3 度" + END],
    "chatglm3": ["\n Hello. <|user|>", f"weather\n {WRITTEN_ARGUMENTS}<|observation|>", "\n 3 度" + END],
    "deepseek": [
        "Hello. " + END,
        f"<calls><call>weather\n{WRITTEN_ARGUMENTS}</call></calls>{END}",
        "3 度" + END,
    ],
    "gemma": ["Hello.<end_of_turn>", TEXT_CALL, TEXT_ANSWER + "<end_of_turn>"],
    "generation": ["Hello. " + END, TEXT_CALL, TEXT_ANSWER + END],
}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no list of tools", "tools"])
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_assistants_words_and_their_ends_are_supervised(
    name: str, system: list[JSON], tools: list[JSON], tokenizer: PreTrainedTokenizerBase
) -> None:
    runs = runs_under(STYLES[name], chat(system + MESSAGES, tools), tokenizer)
    assert supervised(runs) == EXPECTED[name]
    context = "".join(text for loss, text in runs if not loss)
    assert ("Be brief." in context) == bool(system)
    assert ("查 weather" in context) == ("查 time" in context) == bool(tools)
    assert '{"t": 3}' in context.replace("\\", "")


def test_thoughts_in_the_words_of_an_answer_are_found_by_a_template_that_looks_there(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    words = ["<think>\nOne.\n</think>\n\nBeta", "<think>\nTwo.\n</think>\n\nDelta"]
    messages: list[JSON] = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": words[0]},
        {"role": "user", "content": "<tool_response>?"},
        {"role": "assistant", "content": words[1]},
    ]
    for style in (QWEN3, SMOLLM2):  # in Qwen3's style a "question" that begins like a result is none
        runs = runs_under(style, chat(messages), tokenizer)
        assert supervised(runs) == [words[0] + END, words[1] + END]
        assert whole_text(runs) == rendered(tokenizer, messages)
    with pytest.raises(DataError, match=r"leaves out the thoughts in the words of an answer \(message 4\)"):
        runs_under(DEEPSEEK, chat(messages), tokenizer)
    later = [*messages[:3], {"role": "assistant", "content": "Delta"}]
    assert supervised(runs_under(DEEPSEEK, chat(later), tokenizer)) == [f"\n\nBeta{END}", f"Delta{END}"]
    (tokens,) = encode_many([chat(later)], tokenizer)
    assert isinstance(tokens, Tokens) and NO_THOUGHTS in tokens.notes


def test_what_a_template_refuses_is_said_in_the_question(tokenizer: PreTrainedTokenizerBase) -> None:
    messages: list[JSON] = [
        SYSTEM,
        {"role": "user", "content": "A"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "C"},
        {"role": "assistant", "content": "D", "weight": 0},
        {"role": "system", "content": "Now shout."},
        {"role": "user", "content": "E"},
        {"role": "assistant", "content": "F"},
    ]
    start, ask, end = "<|im_start|>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"
    assert runs_under(GEMMA, chat(messages), tokenizer) == [
        (False, f"{start}{ask}Be brief.\n\nA\nB{end}"),
        (True, "C"),
        (False, f"\nD<end_of_turn>\n{ask}Now shout.\n\nE{end}"),
        (True, "F<end_of_turn>"),
        (False, "\n"),
    ]
    runs = runs_under(SMOLLM2, chat(messages), tokenizer)
    assert whole_text(runs) == rendered(tokenizer, messages)
    assert supervised(runs) == ["C" + END, "F" + END]


def test_several_calls_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    calls = [CALL, {"id": "abcdefgh2", "function": {"name": "time", "arguments": "{}"}}]
    results = [
        {"role": "tool", "content": "noon", "tool_call_id": "abcdefgh2"},
        {"role": "tool", "content": "rain", "tool_call_id": "abcdefgh1"},
    ]
    answer = {"role": "assistant", "content": "Rain."}
    messages = [MESSAGES[0], {"role": "assistant", "content": "Let me see.", "tool_calls": calls}, *results, answer]
    second = '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    runs = runs_under(QWEN25, chat(messages, TOOLS), tokenizer)
    assert supervised(runs) == [f"Let me see.\n{QWEN_CALL}{second}{END}", "Rain." + END]
    runs = runs_under(SMOLLM2, chat(messages, TOOLS), tokenizer)
    assert [text for _, text in runs[1:5]] == [
        f"Thought: Let me see.\n{TEXT_CALL}",
        " rain\n",
        "Action: time\nAction Input: {}\nObservation:",
        " noon\n",
    ]
    assert supervised(runs)[-1].startswith("Final Answer: Rain.<|")
    # It takes calls, but one at a time: no run mixes two ways to write them.
    with pytest.raises(DataError, match="refuses the record: one call at a time"):
        runs_under(LLAMA31, chat(messages, TOOLS), tokenizer)


def test_ids_that_a_template_refuses_are_replaced(tokenizer: PreTrainedTokenizerBase) -> None:
    text = str(MESSAGES).replace("abcdefgh1", "call_0123456789")
    messages = eval(text, {"__builtins__": {}})
    tokens = encode_tokens(chat(messages), MISTRAL.put_on(tokenizer))
    runs = runs_of(tokens.sample(), tokenizer)
    assert supervised(runs)[1] == MISTRAL_CALL.replace("abcdefgh1", "call00001") + END
    assert '"call_id": "call00001"' in whole_text(runs)
    assert tokens.notes == {NEW_IDS: "call00001"}


def test_chats_in_the_plain_format(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = encode_tokens(chat([SYSTEM, *MESSAGES], TOOLS[:1]), tokenizer, "plain").sample()
    header = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    tool = '{"type": "function", "function": {"name": "weather", "description": "查 weather", "parameters": '
    assert runs_of(sample, tokenizer) == [
        (
            False,
            f'{header}\n\n### System:\nBe brief.\n\n### APIs:\n{tool}{{"type": "object"}}}}}}\n\n'
            "### Instruction:\nHi 🤗\n\n### Response:\n",
        ),
        (True, "Hello. " + END),
        (False, "\n\n### Instruction:\n北京?\n\n### Response:\n"),
        (True, TEXT_CALL),
        (False, ' {"t": 3}\n'),
        (True, TEXT_ANSWER + END),
    ]


def test_what_cannot_be_masked_is_refused_in_its_place(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'loud' in m.content %}{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>' if m.role == 'assistant' else ' ' }}{% endfor %}"
    )
    records = [
        chat([{"role": "user", "content": "A"}, {"role": "assistant", "content": answer}])
        for answer in ("quiet", "loud", "still")
    ]
    first, second, third = encode_many([*records[:2], RECORDS["instruct"]], tokenizer)
    assert isinstance(second, DataError)
    assert not isinstance(first, DataError) and not isinstance(third, DataError)
    assert first.sample() == encode_tokens(records[0], tokenizer).sample()
    assert third.sample() == encode_tokens(RECORDS["instruct"], tokenizer).sample()
    assert "changes the words of an answer, or what stands before it" in str(second)
    with pytest.raises(DataError, match="changes the words"):
        encode_tokens(records[1], tokenizer)


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
def test_many_records_are_encoded_as_each_alone(prompt_format: str, tokenizer: PreTrainedTokenizerBase) -> None:
    QWEN3.put_on(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(5)  # some tokenizer.json say so
    records: list[Any] = [*RECORDS.values(), chat(MESSAGES, TOOLS), {"type": "instruct"}, chat(MESSAGES)]
    many = encode_many(records, tokenizer, prompt_format)
    assert [isinstance(each, DataError) for each in many] == [False] * (len(records) - 2) + [True, False]
    for record, tokens in zip(records, many, strict=True):
        if not isinstance(tokens, DataError):
            assert tokens.sample() == encode_tokens(record, tokenizer, prompt_format).sample()
            assert len(tokens.ids) > 5
