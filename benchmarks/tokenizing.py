"""Make a tokenizer and records; watch the memory of processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil

from benchmarks.workers import ROOT

SHARED = ROOT.parent / "shared" / "data"
SAMPLES = ROOT / "data" / "samples" / "faq.json"
REAL = [str(SHARED / "gsm8k" / "train.jsonl"), str(SHARED / "toolcall" / "*.json")]
RECORDS = REAL if SHARED.is_dir() else [str(SAMPLES)]
PAUSE = 0.2  # seconds between two looks at the memory
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def pairs() -> Iterator[tuple[str, str]]:
    """Yield questions and answers of `../shared/data`, else shipped ones."""
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
    """Write a byte-level BPE with ChatML prompts as a HuggingFace folder."""
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
    tokenizer.train_from_iterator(chain.from_iterable(pairs()), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    fast.save_pretrained(folder)


def peak_of(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Wait for a process; return the peak of it and all that it started.

    Proportional set sizes: a page that several processes share counts once.
    """
    peak, first = 0, psutil.Process(process.pid)
    while process.poll() is None:
        sizes = []
        for each in (first, *first.children(recursive=True)):
            with suppress(psutil.Error):  # it has gone
                sizes.append(each.memory_full_info().pss)
        peak = max(peak, sum(sizes))
        time.sleep(PAUSE)
    return peak
