"""Build layers with their weights: from a checkpoint of either layout, or from a seed.

A layer is built on the meta device, which allocates nothing, and then takes the loaded tensors, cast and moved one by
one. So a process holds its own layers once, in the dtype they train in, and never a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from models.attention.positions import Positions
from models.checkpoint.adapter import AdaptedStates
from models.checkpoint.source import warn_of_nan
from models.errors import CheckpointError
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.layers import Block
from models.parallel.groups import ONE_RANK
from models.parallel.tensor import TensorShare
from models.quantized_base import FP8, Fp8, quantize
from models.spec import ModelSpec


class LayerStates(Protocol):
    """A source of complete layer state dicts."""

    def check_layer(self, layer: int) -> None: ...

    def read_layer(self, layer: int) -> dict[str, Tensor]: ...

    def describe(self, layer: int, name: str) -> str: ...


class SeededStates:
    """Fresh weights, a pure function of (seed, layer).

    As transformers initialises them: by its own code in a derived family; in a declared one matrices are normal with
    the standard deviation `initializer_range` of config.json, norms start at one and biases at zero. The head of a tied
    model starts as the embedding.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self.seed = seed

    def check_layer(self, layer: int) -> None:
        """Nothing can be wrong with fresh weights."""

    def describe(self, layer: int, name: str) -> str:
        return f"layer {layer}: {name}"

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        family, config = self.spec.family, self.spec.config
        with torch.random.fork_rng(devices=[]):
            initialise = family.initialise(config) if family.initialise else partial(_initialise, config)
            torch.manual_seed(self.seed + layer)
            module = self.spec.build(layer).apply(initialise)
        state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        if self.spec.tied and layer == self.spec.n_layers - 1:
            state[HEAD_WEIGHT] = self.read_layer(0)[EMBEDDING_WEIGHT]
        return state


class NewScores:
    """The weights of a language model with a fresh head that scores texts (`models.scores`).

    Args:
        base: of the language model.
        spec: of the model that scores.
    """

    def __init__(self, base: Any, spec: ModelSpec, seed: int) -> None:
        self._base, self._fresh, self._head = base, SeededStates(spec, seed), spec.n_layers - 1

    def check_layer(self, layer: int) -> None:
        self._base.check_layer(layer)

    def describe(self, layer: int, name: str) -> str:
        return str(self._base.describe(layer, name))

    def read_fp8(self, layer: int) -> dict[str, tuple[Tensor, Fp8]]:
        found: dict[str, tuple[Tensor, Fp8]] = self._base.read_fp8(layer)
        return found

    def read_layer(self, layer: int) -> dict[str, Tensor]:
        read: dict[str, Tensor] = self._base.read_layer(layer)
        if layer < self._head:
            return read
        fresh = self._fresh.read_layer(layer)
        return {name: fresh[name] if name == HEAD_WEIGHT else read[name] for name in fresh}


def build_layer(
    spec: ModelSpec,
    layer: int,
    states: LayerStates,
    positions: Positions,
    dtype: torch.dtype,
    device: torch.device,
    share: TensorShare | None = None,
    shared: SharedReading | None = None,
) -> nn.Module:
    """Build a layer with its weights, or its shards of them, in `dtype` on `device`.

    Args:
        shared: where replicas read together; None where this process reads for itself.

    Raises:
        CheckpointError: the weights are not those of the layer; where replicas read together, on the one that read.
    """
    with torch.device("meta"):
        module = spec.build(layer, positions)
    share = share or TensorShare(spec, ONE_RANK)
    share.narrow(layer, module)
    read = partial(_read, spec, states, share, dtype, device)
    like = as_trained(spec, module, dtype)
    state = shared.take(layer, read, like, device) if shared else read(layer)
    module.load_state_dict(state, strict=True, assign=True)
    module.to(device)  # what was computed
    if spec.trained.lora and spec.trained.lora.base and isinstance(module, Block):
        assert isinstance(states, AdaptedStates)
        quantize(module, states.read_fp8(layer) if spec.trained.lora.base == FP8 else None)
    share.connect(layer, module)
    return module


def _read(
    spec: ModelSpec, states: LayerStates, share: TensorShare, dtype: torch.dtype, device: torch.device, layer: int
) -> dict[str, Tensor]:
    with torch.device("meta"):
        like = as_trained(spec, spec.build(layer), dtype)
    read, state = states.read_layer(layer), {}
    warn_of_nan(read, partial(states.describe, layer))
    for name, tensor in read.items():
        kept, shard = like[name].dtype, share.shard(f"{layer}.{name}")
        if kept.is_floating_point and not tensor.is_floating_point():
            raise CheckpointError(f"{states.describe(layer, name)} is {tensor.dtype}; expected floating point numbers")
        state[name] = (shard.of(tensor) if shard else tensor).to(device=device, dtype=kept, copy=True)
    return state


def as_trained(spec: ModelSpec, module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Get names, shapes and dtypes of a layer's weights, on the meta device."""
    frozen = [f"block.{name}" for name in spec.family.frozen]  # computed with as with weights that are trained
    fixed = {name: buffer.dtype for name, buffer in module.named_buffers() if name not in frozen}  # not to be rounded
    weights = module.state_dict().items()
    return {name: torch.empty_like(weight, dtype=fixed.get(name, dtype), device="meta") for name, weight in weights}


def tie_weights(embedding: nn.Module, head: nn.Module) -> None:
    """Make the two ends of a tied model in one process one parameter."""
    owner, _, name = HEAD_WEIGHT.rpartition(".")
    setattr(head.get_submodule(owner), name, embedding.get_parameter(EMBEDDING_WEIGHT))


def _initialise(config: PreTrainedConfig, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=getattr(config, "initializer_range", 0.02))
        elif name == "bias":
            nn.init.zeros_(parameter)


class SharedReading:
    """This process's part in reading a stage's layers once for all its replicas.

    Args:
        group: the replicas.
        layers: that each of them builds, in this order.
    """

    def __init__(self, group: ProcessGroup, layers: Sequence[int]) -> None:
        self._group = group
        self._layers = list(layers)
        self._own: dict[str, Tensor] = {}

    def take(
        self, layer: int, read: Callable[[int], dict[str, Tensor]], like: dict[str, Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """Get the weights of the next layer; all replicas call it together.

        Args:
            read: gives the weights of a layer, on the device.
            like: names, shapes and dtypes of this one's.
        """
        rank, replicas = self._group.rank(), self._group.size()
        place = self._layers.index(layer)
        reader = place % replicas
        if reader == 0:
            self._own = {}
            for own in self._layers[place + rank : place + rank + 1]:
                self._own = read(own)
        state = self._own if reader == rank else {}
        for name, expected in like.items():
            if reader != rank:
                state[name] = torch.empty_like(expected, device=device)
            # As bytes, as not every network knows every dtype.
            torch.distributed.broadcast(state[name].view(-1).view(torch.uint8), group=self._group, group_src=reader)
        return state
