"""How much arithmetic a model needs, and which share of the devices' peak a run turns into it (MFU).

Counted as in PaLM (arXiv:2204.02311, appendix B): 6 FLOPs per token for each weight it is multiplied with (2 forward,
4 backward), and for attention 12 x heads x head_dim per layer for each pair of query and key, the causal half that a
kernel may skip included. Recomputed activations do not count. Where this model needs less, less counts: of the experts
those that a token is sent to, of the head the supervised tokens, of a sliding window the keys inside, and of padding
nothing. Shapes come from the meta device: a few milliseconds a layer, once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from models.positions import SLIDING, attention_kind
from models.spec import ModelSpec
from training.metrics.devices import peak_flops


class ModelFlops:
    """FLOPs of a model's layers, forward and backward together."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._pair = 12.0 * config.num_attention_heads * head_dim
        _, *self._blocks, self._head = (6 * _multiplied(spec, layer) for layer in range(spec.n_layers))
        kinds = [attention_kind(config, block) for block in range(spec.n_blocks)]
        self._windows = [config.sliding_window if kind == SLIDING else math.inf for kind in kinds]

    def by_layer(self, lengths: Collection[float], supervised: float) -> list[float]:
        """FLOPs of each layer for samples of these lengths; nothing for the embedding.

        Args:
            lengths: in tokens, without padding.
            supervised: tokens that bear loss, over all samples.
        """
        tokens = sum(lengths)
        pairs = {window: sum(length * min(length, window) for length in lengths) for window in set(self._windows)}
        blocks = [
            weights * tokens + self._pair * pairs[window]
            for weights, window in zip(self._blocks, self._windows, strict=True)
        ]
        return [0.0, *blocks, self._head * supervised]


class Utilization:
    """Model FLOPs utilisation (MFU) of a run's steps, from 0 to 1.

    Args:
        dtype: that the model computes in; the peaks are those of bf16 and fp16.
        processes: of the run, each with a device like this one's.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, processes: int) -> None:
        known = torch.cuda.is_available() and dtype in (torch.bfloat16, torch.float16)
        peak = peak_flops(torch.cuda.get_device_name()) if known else None
        self._peak = peak * processes if peak else None
        self._flops = ModelFlops(spec)

    def __call__(self, lengths: Collection[int], supervised: int, seconds: float) -> float | None:
        """MFU of a step that took `seconds` for samples of these lengths; None where the device is not known."""
        if self._peak is None:
            return None
        return sum(self._flops.by_layer(lengths, supervised)) / seconds / self._peak


def _multiplied(spec: ModelSpec, layer: int) -> float:
    """How many of a layer's weights a token is multiplied with: its matrices, and its share of stacked experts."""
    weights = 0.0
    for shape in spec.shapes(layer).values():
        if len(shape) == 2:
            weights += shape.numel()
        elif len(shape) == 3:
            weights += shape.numel() * spec.config.num_experts_per_tok / shape[0]
    return weights
