"""What the training loop asks of an engine, whichever way the model is spread, and what building any of them takes.

`training.engine.pipeline` is the pipeline, `training.engine.zero` is ZeRO. Both see the same global batches and give
the same numbers.
"""

from __future__ import annotations

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
from torch import Tensor, nn

from data.loader import GlobalBatch, Loader, MicroBatch
from models.attention.packed import Documents
from models.block_options import BlockOptions
from models.checkpoint.source import open_source
from models.loading import LayerStates, SeededStates
from models.loss import micro_batch_loss
from models.process_groups import NONE_SHARED, Sharing
from models.spec import ModelSpec
from training.config.deepspeed_config import check_device, deepspeed_config, router_loss_weight, training_dtype
from training.config.gpu import check_gpu
from training.config.keys import TrainConfig
from training.distributed.disk import Disk
from training.distributed.groups import among_members
from training.distributed.processes import agreed
from training.engine.clipping import clip_in_update
from training.engine.gradient_sums import sum_as_they_are
from training.engine.prefetch import Sent, ahead
from training.engine.timings import Timings
from training.optimizer.optimizers import build_optimizer
from training.topology import Division


class Trainer(ABC):
    """One rank's share of the model in a DeepSpeed engine. All ranks call each method, with the same global batch.

    Attributes:
        in_stages: whether the layers are divided among the stages of a pipeline.
        replica: the number, from 0, of the replica of the model or of a stage that this rank is.
        sharing: with whom it shares its rows and its layers.
        stage: of the pipeline, from 0.
    """

    in_stages: ClassVar[bool]

    def __init__(self, engine: Any, replica: int, sharing: Sharing = NONE_SHARED, stage: int = 0) -> None:
        self.engine = engine
        self.replica = replica
        self.sharing = sharing
        self.stage = stage
        self.timings = Timings()

    @classmethod
    @abstractmethod
    def build(cls, config: TrainConfig, spec: ModelSpec, folder: Path, division: Division) -> Trainer:
        """Load this rank's weights, make the optimizer and wrap both in DeepSpeed's engine.

        Args:
            folder: of the weights, in either layout; nothing is read with `from_scratch`.
            division: the layers that each stage holds, and those that recompute.

        Raises:
            RunRefused: on every rank, when some rank's weights or settings are unusable.
        """

    @abstractmethod
    def train_step(self, loader: Loader, batch: GlobalBatch) -> float:
        """One optimizer step; the loss, a mean over the global batch's supervised tokens, the same on all ranks."""

    @abstractmethod
    def eval_loss(self, loader: Loader, batch: GlobalBatch) -> float:
        """The cross-entropy over the supervised tokens of a global batch; no gradient, no dropout, no further terms."""

    @abstractmethod
    def write_layers(self, folder: Path, save: Callable[[Any, str], object], disk: Disk) -> None:
        """Write the layer files of the pipeline layout that DeepSpeed does not write by itself.

        Args:
            save: writes a state dict to a path; it does not raise, as the ranks work together.
            disk: on which all layers of its ranks are to be.
        """

    def micro_batches(self, loader: Loader, batch: GlobalBatch) -> Iterator[Sent]:
        """This rank's micro-batches, on their way to the device; engine and model are told what comes."""
        # No two batches need have as many micro-batches, and DeepSpeed averages over as many as it is told.
        samples = batch.n_micro_batches * loader.micro_batch_size * loader.replicas
        self.engine.set_train_batch_size(samples * self.sharing.sequence.size)
        documents = [Documents.laid_out(*layout) for layout in loader.layouts(batch, self.rows)]
        for positions in self.engine.module.positions:
            positions.expect(documents)
        micro_batches = loader.tensors(batch, self.rows)
        if self.sharing.sequence.size > 1:
            micro_batches = map(self._own_tokens, micro_batches)
        return ahead(micro_batches, self.engine.device)

    @property
    def rows(self) -> int:
        """Whose rows this rank works on: those that share them count as one replica for the loader."""
        return self.replica // self.sharing.sequence.size

    def _own_tokens(self, micro_batch: MicroBatch) -> MicroBatch:
        """Of shared rows [B, S] this rank's tokens, and the label that follows them; positions are those of whole rows.

        The loss is averaged over all ranks, so a part of the tokens' sum counts once for each that shares the rows.
        """
        (input_ids, position_ids), (labels, scale, share) = micro_batch
        peers = self.sharing.sequence
        own = peers.part(input_ids.shape[1])
        known = labels[:, own.start : own.stop + 1]
        return (input_ids[:, own], position_ids), (known, scale * peers.size, share)


def on_cpu(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's state dict, in memory of its own."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in layer.state_dict().items()}


def build_engine(
    config: TrainConfig,
    spec: ModelSpec,
    folder: Path,
    layers: Sequence[int],
    make_model: Callable[..., nn.Module],
    recompute: frozenset[int],
    sharing: Sharing,
) -> Any:
    """The engine of `Trainer.build`.

    Args:
        layers: those that this process holds, in the order of building.
        make_model: takes, by name, what `models.pipeline` and `models.sharded` both take.
        sharing: with whom the process shares its rows and its layers.
    """
    with agreed():
        check_gpu(config)
        check_device(config)
        router_weight = router_loss_weight(config, spec)
        states: LayerStates = SeededStates(spec, config.seed) if config.from_scratch else open_source(folder, spec)
        # Building the model communicates, so every rank looks at its weights before any begins.
        for layer in layers:
            states.check_layer(layer)
    # Where each host has a disk of its own, what one replica there has read lies in the cache of the system.
    together = config.storage == "shared" and config.model_topo.replicas > 1 and not config.from_scratch
    # Dropout differs from rank to rank, but not between those that compute the same together.
    torch.manual_seed(config.seed + config.model_topo.first_peer(torch.distributed.get_rank()))
    with among_members():
        model = make_model(
            states=states,
            dtype=training_dtype(config),
            blocks=BlockOptions(recompute, config.offload_activations, config.compile is True, config.fp8.enabled),
            micro_batch_loss=partial(
                micro_batch_loss,
                z_loss_weight=config.aux_max_z_loss.weight,
                router_loss_weight=router_weight,
                rows=sharing.sequence,
            ),
            sharing=sharing,
            read_together=layers if together else (),
        )
    return wrap(model, config, spec.tied_names)


def wrap(model: nn.Module, config: TrainConfig, tied_names: tuple[str, str] | None = None) -> Any:
    """This rank's layers with their optimizer in DeepSpeed's engine; `tied_names` as in `parameter_groups`."""
    with agreed():
        trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
        optimizer = build_optimizer(config, trained, tied_names)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use, four times
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config))
    sum_as_they_are(engine.optimizer)
    clip_in_update(engine.optimizer)
    if config.model_topo.replicas == 1:  # DeepSpeed would copy the gradients, round sums to 16 bits, and copy them back
        engine._reduce_non_expert_gradients = lambda *_: None
    return engine
