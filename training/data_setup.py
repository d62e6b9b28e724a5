"""Read the records that a config names, and build their global batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from rich.console import Console

from data.chat.native.kinds import end_tokens
from data.chat.prompts import Prompts, format_of
from data.collation import Collation
from data.errors import DataError
from data.loader import PAD_MULTIPLE, Loader
from data.packing import choose_row_length
from data.sample_set import SampleSet
from data.settings import PLAIN, Source
from data.tokenized.answer_end import answer_end
from data.tokenized.dataset import Dataset, load_dataset
from data.tokenized.tokenizer import load_tokenizer
from models.block_options import FP8_MULTIPLE
from models.config_json import stop_ids
from models.spec import ModelSpec
from training.config.deepspeed_config import router_loss_weight
from training.config.keys import TrainConfig
from training.errors import ConfigError


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


def training_loader(
    data: SampleSet,
    config: TrainConfig,
    spec: ModelSpec,
    kind: type[Loader] = Loader,
    collation: Collation | None = None,
) -> Loader:
    """Make the global batches that a run of this model trains on.

    Args:
        collation: the objective's own where absent.

    Raises:
        ConfigError: as `build_loader`, or a weight for a router loss that the model does not have.
    """
    router_loss = router_loss_weight(config, spec) > 0
    return build_loader(
        data, config, config.dataloader_drop_last, router_loss=router_loss, kind=kind, collation=collation
    )


def build_loader(
    data: SampleSet,
    config: TrainConfig,
    drop_last: bool = False,
    numbers: Sequence[int] | NDArray[Any] | None = None,
    router_loss: bool = False,
    kind: type[Loader] = Loader,
    collation: Collation | None = None,
) -> Loader:
    """Build the loader of global batches, with the config's sizes and seed.

    Args:
        numbers: indices of the samples to use; all by default.
        collation: the objective's own where absent.
        router_loss: whether there is one. It is computed per micro-batch, so these must not depend on the topology.

    Raises:
        ConfigError: `pack_len` is shorter than a sample.
    """
    return kind(
        data,
        config.train_batch_size,
        config.micro_batch_size,
        config.model_topo.row_replicas,
        config.seed,
        drop_last,
        config.packing,
        row_length(data.lengths if kind.knows_lengths else None, config, router_loss),
        numbers,
        config.least_micro_batches,
        router_loss,
        (FP8_MULTIPLE if config.fp8.enabled else PAD_MULTIPLE) * config.model_topo.sequence,
        collation or config.objective.collation(data),
    )


def row_length(lengths: NDArray[Any] | None, config: TrainConfig, router_loss: bool) -> int:
    """Return the length of packed sequences: `pack_len`, or one that suits the data and the pipeline.

    Args:
        lengths: tokens of each sample; None for a stream, which uses the most it may have, so resuming is exact.
    """
    if lengths is None:
        lengths = numpy.array([config.sample_limit])
    longest = int(lengths.max())
    if config.pack_len is not None:
        if config.packing and config.pack_len < longest:
            raise ConfigError(
                f"pack_len: {config.pack_len} is shorter than the longest sample; expected at least {longest}"
            )
        return config.pack_len
    if config.packing == "dataset":  # decides which samples a step sees, so it must not depend on the topology
        return max(config.sample_limit, longest)
    if router_loss:  # the shortest sequences give the most micro-batches, which keep any pipeline busy
        return longest
    return choose_row_length(
        mean=float(lengths.mean()),
        longest=longest,
        limit=config.sample_limit,
        batch_size=config.train_batch_size,
        micro_batch_size=config.micro_batch_size,
        replicas=config.model_topo.row_replicas,
        stages=config.model_topo.stages,
    )
