"""The rows of a proof: what was compared, how far it was apart at most, the bound and the place.

Differences are relative; of a tensor the norm of the difference over the norm of the reference, of an update over that
of the update and a thousandth of the weight, whose last digits a weight cannot hold. A bound is a number of roundings.
A gradient passes all layers, whose roundings add up as a random walk does: in bf16 and fp16, where sums are in fp32 but
each value between two operations is rounded, 8 x the root of their number, of 2^-7 and 2^-10; in fp32, where what is
rounded is mostly sums of many terms, 100 x that root, of 2^-23. The biases of keys, whose gradients nearly cancel, come
to three quarters of it, most weights to a fifth. Losses and norms are means in which most of it goes out: 2^-23 x 32,
2^-7 and 2^-10. The states of linear attention make all this larger (half a rounding of the embeddings changes gradients
of transformers' own model by 2^-10), so in fp32 these bounds are 64 times as wide there. The optimizer computes in fp32
whatever the precision: 2^-23 x 1024. Where the same bits are due, the bound is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention.positions import LINEAR
from models.checkpoint.source import open_source
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saved_slices import layer_of
from training.config.deepspeed_config import training_dtype
from training.proof.launches import Start, metrics
from training.proof.recorder import Recorded
from training.proof.reference import Reference
from training.proof.shrink_config import SAVED, STEPS
from training.proof.small_run import SmallRun

# Of means, and of gradients for the root of the number of layers.
ROUNDINGS = {torch.float32: (32, 100), torch.bfloat16: (1, 8), torch.float16: (1, 8)}
RECURRENT = {torch.float32: 64}  # times that, where blocks have recurrent states
OF_AN_UPDATE = 1024 * torch.finfo(torch.float32).eps
UNHELD = 1e-3  # the share of a weight that counts as a part of its update
Tensors = Mapping[str, Tensor]


@dataclass
class Row:
    """A property, with the largest difference of all that were compared.

    Attributes:
        bound: what it may be at most.
        where: it is.
    """

    what: str
    bound: float
    count: int = 0
    largest: float = 0.0
    where: str = ""

    @property
    def holds(self) -> bool:
        """A property of which nothing was compared does not."""
        return self.count > 0 and self.largest <= self.bound

    def note(self, value: float, where: str) -> None:
        """Take up one difference; what is no number is infinite."""
        value = value if math.isfinite(value) else math.inf
        self.count += 1
        if value > self.largest:
            self.largest, self.where = value, where


class Comparison:
    """Fills the rows.

    Args:
        run: that went through.
    """

    def __init__(self, small: SmallRun, run: Start) -> None:
        self._small, self._run, self._dtype = small, run, training_dtype(small.config)
        recurrent = LINEAR in small.spec.positions().kinds
        of_means, of_gradients = bounds_of(self._dtype, small.spec.n_layers, recurrent)
        self.loss = Row("loss", of_means)
        self.norm = Row("norm of the gradient", of_means)
        self.gradients = Row("gradients", of_gradients)
        self.flat = Row("gradients that say nothing", 0.0)
        self.updates = Row("updates of the weights", OF_AN_UPDATE)
        self.replicas = Row("weights of every replica", 0.0)
        self.evaluation = Row("loss of the evaluation", of_means)
        self.saved = Row("weights in the checkpoint", 0.0)
        self.resumed_loss = Row("loss after kill and resume", 0.0)
        self.resumed = Row("weights after kill and resume", 0.0)

    @property
    def rows(self) -> list[Row]:
        return [value for value in vars(self).values() if isinstance(value, Row)]

    def with_reference(self, shown: Callable[[int], None]) -> None:
        """Each step of the run with that of one process, and what was saved and evaluated.

        Args:
            shown: told the steps that are done.
        """
        numbers, tied = metrics(self._run.folder), self._small.spec.tied_names
        reference = Reference(self._small.config, self._small.samples)
        for step in range(1, STEPS + 1):
            noted, place = Recorded(self._run.notes, step), self._place(step)
            expected = reference.step(step, noted.gradients)
            self.loss.note(apart(numbers["loss"].get(step), expected.loss), place(""))
            self.norm.note(apart(numbers["grad_norm"].get(step), expected.norm), place(""))
            compare(self.gradients, place, noted.gradients, expected.gradients, tied)
            for name, gradient in noted.gradients.items():
                self.flat.note(float(is_flat(gradient)), place(name))
            compare(self.updates, place, noted.masters, expected.weights, tied, expected.before)
            rounded = {name: master.to(self._dtype) for name, master in noted.masters.items()}
            for rank, weights in enumerate(noted.weights):
                compare_bits(self.replicas, place, weights, noted.of_rank(rank, rounded))
            if step % SAVED == 0:
                loss = reference.evaluate(self._small.evaluated)
                self.evaluation.note(apart(numbers["eval_loss"].get(step), loss), place(""))
                if tied:  # both ends are in the files, also where a stage holds them as one
                    rounded[tied[1]] = rounded[tied[0]]
                saved = self._saved(step)
                fixed = {name: tensor for name, tensor in reference.fixed.items() if name in saved}
                compare_bits(self.saved, place, saved, rounded | fixed)
            shown(step)

    def with_resumed(self, run: Start) -> None:
        """The run that was killed and resumed with the one that went through."""
        expected, found = metrics(self._run.folder)["loss"], metrics(run.folder)["loss"]
        for step in range(SAVED + 1, STEPS + 1):
            place = self._place(step)
            self.resumed_loss.note(apart(found.get(step), expected[step]), place(""))
            compare_bits(self.resumed, place, *(Recorded(each.notes, step).masters for each in (run, self._run)))

    def _saved(self, step: int) -> dict[str, Tensor]:
        """The weights in a checkpoint's layer files."""
        spec = self._small.spec
        source = open_source(step_folder(self._run.folder, step), spec)
        layers = ((layer, source.read_layer(layer)) for layer in range(spec.n_layers))
        return {f"{layer}.{name}": tensor for layer, state in layers for name, tensor in state.items()}

    def _place(self, step: int) -> Callable[[str], str]:
        """Names a step and, of a weight, its layer and stage."""
        record = CheckpointRecord.read(step_folder(self._run.folder, STEPS))
        assert record is not None
        stage_of = record.topology.stage_of

        def place(name: str) -> str:
            at = f", {name}: layer {layer_of(name)}, stage {stage_of(layer_of(name))}" if name else ""
            return f"step {step}{at}"

        return place


