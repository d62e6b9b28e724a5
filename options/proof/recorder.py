"""Record each step of a proof's run: gradients, and weights after the update.

The recorder is the pipeline's own trainer, in the job of a real run. For each step a rank writes one file: the
gradients that the optimizer gets (on replica 0), its slices of the optimizer's fp32 weights, and the weights it
computes with; with tensor parallelism, its shard of each. If the folder says so, it waits in the middle of a step to be
killed.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from models.adapters import IDLE
from models.parallel.shard import Shard
from options.weight_streaming.trainer import WeightStreamingTrainer
from training.checkpoint.resharding import slices_of
from training.engine.pipeline import PipelineTrainer
from training.engine.stage_engine import StageEngine
from training.engine.trainer import Trainer

HOLD = "hold"  # file with the number of the step in which to wait
HELD = "held"  # file that rank 0 creates when it waits

Key = TypeVar("Key")


class Recording(Trainer):
    """A trainer that records its steps.

    Attributes:
        folder: for the files.
    """

    folder: ClassVar[Path]

    def _record(self, gradients: dict[str, Tensor], take_step: Callable[[], None]) -> None:
        """Take an optimizer step, and write what it was taken with and what it left.

        Args:
            gradients: in fp32, without the loss scale.
        """
        step = self.engine.global_steps + 1
        self._wait(step)
        take_step()
        masters = {
            (piece.name, piece.offset): piece.master.view(-1)[piece.start : piece.start + piece.numel]
            for piece in slices_of(self.engine)
        }
        noted = {
            "gradients": gradients if self.replica == 0 else {},
            "masters": _copied(masters),
            "weights": _copied(self._weights()),
            "cuts": self._cuts(),
        }
        torch.save(noted, self.folder / f"step-{step}.rank-{self.engine.global_rank}.pt")

    def _weights(self) -> dict[str, Tensor]:
        """Get the weights that this rank has, apart from those of 4 bits."""
        raise NotImplementedError

    def _cuts(self) -> dict[str, Any]:
        """Return the arguments of `Shard` for each weight of which this rank has a shard."""
        return {}

    def _wait(self, step: int) -> None:
        hold = self.folder / HOLD
        if hold.is_file() and hold.read_text() == str(step):
            if self.engine.global_rank == 0:
                (self.folder / HELD).touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which it ends when `--prove` itself was killed
            while True:
                time.sleep(1)


class StreamingRecorder(Recording, WeightStreamingTrainer):
    """A process of a pool that records its steps."""

    def _update(self) -> None:
        like = self.engine.module.sums
        gradients = {name: self.engine.gradient(name).view_as(like[name]) for name in self.engine.names}
        self._record(_copied(gradients), super()._update)

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.engine.module.weights[name] for name in self.engine.names}


class StepRecorder(Recording, PipelineTrainer):
    """A stage that records its steps."""

    def _take_optimizer_step(self, engine: StageEngine, lr_kwargs: Any = None) -> None:
        self._record(self._gradients(), partial(super()._take_optimizer_step, engine, lr_kwargs))

    def _gradients(self) -> dict[str, Tensor]:
        """Copy the gradients of this stage in fp32, without the loss scale; all ranks call it together."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        scale = float(scaler.cur_scale) if scaler else 1.0
        weights = {name: weight for name, weight in self._weights().items() if weight.requires_grad}
        return _copied({name: safe_get_full_grad(weight).detach().float() / scale for name, weight in weights.items()})

    def _weights(self) -> dict[str, Tensor]:
        named = self.engine.module.named_parameters()
        return {name: each for name, each in named if each.is_floating_point() and name != IDLE}

    def _cuts(self) -> dict[str, Any]:
        share = self.engine.module.share
        cuts: dict[str, Any] = {}
        for name in self._weights():
            if cut := share.shard(name):
                cuts[name] = cut.shape, cut.side, [(each.start, each.stop) for each in cut.ranges]
        return cuts


def _copied(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}


def make_recorder(folder: str, kind: type[Trainer]) -> type[Recording]:
    """Make a trainer class of a kind that records to `folder`."""
    recorder = StreamingRecorder if issubclass(kind, WeightStreamingTrainer) else StepRecorder
    return type("Recorder", (recorder,), {"folder": Path(folder)})


class Recorded:
    """A recorded step, joined from all ranks.

    Attributes:
        gradients: `<layer>.<name>` -> gradient in fp32.
        masters: `<layer>.<name>` -> the optimizer's fp32 weight after the step.
        weights: by rank, name -> weight that it computes with after the step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        self.weights: list[dict[str, Tensor]] = []
        self._cuts: list[dict[str, Shard]] = []
        pieces: dict[tuple[str, Shard | None], dict[int, Tensor]] = {}
        for path in sorted(folder.glob(f"step-{step}.rank-*.pt")):
            noted = torch.load(path)
            cuts = {}
            for name, (shape, side, ranges) in noted["cuts"].items():
                cuts[name] = Shard(tuple(shape), side, tuple(range(*each) for each in ranges))
            self.weights.append(noted["weights"])
            self._cuts.append(cuts)
            for name, gradient in noted["gradients"].items():
                _put(gradient, cuts.get(name), name, self.gradients)
            for (name, offset), part in noted["masters"].items():
                pieces.setdefault((name, cuts.get(name)), {})[offset] = part
        shapes: dict[str, torch.Size] = {}
        for weights in self.weights:
            shapes |= {name: weight.shape for name, weight in weights.items()}
        for (name, cut), parts in pieces.items():
            part = torch.cat([parts[offset] for offset in sorted(parts)])
            _put(part.view(cut.part_shape if cut else shapes[name]), cut, name, self.masters)

    def slice_for_rank(self, rank: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take from `whole` weights the shards that a rank should have."""
        cuts, names = self._cuts[rank], self.weights[rank].keys() & whole.keys()
        return {name: cuts[name].of(whole[name]) if name in cuts else whole[name] for name in names}


def _put(part: Tensor, cut: Shard | None, name: str, whole: dict[str, Tensor]) -> None:
    """Put a rank's shard into the whole weight; elements that no rank has stay NaN."""
    if cut is None:
        whole[name] = part
    else:
        cut.put(part, whole.setdefault(name, part.new_full(cut.shape, math.nan)))
