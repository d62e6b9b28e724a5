"""Tensor parallelism for generation: every process holds a share of each block, and all answer together.

Which matrix is cut which way stands in transformers' configuration of the family (`base_model_tp_plan`), after
Megatron-LM (arXiv:1909.08053): what reads the hidden states is cut by its outputs, so that a head or a neuron lies
whole on one process, and what writes them by its inputs, so that its results are summed. All processes ask the same,
see the same hidden states and so choose the same tokens.

Cost: two sums of [B, S, H] a block and forward pass. Embedding, norms, routers and head lie whole on every process, and
while a layer loads, so does that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from models.errors import CheckpointError
from models.spec import ModelSpec

# The words of a plan. By outputs: how many matrices lie above each other in one; each is cut by itself.
OUTPUTS = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}
INPUTS = {"rowwise", "rowwise_split_input"}
WHOLE = {"replicated_with_grad_allreduce"}  # alike everywhere as long as nothing is trained
SUMMED = {"rowwise", "rowwise_split_input", "moe_tp_experts"}


class TensorParallel:
    """Cuts blocks down to this process's share.

    Args:
        group: the processes that hold the model together.

    Raises:
        CheckpointError: transformers says not how to cut this family, or its heads cannot be shared out evenly.
    """

    def __init__(self, spec: ModelSpec, group: distributed.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        plan: dict[str, str] = getattr(spec.config, "base_model_tp_plan", None) or {}
        known = OUTPUTS.keys() | SUMMED | WHOLE
        if spec.family.rotary is None or not plan or not set(plan.values()) <= known:  # biases of ALiBi are by head
            raise CheckpointError(f"tensor parallelism: there is no plan for {spec.family.name}; expected one process")
        self.plan = {name.removeprefix("layers.*."): word for name, word in plan.items()}
        if self.plan.get("self_attn.k_proj") == "colwise":
            self._divide(spec.config.num_key_value_heads, "num_key_value_heads")

    def cut(self, block: nn.Module) -> None:
        """Keep this process's share of a decoder layer of transformers, and let its outputs be those of all."""
        for name, parameter in block.named_parameters():
            word = self.plan.get(name) or self.plan.get(name.rpartition(".")[0], "")
            if word in OUTPUTS or word in INPUTS:
                parameter.data = self._share(name, parameter.data, word)
        for name, module in block.named_modules():
            word = self.plan.get(name, "")
            if word == "rowwise_split_input":
                module.register_forward_pre_hook(self._split)
            if word == "colwise_gather_output":
                module.register_forward_hook(self._gather)
            if word in SUMMED:
                module.register_forward_hook(self._sum)

    def _share(self, name: str, whole: Tensor, word: str) -> Tensor:
        if word in INPUTS and whole.dim() == 1:  # a bias, which counts once
            return whole if self.rank == 0 else torch.zeros_like(whole)
        side = -1 if word in INPUTS or whole.dim() == 1 else -2
        pieces = whole.chunk(OUTPUTS.get(word, 1), side)
        width = self._divide(pieces[0].shape[side], name)
        return torch.cat([piece.narrow(side, self.rank * width, width) for piece in pieces], side)

    def _divide(self, count: int, name: str) -> int:
        if count % self.size:
            raise CheckpointError(
                f"tensor parallelism: {name}: {count} cannot be shared out evenly over {self.size} processes; "
                "expected a number that divides it"
            )
        return count // self.size

    def _split(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].chunk(self.size, -1)[self.rank], *inputs[1:])

    def _gather(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        shares = [torch.empty_like(output) for _ in range(self.size)]
        distributed.all_gather(shares, output, self.group)
        return torch.cat(shares, -1)

    def _sum(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        distributed.all_reduce(output, group=self.group)
        return output