def bounds_of(dtype: torch.dtype, n_layers: int, recurrent: bool = False) -> tuple[float, float]:
    """Of losses and norms, and of gradients, of a run in `dtype`."""
    of_means, of_gradients = ROUNDINGS[dtype]
    rounding = torch.finfo(dtype).eps * (RECURRENT.get(dtype, 1) if recurrent else 1)
    return of_means * rounding, of_gradients * math.sqrt(n_layers) * rounding


def apart(found: float | None, expected: float) -> float:
    """The relative difference of two numbers."""
    return math.inf if found is None else abs(found - expected) / abs(expected)


def is_flat(gradient: Tensor) -> bool:
    """Whether a gradient is zero, constant or not finite: no comparison could tell it from none."""
    return not gradient.isfinite().all() or bool((gradient == gradient.flatten()[0]).all())


def compare(
    row: Row,
    place: Callable[[str], str],
    found: Tensors,
    expected: Tensors,
    tied: tuple[str, str] | None,
    before: Tensors | None = None,
) -> None:
    """Note how far tensors of the same name are apart; one that is absent on a side is so without end.

    Args:
        tied: the names of the weight that is both embedding and head; on several stages each end holds all of it.
        before: the weights before the update, where weights are compared.
    """
    for name in {**expected, **found}:
        twin = tied[0] if tied and name == tied[1] and name not in expected else name
        if name not in found or twin not in expected:
            row.note(math.inf, place(name))
            continue
        scale = expected[twin].norm()
        if before is not None:
            scale = (expected[twin] - before[twin]).norm() + UNHELD * before[twin].norm()
        row.note(((found[name] - expected[twin]).norm() / scale).item(), place(name))


def compare_bits(row: Row, place: Callable[[str], str], found: Tensors, expected: Tensors) -> None:
    """Note the largest difference between numbers of tensors of the same name that should have the same bits."""
    for name in {**expected, **found}:
        one, other = found.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            row.note(math.inf, place(name))
        else:
            row.note(0.0 if torch.equal(one, other) else (one.float() - other.float()).abs().max().item(), place(name))
