"""Compute model FLOPs utilization (MFU): the model's own FLOP/s as a share of the devices' peak.

The arithmetic is counted as in PaLM (arXiv:2204.02311, appendix B): 6 FLOPs per token for each weight it is multiplied
with, and for attention 12 x heads x head_dim per layer for each pair of query and key, the causal half that a kernel
may skip included. Recomputation and padding do not count, of the experts only those that a token is sent to, of the
head the supervised tokens, of a sliding window the keys inside.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from models.attention.positions import LINEAR, SLIDING, attention_kind
from models.router import top_k
from models.spec import ModelSpec
from training.callbacks import Callback
from training.config.deepspeed_config import training_dtype
from training.metrics.devices import peak_flops

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.language_model import LanguageModel
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics


def _pairs_within(window: float, lengths: Collection[float]) -> float:
    """Count the pairs of tokens that see each other, in samples of these lengths."""
    return sum(length * min(length, window) for length in lengths)


class ModelFlops:
    """FLOPs of a model's layers, forward and backward together."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        self._pair = 12.0 * config.num_attention_heads * head_dim
        _, *self._blocks, self._head = (_multiplied(spec, layer) for layer in range(spec.n_layers))
        kinds = [attention_kind(config, block) for block in range(spec.n_blocks)]
        window = float(getattr(config, "sliding_window", None) or math.inf)
        windows = {SLIDING: window, LINEAR: 0.0}  # linear attention has no pairs
        self._windows = [windows.get(kind, math.inf) for kind in kinds]

    def by_layer(self, lengths: Collection[float], supervised: float) -> list[float]:
        """Count each layer's FLOPs for samples of these lengths, without padding.

        Args:
            supervised: trained tokens of all samples.
        """
        tokens = sum(lengths)
        pairs = {window: _pairs_within(window, lengths) for window in set(self._windows)}
        blocks = [
            weights * tokens + self._pair * pairs[window]
            for weights, window in zip(self._blocks, self._windows, strict=True)
        ]
        return [0.0, *blocks, self._head * supervised]


def _multiplied(spec: ModelSpec, layer: int) -> float:
    """Count the FLOPs of a token with a layer's weights: of experts its share.

    Two for a weight in the forward pass, two for the gradient of the input, two for that of a trained weight itself.
    """
    flops, trained = 0.0, set(spec.trained_names(layer))
    for name, shape in spec.shapes(layer).items():
        passes = 6 if name in trained else 4
        if len(shape) == 2:
            flops += passes * shape.numel()
        elif len(shape) == 3:
            flops += passes * shape.numel() * top_k(spec.config) / shape[0]
    return flops


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
