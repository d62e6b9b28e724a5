"""Showing samples as the model gets them: supervised tokens in colour.

The text is put together from the tokens themselves, so what is coloured is what bears loss, token by token.
"""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.tokenize import IGNORED, Sample

SUPERVISED_STYLE = "bold green"


def show_samples(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print samples, one after the other, with a line that counts their tokens."""
    for number, sample in enumerate(samples, start=1):
        supervised = sum(label != IGNORED for label in sample["labels"])
        length = len(sample["input_ids"])
        console.rule(f"sample {number}: {length} tokens, {supervised} supervised ({supervised / length:.0%})")
        console.print(coloured(sample, tokenizer), soft_wrap=True)
    console.rule(f"[{SUPERVISED_STYLE}]supervised[/]: bears loss; the rest is context")


def coloured(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The sample's text; whole runs of tokens are decoded together, so that split characters come out whole."""
    text = Text()
    pairs = zip(sample["input_ids"], sample["labels"], strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text.append(tokenizer.decode([token for token, _ in run]), style=SUPERVISED_STYLE if supervised else "")
    return text
