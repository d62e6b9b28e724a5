"""Keep all layers of a model in memory that the processes of a host share (`schedule: weight_streaming`).

Each process has every layer as a module. On a CPU its parameters are views of the shared memory. On a GPU they are
copied to the device for a turn and point back to host memory after it, so a device holds the layers of two turns: the
current one and the next. In fp8 the copies in 8 bits are there for the turn (`options.weight_streaming.eight_bits`).

Gradients are summed in fp32, in shared memory too. On a GPU the sums go to the device with the weights, and back at
the end of the turn. Micro-batches are added in their order, whichever process computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.adapters import save_trained_only
from models.block_options import BlockOptions
from models.layers import Activations, Block, Head
from models.loading import LayerStates, as_trained, build_layer
from models.loss.interface import MicroBatchLoss
from models.offload import Returns
from models.parallel.groups import RankGroups
from models.router import n_experts
from models.spec import ModelSpec
from options.planner.inputs import layer_kinds
from options.weight_streaming.handover import bytes_of
from options.weight_streaming.products import keep, last_product, leave_out, worth_keeping
from options.weight_streaming.schedule import Slots
from options.weight_streaming.shared_memory import share_tensors
from training.distributed.processes import gather
from training.engine.gradients import add

if TYPE_CHECKING:
    from options.weight_streaming.eight_bits import EightBits


class StreamedModel(nn.Module):
    """The layers, under their numbers as names.

    Args:
        own: layers that this process loads.
        pool: ranks that share the weights.
        device: the device that this process computes on.
        slots: of a round, which say how many share the head and how many products of a block are kept.

    Attributes:
        weights: `<layer>.<name>` -> weight or buffer of a layer, in shared memory.
        sums: `<layer>.<name>` -> the sum of a trained weight's gradients, in fp32 and in shared memory.
        head_sums: for each turn of the head, the sums that it adds to; the first turn's are in `sums`.
        positions: masks and rotary angles of the blocks, a list of one.
        eight_bits: copies of the weights for products in fp8, if these are.
        keeping: block -> its linear layers whose products are kept until it is computed again.
    """

    def __init__(
        self,
        spec: ModelSpec,
        own: Sequence[int],
        pool: Sequence[int],
        device: torch.device,
        slots: Slots,
        states: LayerStates,
        dtype: torch.dtype,
        blocks: BlockOptions,
        micro_batch_loss: MicroBatchLoss,
        groups: RankGroups,
        read_together: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.spec, self.device, self.dtype, self.micro_batch_loss = spec, device, dtype, micro_batch_loss
        self.positions = [spec.positions(groups)]
        with torch.device("meta"):
            layers = [spec.build(layer, self.positions[0]) for layer in range(spec.n_layers)]

        # One copy of all weights and of all sums for the processes of a host.
        kept: dict[str, Tensor] = {}
        trained: dict[str, Tensor] = {}
        for number, layer in enumerate(layers):
            kept |= {f"{number}.{name}": like for name, like in as_trained(spec, layer, dtype).items()}
            trained |= {
                f"{number}.{name}": torch.empty_like(weight, dtype=torch.float32)
                for name, weight in layer.named_parameters()
                if weight.requires_grad
            }
        self.weights, self.sums = share_tensors(kept, pool, device), share_tensors(trained, pool, device)
        of_head = {name: like for name, like in trained.items() if name.startswith(f"{spec.n_layers - 1}.")}
        self.head_sums = [self.sums, *(share_tensors(of_head, pool, device) for _ in range(1, slots.heads))]

        for number in own:
            loaded = build_layer(spec, number, states, self.positions[0], dtype, torch.device("cpu"))
            for name, tensor in loaded.state_dict().items():
                self.weights[f"{number}.{name}"].copy_(tensor)
        gather(None)  # all have loaded theirs

        # Layers with these weights as their own.
        returns, last = Returns(), cache(lambda kind: last_product(spec, kind))
        kept_of = cache(lambda kind: [each.name for each in worth_keeping(spec, kind)[: slots.kept]])
        self.eight_bits, self.keeping = _eight_bits() if blocks.fp8 else None, dict[int, list[Any]]()
        for (number, layer), kind in zip(enumerate(layers), layer_kinds(spec), strict=True):
            names = layer.state_dict()
            layer.load_state_dict({name: self.weights[f"{number}.{name}"] for name in names}, assign=True)
            for buffer in layer.buffers():
                buffer.data = buffer.to(device)
            if spec.trained.lora:
                save_trained_only(layer)
            if isinstance(layer, Block):
                blocks.apply(number, layer, returns)
                self.keeping[number] = [layer.get_submodule(name) for name in kept_of(kind)]
                if self.eight_bits:
                    self.eight_bits.add(number, layer, last(kind), kept_of(kind))
                else:
                    for linear in self.keeping[number]:
                        keep(linear)
                    if ending := last(kind):
                        leave_out(layer.get_submodule(ending))
            elif isinstance(layer, Head):
                layer.project_in_loss = True
            self.add_module(str(number), layer)

    def layer(self, number: int) -> nn.Module:
        """Return a layer by its number."""
        return self.get_submodule(str(number))

    def loss(self, activations: Activations, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of a micro-batch from the head's output."""
        head = self.layer(self.spec.n_layers - 1)
        assert isinstance(head, Head)
        return self.micro_batch_loss(head, activations, labels)

    def activations_like(self, rows: int, length: int) -> tuple[Tensor, ...]:
        """Make the activations between two layers for [rows, length], without position ids, on the meta device."""
        with torch.device("meta"):
            hidden = torch.empty(rows, length, self.spec.config.hidden_size, dtype=self.dtype)
            return hidden, *((torch.empty(2, n_experts(self.spec.config)),) if self.spec.family.router else ())

    def products_like(self, layer: int, tokens: int) -> list[Tensor]:
        """Make the kept products of a block for so many tokens, on the meta device."""
        linears = self.keeping.get(layer, ())
        return [torch.empty(tokens, len(each.weight), dtype=each.weight.dtype, device="meta") for each in linears]

    def bytes_kept(self, tokens: int) -> int:
        """Return the most bytes that a block keeps of so many tokens."""
        return max(bytes_of(self.products_like(layer, tokens)) for layer in range(self.spec.n_layers))

    def give_products(self, layer: int, products: Sequence[Tensor]) -> None:
        """Give a block the products that it is not to compute again."""
        for linear, product in zip(self.keeping.get(layer, ()), products, strict=True):
            linear.kept = product

    def take_products(self, layer: int) -> list[Tensor]:
        """Take the kept products from a block that has been computed."""
        linears = self.keeping.get(layer, ())
        products = [linear.kept for linear in linears]
        for linear in linears:
            linear.kept = None
        return products


