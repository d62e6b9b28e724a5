"""Many of something in the data wing: a part of `python -m benchmarks.data`.

- `chat_s`: one dialogue of 4,000 messages, the first of its kind, from its record to its tokens and loss mask, in one
  thread.
- `tiny_s`: 100,000 records of a few words each to a cache, by one worker with one thread.
- `order_bytes`: what the shuffled order of 100 million samples takes, in bytes a sample, after an epoch has passed.
"""

from __future__ import annotations

import gc
import json
import os
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.parts import against_targets
from benchmarks.tokenizing import LIMIT, make_tokenizer

MESSAGES, RECORDS, SAMPLES = 4000, 100_000, 100_000_000
TARGETS = {"chat_s": "under 0.3", "tiny_s": "under 10", "order_bytes": "at most 8"}


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    make_tokenizer(folder / "tokenizer")
    with patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"):
        return {"chat_s": chat(folder), "tiny_s": tiny(folder), "order_bytes": order()}


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    return against_targets(
        f"{MESSAGES:,} messages in a dialogue, {RECORDS:,} tiny records, {SAMPLES:,} samples in order", figures, TARGETS
    )


def chat(folder: Path) -> float:
    """Seconds for one long dialogue."""
    from data.tokenized.tokenize import encode_tokens, load_tokenizer

    messages = [
        {"role": "assistant" if number % 2 else "user", "content": f"{number} words and more of them"}
        for number in range(MESSAGES)
    ]
    tokenizer = load_tokenizer(folder / "tokenizer")
    encode_tokens({"type": "instruct", "instruct": "a", "output": "b"}, tokenizer)  # the template is compiled
    gc.disable()  # as in the processes that tokenize
    try:
        begin = time.perf_counter()
        encode_tokens(_record(messages), tokenizer).sample()
        return time.perf_counter() - begin
    finally:
        gc.enable()


def _record(messages: list[dict[str, str]]) -> Any:
    from data.records.formats import convert

    (record,) = convert({"messages": messages}).records
    return record


def tiny(folder: Path) -> float:
    """Seconds for many short records."""
    from data.chat.prompts import Prompts
    from data.tokenized.recipe import DataFile, Recipe
    from data.tokenized.store import Cache

    path = folder / "tiny.jsonl"
    lines = (
        json.dumps({"instruction": f"Add {number} and 1.", "output": str(number + 1)}) for number in range(RECORDS)
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    recipe = Recipe((DataFile(str(path)),), str(folder / "tokenizer"), Prompts("chat_template"), LIMIT)
    begin = time.perf_counter()
    Cache(folder / "cache").make(recipe, lambda *_: None, workers=1)
    return time.perf_counter() - begin


class _Lengths:
    """A set of samples of which only the lengths are asked for."""

    def __init__(self, count: int) -> None:
        self.lengths: NDArray[numpy.int32] = numpy.ones(count, dtype=numpy.int32)
        self.supervised = self.lengths
        self.samples: Sequence[Any] = []


def order() -> float:
    """Bytes a sample, the lengths left aside."""
    from data.loader import Loader

    data = _Lengths(SAMPLES)
    tracemalloc.start()
    loader = Loader(data, batch_size=1024, micro_batch_size=8, replicas=1, seed=0)
    loader.batch(loader.steps_per_epoch)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / SAMPLES
