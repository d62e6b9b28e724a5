"""The tokenized records of a run, and what happened to them on the way.

Every sample is tokenized once, before training; too long ones are cut and counted. A sample that bears no loss after
the cut cannot teach anything: it is counted as well and left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from transformers import PreTrainedTokenizerBase

from data.errors import DataError
from data.prompts import PromptFormat
from data.records import read_records
from data.tokenize import IGNORED, Sample, encode_whole


@dataclass
class Dataset:
    """Samples ready to be batched.

    Attributes:
        samples: in the order of the records.
        types: of each sample's record.
        origins: file and number, from 1, of each sample's record.
        kinds: how many records of each type were read.
        truncated: how many were longer than the limit.
        silent: how many were left out because nothing of them bears loss.
        longest: the length of the longest record before it was cut.
    """

    samples: list[Sample] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    origins: list[tuple[str, int]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    silent: int = 0
    longest: int = 0

    def origin(self, number: int) -> str:
        """Where a sample comes from, for a person."""
        file, record = self.origins[number]
        return f"{file}: record {record}"

    def fingerprint(self) -> str:
        """A digest of all tokens and labels: it changes with the records, the prompts, the tokenizer and the limit."""
        digest = hashlib.sha256()
        for sample in self.samples:
            for ids in (sample["input_ids"], sample["labels"]):
                digest.update(len(ids).to_bytes(8, "little") + numpy.asarray(ids, dtype="<i4").tobytes())
        return digest.hexdigest()

    def summary(self, max_seq_len: int) -> str:
        """One line for the log."""
        tokens = sum(len(sample["input_ids"]) for sample in self.samples)
        supervised = sum(supervised_count(sample) for sample in self.samples)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        line = f"{len(self.samples)} samples ({kinds}), {tokens:,} tokens, {supervised:,} of them supervised"
        if self.truncated:
            line += f"; {self.truncated} cut to max_seq_len {max_seq_len} (the longest had {self.longest} tokens)"
        if self.silent:
            line += f"; {self.silent} left out: nothing supervised in the first {max_seq_len} tokens"
        return line


def load_dataset(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    prompt_format: PromptFormat,
) -> Dataset:
    """Read, check and tokenize the records of one or several files.

    Raises:
        DataError: a file or a record is wrong, or nothing that bears loss is left.
    """
    dataset = Dataset()
    files = [paths] if isinstance(paths, (str, Path)) else paths
    records = [(file, number, record) for file in files for number, record in enumerate(read_records(file), start=1)]
    for file, number, record in records:
        try:
            sample = encode_whole(record, tokenizer, prompt_format)
        except DataError as error:
            raise DataError(f"{file}: record {number}: {error}") from None
        length = len(sample["input_ids"])
        dataset.kinds[record.type] += 1
        dataset.longest = max(dataset.longest, length)
        dataset.truncated += length > max_seq_len
        cut: Sample = {"input_ids": sample["input_ids"][:max_seq_len], "labels": sample["labels"][:max_seq_len]}
        if supervised_count(cut):
            dataset.samples.append(cut)
            dataset.types.append(record.type)
            dataset.origins.append((str(file), number))
        else:
            dataset.silent += 1
    if not dataset.samples:
        raise DataError(f"{paths}: nothing bears loss within max_seq_len {max_seq_len}; expected a larger limit")
    return dataset


def supervised_count(sample: Sample) -> int:
    """How many tokens bear loss: the first has no predecessor that could predict it."""
    return sum(label != IGNORED for label in sample["labels"][1:])
