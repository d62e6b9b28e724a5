"""`--inspect` shows samples as the model gets them: what bears loss is styled, the rest is not, counts are right."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.inspect import SUPERVISED_STYLE, coloured, show_samples
from data.prompts import PromptFormat
from data.tokenize import Sample, encode
from tests.data.helpers import RECORDS, runs

STYLED = re.compile(r"\x1b\[1;32m(.*?)\x1b\[0m")


def recorded(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, styles: bool) -> str:
    console = Console(record=True, file=StringIO(), width=100)
    show_samples(samples, tokenizer, console)
    return console.export_text(styles=styles)


@pytest.mark.parametrize("prompt_format", ["plain", "chat_template"])
@pytest.mark.parametrize("name", RECORDS)
def test_supervised_text_is_styled_and_the_rest_is_not(
    name: str, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = coloured(encode(RECORDS[name], tokenizer, 10_000, prompt_format), tokenizer)
    expected = runs(RECORDS[name], tokenizer, prompt_format)
    assert text.plain == "".join(part for _, part in expected)
    styled = [text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED_STYLE]
    assert styled == [part for supervised, part in expected if supervised]
    assert len(text.spans) == len(styled)


def test_the_printed_style_marks_the_answers_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = encode(RECORDS["ref_qa"], tokenizer, 10_000)
    printed = recorded([sample], tokenizer, styles=True)
    assert STYLED.findall(printed) == ["One.<|im_end|>", "两个。<|im_end|>", "supervised"]  # the last is the legend


def test_each_sample_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    samples: list[Sample] = [
        {"input_ids": [70, 71, 72, 73], "labels": [-100, -100, -100, 73]},
        {"input_ids": [70, 71], "labels": [70, 71]},
    ]
    printed = recorded(samples, tokenizer, styles=False)
    assert "sample 1: 4 tokens, 1 supervised (25%)" in printed
    assert "sample 2: 2 tokens, 2 supervised (100%)" in printed


def test_text_is_printed_literally_and_is_not_broken(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "[red]not markup[/red] :smile: 42 " + "long " * 60
    printed = recorded([encode({"type": "pretrain", "text": text}, tokenizer, 10_000)], tokenizer, styles=True)
    assert f"\x1b[1;32m{text}<|im_end|>\x1b[0m" in printed
