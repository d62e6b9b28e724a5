"""Measure answers per second of SmolLM2-135M's shapes in bf16.

Each pair is measured in turn, several times; the median counts.

- `single_vs_transformers`, `first_token_vs_transformers`: one greedy answer on all cores against
  `transformers.generate`: tokens per second behind the first token, and the time to it (a prompt of 256 tokens).
- `batched_vs_single`: eight prompts of different lengths at once against one after the other.
- `demo_first_token_s`: from `demo.py --prompt` to the first piece of the answer.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.peers import SMOLLM2
from benchmarks.report import Report, against_targets, run_parts
from benchmarks.tokenizing import make_tokenizer
from benchmarks.workers import ROOT
from models.api import load_model
from options.demo.generation import Request, generate, generate_many

PROMPT, NEW, AT_ONCE, ROUNDS = 256, 64, 8, 5  # tokens, tokens, prompts, pairs


def measure(folder: Path) -> Report:
    """Measure all; the folder takes 300 MB."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).bfloat16().save_pretrained(folder)
    make_tokenizer(folder)
    model, asked = load_model(folder), prompts()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor(asked[:1])

    def transformers_writes(count: int) -> None:
        exactly = {"min_new_tokens": count, "max_new_tokens": count}
        theirs.generate(ids, attention_mask=torch.ones(1, PROMPT), do_sample=False, pad_token_id=0, **exactly)

    def we_write(count: int) -> None:
        assert len(list(generate(model, asked[0], count, set()))) == count

    def one_by_one() -> None:
        for prompt in asked:
            assert len(list(generate(model, prompt, NEW, set()))) == NEW

    def at_once() -> None:
        requests = [Request(prompt, NEW, set()) for prompt in asked]
        assert len(list(generate_many(model, requests, AT_ONCE))) == NEW * AT_ONCE

    rounds = []
    for _ in range(ROUNDS + 1):
        ways = product((transformers_writes, we_write), (1, NEW))
        rounds.append([seconds(write, count) for write, count in ways])
    del rounds[0]  # it warms up
    batches = [(seconds(one_by_one), seconds(at_once)) for _ in range(ROUNDS)]
    return against_targets(
        "answers against transformers",
        single_vs_transformers=(median((b - a) / (d - c) for a, b, c, d in rounds), "at least 1.0"),
        first_token_vs_transformers=(median(a / c for a, _, c, _ in rounds), "at least 1.0"),
        batched_vs_single=(median(alone / together for alone, together in batches), "at least 3"),
        demo_first_token_s=(median(demo_first_token(folder) for _ in range(ROUNDS)), "under 6"),
        tokens_per_s=(median((NEW - 1) / (d - c) for _, _, c, d in rounds), ""),
    )


def prompts() -> list[list[int]]:
    """Make prompts of different lengths."""
    ids = torch.randint(3, 30_000, (AT_ONCE, PROMPT), generator=torch.Generator().manual_seed(0))
    return [ids[row, : PROMPT - 16 * row].tolist() for row in range(AT_ONCE)]


def seconds(work: Callable[..., None], *given: int) -> float:
    begin = time.perf_counter()
    work(*given)
    return time.perf_counter() - begin


def demo_first_token(folder: Path) -> float:
    """Time the command up to the first character of its answer."""
    words = [sys.executable, "demo.py", "--model", str(folder), "--prompt", "What is Pipetune?", "--greedy"]
    begin = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as demo:
        assert demo.stdout is not None and demo.stdout.read(1)
        taken = time.perf_counter() - begin
        demo.kill()
    return taken


if __name__ == "__main__":
    run_parts("Answers per second.", {"generation": measure})
