"""What is trained of records as they are published: the exact text of the trained tokens, and nobody else's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.records.raw_records import read_file
from data.records.reading import parse
from data.tokenized.tokenize import encode_tokens
from tests.data.helpers import runs_of
from tests.data.template_styles import QWEN3

JSON = dict[str, Any]
SYSTEM, ASKED, RESULT, LATER, REWORDED = "Be brief.", "Warm in Lima?", "18 degrees", "And in Rome?", "Not cold."
TOOLS = [{"name": "weather", "description": "Looks outside.", "parameters": {"type": "object"}}]
CALLS: list[JSON] = [{"name": "weather", "arguments": {"city": city}} for city in ("Lima", "Rome")]
WRITTEN = [
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Lima", "Rome")
]
END, NO_THOUGHT = "<|im_end|>", "<think>\n\n</think>\n\n"  # Qwen3 writes an empty thought before its last answer
USER: JSON = {"role": "user", "content": ASKED}
ANSWER: JSON = {"role": "assistant", "content": "It is mild."}
TALK: JSON = {"messages": [{"role": "system", "content": SYSTEM}, USER, ANSWER]}
MILD = f"{NO_THOUGHT}It is mild.{END}"


def part(kind: str, **fields: Any) -> JSON:
    return {"type": kind, **fields}


WORDS = part("text", text="Let me look.")
THOUGHT = part("thinking", thinking="A city.", signature="x")
USE = part("tool_use", id="1", name="weather", input=CALLS[0]["arguments"])
GIVEN = part("tool_result", tool_use_id="1", content=[part("text", text=RESULT)])


def anthropic(answer: list[JSON], *behind: JSON) -> JSON:
    """A dialogue whose first answer consists of parts."""
    asked = {"role": "user", "content": [part("text", text=ASKED)]}
    messages = [asked, {"role": "assistant", "content": answer}, *behind]
    return {"system": [{"text": SYSTEM}], "tools": TOOLS, "messages": messages}


def results(*parts: JSON) -> JSON:
    return {"role": "user", "content": list(parts)}


# By kind: what a file holds; the texts that are trained, in order; words of others that stand untrained in the text.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "xLAM: calls and tools as text": (
        {"id": 0, "query": ASKED, "answers": json.dumps(CALLS), "tools": json.dumps(TOOLS)},
        [NO_THOUGHT + "\n".join(WRITTEN) + END],
        [ASKED, "Looks outside."],
    ),
    "APIGen: a call and tools as objects": (
        {"query": ASKED, "answers": CALLS[:1], "tools": TOOLS},
        [NO_THOUGHT + WRITTEN[0] + END],
        [ASKED, "Looks outside."],
    ),
    "APIGen-MT: a dialogue": (
        {
            "system": SYSTEM,
            "tools": json.dumps(TOOLS),
            "conversations": [
                {"from": "human", "value": ASKED},
                {"from": "function_call", "value": json.dumps(CALLS[0])},
                {"from": "observation", "value": RESULT},
                {"from": "gpt", "value": ANSWER["content"]},
            ],
        },
        [WRITTEN[0] + END, MILD],
        [SYSTEM, ASKED, RESULT, "Looks outside."],
    ),
    "OpenR1: the answer in other words": (
        TALK | {"problem": ASKED, "answer": REWORDED},
        [MILD],
        [SYSTEM, ASKED],
    ),
    "OpenR1: thoughts in the words": (
        {"messages": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nMild."}], "answer": REWORDED},
        [f"<think>\nHm.\n</think>\n\nMild.{END}"],
        [ASKED],
    ),
    "Anthropic: text": (anthropic([WORDS]), [f"{NO_THOUGHT}Let me look.{END}"], [SYSTEM, ASKED]),
    "Anthropic: thinking and text": (
        anthropic([THOUGHT, WORDS]),
        [f"<think>\nA city.\n</think>\n\nLet me look.{END}"],
        [SYSTEM, ASKED],
    ),
    "Anthropic: a tool's use and its result": (
        anthropic([THOUGHT, WORDS, USE], results(GIVEN), ANSWER),
        [f"<think>\nA city.\n</think>\n\nLet me look.\n{WRITTEN[0]}{END}", MILD],
        [SYSTEM, ASKED, RESULT, "Looks outside."],
    ),
    "Anthropic: a question behind the result": (
        anthropic([USE], results(GIVEN, part("text", text=LATER)), ANSWER),
        [WRITTEN[0] + END, MILD],
        [SYSTEM, ASKED, RESULT, LATER],
    ),
    "a refusal to answer": (
        {"messages": [USER, {"role": "assistant", "content": [part("refusal", refusal="No.")]}]},
        [f"{NO_THOUGHT}No.{END}"],
        [ASKED],
    ),
    "a file with a version": ({"version": "1.1", "train": [TALK, TALK]}, [MILD, MILD], [SYSTEM, ASKED]),
    "a file with a schema": ({"schema": {"fields": [{"name": "messages"}]}, "data": [TALK]}, [MILD], [SYSTEM, ASKED]),
}


@pytest.mark.parametrize("kind", CASES)
def test_exactly_the_assistants_part_is_trained(kind: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    content, expected, others = CASES[kind]
    (tmp_path / "a.json").write_text(json.dumps(content), encoding="utf-8")
    QWEN3.put_on(tokenizer)
    records = [record for raw in read_file(tmp_path / "a.json") for record in parse(raw).records]
    runs = [run for record in records for run in runs_of(encode_tokens(record, tokenizer).sample(), tokenizer)]
    assert [text for trained, text in runs if trained] == expected
    untrained = "".join(text for trained, text in runs if not trained)
    assert [words for words in others if words not in untrained] == []
    assert REWORDED not in "".join(text for _, text in runs)
