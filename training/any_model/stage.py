"""One stage of a `Pipeline`: the module with its layers, and the shapes that cross its borders.

The input of a layer is the output of the one before: a tensor or a tuple of tensors, not complex. The tensors between
stages have the same shapes in every micro-batch. Before the first one, the stages pass the shapes of the first inputs
through their layers in turn, on the meta device, which computes nothing. So a layer's tensors must be parameters or
buffers, and no shape may depend on values. Layers that do not fit each other are found before anything runs.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from common.terminal import reason_of
from models.checkpoint.layout import layer_file
from models.pipeline import LaterLayer
from training.any_model.config import PipelineConfig
from training.checkpoint.deepspeed_files import read_mapped
from training.config.deepspeed_config import training_dtype
from training.distributed.processes import agreed, gather
from training.engine.stage_engine import StageEngine
from training.errors import ConfigError
from training.plan.partition import best_split


class Border(NamedTuple):
    """The shapes and dtypes of the tensors that cross a border between stages.

    Attributes:
        tensors: shape and dtype of each.
        alone: whether it is a single tensor, not in a tuple.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    alone: bool

    @classmethod
    def describe(cls, stream: Any) -> Border:
        """Describe a tensor or a tuple of tensors; raise a ConfigError for anything else."""
        tensors = stream if isinstance(stream, tuple) else (stream,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.is_complex():
                found = "a complex one" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigError(f"expected a tensor or a tuple of tensors, found {found}")
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), not isinstance(stream, tuple))

    def like(self) -> tuple[Tensor, ...]:
        """Make such tensors on the meta device."""
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.tensors)

    def unpacked(self, tensors: tuple[Tensor, ...]) -> Any:
        """Turn a tuple of tensors into a layer's input."""
        return tensors[0] if self.alone else tensors

    def __str__(self) -> str:
        return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in self.tensors)


class Step(nn.Module):
    """A layer with its forward step as one module, for `functional_call`."""

    def __init__(self, layer: nn.Module, forward_step: ForwardStep) -> None:
        super().__init__()
        self.layer = layer
        self._forward_step = forward_step

    def forward(self, inputs: Any) -> Any:
        return self._forward_step(self.layer, inputs)


