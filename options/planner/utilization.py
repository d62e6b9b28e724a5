"""Compute model FLOPs utilization (MFU): the model's own FLOP/s as a share of the devices' peak.

The arithmetic is that of `models.flops`, as in PaLM. Recomputation and padding do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from models.flops import ModelFlops
from models.spec import ModelSpec
from training.callbacks import Callback
from training.config.precision import training_dtype
from training.distributed.processes import gather
from training.metrics.devices import peak_flops

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics
    from training.objective import ModelAndRecords


class Utilization:
    """MFU of a run's steps, from 0 to 1.

    Args:
        dtype: of the model; the peak is that of bf16 and fp16, even if products are in fp8.
        devices: torch's name of each process's.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, devices: Sequence[str]) -> None:
        peaks = [peak_flops(name) or 0.0 for name in devices if dtype in (torch.bfloat16, torch.float16)]
        self._peak = sum(peaks) if all(peaks) else 0.0
        self._flops = ModelFlops(spec)

    def __call__(self, lengths: Collection[int], supervised: int, seconds: float) -> float | None:
        """Return the MFU of a step of `seconds` with samples of these lengths; None if the device is unknown."""
        if not self._peak:
            return None
        return sum(self._flops.by_layer(lengths, supervised)) / seconds / self._peak


class Mfu(Callback):
    """Add the MFU of a language model to each step's metrics."""

    def __init__(self, model: ModelAndRecords) -> None:
        self._model = model

    def on_start(self, run: Run) -> None:
        devices = gather(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
        self._utilization = Utilization(self._model.spec, training_dtype(run.config), devices)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.mfu = self._utilization(batch.lengths, batch.supervised, metrics.seconds)
