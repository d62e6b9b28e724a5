"""Compare a run with its reference: each row has a property, the largest difference, its bound and its place.

Differences are relative: the norm of a tensor's difference over the norm of the reference; for an update, over the norm
of the update plus a thousandth of the weight, as a weight cannot hold the last digits. A bound is a number of
roundings. Gradients pass through all layers, whose roundings add up like a random walk. In bf16 and fp16 sums are in
fp32 but each value between operations is rounded, so the bound is 8 x sqrt(layers) x 2^-7 or 2^-10. In fp32 mostly sums
of many terms are rounded: 100 x sqrt(layers) x 2^-23. Key biases, whose gradients nearly cancel, reach three quarters
of it, most weights a fifth. Losses and norms are means, in which most errors cancel: 2^-23 x 32, 2^-7 and 2^-10. States
of linear attention amplify errors (half a rounding of the embeddings changes gradients of transformers' own model by
2^-10), so in fp32 their bounds are 64 times as wide. An objective whose loss feels the rounding of sums over tokens has
wider bounds of losses and norms (`training.objective.Formula`). The optimizer always computes in fp32: 2^-23 x 1024.
Where the bits must be the same, the bound is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention.positions import LINEAR
from models.checkpoint.adapter import LayerFiles
from models.checkpoint.source import open_source
from models.family import EYES
from options.proof.launches import LaunchedRun
from options.proof.recorder import Recorded
from options.proof.reference import Reference, Step
from options.proof.small_run import SAVED, STEPS, SmallRun
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saved_slices import layer_of
from training.config.precision import training_dtype

# Bounds in roundings: of means, and of gradients per sqrt(layers).
ROUNDINGS = {torch.float32: (32, 100), torch.bfloat16: (1, 8), torch.float16: (1, 8)}
RECURRENT = {torch.float32: 64}  # factor for blocks with recurrent states
UPDATE_BOUND = 1024 * torch.finfo(torch.float32).eps
CANCELLED = 1e-6  # of the gradients of a tower: what is smaller is rounding
TINY = torch.finfo(torch.float32).tiny
WEIGHT_SHARE = 1e-3  # of a weight, added to the norm of its update
Tensors = Mapping[str, Tensor]


@dataclass
class Row:
    """A property, and the largest of its differences.

    Attributes:
        bound: upper limit of `largest`.
        where: step, weight, layer and stage of `largest`.
    """

    what: str
    bound: float
    count: int = 0
    largest: float = 0.0
    where: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the property holds; it fails if nothing was compared."""
        return self.count > 0 and self.largest <= self.bound

    def note(self, value: float, where: str) -> None:
        """Add one difference; NaN counts as infinite."""
        value = value if math.isfinite(value) else math.inf
        self.count += 1
        if value > self.largest:
            self.largest, self.where = value, where


