"""Read the records that a config names; `training.batches` divides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console

from data.chat.native.kinds import end_tokens
from data.chat.prompts import Prompts, format_of
from data.errors import DataError
from data.settings import PLAIN, Source
from data.tokenized.answer_end import answer_end
from data.tokenized.dataset import Dataset
from data.tokenized.loading import load_dataset
from data.tokenized.tokenizer import load_tokenizer
from models.config_json import stop_ids
from training.config.keys import TrainConfig


class RecordReader:
    """Read and tokenize sets of records with one tokenizer and prompt format.

    Args:
        folder: of the model, with its tokenizer's files.
        log: quiet on all ranks but 0.

    Attributes:
        how: keyword arguments of record readers: `on_bad_record`, `truncate`, `preference`, seed and log.
        ends: token ids at which servers must stop; empty if the model's own list has them all.
    """

    def __init__(self, config: TrainConfig, folder: Path, log: Console) -> None:
        self.tokenizer = load_tokenizer(folder)
        asked = Prompts(config.prompt_format, config.template_args, config.template_fallback, config.mask)
        self.prompts = replace(asked, prompt_format=format_of(asked, self.tokenizer))
        self.how: dict[str, Any] = {"on_bad_record": config.on_bad_record, "truncate": config.truncate}
        self.how |= {"seed": config.seed, "log": log}
        self.how["preference"] = config.objective.wanted
        self._config = config
        self.folder = folder
        self._log = log
        log.print(f"prompts: {self.prompts.prompt_format}{'' if config.prompt_format else self._why()}")
        known = stop_ids(folder)
        self.ends = answer_end(self.tokenizer, self.prompts) - known
        if self.ends:
            end = self.tokenizer.decode(list(self.ends))
            log.print(f"end of answers: {end}; the checkpoints' generation_config.json lists it, the model's does not")
            self.ends |= known | end_tokens(self.tokenizer)

    def _why(self) -> str:
        """Say why prompts are plain, where nobody asked for it."""
        if self.prompts.prompt_format != PLAIN:
            return ""
        return ", as the tokenizer has no chat template (Alpaca's text; prompt_format names another)"

    def read(self, what: str, data_path: Sequence[str | Source]) -> Dataset:
        """Tokenize records, or find them in the cache, and log where they are."""
        config = self._config
        inputs = data_path, self.folder, config.max_seq_len, self.prompts
        dataset = load_dataset(*inputs, cache_dir=config.cache_dir, pixels=config.pixels, **self.how)
        self._log.print(f"{what}: {len(dataset):,} samples, cached in {dataset.folder}, which can be removed any time")
        return dataset

    def read_sets(self) -> tuple[Dataset, Dataset | None]:
        """Read the training set, and the evaluation set, if any.

        Raises:
            DataError: `eval_share` leaves nothing to train on.
        """
        config = self._config
        dataset = self.read("data", config.data_path)
        if config.eval_share:
            return hold_out(dataset, config.eval_share, config.seed)
        return dataset, self.read_evaluation()

    def read_evaluation(self) -> Dataset | None:
        """Read the records of `eval_data_path`, if it is set."""
        paths = self._config.eval_data_path
        return self.read("evaluation data", paths) if paths else None


def hold_out(data: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a set at random: the samples to train on, and `share` of them, at least one, to evaluate on.

    Equal samples stay on the same side; repeated ones are evaluated once.

    Raises:
        DataError: nothing is left to train on.
    """
    digests, first = numpy.unique(data.digests, return_index=True)
    count = max(1, round(share * len(digests)))
    if count == len(digests):
        raise DataError(f"eval_share: {share:g} of {len(digests):,} different samples leaves none to train on")
    drawn = numpy.random.default_rng(seed).choice(len(digests), count, replace=False)
    trained = numpy.flatnonzero(~numpy.isin(data.digests, digests[drawn]))
    return data.select(trained), data.select(numpy.sort(first[drawn]))
