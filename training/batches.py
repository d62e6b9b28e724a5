"""Build the loader of global batches with a config's sizes, for samples wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from data.collation import Collation
from data.loader import PAD_MULTIPLE, Loader
from data.packing import choose_row_length
from data.sample_set import SampleSet
from models.block_options import FP8_MULTIPLE
from models.spec import ModelSpec
from training.config.deepspeed_config import router_loss_weight
from training.config.keys import TrainConfig
from training.errors import ConfigError


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
