"""What the runs and the reference came to, put side by side: the rows of a proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.source import open_source
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saved_slices import layer_of
from training.config.deepspeed_config import training_dtype
from training.proof.launches import Start, metrics
from training.proof.recorder import Recorded
from training.proof.reference import Reference
from training.proof.rows import UPDATE, Difference, Row, bound_of, flat, number, same_bits, tensors
from training.proof.shrink_config import SAVED, STEPS
from training.proof.small_run import SmallRun

LOSS, NORM, GRADIENTS = "loss", "norm of the gradient", "gradients"
FLAT, UPDATES, COPIES = "gradients that are zero, flat or not finite", "updates of the weights", "weights of all replicas"
EVALUATION, SAVE, RESUME = "loss of the evaluation", "weights in the checkpoint", "weights after kill and resume"
RESUMED_LOSS = "loss after kill and resume"


class Comparison:
    """Collects differences.

    Args:
        run: that went through.
    """

    def __init__(self, small: SmallRun, run: Start) -> None:
        self._small, self._run = small, run
        self._dtype = training_dtype(small.config)
        self._found: dict[str, list[Difference]] = defaultdict(list)
        record = CheckpointRecord.read(step_folder(run.folder, STEPS))
        assert record is not None
        self._topology = record.topology

    def with_reference(self, shown: Callable[[int], None]) -> None:
        """Each step of the run with that of one process, and what was saved and evaluated.

        Args:
            shown: told the steps that are done.
        """
        found, numbers = self._found, metrics(self._run.folder)
        reference = Reference(self._small.config, self._small.samples)
        for step in range(1, STEPS + 1):
            noted = Recorded(self._run.notes, step)
            expected = reference.step(step, noted.gradients)
            found[LOSS].append(number(step, numbers["loss"].get(step), expected.loss))
            found[NORM].append(number(step, numbers["grad_norm"].get(step), expected.norm))
            tied = self._small.spec.tied_names
            found[GRADIENTS] += tensors(step, noted.gradients, expected.gradients, tied)
            found[FLAT] += flat(step, noted.gradients)
            found[UPDATES] += tensors(step, noted.masters, expected.weights, tied, expected.before)
            for copies in zip(*noted.weights.values(), strict=True):
                weights = dict(zip(noted.weights, copies, strict=True))
                found[COPIES] += same_bits(step, weights, self._rounded(noted.masters))
            if step % SAVED == 0:
                loss = reference.evaluate(self._small.evaluated)
                found[EVALUATION].append(number(step, numbers["eval_loss"].get(step), loss))
                saved = self._saved(step)
                found[SAVE] += same_bits(step, saved, {name: noted.weights[name][0] for name in noted.weights})
            shown(step)

    def with_resumed(self, run: Start) -> None:
        """The run that was killed and resumed with the one that went through."""
        expected, found = metrics(self._run.folder)["loss"], metrics(run.folder)["loss"]
        for step in range(SAVED + 1, STEPS + 1):
            self._found[RESUMED_LOSS].append(number(step, found.get(step), expected[step]))
            masters = (Recorded(each.notes, step).masters for each in (run, self._run))
            self._found[RESUME] += same_bits(step, *masters)

    def rows(self) -> list[Row]:
        """A row for each property, in the order of a step."""
        bound = bound_of(self._dtype)
        bounds = {LOSS: bound, NORM: bound, GRADIENTS: bound, FLAT: 0.0, UPDATES: UPDATE, COPIES: 0.0, SAVE: 0.0}
        bounds |= {EVALUATION: bound, RESUMED_LOSS: 0.0, RESUME: 0.0}
        return [Row.of(name, self._found[name], limit, self._place) for name, limit in bounds.items()]

    def _rounded(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: master.to(self._dtype) for name, master in masters.items()}

    def _saved(self, step: int) -> dict[str, Tensor]:
        source = open_source(step_folder(self._run.folder, step), self._small.spec)
        return {
            f"{layer}.{name}": tensor.to(self._dtype)
            for layer in range(self._small.spec.n_layers)
            for name, tensor in source.read_layer(layer).items()
        }

    def _place(self, name: str) -> str:
        """A weight with its layer and stage."""
        layer = layer_of(name)
        return f"{name} (layer {layer}, stage {self._topology.stage_of(layer)})"
