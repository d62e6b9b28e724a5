"""Count the arithmetic of a model's layers, forward and backward together.

It is counted as in PaLM (arXiv:2204.02311, appendix B): 6 FLOPs per token for each weight it is multiplied with, and
12 x heads x head_dim per layer for each pair of query and key. Of experts only those count that a token is sent to, of
the head the supervised tokens, of a sliding window the keys inside.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from models.attention.positions import LINEAR, SLIDING, attention_kind
from models.router import top_k
from models.spec import ModelSpec


class ModelFlops:
    """FLOPs of a model's layers.

    Attributes:
        pair: of a query and a key, in one block.
        blocks: of a token with the weights of each block.
        head: of a trained token.
        windows: how many tokens a token sees in each block, at most; linear attention has no pairs.
    """

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        self.pair = 12.0 * config.num_attention_heads * head_dim
        _, *self.blocks, self.head = (_multiplied(spec, layer) for layer in range(spec.n_layers))
        kinds = [attention_kind(config, block) for block in range(spec.n_blocks)]
        window = float(getattr(config, "sliding_window", None) or math.inf)
        within = {SLIDING: window, LINEAR: 0.0}
        self.windows = [within.get(kind, math.inf) for kind in kinds]

    def by_layer(self, lengths: Collection[float], supervised: float) -> list[float]:
        """Count each layer's FLOPs for samples of these lengths, without padding.

        The causal half of the pairs counts too that a kernel may skip.

        Args:
            supervised: trained tokens of all samples.
        """
        tokens = sum(lengths)
        pairs = {window: _pairs_within(window, lengths) for window in set(self.windows)}
        blocks = [
            weights * tokens + self.pair * pairs[window]
            for weights, window in zip(self.blocks, self.windows, strict=True)
        ]
        return [0.0, *blocks, self.head * supervised]


def _pairs_within(window: float, lengths: Collection[float]) -> float:
    """Count the pairs of tokens that see each other, in samples of these lengths."""
    return sum(length * min(length, window) for length in lengths)


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
