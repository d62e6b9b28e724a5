"""Chat templates of the user's own, from a Jinja file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import check_prompt_format
from data.errors import DataError
from data.tokenized.tokenize import encode_tokens
from tests.data.helpers import RECORDS, question_ids, runs_of, supervised, whole_text

JSON = dict[str, Any]
END = "<|im_end|>"

FILE = (
    "{% for m in messages %}{{ m.role | upper + ':' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def test_a_template_from_a_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(FILE, encoding="utf-8")
    assert check_prompt_format(str(path)) == str(path)
    record: JSON = {"type": "conversation", "rounds": [["ask", "A"], ["ans", "B"], ["ask", "C"], ["ans", "D"]]}
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
    path.write_text(FILE.replace("':'", "'> '"), encoding="utf-8")  # it is read anew
    assert whole_text(runs_of(encode_tokens(record, tokenizer, str(path)).sample(), tokenizer)).startswith("USER> A\n")


def test_a_word_that_the_tokenizer_joins_with_the_end_of_the_prompt_is_supervised(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = FILE.replace("':'", "': '").replace("NT:", "NT: ")
    record = {"type": "instruct", "instruct": "A", "output": "the run"}
    (answer,) = supervised(runs_of(encode_tokens(record, tokenizer).sample(), tokenizer))
    assert answer == " the run" + END


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not found; expected a Jinja file"),
        (b"{% for m in messages %}", "line 1: .*; expected a Jinja template"),
        (b"\xff", "byte 0: not UTF-8; expected a Jinja file in UTF-8"),
        (b"", "cannot be read: "),
    ],
)
def test_a_file_that_is_no_template_is_refused_in_one_line(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    if content:
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: {reason}") as caught:
        check_prompt_format(str(path))
    assert "\n" not in str(caught.value)


def test_a_template_runs_in_a_sandbox(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages.__class__.__base__.__subclasses__() }}{{ messages.append(1) }}", encoding="utf-8")
    check_prompt_format(str(path))
    with pytest.raises(DataError, match="refuses the record"):
        encode_tokens(RECORDS["instruct"], tokenizer, str(path))
