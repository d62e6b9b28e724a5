"""Tensor parallelism for generation: every process holds a share of each block, and all answer together.

Which matrix is cut which way stands in transformers' configuration of the family (`base_model_tp_plan`), after
Megatron-LM (arXiv:1909.08053): what reads the hidden states is cut by its outputs, so that a head or a neuron lies
whole on one process, and what writes them by its inputs, so that its results are summed. All processes ask the same,
see the same hidden states and so choose the same tokens.

Cost: two sums of [B, S, H] a block and forward pass. Embedding, norms, routers and head lie whole on every process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig

from models.causal_lm import CausalLM
from models.checkpoint.layout import resolve
from models.checkpoint.source import open_source
from models.errors import CheckpointError
from models.spec import ModelSpec

# By the word of a plan: the side of a matrix [..., out, in] to cut, and how many matrices lie above each other in it.
CUT = {"colwise": (-2, 1), "colwise_gather_output": (-2, 1), "packed_colwise": (-2, 2)}
CUT |= {"rowwise": (-1, 1), "rowwise_split_input": (-1, 1)}
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
KNOWN = {*CUT, *SUMMED, "replicated_with_grad_allreduce"}  # the last is alike everywhere while nothing is trained


def load_share(
    path: str | Path, group: distributed.ProcessGroup, dtype: torch.dtype | None = None, device: str = "cpu"
) -> CausalLM:
    """This process's share of the model in a folder of either layout; all processes of the group call it.

    Raises:
        CheckpointError: see `load_model`; or there is no plan for the family, or a weight cannot be shared out evenly.
    """
    folder = resolve(path)
    spec = ModelSpec.from_folder(folder)
    share = Share(spec, folder, group)
    shared = replace(spec, family=replace(spec.family, decoder_layer=share.decoder_layer), _shapes={})
    return CausalLM(shared, share, dtype or share.source.dtype(), torch.device(device)).eval()


class Share:
    """The blocks and the `LayerStates` of one process."""

    def __init__(self, spec: ModelSpec, folder: Path, group: distributed.ProcessGroup) -> None:
        self.source = open_source(folder, spec)
        self.check_layer, self.describe = self.source.check_layer, self.source.describe
        self._whole_layer = spec.family.decoder_layer
        self._group, self._rank, self._size = group, group.rank(), group.size()
        plan: dict[str, str] = getattr(spec.config, "base_model_tp_plan", None) or {}
        if spec.family.rotary is None or not plan or set(plan.values()) - KNOWN:  # ALiBi knows heads by number
            raise CheckpointError(f"{folder}: no plan for tensor parallelism of {spec.family.name}; expected 1 process")
        self._plan = {name.removeprefix("layers.*."): word for name, word in plan.items()}
        self._part_of(spec.config.num_key_value_heads, "num_key_value_heads")

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        """A layer's weights, a block's cut."""
        whole = self.source.read_layer(layer)
        return {name: self._cut(name.removeprefix("block."), tensor) for name, tensor in whole.items()}

    def decoder_layer(self, config: PreTrainedConfig, index: int) -> nn.Module:
        """A block of the family with the shapes of a share and the outputs of all."""
        layer = self._whole_layer(config, index)
        for name, parameter in layer.named_parameters():
            parameter.data = self._cut(name, parameter.data)
        for name, module in layer.named_modules():
            word = self._plan.get(name)
            if word == "rowwise_split_input":
                module.register_forward_pre_hook(lambda _, inputs: inputs[0].chunk(self._size, -1)[self._rank])
            if word == "colwise_gather_output":
                module.register_forward_hook(lambda _, inputs, output: self._gathered(output))
            if word in SUMMED:
                module.register_forward_hook(lambda _, inputs, output: self._summed(output))
        return layer

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        word = self._plan.get(name) or self._plan.get(name.rpartition(".")[0])
        if word not in CUT:
            return whole
        side, above = CUT[word]
        if whole.dim() == 1 and side == -1:  # a bias that is added to a sum counts once
            return whole if self._rank == 0 else torch.zeros_like(whole)
        side = max(side, -whole.dim())
        pieces = whole.chunk(above, side)
        width = self._part_of(pieces[0].shape[side], name)
        return torch.cat([piece.narrow(side, self._rank * width, width) for piece in pieces], side)

    def _part_of(self, count: int, name: str) -> int:
        if count % self._size:
            raise CheckpointError(
                f"tensor parallelism: {name}: {count} cannot be shared out evenly over {self._size} processes; "
                "expected a number that divides it"
            )
        return count // self._size

    def _gathered(self, output: Tensor) -> Tensor:
        shares = [torch.empty_like(output) for _ in range(self._size)]
        distributed.all_gather(shares, output, self._group)
        return torch.cat(shares, -1)

    def _summed(self, output: Tensor) -> Tensor:
        distributed.all_reduce(output, group=self._group)
        return output
