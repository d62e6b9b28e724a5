"""Record each step of a proof's run: gradients, and weights after the update.

The recorder is the run's own trainer, in the job of a real run. For each step a rank writes one file: the
gradients that the optimizer gets (on replica 0), its slices of the optimizer's fp32 weights, and the weights it
computes with; with tensor parallelism, its shard of each. If the folder says so, it waits in the middle of a step to be
killed.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from models.adapters import IDLE
from models.parallel.shard import Shard
from training.checkpoint.resharding import slices_of
from training.engine.trainer import Trainer

HOLD = "hold"  # file with the number of the step in which to wait
HELD = "held"  # file that rank 0 creates when it waits

Key = TypeVar("Key")


@runtime_checkable
class KnowsWeights(Protocol):
    """An engine whose weights are no parameters of DeepSpeed's: it says itself what it has, by `<layer>.<name>`."""

    def own_weights(self) -> dict[str, Tensor]:
        """Return the trained weights that this rank saves."""

    def own_gradients(self) -> dict[str, Tensor]:
        """Return their gradients in fp32, without the loss scale."""


class Recording(Trainer):
    """A trainer that records its steps.

    Attributes:
        folder: for the files.
    """

    folder: ClassVar[Path]

    def take_step(self, step: Callable[[], None]) -> None:
        """Take an optimizer step, and write what it was taken with and what it left."""
        number = self.engine.global_steps + 1
        gradients = _copied(self._gradients())
        self._wait(number)
        super().take_step(step)
        masters = {
            (piece.name, piece.offset): piece.master.view(-1)[piece.start : piece.start + piece.numel]
            for piece in slices_of(self.engine)
        }
        noted = {
            "gradients": gradients if self.replica == 0 else {},
            "masters": _copied(masters),
            "weights": _copied(self._weights()),
            "cuts": self._shards(),
        }
        torch.save(noted, self.folder / f"step-{number}.rank-{self.engine.global_rank}.pt")

    def _gradients(self) -> dict[str, Tensor]:
        """Get this rank's gradients in fp32, without the loss scale; all ranks call it together."""
        if isinstance(self.engine, KnowsWeights):
            return self.engine.own_gradients()
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        scale = float(scaler.cur_scale) if scaler else 1.0
        weights = {name: weight for name, weight in self._weights().items() if weight.requires_grad}
        return {name: safe_get_full_grad(weight).detach().float() / scale for name, weight in weights.items()}

    def _weights(self) -> dict[str, Tensor]:
        """Get the weights that this rank has, apart from those of 4 bits."""
        if isinstance(self.engine, KnowsWeights):
            return self.engine.own_weights()
        named = self.engine.module.named_parameters()
        return {name: each for name, each in named if each.is_floating_point() and name != IDLE}

    def _shards(self) -> dict[str, Any]:
        """Return the arguments of `Shard` for each weight of which this rank has a shard."""
        share: Any = getattr(self.engine.module, "share", None)
        cuts: dict[str, Any] = {}
        for name in self._weights() if share else ():
            if cut := share.shard(name):
                cuts[name] = cut.shape, cut.side, [(each.start, each.stop) for each in cut.ranges]
        return cuts

    def _wait(self, step: int) -> None:
        hold = self.folder / HOLD
        if hold.is_file() and hold.read_text() == str(step):
            if self.engine.global_rank == 0:
                (self.folder / HELD).touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which it ends when `--prove` itself was killed
            while True:
                time.sleep(1)


def _copied(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}


def make_recorder(folder: str, kind: type[Trainer]) -> type[Recording]:
    """Make a trainer class of a kind that records to `folder`."""
    return type("Recorder", (Recording, kind), {"folder": Path(folder)})


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
