"""How much arithmetic a model needs, and which share of the devices' peak a run turns into it (MFU).

Counted as in PaLM (arXiv:2204.02311, appendix B): 6 FLOPs per token for each weight it is multiplied with (2 forward,
4 backward), and for attention 12 x heads x head_dim per layer for each pair of query and key, the causal half that a
kernel may skip included. Recomputed activations do not count. Where this model needs less, less counts: of the experts
those that a token is sent to, of the head the supervised tokens, of a sliding window the keys inside, and of padding
nothing. Shapes come from the meta device: a few milliseconds a layer, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from models.positions import SLIDING, attention_kind
from models.spec import ModelSpec
from training.metrics.devices import peak_flops


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model's forward and backward pass.

    Attributes:
        token: for each token, without attention scores and head.
        supervised: for each token that bears loss: the head.
        pair: for each query and key, summed over the blocks with full attention.
        windowed_pair: the same over the blocks with a sliding window.
        window: how many keys a query sees there.
    """

    token: float
    supervised: float
    pair: float
    windowed_pair: float
    window: int

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelFlops:
        """Count by the shapes of the model's weights."""
        config = spec.config
        per_block = _flops_per_pair(spec)
        windowed = sum(attention_kind(config, block) == SLIDING for block in range(spec.n_blocks))
        return cls(
            token=6 * sum(_multiplied(spec, layer) for layer in range(1, spec.n_layers - 1)),
            supervised=6 * _multiplied(spec, spec.n_layers - 1),
            pair=per_block * (spec.n_blocks - windowed),
            windowed_pair=per_block * windowed,
            window=config.sliding_window if windowed else 0,
        )

    def of_batch(self, lengths: Iterable[float], supervised: float) -> float:
        """FLOPs of a step.

        Args:
            lengths: of the batch's samples, in tokens.
            supervised: tokens that bear loss, over all samples.
        """
        total = self.supervised * supervised
        for length in lengths:
            attention = self.pair * length + self.windowed_pair * min(length, self.window)
            total += length * (self.token + attention)
        return total


def layer_flops(spec: ModelSpec, lengths: Sequence[int], supervised: int) -> list[float]:
    """FLOPs of each layer, forward and backward, for samples of these lengths; nothing for the embedding.

    Args:
        supervised: tokens that bear loss, over all samples.
    """
    tokens, per_pair = sum(lengths), _flops_per_pair(spec)
    pairs = sum(length**2 for length in lengths)
    flops = [0.0]
    for block in range(spec.n_blocks):
        seen = pairs
        if attention_kind(spec.config, block) == SLIDING:
            seen = sum(length * min(length, spec.config.sliding_window) for length in lengths)
        flops.append(6 * _multiplied(spec, block + 1) * tokens + per_pair * seen)
    return [*flops, 6 * _multiplied(spec, spec.n_layers - 1) * supervised]


class Utilization:
    """Model FLOPs utilisation (MFU) of a run's steps, from 0 to 1.

    Args:
        spec: the model.
        dtype: it computes in; the peaks are those of bf16 and fp16.
        processes: of the run, each with a device like this one's.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, processes: int) -> None:
        known = torch.cuda.is_available() and dtype in (torch.bfloat16, torch.float16)
        peak = peak_flops(torch.cuda.get_device_name()) if known else None
        self._peak = peak * processes if peak else None
        self._flops = ModelFlops.of(spec) if peak else None

    def __call__(self, lengths: Iterable[int], supervised: int, seconds: float) -> float | None:
        """MFU of a step that took `seconds` for samples of these lengths; None where the device is not known."""
        if self._flops is None or self._peak is None:
            return None
        return self._flops.of_batch(lengths, supervised) / seconds / self._peak


def _flops_per_pair(spec: ModelSpec) -> float:
    """FLOPs of a block for each pair of query and key."""
    config = spec.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 12.0 * config.num_attention_heads * head_dim


def _multiplied(spec: ModelSpec, layer: int) -> float:
    """How many of a layer's weights a token is multiplied with: its matrices, and its share of stacked experts."""
    weights = 0.0
    for shape in spec.shapes(layer).values():
        if len(shape) == 2:
            weights += shape.numel()
        elif len(shape) == 3:
            weights += shape.numel() * spec.config.num_experts_per_tok / shape[0]
    return weights
