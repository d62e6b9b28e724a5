"""How much arithmetic a model needs.

Counted as in PaLM (arXiv:2204.02311, appendix B): 6 FLOPs per token for each weight it is multiplied with (2 forward,
4 backward), and for attention 12 x heads x head_dim per layer for each pair of query and key, the causal half that a
kernel may skip included. Recomputed activations do not count. Where this model needs less, less counts: of the experts
those that a token is sent to, of the head the supervised tokens, of a sliding window the keys inside, and of padding
nothing. Shapes come from the meta device: a few milliseconds a layer, once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from models.attention.positions import LINEAR, SLIDING, attention_kind
from models.router import top_k
from models.spec import ModelSpec


class ModelFlops:
    """FLOPs of a model's layers, forward and backward together."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        self._pair = 12.0 * config.num_attention_heads * head_dim
        _, *self._blocks, self._head = (6 * _multiplied(spec, layer) for layer in range(spec.n_layers))
        kinds = [attention_kind(config, block) for block in range(spec.n_blocks)]
        window = float(getattr(config, "sliding_window", None) or math.inf)
        windows = {SLIDING: window, LINEAR: 0.0}  # linear attention has no pairs
        self._windows = [windows.get(kind, math.inf) for kind in kinds]

    def by_layer(self, lengths: Collection[float], supervised: float) -> list[float]:
        """FLOPs of each layer for samples of these lengths, without padding; nothing for the embedding.

        Args:
            supervised: tokens that bear loss, over all samples.
        """
        tokens = sum(lengths)
        pairs = {window: sum(length * min(length, window) for length in lengths) for window in set(self._windows)}
        blocks = [
            weights * tokens + self._pair * pairs[window]
            for weights, window in zip(self._blocks, self._windows, strict=True)
        ]
        return [0.0, *blocks, self._head * supervised]


def _multiplied(spec: ModelSpec, layer: int) -> float:
    """How many of a layer's weights a token is multiplied with: its matrices, and its share of stacked experts."""
    weights = 0.0
    for shape in spec.shapes(layer).values():
        if len(shape) == 2:
            weights += shape.numel()
        elif len(shape) == 3:
            weights += shape.numel() * top_k(spec.config) / shape[0]
    return weights
