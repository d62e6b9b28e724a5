"""Tokenizing against the bare tokenizer, its memory, and a second start: a part of `python -m benchmarks.data`.

Records are made of `../shared/data` where it is there (worked maths problems and text), else of the shipped ones, again
and again with another number in front of each, and a tokenizer of up to 32,000 words is trained on them.

- `tokenize_vs_bare`: how many records per second a whole build makes (start of the processes, reading, parsing,
  prompts, masks, writing the cache) against `tokenizers.encode_batch` on the very texts that it tokenizes, in one
  process with as many threads as there are cores. In turn, several times; the median of the pairs.
- `peak_rss_gb`: a JSONL file of 1 GB is tokenized. The largest sum of the proportional set sizes of the process that
  asks and of all that it starts; a page that several of them share counts once. Looked at every 0.1 s.
- `second_start_s`: the same in another process, from the call until all counts are there; imports left aside.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.parts import against_targets
from benchmarks.ranks import ROOT

SHARED = ROOT.parent / "shared" / "data"
SAMPLES = ROOT / "data" / "samples" / "faq.json"
LARGE, SMALLER = 10**9, 2 * 10**8  # bytes
LIMIT = 2048
REPETITIONS = 5
BATCH = 1000  # texts for the bare tokenizer at a time
TARGETS = {"tokenize_vs_bare": "at least 0.8", "peak_rss_gb": "at most 1", "second_start_s": "at most 3"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def measure(folder: Path) -> dict[str, Any]:
    """All figures.

    Args:
        folder: where to work; it takes some 3 GB.
    """
    make_tokenizer(folder / "tokenizer")
    smaller, large = folder / "smaller.jsonl", folder / "large.jsonl"
    write_records(smaller, SMALLER)
    builds, bare = [], []
    for _ in range(REPETITIONS):
        bare.append(run("bare", folder, smaller)["records_per_s"])
        builds.append(run("load", folder, smaller)["records_per_s"])
        shutil.rmtree(folder / "cache")
    write_records(large, LARGE)
    first, peak = run_watched("load", folder, large)
    second = run("load", folder, large)
    return {
        "tokenize_vs_bare": median(build / alone for build, alone in zip(builds, bare, strict=True)),
        "peak_rss_gb": peak / 1e9,
        "second_start_s": second["seconds"],
        "tokenizing": {
            "records_per_s": median(builds),
            "bare_records_per_s": median(bare),
            "gb": large.stat().st_size / 1e9,
            "tokens": first["tokens"],
            "seconds": first["seconds"],
        },
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for people."""
    about = figures["tokenizing"]
    title = f"tokenizing {about['gb']:.2f} GB, {about['tokens']:,} tokens, in {about['seconds']:.0f} s"
    return against_targets(title, figures, TARGETS)


def run(what: str, folder: Path, data: Path) -> dict[str, Any]:
    """Let a process of its own do something and say how it went."""
    return finish(start(what, folder, data))


def run_watched(what: str, folder: Path, data: Path) -> tuple[dict[str, Any], int]:
    """The same, and the peak memory of the process and its children in bytes."""
    process = start(what, folder, data)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_set_size, family(process.pid))))
        time.sleep(0.1)
    return finish(process), peak


def start(what: str, folder: Path, data: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.tokenizing", what, str(folder), str(data)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    told, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(map(str, process.args))} failed")  # type: ignore[arg-type]  # it is a list here
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    return result


def family(process: int) -> list[int]:
    """A process and all that it started, as far as they are there at this moment."""
    try:
        told = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [process, *(each for child in told.split() for each in family(int(child)))]


def proportional_set_size(process: int) -> int:
    """In bytes; 0 for a process that has gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def write_records(path: Path, size: int) -> None:
    """A JSONL file of so many bytes."""
    written = 0
    with open(path, "wb") as file:
        for record in records():
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            written += file.write(line)
            if written >= size:
                return


def records() -> Iterator[dict[str, Any]]:
    """Instructions without end, no two alike."""
    known = list(pairs())
    for turn in count():
        for number, (question, answer) in enumerate(known):
            yield {"instruction": f"{turn * len(known) + number}. {question}", "output": answer}


def pairs() -> Iterator[tuple[str, str]]:
    """Questions and answers."""
    if not SHARED.is_dir():
        shipped = json.loads(SAMPLES.read_text(encoding="utf-8"))
        yield from ((each["instruct"], each["output"]) for each in shipped if each["type"] == "instruct")
        return
    for line in (SHARED / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["question"], row["answer"]
    text = (SHARED / "text" / "wiki_demo.txt").read_text(encoding="utf-8")
    yield from (("Go on.", text[begin : begin + 2000]) for begin in range(0, len(text), 2000))


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE with ChatML prompts, as a HuggingFace folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs() for text in pair), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    fast.save_pretrained(folder)


def load(folder: Path, data: Path) -> dict[str, Any]:
    """Ask for the samples, as a run does."""
    from data.tokenized.dataset import load_dataset

    begin = time.perf_counter()
    dataset = load_dataset(data, folder / "tokenizer", LIMIT, "chat_template", cache_dir=folder / "cache")
    tokens = int(dataset.lengths.sum())
    assert dataset.supervised.sum() < tokens
    assert dataset.fingerprint()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": tokens, "records_per_s": dataset.total.records / seconds}


def bare(folder: Path, data: Path) -> dict[str, Any]:
    """Give the texts of the same samples to the tokenizer alone."""
    from data.chat.prompts import Prompts
    from data.records.formats import convert
    from data.tokenized.tokenize import Writer, load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    writer = Writer(tokenizer, Prompts("chat_template"))
    with open(data, encoding="utf-8") as lines:
        texts = [writer.write(record)[0].text for line in lines for record in convert(json.loads(line)).records]
    begin = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        tokenizer.backend_tokenizer.encode_batch(texts[first : first + BATCH], add_special_tokens=False)
    return {"records_per_s": len(texts) / (time.perf_counter() - begin)}


if __name__ == "__main__":  # one process of a measurement
    work = {"load": load, "bare": bare}[sys.argv[1]]
    print(json.dumps(work(Path(sys.argv[2]), Path(sys.argv[3]))))
