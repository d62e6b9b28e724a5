"""The load-balancing loss of mixture-of-experts models, summed along the pipeline.

The loss compares how often each expert was chosen with how probable it was, over all layers and tokens (Switch
Transformer, arXiv:2101.03961, equations 4 to 6, in the form of transformers' `output_router_logits`). The layers are on
different stages, so each block adds its sums, 2 x experts numbers, to a tensor that flows beside the hidden states, and
the last stage computes the loss. Padding does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

# What the families call the number of experts, and of those that a token is sent to.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def n_experts(config: PreTrainedConfig) -> int:
    """Count the experts of a block; 0 for a dense model."""
    return first_of(config, EXPERTS)


def top_k(config: PreTrainedConfig) -> int:
    """Count the experts of a token."""
    return first_of(config, CHOSEN)


def first_of(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    return next((int(found) for name in names if (found := getattr(config, name, None))), 0)


class RouterRecorder:
    """Records the logits [T, E] of one block's router in the last pass."""

    def __init__(self, router: nn.Module, top_k: int) -> None:
        self.top_k = top_k
        self._logits: Tensor | None = None
        router.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self._logits = outputs[0]

    def statistics(self, real: Tensor) -> Tensor:
        """Sum tokens and probabilities of each expert, [2, E] fp32, over `real` tokens."""
        assert self._logits is not None
        probabilities = torch.softmax(self._logits.float(), dim=-1)
        self._logits = None
        counted = real.reshape(-1).float()
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        counts = torch.zeros_like(probabilities[0])
        counts = counts.scatter_add(0, chosen.reshape(-1), counted.repeat_interleave(self.top_k))
        return torch.stack([counts, (probabilities * counted[:, None]).sum(dim=0)])


def router_loss(statistics: Tensor, top_k: int) -> Tensor:
    """Compute the load-balancing loss of a micro-batch from [2, E] sums.

    It is `top_k` where the experts share the tokens evenly, more where they do not, and 0 where there are no tokens.
    """
    counts, probabilities = statistics
    rows = (counts.sum() / top_k).clamp(min=1.0)  # tokens x layers
    loss: Tensor = len(counts) * (counts / rows * probabilities / rows).sum()
    return loss


def experts_implementation() -> str:
    """Choose how experts are computed, by transformers' name."""
    return "grouped_mm" if torch.cuda.is_available() else "eager"
