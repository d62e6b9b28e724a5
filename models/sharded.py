"""The same layers in every process, for ZeRO: each replica runs the whole model, and stage 3 shards its weights.

The layers are built one after the other. Under stage 3 each is cut into one slice a process before the next is read, so
no process ever holds more than its slices, one whole layer and one that it has read for all; in the other stages every
process holds the model, as ZeRO demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from models.adapters import save_trained_only
from models.attention.positions import LINEAR
from models.block_options import PLAIN, BlockOptions
from models.layers import Activations, Block, Embedding, Head
from models.loading import LayerStates, SharedReading, build_layer, tie_weights
from models.loss.interface import MicroBatchLoss
from models.loss.micro_batch import micro_batch_loss
from models.offload import Returns
from models.parallel.groups import NO_GROUPS, RankGroups
from models.spec import ModelSpec


class ShardedModel(nn.ModuleList):
    """Embedding, blocks and head with their loss; parameters are `<layer>.<name>`.

    Args:
        shards: DeepSpeed's config of a stage-3 run, by which each layer is sharded as soon as it is built; None where
            each process holds the whole model.
        dtype, micro_batch_loss, groups, read_together: as in `models.pipeline`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        states: LayerStates,
        dtype: torch.dtype,
        shards: dict[str, Any] | None,
        blocks: BlockOptions = PLAIN,
        micro_batch_loss: MicroBatchLoss = micro_batch_loss,
        groups: RankGroups = NO_GROUPS,
        read_together: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.micro_batch_loss = micro_batch_loss
        positions, returns = spec.positions(groups), Returns()
        self.positions = [positions]
        device = torch.device(get_accelerator().current_device_name())
        everybody = torch.distributed.group.WORLD
        shared = SharedReading(everybody, read_together) if everybody and read_together else None
        for number in range(spec.n_layers):
            layer = build_layer(spec, number, states, positions, dtype, device, shared=shared)
            if spec.trained.lora:
                save_trained_only(layer)
            if isinstance(layer, (Embedding, Block)):
                blocks.apply(number, layer, returns)
            elif isinstance(layer, Head) and spec.tied:
                tie_weights(self[0], layer)
            if shards is not None:
                self._shard(layer, shards)
            self.append(layer)

    def forward(self, inputs: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of `((input_ids, position_ids), (labels, scale, share))`."""
        *layers, head = self
        assert isinstance(head, Head)
        activations = inputs
        for layer in layers:
            activations = layer(activations)
        # By name, as ZeRO's hooks warn of positional arguments that they do not know.
        loss: Tensor = head(activations, loss=lambda activations: self.micro_batch_loss(head, activations, labels))
        return loss

    def _shard(self, layer: nn.Module, config: dict[str, Any]) -> None:
        """Leave each process its slice of every parameter."""
        if isinstance(layer, Block) and layer.kind == LINEAR:
            # It is called once for each document of a packed row, on each rank another number of times. As a leaf the
            # block is gathered once, whole, so that all ranks take part in the same exchanges.
            set_z3_leaf_module(layer.block, True)
        sharded: Any = next(self.parameters(), None)
        if sharded is None:
            deepspeed.zero.Init(module=layer, config_dict_or_path=config)
        else:  # by the settings of the first layer: a second Init would make the process groups of ZeRO++ again
            sharded.convert_to_zero_parameters(param_list=list(layer.parameters()))
