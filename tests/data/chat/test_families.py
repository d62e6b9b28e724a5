"""Every family's notation, every structure of a dialogue: the text is transformers' own, or the record is refused.

The oracle knows nothing of masks: `apply_chat_template` writes the text, and marker words tell who said what.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.loss_mask import NO_END
from data.chat.template_check import NO_THOUGHTS, OTHER_ANSWER, OTHER_PROMPT
from data.errors import DataError
from data.tokenized.tokenize import Tokens, encode_many
from tests.data.chat.template_families import FAMILIES, Family
from tests.data.helpers import chat, runs_of, text_of

JSON = dict[str, Any]

TOOLS: list[JSON] = [
    {"type": "function", "function": {"name": name, "description": "Does " + name, "parameters": {"type": "object"}}}
    for name in ("lookup", "compute")
]
SYSTEM = {"role": "system", "content": "SYS0"}


def user(number: int) -> JSON:
    return {"role": "user", "content": f"ASK{number} 问?"}


def assistant(number: int, text: str | None = None, **more: Any) -> JSON:
    return {"role": "assistant", "content": f"SAY{number} 答." if text is None else text, **more}


def calls(*arguments: JSON, first: int = 0) -> list[JSON]:
    names = ("lookup", "compute")
    return [
        {
            "id": f"functions.{names[n]}:{first + n}",
            "type": "function",
            "function": {"name": names[n], "arguments": each},
        }
        for n, each in enumerate(arguments)
    ]


def result(number: int, call: JSON) -> JSON:
    return {"role": "tool", "content": f"RES{number}", "tool_call_id": call["id"], "name": call["function"]["name"]}


ONE = calls({"city": "ARG1 京", "days": 2})
TWO = calls({"city": "ARG1"}, {"x": 1.5, "flag": True})
NUMBERS = calls({"ARG3": 7, "ARG4": -0.25})
DIALOGUES: dict[str, list[JSON]] = {
    "two turns": [user(1), assistant(1), user(2), assistant(2)],
    "system": [SYSTEM, user(1), assistant(1), user(2), assistant(2)],
    "thoughts": [user(1), assistant(1, reasoning_content="THK1"), user(2), assistant(2, reasoning_content="THK2")],
    "call": [user(1), assistant(1, "", tool_calls=ONE), result(1, ONE[0]), assistant(2), user(3), assistant(3)],
    "numbers": [user(1), assistant(1, "", tool_calls=NUMBERS), result(1, NUMBERS[0]), assistant(2)],
    "parallel": [user(1), assistant(1, "", tool_calls=TWO), result(1, TWO[0]), result(2, TWO[1]), assistant(2)],
    "beside": [user(1), assistant(1, tool_calls=ONE), result(1, ONE[0]), assistant(2)],
    "thought and call": [
        user(1),
        assistant(1, "", reasoning_content="THK1", tool_calls=ONE),
        result(1, ONE[0]),
        assistant(2),
    ],
    "call last": [user(1), assistant(1), user(2), assistant(2, "", tool_calls=ONE)],
    "weight": [user(1), assistant(1, weight=0), user(2), assistant(2)],
    "users in a row": [user(1), user(2), assistant(1)],
    "ends with a question": [user(1), assistant(1), user(2)],
    "empty answer": [user(1), assistant(1, ""), user(2), assistant(2)],
    "json and blanks": [
        user(1),
        assistant(1, ' {"a": [1, "SAY1"]}\n\n'),
        user(2),
        assistant(2, "SAY2\n```\ncode\n```"),
    ],
}
ROLE = re.compile(r"<[^<> ]+>|\[\w+\]")  # the token that a message begins with
MARKERS = re.compile(r"(?:SYS|ASK|SAY|THK|ARG|RES)\d")


def said_by(message: JSON) -> list[str]:
    """The markers in a message."""
    return MARKERS.findall(str({name: message.get(name) for name in ("content", "reasoning_content", "tool_calls")}))


@pytest.mark.parametrize("dialogue", DIALOGUES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_transformers_own_and_the_assistants_words_are_trained(
    name: str, dialogue: str, tokenizer: PreTrainedTokenizerBase, oracle: Callable[..., str | None]
) -> None:
    FAMILIES[name].style().put_on(tokenizer)
    messages = DIALOGUES[dialogue]
    tools = TOOLS if any(each.get("tool_calls") for each in messages) else []
    plain = [{key: value for key, value in each.items() if key != "weight"} for each in messages]
    theirs = oracle(tokenizer, plain, tools)
    wanted = [marker for each in messages for marker in said_by(each)]
    asked = max(number for number, each in enumerate(messages) if each["role"] == "user")
    earlier = [m for n, each in enumerate(messages) for m in said_by(each) if n < asked and m.startswith("THK")]
    names = [call["function"]["name"] for each in messages for call in each.get("tool_calls", [])]
    described = [each["function"]["description"] for each in tools]
    missing = [word for word in (*wanted, *names, *described) if theirs is None or word not in theirs]
    (tokens,) = encode_many([chat(messages, tools)], tokenizer, "chat_template")
    if isinstance(tokens, DataError):
        assert set(missing) - set(earlier), f"refused, though it is all there: {tokens}"
        return
    ours = text_of(tokens.ids, tokenizer)
    assert all(marker in ours for marker in wanted if marker not in missing or marker not in earlier)
    if set(missing) <= set(earlier):
        assert ours in (
            theirs,
            f"{str(theirs).rstrip()}{tokenizer.eos_token}{str(theirs)[len(str(theirs).rstrip()) :]}",
        )
        assert (NO_THOUGHTS in tokens.notes) == bool(missing)
    else:
        assert any(note.startswith("rewritten: ") for note in tokens.notes)
    check_mask(tokens, messages, earlier if missing else [], tokenizer, FAMILIES[name])
    check_served(tokens, plain, tools, tokenizer, oracle)


def check_mask(
    tokens: Tokens, messages: list[JSON], dropped: list[str], tokenizer: PreTrainedTokenizerBase, family: Family
) -> None:
    """What is trained: every word of the assistant, none of anybody else's, each turn with its end."""
    runs = runs_of(tokens.sample(), tokenizer)
    learnt = [marker for loss, text in runs if loss for marker in MARKERS.findall(text)]
    spoken = [each for each in messages if each["role"] == "assistant" and each.get("weight", 1)]
    assert sorted(learnt) == sorted(marker for each in spoken for marker in said_by(each) if marker not in dropped)
    ends = {end.replace("{{ eos_token }}", tokenizer.eos_token).strip() for end in (family.end, family.call_end) if end}
    next_roles = {found[0] for frame in (family.user, family.tool or "") if (found := ROLE.match(frame))}
    endless = not family.end.strip()
    if endless:  # the next role's token, or, behind the last answer, the end of sequence
        ends = set(next_roles)
    ends.add(tokenizer.eos_token)
    for loss, text in runs:
        assert not loss or text.rstrip().endswith(tuple(ends)) or NO_END in tokens.notes
    others = [each for each in messages[:-1] if each["role"] == "assistant"]
    assert (NO_END in tokens.notes) == bool(others and endless and not next_roles)


def check_served(
    tokens: Tokens,
    messages: list[JSON],
    tools: list[JSON],
    tokenizer: PreTrainedTokenizerBase,
    oracle: Callable[..., str | None],
) -> None:
    """A training sample begins with the very ids that a server sends, or the difference is noted."""
    last = max(number for number, each in enumerate(messages) if each["role"] == "assistant")
    prompt = oracle(tokenizer, messages[:last], tools, add_generation_prompt=True)
    if prompt is None or any(note.startswith("rewritten: ") for note in tokens.notes):
        return
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokens.ids[: len(ids)] == ids or OTHER_PROMPT in tokens.notes
    if not messages[last].get("weight", 1) or OTHER_PROMPT in tokens.notes:
        return
    begins = {begin for begin, _ in tokens.loss}
    assert len(ids) in begins or OTHER_ANSWER in tokens.notes


@pytest.fixture
def oracle() -> Callable[..., str | None]:
    """What transformers makes of a dialogue; None where the template refuses it."""

    def render(
        tokenizer: PreTrainedTokenizerBase, messages: list[JSON], tools: list[JSON], add_generation_prompt: bool = False
    ) -> str | None:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception:  # whatever the template raises
            return None

    return render
