"""Random dialogues with words that may be taken for something else: masks are exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data.chat.chat_template import ChatTemplate, chat_template
from data.chat.messages import said_in
from data.chat.prompts import Prompts
from data.chat.rendered import RenderedText
from data.records.chat import Chat
from tests.data.helpers import chat, rendered
from tests.data.template_styles import STYLES

JSON = dict[str, Any]
END = "<|im_end|>"

# Words that may be taken for something else: marks, tokens, JSON, white space.
PIECES = st.sampled_from(
    list("aZ9 \n\t\"'{}<>\\|é好🤗\u2028\x1c")
    + "zqa0000q zqb0000q zq0xa0q zqi000000 {{m}} assistant null <|im_start|> <|im_end|> <|eot_id|> [INST] </s>".split()
    + ["<tool_call>", "</tool_call>", "<|user|>"]
)
WORDS = st.lists(PIECES, max_size=6).map("".join)
NAMES = st.text("abc_", min_size=1, max_size=4)
VALUES = WORDS | st.integers() | st.booleans() | st.none() | st.lists(WORDS, max_size=2)
CALLS = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    NAMES,
    st.dictionaries(NAMES, VALUES, max_size=2),
)


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[list[JSON], list[JSON]]:
    messages: list[JSON] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if draw(st.booleans()):
            messages.append({"role": "assistant", "content": "", "tool_calls": [draw(CALLS)]})
            messages.append({"role": "tool", "content": draw(WORDS)})
        messages.append({"role": "assistant", "content": draw(WORDS), "weight": draw(st.sampled_from([0, 1, 1]))})
    messages[-1]["weight"] = 1
    tools = [{"type": "function", "function": {"name": draw(NAMES), "description": draw(WORDS)}}]
    return messages, tools if draw(st.booleans()) else []


def arguments_of(message: JSON) -> tuple[str, str]:
    function = message["tool_calls"][0]["function"]
    return function["name"], json.dumps(function.get("arguments", {}), ensure_ascii=False)


def qwen(message: JSON) -> str:
    if not message.get("tool_calls"):
        return message["content"] + END
    return '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format(*arguments_of(message)) + END


def llama(message: JSON) -> str:
    if not message.get("tool_calls"):
        return message["content"].strip() + "<|eot_id|>"
    return '{{"name": "{}", "parameters": {}}}<|eot_id|>'.format(*arguments_of(message))


def deepseek(message: JSON) -> str:
    if not message.get("tool_calls"):
        return message["content"] + END
    return "<calls><call>{}\n{}</call></calls>".format(*arguments_of(message)) + END


def glm(message: JSON) -> str:
    return "{}\n {}".format(*arguments_of(message)) if message.get("tool_calls") else "\n " + message["content"]


SAYS = {"qwen2.5": qwen, "llama3.1": llama, "deepseek": deepseek, "chatglm3": glm}


def losses(written: RenderedText) -> list[str]:
    return [written.text[begin:end] for begin, end in written.loss]


@pytest.mark.parametrize("name", SAYS)
def test_any_words_are_trained_whole_and_alone(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    template = chat_template(STYLES[name].put_on(tokenizer), Prompts())
    tools_known = name in ("qwen2.5", "llama3.1")

    @settings(max_examples=60, deadline=None)
    @given(dialogues())
    def check(drawn: tuple[list[JSON], list[JSON]]) -> None:
        messages, tools = drawn
        tools = tools if tools_known else []
        record = chat(messages, tools)
        written = template.write(said_in(record), record.tools)
        own = rendered(tokenizer, [{k: v for k, v in m.items() if k != "weight"} for m in messages], tools)
        assert written.text in (own, own + END)
        ends = [""] * len(messages)
        if name == "chatglm3":
            roles = ["<|observation|>" if m["role"] == "tool" else f"<|{m['role']}|>" for m in messages]
            ends = [*roles[1:], END]
        expected = [
            SAYS[name](message) + end
            for message, end in zip(messages, ends, strict=True)
            if message["role"] == "assistant" and message.get("weight", 1)
        ]
        assert losses(written) == expected

    check()


# What differs from turn to turn stands around answers: ids of calls, numbers of rounds. Lengths must not leak from one
# dialogue into the mask of another.
CALLER = """{% for m in messages %}<|im_start|>{{ m.role }}{{ ' of ' + m.tool_call_id if m.role == 'tool' }}
{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function | tojson }}</tool_call>
{% endfor %}{{ m.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
ROUNDS = """{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index // 2 + 1 }}]
{{ m.content }}
{% elif m.role == 'assistant' %}Answer {{ loop.index // 2 }}: {{ m.content }}
{% endif %}{% endfor %}{{ 'Answer ' ~ (messages | length + 1) // 2 ~ ':' if add_generation_prompt }}"""


def called(call_id: str, value: Any) -> JSON:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"n": value}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": call_id, "content": "r"}, {"role": "assistant", "content": "a"}]
    return {"messages": messages}


@pytest.mark.parametrize("template", [CALLER, ROUNDS])
def test_the_mask_of_a_dialogue_is_the_same_whatever_was_read_before(
    template: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = [{"role": role, "content": "w"} for role in ("user", "assistant")]
    rounds = [chat(pair * count) for count in (2, 12)]
    calls = [Chat.model_validate(called(name, value)) for name in ("f:1", "f:123", "g") for value in (1, 2000, True)]
    tokenizer.chat_template = template
    for order in (slice(None), slice(None, None, -1)):
        used = ChatTemplate(tokenizer, template, Prompts())
        for record in (calls if template == CALLER else rounds)[order]:
            written = used.write(said_in(record), record.tools)
            assert written == ChatTemplate(tokenizer, template, Prompts()).write(said_in(record), record.tools)
            assert all(text.rstrip().endswith((END, "w")) for text in losses(written))
