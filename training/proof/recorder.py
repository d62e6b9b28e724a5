"""Record each step of a proof's run: gradients, and weights after the update.

The recorder is the pipeline's own trainer, in the job of a real run. For each step a rank writes one file: the
gradients that the optimizer gets (on replica 0), its slices of the optimizer's fp32 weights, and the weights it
computes with; with tensor parallelism, its shard of each. If the folder says so, it waits in the middle of a step to be
killed.
"""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.utils import safe_get_full_grad
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.shard import Shard
from training.checkpoint.resharding import slices_of
from training.engine.pipeline import PipelineTrainer
from training.engine.stage_engine import StageEngine

HOLD = "hold"  # file with the number of the step in which to wait
HELD = "held"  # file that rank 0 creates when it waits
GRADIENT, MASTER, WEIGHT = "gradient", "master", "weight"
CUTS = "cuts"  # in a file's metadata: name of a weight -> shard that the rank has


class Recorder(PipelineTrainer):
    """A stage that records its steps.

    Attributes:
        folder: for the files.
    """

    folder: ClassVar[Path]

    def _take_optimizer_step(self, engine: StageEngine, lr_kwargs: Any = None) -> None:
        step = engine.global_steps + 1
        noted = {f"{GRADIENT}/{name}": gradient for name, gradient in self._gradients() if self.replica == 0}
        self._wait(step)
        super()._take_optimizer_step(engine, lr_kwargs)
        for piece in slices_of(engine):
            master = piece.master.detach().view(-1)[piece.start : piece.start + piece.numel]
            noted[f"{MASTER}/{piece.offset}/{piece.name}"] = master
        noted |= {f"{WEIGHT}/{name}": weight.detach() for name, weight in engine.module.named_parameters()}
        save_file(
            {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in noted.items()},
            self.folder / f"step-{step}.rank-{engine.global_rank}.safetensors",
            {CUTS: json.dumps(self._cuts())},
        )

    def _gradients(self) -> list[tuple[str, Tensor]]:
        """Return the gradients of this stage in fp32, without the loss scale; all ranks call it together."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        scale = float(scaler.cur_scale) if scaler else 1.0
        return [
            (name, safe_get_full_grad(parameter).detach().float() / scale)
            for name, parameter in self.engine.module.named_parameters()
        ]

    def _cuts(self) -> dict[str, Any]:
        """Return the arguments of `Shard` for each weight of which this rank has a shard."""
        share = self.engine.module.share
        cuts = {name: share.shard(name) for name, _ in self.engine.module.named_parameters()}
        return {
            name: (cut.shape, cut.side, [(each.start, each.stop) for each in cut.ranges])
            for name, cut in cuts.items()
            if cut
        }

    def _wait(self, step: int) -> None:
        hold = self.folder / HOLD
        if hold.is_file() and hold.read_text() == str(step):
            if self.engine.global_rank == 0:
                (self.folder / HELD).touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which it ends when `--prove` itself was killed
            while True:
                time.sleep(1)


def make_recorder(folder: str) -> type[Recorder]:
    """Make a trainer class that records to `folder`."""
    return type("Recorder", (Recorder,), {"folder": Path(folder)})


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
        shapes: dict[str, torch.Size] = {}
        for path in sorted(folder.glob(f"step-{step}.rank-*.safetensors")):
            with safe_open(path, "pt") as file:
                cuts = {
                    name: Shard(tuple(shape), side, tuple(range(*each) for each in ranges))
                    for name, (shape, side, ranges) in json.loads(file.metadata()[CUTS]).items()
                }
            self.weights.append({})
            self._cuts.append(cuts)
            for key, tensor in load_file(path).items():
                kind, name = key.split("/", 1)
                if kind == GRADIENT:
                    _put(tensor, cuts.get(name), name, self.gradients)
                elif kind == WEIGHT:
                    self.weights[-1][name] = tensor
                    shapes[name] = tensor.shape
                else:
                    offset, name = name.split("/")
                    pieces.setdefault((name, cuts.get(name)), {})[int(offset)] = tensor
        for (name, cut), parts in pieces.items():
            part = torch.cat([parts[at] for at in sorted(parts)])
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
