"""The same layers, split over the stages of a DeepSpeed pipeline.

`PipelineModel` is DeepSpeed's PipelineModule with four things done differently:

* `parts` is a list (how many layers each stage holds), not a heuristic.
* Each process builds and loads only its own layers, straight into their dtype and device.
* It knows the shapes that flow between stages for any micro-batch, so that no stage has to send them first.
* Embedding and head of a tied model each own a copy of the weight; in one process they share one parameter. DeepSpeed's
  TiedLayerSpec builds one module a key, so a head that also has a norm loses it when both ends share a rank, and the
  head writes no layer file of its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, product, repeat
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from models.adapters import add_idle_weight, save_trained_only
from models.attention.positions import Positions
from models.block_options import PLAIN, BlockOptions
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.layers import Activations, Block, Embedding, Head
from models.loading import LayerStates, SharedReading, build_layer, tie_weights
from models.loss.interface import MicroBatchLoss
from models.loss.micro_batch import micro_batch_loss
from models.offload import Returns
from models.parallel.groups import NO_GROUPS, RankGroups
from models.parallel.tensor import TensorShare
from models.router import n_experts
from models.spec import ModelSpec
from models.weight_gradients import WeightGradients

TIE_KEY = "embedding"


class LaterLayer(LayerSpec):
    """A layer that a function makes when its stage asks for it."""

    def __init__(self, make: Callable[..., nn.Module], *arguments: Any) -> None:
        super().__init__(nn.Module)
        self._make = partial(make, *arguments)

    def build(self, log: bool = False) -> nn.Module:
        return self._make()


class SharedWeights(PipelineModule):
    """A stage some of whose weights lie on other stages too, each with a copy that gets the sum of all gradients."""

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """List the weights held here that other stages hold too, each with the group that sums its gradient."""
        return [(tied["weight"], tied["group"]) for tied in self.tied_comms.values()]

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """Give all copies the first stage's values."""
        super()._synchronize_tied_weights()

    def _shared(self, ranks: list[int], find: Callable[[], Any]) -> dict[str, Any] | None:
        """Make a group for the ranks that share a weight; return what DeepSpeed keeps of it, None elsewhere.

        Args:
            find: returns this rank's copy.
        """
        group = comm.new_group(ranks=ranks)  # which every process counts, and its members make
        if self.global_rank not in ranks:
            return None
        weight = find()
        weight.ds_pipe_replicated = self.global_rank != ranks[0]  # so that the gradient norm counts it once
        owner = nn.Module()
        owner.register_parameter("weight", weight)
        return {"ranks": ranks, "group": group, "weight": weight, "weight_attr": ["weight"], "module": owner}


