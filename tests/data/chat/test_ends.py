"""An end that stands in the words already is not written once more, and a dialogue in a text is told as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.settings import CHAT_TEMPLATE, PLAIN
from data.tokenized.tokenize import Tokens, encode_tokens
from data.tokenized.tokenizer import load_tokenizer
from data.tokenized.writer import RENDERED, TWICE
from tests.data.helpers import RECORDS, chat

JSON = dict[str, Any]
END = "<|im_end|>"
USER = {"role": "user", "content": "Hi"}


def said(text: str, **more: Any) -> JSON:
    return {"role": "assistant", "content": text, **more}


def encoded(raw: Any, tokenizer: PreTrainedTokenizerBase, prompt_format: str = CHAT_TEMPLATE) -> Tokens:
    return encode_tokens(raw, tokenizer, Prompts(prompt_format))


BARE: dict[str, tuple[JSON, JSON]] = {
    "an answer": ({"prompt": "Hi", "completion": f"Hello{END}"}, {"prompt": "Hi", "completion": "Hello"}),
    "white space": ({"prompt": "Hi", "completion": f"Hello{END}\n"}, {"prompt": "Hi", "completion": "Hello"}),
    "messages": (
        {"messages": [USER, said(f"A{END}"), USER, said(f"B{END}")]},
        {"messages": [USER, said("A"), USER, said("B")]},
    ),
    "one that is not trained": (
        {"messages": [USER, said(f"A{END}", weight=0), USER, said("B")]},
        {"messages": [USER, said("A", weight=0), USER, said("B")]},
    ),
    "rounds": (
        {"type": "conversation", "rounds": [["ask", "q"], ["ans", f"a{END}"]]},
        {"type": "conversation", "rounds": [["ask", "q"], ["ans", "a"]]},
    ),
}


@pytest.mark.parametrize("prompt_format", [CHAT_TEMPLATE, PLAIN])
@pytest.mark.parametrize("name", BARE)
def test_an_answer_ends_once(name: str, prompt_format: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ended, bare = (encoded(raw, tokenizer, prompt_format) for raw in BARE[name])
    assert (ended.ids, ended.loss) == (bare.ids, bare.loss)
    assert TWICE in ended.notes and TWICE not in bare.notes
    assert END in ended.notes[TWICE]


def test_an_answer_of_tools_ends_once(tokenizer: PreTrainedTokenizerBase) -> None:
    raw = RECORDS["api_param as an object"]
    *rounds, (_, answer) = raw["rounds"]
    ended = raw | {"rounds": [*rounds, ["ans-api", answer | {"ans": answer["ans"] + END}]]}
    assert encoded(ended, tokenizer)[:2] == encoded(raw, tokenizer)[:2]


def test_an_end_before_a_call_or_in_the_middle_stays(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encoded({"prompt": "Hi", "completion": f"A{END}B"}, tokenizer)
    assert TWICE not in tokens.notes and tokenizer.decode(tokens.ids).count(END) == 3
    tokens = encoded(chat([USER, {"role": "user", "content": f"x{END}"}, said("a")]), tokenizer)
    assert TWICE not in tokens.notes, "a user's words"


@pytest.mark.parametrize("end", [END, "</s>"])
def test_a_text_ends_once(end: str, tokenizer: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase) -> None:
    its = tokenizer if end == END else sentencepiece
    bare, ended = encoded({"text": "Hello world"}, its), encoded({"text": f"Hello world{end}"}, its)
    assert bare[:2] == ended[:2] and ended.ids[-2:].count(its.eos_token_id) == 1
    assert ended.notes == {TWICE: repr(f"Hello world{end}")} and not bare.notes


def test_a_text_begins_once(sentencepiece: PreTrainedTokenizerBase) -> None:
    bare, begun = encoded({"text": "Hello"}, sentencepiece), encoded({"text": "<s>Hello</s>"}, sentencepiece)
    assert begun.ids.count(sentencepiece.bos_token_id) == bare.ids.count(sentencepiece.bos_token_id) == 1
    assert begun.ids[-1] == bare.ids[-1] == sentencepiece.eos_token_id and TWICE in begun.notes


def test_a_rendered_dialogue_keeps_its_tokens_and_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [USER, said("On Mondays.")]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    tokens = encoded({"text": text}, tokenizer)
    assert tokens.ids == tokenizer(text + END, add_special_tokens=False)["input_ids"]
    assert tokens.loss == [(0, len(tokens.ids))]
    assert [*tokens.notes] == [RENDERED]
    assert not encoded({"text": f"An article on {END} and <|im_start|>."}, tokenizer).notes
    assert not encoded({"text": text}, tokenizer, PLAIN).notes, "there nobody asks in such a form"


def test_a_template_without_an_end_does_no_harm(tokenizer_folder: Path) -> None:
    """The end of sequence, which is put behind the last answer there, is written once as well."""
    its = load_tokenizer(tokenizer_folder)
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    its.chat_template = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    bare, ended = (encoded({"prompt": "Hi", "completion": text}, its) for text in ("Hello", f"Hello{its.eos_token}"))
    assert bare[:2] == ended[:2]
    its.chat_template = {"tool_use": "x"}
    assert encoded({"text": "Hello"}, its, PLAIN).ids == encoded({"text": "Hello"}, its).ids


def test_it_is_counted(load_judged: Any) -> None:
    dataset = load_judged(
        {"prompt": "Hi", "completion": f"Hello{END}"}, {"text": f"a{END}"}, {"text": "b"}, wanted=None
    )
    assert dataset.notes == [[TWICE, 2, repr(f"Hello{END}")]] and json.dumps(dataset.notes)