class LayerStage(PipelineModule):
    """This process's layers; the last stage has the loss.

    Args:
        layers: of the whole model.
        forward_step, loss: see `Pipeline`.
        parts: layers per stage.
        folder: checkpoint to load the weights from.

    Raises:
        ConfigError: the stage has nothing to train.
        CheckpointError: the weights are not those of the layers.
    """

    arriving: Border
    leaving: Border

    def __init__(
        self,
        layers: Sequence[Layer],
        forward_step: ForwardStep,
        loss: Loss,
        config: PipelineConfig,
        parts: Sequence[int],
        folder: Path | None = None,
    ) -> None:
        self._bounds = [0, *accumulate(parts)]
        self._recompute = config.recomputed(len(layers))  # numbers from 1
        grid = config.model_topo.process_topology
        topology = ProcessTopology(axes=list(grid.axes), dims=list(grid.dims))
        made = [LaterLayer(make, layer, config.seed + number) for number, layer in enumerate(layers)]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its seed settings, which have no effect here
            # With dynamic_shape the engine calls `_send_tensor_meta` for every micro-batch.
            super().__init__(made, topology=topology, loss_fn=self.loss, dynamic_shape=True)
        self._forward_step, self._loss = forward_step, loss  # may be modules, whose buffers move with the stage
        dtype = training_dtype(config)
        self._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # complex buffers stay
        if folder:
            load_layers(self.layers_by_number(), folder)
        with agreed():
            if not any(weight.requires_grad for weight in self.parameters()):
                raise ConfigError(
                    f"parts: stage {self.stage_id} of {list(parts)} has no weight to train; expected one in each"
                )

    def learn_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        """Find the shapes at the borders for micro-batches like this one; all ranks call it together."""
        found = Border(Border.describe(inputs).tensors, alone=len(inputs) == 1)
        for stage in range(self.num_stages):
            leaving = None
            with agreed():
                if stage == self.stage_id:
                    self.arriving, leaving = found, self._trace(found)
                    self.leaving = leaving
            found = next(each for each in gather(leaving) if each is not None)

    def layers_by_number(self) -> dict[int, nn.Module]:
        """Return this stage's layers by their number in the model."""
        return dict(enumerate(self.forward_funcs, self._local_start))

    def activations_like(self) -> tuple[Tensor, ...]:
        """Return meta tensors like those that arrive here, for the engine."""
        return self.arriving.like()

    def forward(self, stream: tuple[Tensor, ...]) -> Any:
        found = self.arriving.unpacked(stream)
        for number, layer in self.layers_by_number().items():
            again = self.training and number + 1 in self._recompute
            step = partial(self._forward_step, layer)
            found = checkpoint(step, found, use_reentrant=False) if again else step(found)
        if self.stage_id == self.num_stages - 1:
            return found
        return tuple(tensor.contiguous() for tensor in (found if isinstance(found, tuple) else (found,)))

    def loss(self, outputs: Any, labels: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of a micro-batch; DeepSpeed calls it on the last stage."""
        found = self._loss(outputs, labels[0] if len(labels) == 1 else labels)
        if not isinstance(found, Tensor) or found.dim():
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"loss: expected a tensor without dimensions, found {what}")
        return found

    def _partition_layers(self, method: str = "parts") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    @torch.no_grad()
    def _trace(self, arriving: Border) -> Border:
        stream, border = arriving.unpacked(arriving.like()), arriving
        for number, layer in self.layers_by_number().items():
            step = Step(layer, self._forward_step)
            tensors = [*step.named_parameters(), *step.named_buffers()]
            try:
                stream = functional_call(step, {name: tensor.to("meta") for name, tensor in tensors}, (stream,))
                border = Border.describe(stream)
            except Exception as error:  # whatever a layer raises
                what = f"layer {number} ({type(layer).__name__}) with {border}"
                raise ConfigError(f"layers: {what}: {reason_of(error)}") from error
        if self.stage_id < self.num_stages - 1 and not any(dtype.is_floating_point for _, dtype in border.tensors):
            raise ConfigError(f"parts: {border} leave stage {self.stage_id}; expected a tensor with a gradient")
        return border


class LayerStageEngine(StageEngine):
    """The engine of a stage that knows its borders from `LayerStage.learn_shapes`."""

    def _send_tensor_meta(self, stream: tuple[Tensor, ...], stage: int) -> None:
        """Check before each micro-batch is sent that it has the expected shapes."""
        found = Border(Border.describe(stream).tensors, self.module.leaving.alone)
        if found != self.module.leaving:
            raise ConfigError(
                f"layers: {found} leave stage {self.stage_id}, but {self.module.leaving} did for the first "
                "micro-batch; expected the same in all"
            )


def load_layers(layers: dict[int, nn.Module], folder: Path) -> None:
    """Load weights and buffers of a checkpoint into layers, given by number.

    Raises:
        ConfigError: the checkpoint has other layers.
        CheckpointError: a file is missing or damaged.
    """
    for number, layer in layers.items():
        state = read_mapped(folder / layer_file(number))
        try:
            layer.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"layers: layer {number} ({type(layer).__name__}) is not that of {folder}: {reason_of(error)}"
            ) from None


Layer = nn.Module | Callable[[], nn.Module]
ForwardStep = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Tensor]


def make(layer: Layer, seed: int) -> nn.Module:
    """Return the layer, or make it; its random weights are the same in every process."""
    if isinstance(layer, nn.Module):
        return layer
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too, for good
        return layer()


def check_functions(**functions: Callable[..., Any]) -> None:
    """Raise a ConfigError for a function that is a module with weights."""
    for name, function in functions.items():
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            raise ConfigError(f"{name}: has weights, which no layer's file would hold; expected them in the layers")


def make_on_meta(layers: Sequence[Layer]) -> list[nn.Module]:
    """Make the layers that are functions on the meta device, without memory."""
    with torch.device("meta"):
        return [make(layer, 0) for layer in layers]


def count_weights(layers: Sequence[Layer]) -> list[int]:
    """Count the parameters of each layer."""
    return [sum(weight.numel() for weight in layer.parameters()) for layer in make_on_meta(layers)]


def divide(layers: Sequence[Layer], parts: Sequence[int] | None, stages: int) -> list[int]:
    """Divide layers among stages; return the layers per stage.

    Args:
        parts: the user's; by default, the largest stage gets the fewest parameters.

    Raises:
        ConfigError: the layers cannot be divided this way.
    """
    if len(layers) < stages:
        raise ConfigError(f"parts: {stages} stages for {len(layers)} layers; expected a layer for each stage")
    if parts is None:
        parts = best_split([count + 1 for count in count_weights(layers)], stages, lambda *_: True)
        assert parts is not None  # the filter accepts any division
    if sum(parts) != len(layers):
        raise ConfigError(f"parts: {list(parts)} sums to {sum(parts)}, but there are {len(layers)} layers")
    holders: dict[int, int] = {}
    stage_of = [stage for stage, size in enumerate(parts) for _ in range(size)]
    made = make_on_meta(layers)  # kept until the end, so that no id is reused
    for number, layer in enumerate(made):
        for name, weight in layer.named_parameters():
            if weight.is_complex():
                kind = type(layer).__name__
                raise ConfigError(f"layers: {name} of layer {number} ({kind}) is complex; expected a real weight")
            other = holders.setdefault(id(weight), number)
            if stage_of[other] != stage_of[number]:
                raise ConfigError(
                    f"parts: layers {other} and {number} share {name}, and {list(parts)} puts them on two stages; "
                    "expected one"
                )
    return list(parts)