class PipelineModel(SharedWeights):
    """One stage's share of a model, and the loss on the last stage.

    Args:
        topology: the grid of processes, with the axes `pipe` and `data`, and `model` where they share layers.
        parts: layers per stage; one entry a stage (for a `VScheduleModel` two), summing to `spec.n_layers`.
        dtype: the dtype to train in.
        micro_batch_loss: `models.loss.micro_batch.micro_batch_loss` with the weights of its parts.
        groups: the ranks that share this process's rows and layers.
        read_together: this stage's layers in the order in which they are built, where its replicas read them together.

    A micro-batch is `((input_ids, position_ids), (labels, scale, share))`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        states: LayerStates,
        topology: ProcessTopology,
        parts: list[int],
        dtype: torch.dtype,
        blocks: BlockOptions = PLAIN,
        spread_experts: bool = False,
        micro_batch_loss: MicroBatchLoss = micro_batch_loss,
        groups: RankGroups = NO_GROUPS,
        read_together: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self._groups = groups
        self._read_together = read_together
        self._bounds = [0, *accumulate(parts)]
        self._dtype = dtype
        self.micro_batch_loss = micro_batch_loss
        # Of a chunk's layers, which see the micro-batches in order.
        self.positions = [spec.positions(groups) for _ in parts]
        self.share = TensorShare(spec, groups.tensor, spread_experts)

        device = torch.device(get_accelerator().current_device_name())
        chunks = list(chain.from_iterable(repeat(chunk, size) for chunk, size in enumerate(parts)))  # of each layer
        layers = [
            LaterLayer(self._build_layer, layer, states, self.positions[chunk], device)
            for layer, chunk in enumerate(chunks)
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its seed settings, which mean nothing here
            super().__init__(layers, topology=topology, loss_fn=self.loss)

        for weight in self.parameters():  # so that the gradient norm counts once what all ranks have
            weight.ds_pipe_replicated |= self.share.ranks.rank > 0 and not weight.model_parallel
        if not any(weight.requires_grad for weight in self.parameters()):
            add_idle_weight(self, dtype)

        returns = [Returns() for _ in parts]
        for number, layer in self.named_children():
            if spec.trained.lora:
                save_trained_only(layer)
            if isinstance(layer, Head):
                layer.project_in_loss = True
            elif isinstance(layer, (Embedding, Block)):
                blocks.apply(int(number), layer, returns[chunks[int(number)]])

    def loss(self, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of a micro-batch; DeepSpeed calls it on the last stage."""
        return self.micro_batch_loss(self._layer(self.spec.n_layers - 1), activations, labels)

    def activations_like(self, rows: int, length: int, own: int | None = None) -> Activations:
        """Make what flows between stages for [rows, length], or for `own` tokens of each row, on the meta device."""
        config = self.spec.config
        own = length // self._groups.sequence.size if own is None else own
        with torch.device("meta"):
            hidden = torch.empty(rows, own, config.hidden_size, dtype=self._dtype)
            position_ids = torch.empty(rows, length, dtype=torch.int64)
            router_sums = (torch.empty(2, n_experts(config)),) if self.spec.family.router else ()
        return hidden, position_ids, *router_sums

    def end_ranks(self) -> Iterator[list[int]]:
        """Yield, for each replica and share of a layer, the ranks that hold the first and the last layer."""
        stages = [self.stage_owner(layer) for layer in (0, self.spec.n_layers - 1)]
        replicas, parts = range(self._grid.data_parallel_size), range(self.share.ranks.size)
        for replica, part in product(replicas, parts):
            place = {"data": replica} | ({"model": part} if len(parts) > 1 else {})
            yield [self._grid.stage_to_global(stage_id=stage, **place) for stage in stages]

    def _layer(self, layer: int) -> Any:
        return self.get_submodule(str(layer))

    def _weight(self, layer: int, name: str) -> Any:
        return self._layer(layer).get_parameter(name)

    def _build_layer(self, layer: int, states: LayerStates, positions: Positions, device: torch.device) -> nn.Module:
        together = self.share, self._shared_reading
        return build_layer(self.spec, layer, states, positions, self._dtype, device, *together)

    def save_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Write this stage's layers, if whole; else `TensorShare.whole` joins them."""
        if self.share.ranks.size == 1:
            super().save_state_dict(*arguments, **named)

    def _partition_layers(self, method: str = "parts") -> None:
        assert self._grid.model_parallel_size == self.share.ranks.size, "the model axis is that of the ranks"
        together, replicas = self._read_together, self._grid.get_data_parallel_group()
        self._shared_reading = SharedReading(replicas, together) if together else None
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        first, last = self.stage_owner(0), self.stage_owner(self.spec.n_layers - 1)
        tied: dict[str, dict[str, Any]] = {}
        if not self.spec.tied or first == last:
            if self.spec.tied and self.stage_id == first:
                tie_weights(self._layer(0), self._layer(self.spec.n_layers - 1))
            return tied
        if EMBEDDING_WEIGHT not in self.spec.trained_names(0):  # nothing to keep alike
            return tied
        for ranks in self.end_ranks():
            layer, name = (0, EMBEDDING_WEIGHT) if self.stage_id == first else (self.spec.n_layers - 1, HEAD_WEIGHT)
            if entry := self._shared(ranks, partial(self._weight, layer, name)):
                tied[TIE_KEY] = entry
        return tied


class VScheduleModel(DualPipeVModule, PipelineModel):
    """A stage's two chunks for DualPipeV: of 2P chunks the s-th and the s-th last.

    So embedding and head are on the first stage, and the ends of a tied model share one parameter. DeepSpeed runs one
    chunk or the other as this module's forward pass; the loss belongs to the second.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Of each chunk, what backward passes leave for later.
        self.weight_gradients = [WeightGradients() for _ in self.phase_funcs]
        for later, layers in zip(self.weight_gradients, self.phase_funcs, strict=True):
            for layer in layers:
                # What is left keeps its activations, which recomputing and offloading are there to avoid.
                if isinstance(layer, Block) and not (layer.recompute or layer.offload):
                    later.defer(layer)
