"""Measure tokenizing and packing, with 3 GB of disk.

- `tokenize_vs_bare`: records per second of a whole build (processes, reading, prompts, masks, cache) against
  `tokenizers.encode_batch` on the same texts, in one process with a thread for each core; the median of pairs.
- `peak_rss_gb`, `second_start_s`: a JSONL file of 1 GB: memory of all processes together, and the seconds of a second
  start, imports left aside.
- `packing_efficiency`, `packing_efficiency_batch`: tokens over places in rows of 2,048 tokens, of whole epochs and of
  batches of 128 samples.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, against_targets, run_parts
from benchmarks.tokenizing import RECORDS, make_tokenizer, pairs, peak_of
from benchmarks.workers import RESULT, ROOT, command, run_workers, write_figures

LARGE, SMALLER = 10**9, 2 * 10**8  # bytes
LIMIT, REPETITIONS = 2048, 5
BATCH = 128  # samples
TOGETHER = 1000  # texts for the bare tokenizer at a time


def tokenizing(folder: Path) -> Report:
    make_tokenizer(folder / "tokenizer")
    smaller, large = folder / "smaller.jsonl", folder / "large.jsonl"
    write_records(smaller, SMALLER)
    shares, speeds = [], []
    for _ in range(REPETITIONS):
        bare, build = (_run(folder, work, smaller)["records_per_s"] for work in ("bare", "load"))
        shares.append(build / bare)
        speeds.append(build)
        shutil.rmtree(folder / "cache")
    write_records(large, LARGE)
    given = ["--folder", str(folder), "--work", "load", "--given", json.dumps({"data": str(large)})]
    peak = peak_of(subprocess.Popen([*command(None, "benchmarks.data"), *given], cwd=ROOT))
    first = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    second = _run(folder, "load", large)
    title = f"tokenizing 1 GB, {first['tokens']:,} tokens, in {first['seconds']:.0f} s"
    figures, table = against_targets(
        title,
        tokenize_vs_bare=(median(shares), "at least 0.8"),
        peak_rss_gb=(peak / 1e9, "at most 1"),
        second_start_s=(second["seconds"], "at most 3"),
    )
    return Report(figures | {"tokenizing": first | {"records_per_s": median(speeds)}}, table)


def _run(folder: Path, work: str, data: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_workers(None, "benchmarks.data", folder, work, data=str(data))
    return found


def write_records(path: Path, size: int) -> None:
    """Write a JSONL file of N bytes, no two records alike."""
    with open(path, "wb") as file:
        for record in records():
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            if file.tell() >= size:
                return


def records() -> Iterator[dict[str, Any]]:
    known = list(pairs())
    for number in count():
        question, answer = known[number % len(known)]
        yield {"instruction": f"{number}. {question}", "output": answer}


def load(folder: Path, data: str) -> None:
    """Ask for the samples, as a run does."""
    from data.tokenized.loading import load_dataset

    begin = time.perf_counter()
    dataset = load_dataset(Path(data), folder / "tokenizer", LIMIT, "chat_template", cache_dir=folder / "cache")
    tokens = int(dataset.lengths.sum())
    assert dataset.supervised.sum() < tokens
    assert dataset.fingerprint()
    seconds = time.perf_counter() - begin
    write_figures(folder, {"seconds": seconds, "tokens": tokens, "records_per_s": dataset.total.records / seconds})


def bare(folder: Path, data: str) -> None:
    """Give the texts of the same samples to the tokenizer alone."""
    from data.chat.prompts import Prompts
    from data.records.formats import convert
    from data.tokenized.tokenize import Writer
    from data.tokenized.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    writer = Writer(tokenizer, Prompts("chat_template"))
    texts: list[str] = []
    with open(data, encoding="utf-8") as lines:
        for line in lines:
            texts += [writer.write(record)[0].text for record in convert(json.loads(line)).records]
    begin = time.perf_counter()
    for first in range(0, len(texts), TOGETHER):
        tokenizer.backend_tokenizer.encode_batch(texts[first : first + TOGETHER], add_special_tokens=False)
    write_figures(folder, {"records_per_s": len(texts) / (time.perf_counter() - begin)})


def packing(folder: Path) -> Report:
    from data.chat.prompts import Prompts
    from data.loader import Loader
    from data.tokenized.loading import load_dataset

    make_tokenizer(folder / "tokenizer")
    prompts = Prompts("chat_template", template_fallback="rewrite")
    samples = load_dataset(RECORDS, folder / "tokenizer", LIMIT, prompts, cache_dir=folder / "cache")
    epoch = Loader(samples, BATCH, 1, 1, seed=0, packing="dataset", row_length=LIMIT)
    batches = Loader(samples, BATCH, 1, 1, seed=0, packing="batch", row_length=LIMIT)
    efficiency = int(samples.lengths.sum()) / (epoch.rows_per_epoch * LIMIT)
    return against_targets(
        "packing",
        packing_efficiency=(efficiency, "at least 0.98"),
        packing_efficiency_batch=(batches.efficiency(), "at least 0.93"),
    )


if __name__ == "__main__":
    run_parts(
        "Tokenizing and packing: speed, memory, padding.",
        {"tokenizing": tokenizing, "packing": packing},
        {"load": load, "bare": bare},
    )
