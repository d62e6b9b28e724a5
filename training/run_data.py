"""The records of a run as its config asks for them, and how they become global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.dataset import Dataset, load_dataset
from data.loader import Loader
from data.prompts import PromptFormat, default_format
from data.tokenize import Sample, load_tokenizer
from training.config import TrainConfig


@dataclass(frozen=True)
class RecordReader:
    """Reads sets of records alike."""

    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    max_seq_len: int
    log: Console

    @classmethod
    def of(cls, config: TrainConfig, folder: Path, log: Console) -> RecordReader:
        """With the tokenizer in a model's folder."""
        tokenizer = load_tokenizer(folder)
        prompt_format = config.prompt_format or default_format(tokenizer)
        log.print(f"prompts: {prompt_format}")
        return cls(tokenizer, prompt_format, config.max_seq_len, log)

    def read(self, what: str, paths: list[str]) -> Dataset:
        """The tokenized records, and a line about what was decided or cut."""
        dataset = load_dataset(paths, self.tokenizer, self.max_seq_len, self.prompt_format)
        self.log.print(f"{what}: {dataset.summary(self.max_seq_len)}")
        return dataset


def build_loader(samples: Sequence[Sample], config: TrainConfig, replicas: int, drop_last: bool = False) -> Loader:
    """Global batches of the config's sizes, in the order of its seed."""
    return Loader(
        samples, config.train_batch_size, config.train_micro_batch_size_per_gpu, replicas, config.seed, drop_last
    )
