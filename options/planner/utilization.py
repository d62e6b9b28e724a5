"""Compute model FLOPs utilization (MFU): the model's own FLOP/s as a share of the devices' peak.

The arithmetic is that of `models.flops`, as in PaLM. Recomputation and padding do not count.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from models.flops import ModelFlops
from models.spec import ModelSpec
from training.callbacks import Callback
from training.config.deepspeed_config import training_dtype
from training.metrics.devices import peak_flops

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.language_model import LanguageModel
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


class Utilization:
    """MFU of a run's steps, from 0 to 1.

    Args:
        dtype: of the model; the peak is that of bf16 and fp16, even if products are in fp8.
        processes: of the run, each with a device like this one.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, processes: int) -> None:
        known = torch.cuda.is_available() and dtype in (torch.bfloat16, torch.float16)
        peak = peak_flops(torch.cuda.get_device_name()) if known else None
        self._peak = peak * processes if peak else None
        self._flops = ModelFlops(spec)

    def __call__(self, lengths: Collection[int], supervised: int, seconds: float) -> float | None:
        """Return the MFU of a step of `seconds` with samples of these lengths; None if the device is unknown."""
        if self._peak is None:
            return None
        return sum(self._flops.by_layer(lengths, supervised)) / seconds / self._peak


class Mfu(Callback):
    """Add the MFU of a language model to each step's metrics."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def on_start(self, run: Run) -> None:
        self._utilization = Utilization(self._model.spec, training_dtype(run.config), run.config.model_topo.processes)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        metrics.mfu = self._utilization(batch.lengths, batch.supervised, metrics.seconds)