@dataclass
class LoadedLayers:
    """The weights of a turn's layers: being copied to the device, there, or back in host memory.

    Args:
        stream: the stream for copies; None on a CPU.
        part: which of the turns that share the head this is.

    Attributes:
        sums: `<layer>.<name>` -> the sum of a weight's gradients, where this process adds to it.
    """

    model: StreamedModel
    layers: Sequence[int]
    stream: torch.cuda.Stream | None
    part: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    _weights: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _begun: bool = False

    def fetch_weights(self) -> None:
        """Start copying the weights to the device; a second call does nothing."""
        if self._begun:
            return
        self._begun = True
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                for number in self.layers:
                    for weight in self.model.layer(number).parameters():
                        self._weights[weight] = weight.data.to(self.model.device, non_blocking=True)

    def fetch_sums(self, begun: bool) -> None:
        """Start copying the sums to the device, or allocate new ones there.

        Args:
            begun: whether this step has already added to them.
        """
        names: list[str] = []
        for number in self.layers:
            names += [f"{number}.{name}" for name, _ in self.model.layer(number).named_parameters()]
        kept = self.model.head_sums[self.part]
        found = {name: kept[name] for name in names if name in kept}
        if self.stream is None:
            self.sums = found
            return
        with torch.cuda.stream(self.stream):
            for name, total in found.items():
                there = torch.empty_like(total, device=self.model.device)
                self.sums[name] = there.copy_(total, non_blocking=True) if begun else there

    def use(self) -> None:
        """Point the layers at the copied weights, for which the compute stream waits; in fp8 round them once."""
        if self.stream is not None:
            computing = torch.cuda.current_stream(self.model.device)
            computing.wait_stream(self.stream)
            for weight, there in self._weights.items():
                weight.data, self._weights[weight] = there, weight.data
            for tensor in (*self._weights, *self.sums.values()):
                tensor.record_stream(computing)
        if self.model.eight_bits:
            self.model.eight_bits.make(self.layers)

    def clear_sums(self) -> None:
        """Set the sums to zero, for a turn without micro-batches."""
        for total in self.sums.values():
            total.zero_()

    @torch.no_grad()
    def take_gradients(self, number: int, first: bool, scale: float) -> None:
        """Add a layer's gradients to its sums.

        Args:
            first: whether this is the step's first micro-batch, which overwrites the sums.
            scale: the loss scale, which the gradients are divided by.
        """
        for name, weight in self.model.layer(number).named_parameters():
            if (total := self.sums.get(f"{number}.{name}")) is None:
                continue
            gradient, weight.grad = weight.grad, None
            if gradient is not None and scale != 1:
                gradient = gradient.float() / scale
            if first:
                total.zero_() if gradient is None else total.copy_(gradient)
            elif gradient is not None:
                add(total, gradient)

    def give_back(self, stream: torch.cuda.Stream | None) -> None:
        """Start copying the sums back to host memory on `stream`, and point the weights back there."""
        if self.model.eight_bits:
            self.model.eight_bits.drop(self.layers)
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            for name, total in self.sums.items():
                self.model.head_sums[self.part][name].copy_(total, non_blocking=True)
                total.record_stream(stream)
        for weight, host in self._weights.items():
            weight.data = host


def _eight_bits() -> EightBits:
    from options.weight_streaming.eight_bits import EightBits  # torchao, which other runs do not need

    return EightBits()
