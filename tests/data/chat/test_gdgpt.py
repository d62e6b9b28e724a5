"""`prompt_format: gdgpt` writes a record token by token as gdGPT's own code does, and asks in the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.messages import Said
from data.chat.prompts import Prompts
from data.errors import DataError
from data.settings import GDGPT, Mask
from data.tokenized.answer_end import answer_end
from data.tokenized.tokenize import encode, encode_beginning, encode_question
from tests.data.helpers import chat, parse_record, question_ids, runs, supervised_texts

LIMIT = 512  # tokens, where gdGPT cut
END = "<|im_end|>"
CHAT = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions. \n\n"
)
TOOLS = "Answer the following questions as best as you can. You have access to the following tool(s):\n"
CALL = {"inner_thought": "Hm.", "api_name": "sum", "api_param": {"of": [1, None]}, "api_res": {"sum": 1}}


def api(*rounds: Any, desc: Any = "sum: adds") -> dict[str, Any]:
    return {"type": "conver_has_api", "api_desc": desc, "rounds": list(rounds)}


def talk(*rounds: Any) -> dict[str, Any]:
    return {"type": "conversation", "rounds": list(rounds)}


def test_records_are_written_token_by_token_as_gdgpt_does(shared: Path, sentencepiece: PreTrainedTokenizerBase) -> None:
    folder = shared / "golden" / "gdgpt_records"
    cases = json.loads((folder / "records.json").read_text(encoding="utf-8"))["records"]
    assert len(cases) == 24
    for case in cases:
        sample = encode(case["record"], sentencepiece, LIMIT, GDGPT)
        kept = len(case["input_ids"])
        if kept == LIMIT and case["record"]["type"] != "pretrain":
            kept -= 1  # gdGPT overwrites the last token with an end
        else:
            assert len(sample["input_ids"]) == kept, case["id"]
        assert sample["input_ids"][:kept] == case["input_ids"][:kept], case["id"]
        assert sample["labels"][:kept] == case["labels"][:kept], case["id"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"type": "pretrain", "text": "雪 falls."}, [(True, "雪 falls.")]),
        (
            talk(["ans", "A"], ["ans", "B"], ["ask", "C"], ["ask", "D"]),
            [
                (False, f"{CHAT}### Assistent: "),
                (True, f"A {END}\n"),
                (False, "### Assistent: "),
                (True, f"B {END}\n"),
                (False, "### Human: C \n### Human: D \n"),
                (True, END),
            ],
        ),
        (
            {"type": "ref_qa", "reference": "", "rounds": [["ask", "Q"], ["ans", ""]]},
            [
                (
                    False,
                    "Generate responses to the given instruction series according to the reference text. \n\n"
                    "### Reference: \n\n\n### Instruction: Q \n### Response: ",
                ),
                (True, f" {END}\n{END}"),
            ],
        ),
        (
            api(["ask", "Q"], ["ans-api", {"actions": [CALL, CALL | {"api_param": "{}"}], "ans": "1"}], ["ans", "So."]),
            [
                (False, f'{TOOLS}"sum: adds"### Human: Q \n### Assistent: '),
                (True, f"Hm.\n#### api call\n```python\nsum(of=[1, None])\n```  {END}"),
                (False, '\n#### api output\n{\n  "sum": 1\n}\n### Assistent: '),
                (True, f"Hm.\n#### api call\n```python\nsum()\n```  {END}"),
                (False, '\n#### api output\n{\n  "sum": 1\n}\n### Assistent: '),
                (True, f"1  {END}"),
                (False, "### Assistent: "),
                (True, f"So. {END}\n{END}"),
            ],
        ),
        (
            api(["ans-api", {"actions": [], "ans": "1"}], desc={"名": 1}),
            [(False, f'{TOOLS}{{\n  "名": 1\n}}### Assistent: '), (True, f"1  {END}{END}")],
        ),
    ],
)
def test_what_the_golden_records_do_not_hold(
    record: dict[str, Any], expected: list[tuple[bool, str]], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert runs(record, tokenizer, GDGPT) == expected


@pytest.mark.parametrize("about", [None, "", " \n"])
def test_an_instruction_without_input_keeps_the_header_that_speaks_of_one(
    about: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    record = {"type": "instruct", "instruct": "Q", "input": about, "output": "A"}
    (asked, prompt), (trained, answer) = runs(record, tokenizer, GDGPT)
    assert (asked, trained, answer) == (False, True, f"A\n{END}{END}")
    assert "paired with an input" in prompt and prompt.endswith("### Instruction:\nQ\n\n### Response:\n")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("assistant", [f"A {END}\n", f"B {END}\n{END}"]), ("last_turn", [f"B {END}\n{END}"]), ("all", None)],
)
def test_the_mask_is_obeyed(mask: Mask, expected: list[str] | None, tokenizer: PreTrainedTokenizerBase) -> None:
    record = talk(["ask", "Q"], ["ans", "A"], ["ask", "R"], ["ans", "B"])
    whole = "".join(text for _, text in runs(record, tokenizer, GDGPT))
    trained = supervised_texts(record, tokenizer, Prompts(GDGPT, mask=mask))  # type: ignore[arg-type]
    assert trained == (expected or [whole])


def test_messages_are_written_as_a_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert encode(chat(messages), tokenizer, LIMIT, GDGPT) == encode(
        talk(["ask", "Q"], ["ans", "A"]), tokenizer, LIMIT, GDGPT
    )


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "system", "content": "Be brief."}, "a system message"),
        ({"role": "assistant", "content": "A", "reasoning_content": "Hm."}, "thoughts in messages"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "calls and results in messages"),
    ],
)
def test_what_the_texts_have_no_place_for_is_refused(
    message: dict[str, Any], what: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=f"^prompt_format: gdgpt has no place for {what}; expected none, or another"):
        encode(chat([message, {"role": "assistant", "content": "A"}]), tokenizer, LIMIT, GDGPT)


QUESTIONS = [
    (talk(["ask", "Q"], ["ans", "A"], ["ask", "R"], ["ans", "B"]), 2),
    ({"type": "instruct", "instruct": "Q", "output": "A"}, 1),
    ({"type": "instruct", "instruct": "Q", "input": "x", "output": "A"}, 1),
    ({"type": "ref_qa", "reference": "x", "rounds": [["ask", "Q"], ["ans", "A"]]}, 1),
    (api(["ask", "Q"], ["ans", "A"], desc="x"), 1),
]


@pytest.mark.parametrize(("record", "turns"), QUESTIONS)
def test_questions_begin_as_their_records_do(
    record: dict[str, Any],
    turns: int,
    tokenizer: PreTrainedTokenizerBase,
    sentencepiece: PreTrainedTokenizerBase,
) -> None:
    for each in (tokenizer, sentencepiece):
        sample = encode(record, each, LIMIT, GDGPT)
        asked = question_ids(record, each, GDGPT, turns)
        assert asked == sample["input_ids"][: len(asked)]
        assert sample["labels"][len(asked) - 1] == -100 != sample["labels"][len(asked)]
        assert answer_end(each, Prompts(GDGPT)) == {each.eos_token_id}
    assert (
        encode_beginning("x", sentencepiece, GDGPT)
        == encode({"type": "pretrain", "text": "x"}, each, 9, GDGPT)["input_ids"]
    )


def test_a_question_behind_an_answer_of_the_model_has_its_blank_once(tokenizer: PreTrainedTokenizerBase) -> None:
    said = [Said("user", "Q"), Said("assistant", "A ")]
    assert encode_question([*said, Said("user", "R")], tokenizer, GDGPT) == question_ids(
        QUESTIONS[0][0], tokenizer, GDGPT, 2
    )


@pytest.mark.parametrize("tools", [[], [{"type": "function"}]])
def test_an_input_stands_alone(tools: list[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    before = [] if tools else [Said("context", "x", name="Reference")]
    with pytest.raises(DataError, match=r"no place for (an input|tools) beside"):
        encode_question([*before, Said("user", "Q", input="")], tokenizer, GDGPT, tools)


def test_records_are_parsed_or_not(tokenizer: PreTrainedTokenizerBase) -> None:
    record = api(["ask", "Q"], ["ans-api", {"actions": [CALL], "ans": "1"}])
    assert encode(parse_record(record), tokenizer, LIMIT, GDGPT) == encode(record, tokenizer, LIMIT, GDGPT)