class Comparison:
    """Fills the rows.

    Args:
        run: the uninterrupted run.
    """

    def __init__(self, small: SmallRun, run: LaunchedRun) -> None:
        self._small, self._run, self._dtype = small, run, training_dtype(small.config)
        recurrent = LINEAR in small.spec.positions().kinds
        mean_bound, gradient_bound = choose_bounds(self._dtype, small.spec.n_layers, recurrent)
        self._formula = small.config.objective.formula()
        factor = self._formula.widening
        self.loss = Row("loss", factor * mean_bound)
        self.norm = Row("norm of the gradient", factor * mean_bound)
        self.noted = Row(self._formula.about, mean_bound)
        self.gradients = Row("gradients", gradient_bound)
        self.flat = Row("gradients that say nothing", 0.0)
        self.idle = Row("gradients that are zero", gradient_bound)
        self.updates = Row("updates of the weights", UPDATE_BOUND)
        self.replicas = Row("weights of every replica", 0.0)
        self.evaluation = Row("loss of the evaluation", factor * mean_bound)
        self.saved = Row("weights in the checkpoint", 0.0)
        self.resumed_loss = Row("loss after kill and resume", 0.0)
        self.resumed = Row("weights after kill and resume", 0.0)

    @property
    def rows(self) -> list[Row]:
        rows = [value for value in vars(self).values() if isinstance(value, Row)]
        absent = [*([] if self._names else [self.noted]), *([] if self.idle.count else [self.idle])]
        return [row for row in rows if not any(row is each for each in absent)]

    @property
    def _names(self) -> tuple[str, ...]:
        """The numbers in metrics.jsonl that are compared beside loss and norm."""
        return (*self._formula.noted, *filter(None, [self._formula.along_as]))

    def compare_reference(self, show: Callable[[int], None]) -> None:
        """Compare each step of the run, its checkpoints and evaluations with the reference.

        Args:
            show: takes the number of completed steps.
        """
        numbers, tied = self._run.read_numbers(self._names), self._small.spec.tied_names
        reference = Reference(self._small.config, self._small.samples, self._small.evaluated)
        for step in range(1, STEPS + 1):
            noted, place = Recorded(self._run.notes, step), self._place(step)
            expected = reference.step(step, noted.gradients)
            self.loss.note(relative_difference(numbers["loss"].get(step), expected.loss), place(""))
            self.norm.note(relative_difference(numbers["grad_norm"].get(step), expected.norm), place(""))
            for name, value in expected.noted.items():
                self.noted.note(relative_difference(numbers[name].get(step), value), place(""))
            self._compare_gradients(place, noted.gradients, expected)
            compare_row(self.updates, place, noted.masters, expected.weights, tied, expected.before)
            rounded = {name: master.to(self._dtype) for name, master in noted.masters.items()}
            for rank, weights in enumerate(noted.weights):
                compare_bits(self.replicas, place, weights, noted.slice_for_rank(rank, reference.fixed | rounded))
            if step % SAVED == 0:
                loss = reference.evaluate()
                self.evaluation.note(relative_difference(numbers["eval_loss"].get(step), loss), place(""))
                if tied and tied[0] in rounded:  # the files have both ends, even if a stage holds them as one tensor
                    rounded[tied[1]] = rounded[tied[0]]
                saved = self._saved(step)
                fixed = {name: tensor for name, tensor in reference.fixed.items() if name in saved}
                compare_bits(self.saved, place, saved, rounded | fixed)
            show(step)

    def _compare_gradients(self, place: Callable[[str], str], found: Tensors, expected: Step) -> None:
        """Compare a step's gradients: each with the reference's, those that are zero in a tower with the whole tower's.

        No image may pass a weight in a step, and what biases of keys without positions do cancels out.
        """
        tower = {name: each.norm() for name, each in expected.gradients.items() if name.startswith(f"0.{EYES}.")}
        whole = torch.stack([*tower.values(), torch.zeros(())]).norm()
        idle = {name for name, norm in tower.items() if norm <= CANCELLED * whole}
        given, due = (_without(gradients, idle) for gradients in (found, expected.gradients))
        compare_row(self.gradients, place, given, due, self._small.spec.tied_names)
        for name, gradient in given.items():
            self.flat.note(float(is_flat(gradient)), place(name))
        for name in idle:
            left = found[name].norm().item() if name in found else math.inf
            self.idle.note(left / max(whole.item(), TINY), place(name))

    def compare_resumed(self, run: LaunchedRun) -> None:
        """Compare the killed and resumed run with the uninterrupted one."""
        expected, found = self._run.read_numbers()["loss"], run.read_numbers()["loss"]
        for step in range(SAVED + 1, STEPS + 1):
            place = self._place(step)
            self.resumed_loss.note(relative_difference(found.get(step), expected[step]), place(""))
            compare_bits(self.resumed, place, *(Recorded(each.notes, step).masters for each in (run, self._run)))

    def _saved(self, step: int) -> dict[str, Tensor]:
        """Read the weights of a checkpoint's layer files."""
        spec, folder = self._small.spec, step_folder(self._run.folder, step)
        if spec.trained.lora:
            files = LayerFiles(folder)
            layers = [files.read(layer, spec.trained_names(layer)) for layer in range(spec.n_layers)]
        else:
            layers = list(map(open_source(folder, spec).read_layer, range(spec.n_layers)))
        named: dict[str, Tensor] = {}
        for layer, state in enumerate(layers):
            named |= {f"{layer}.{name}": tensor for name, tensor in state.items()}
        return named

    def _place(self, step: int) -> Callable[[str], str]:
        """Return a function that names the step and a weight's layer and stage."""
        record = CheckpointRecord.read(step_folder(self._run.folder, STEPS))
        assert record is not None
        stage_of = record.topology.stage_of

        def place(name: str) -> str:
            at = f", {name}: layer {layer_of(name)}, stage {stage_of(layer_of(name))}" if name else ""
            return f"step {step}{at}"

        return place


def choose_bounds(dtype: torch.dtype, n_layers: int, recurrent: bool = False) -> tuple[float, float]:
    """Return the bounds of means (losses and norms) and of gradients for a run in `dtype`."""
    mean, gradient = ROUNDINGS[dtype]
    rounding = torch.finfo(dtype).eps * (RECURRENT.get(dtype, 1) if recurrent else 1)
    return mean * rounding, gradient * math.sqrt(n_layers) * rounding


def relative_difference(found: float | None, expected: float) -> float:
    """Return the relative difference of two numbers; infinite if one is missing."""
    return math.inf if found is None else abs(found - expected) / abs(expected)


def _without(gradients: Tensors, names: Collection[str]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if name not in names}


def is_flat(gradient: Tensor) -> bool:
    """Return whether a gradient is zero, constant or not finite, so that comparing it proves nothing."""
    return not gradient.isfinite().all() or bool((gradient == gradient.flatten()[0]).all())


def compare_row(
    row: Row,
    place: Callable[[str], str],
    found: Tensors,
    expected: Tensors,
    tied: tuple[str, str] | None,
    before: Tensors | None = None,
) -> None:
    """Add the differences of tensors with the same name; infinite for a missing tensor.

    Args:
        tied: both names of the weight that is embedding and head; on several stages each end holds all of it.
        before: the weights before the update, to compare updates.
    """
    for name in {**expected, **found}:
        twin = tied[0] if tied and name == tied[1] and name not in expected else name
        if name not in found or twin not in expected:
            row.note(math.inf, place(name))
            continue
        scale = expected[twin].norm()
        if before is not None:
            scale = (expected[twin] - before[twin]).norm() + WEIGHT_SHARE * before[twin].norm()
        row.note(((found[name] - expected[twin]).norm() / scale).item(), place(name))


def compare_bits(row: Row, place: Callable[[str], str], found: Tensors, expected: Tensors) -> None:
    """Add the largest absolute differences of tensors that should have the same bits."""
    for name in {**expected, **found}:
        one, other = found.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            row.note(math.inf, place(name))
        else:
            row.note(0.0 if torch.equal(one, other) else (one.float() - other.float()).abs().max().item(), place(name))
