"""One stage of a `Pipeline`: the module with its layers, and the tensors that pass between stages.

The input of a layer is the output of the one before: a tensor or a tuple of tensors, not complex. The tensors between
stages have the same shapes in every micro-batch. Before the first one, the stages pass the first inputs through their
layers in turn on the meta device, which computes nothing, so layers that do not fit each other are found before
anything runs. A layer's tensors must therefore be parameters or buffers, and no shape may depend on values.

Layers may share a weight. Each stage then has a copy; the copies get the sum of their gradients, so they stay alike.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from common.terminal import reason_of
from models.checkpoint.layout import layer_file
from models.pipeline import LaterLayer, SharedWeights
from options.any_layers.config import PipelineConfig
from options.planner.partition import best_split
from training.checkpoint.deepspeed_files import read_mapped
from training.config.precision import training_dtype
from training.distributed.processes import agreed, gather
from training.engine.stage_engine import StageEngine
from training.errors import ConfigError

if TYPE_CHECKING:
    from options.any_layers.pipeline import Pipeline

Layer = nn.Module | Callable[[], nn.Module]
ForwardStep = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Tensor]
Stream = Tensor | tuple[Tensor, ...]  # what passes from layer to layer


class LayerStage(SharedWeights):
    """This process's layers; the last stage has the loss.

    Args:
        parts: layers per stage.
        folder: checkpoint to load the weights from.

    Attributes:
        arriving, leaving: meta tensors like those of every micro-batch.
        shared_names: of each weight that layers share, its names, `<layer>.<name>`, the first layer's first.
    """

    arriving: Stream
    leaving: Stream

    def __init__(
        self, pipeline: Pipeline, config: PipelineConfig, parts: Sequence[int], folder: Path | None = None
    ) -> None:
        self._bounds = [0, *accumulate(parts)]
        self._places = shared_weights(on_no_device(pipeline.layers))
        self.shared_names: list[tuple[str, ...]] = []
        for places in self._places:
            self.shared_names.append(tuple(f"{layer}.{name}" for layer, name in places))
        self._recompute = config.recomputed(len(pipeline.layers))  # numbers from 1
        grid = config.model_topo.process_topology
        topology = ProcessTopology(axes=list(grid.axes), dims=list(grid.dims))
        made = [LaterLayer(make, layer, config.seed + number) for number, layer in enumerate(pipeline.layers)]
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its seed settings, which have no effect here
            # With dynamic_shape the engine calls `_send_tensor_meta` for every micro-batch.
            super().__init__(made, topology=topology, loss_fn=self.loss, dynamic_shape=True)
        # May be modules, whose buffers move with the stage.
        self._forward_step, self._loss = pipeline.forward_step, pipeline.loss
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
        """Find `arriving` and `leaving` for micro-batches like this one; all ranks call it together."""
        stream = on_meta(inputs[0] if len(inputs) == 1 else inputs)
        for stage in range(self.num_stages):
            leaving = None
            with agreed():
                if stage == self.stage_id:
                    self.arriving, self.leaving = stream, self._trace(stream)
                    leaving = self.leaving
            stream = next(each for each in gather(leaving) if each is not None)

    def layers_by_number(self) -> dict[int, nn.Module]:
        """Return this stage's layers by their number in the model."""
        return dict(enumerate(self.forward_funcs, self._local_start))

    def activations_like(self) -> tuple[Tensor, ...]:
        """Return meta tensors like those that arrive here, for the engine."""
        return as_tuple(self.arriving)

    def forward(self, stream: tuple[Tensor, ...]) -> Any:
        found: Any = stream if isinstance(self.arriving, tuple) else stream[0]
        for number, layer in self.layers_by_number().items():
            again = self.training and number + 1 in self._recompute
            step = partial(self._forward_step, layer)
            found = checkpoint(step, found, use_reentrant=False) if again else step(found)
        if self.stage_id == self.num_stages - 1:
            return found
        return tuple(tensor.contiguous() for tensor in as_tuple(found))

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

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Make a group of the stages for each weight that they share; DeepSpeed asks once the layers are built."""
        tied: dict[str, dict[str, Any]] = {}
        for names, places in zip(self.shared_names, self._places, strict=True):
            stages = sorted({self.stage_owner(layer) for layer, _ in places})
            for replica in range(self._grid.data_parallel_size if len(stages) > 1 else 0):
                ranks = [self._grid.stage_to_global(stage_id=stage, data=replica) for stage in stages]
                if entry := self._shared(ranks, partial(self._copy_of, places)):
                    tied[names[0]] = entry
        return tied

    def _copy_of(self, places: Sequence[tuple[int, str]]) -> nn.Parameter:
        """Return this stage's copy of a weight that lies at these places."""
        layer, name = next(place for place in places if self.stage_owner(place[0]) == self.stage_id)
        return self.layers_by_number()[layer].get_parameter(name)

    @torch.no_grad()
    def _trace(self, stream: Stream) -> Stream:
        """Pass meta tensors through this stage's layers."""
        for number, layer in self.layers_by_number().items():
            step = SteppedLayer(layer, self._forward_step)
            tensors = [*step.named_parameters(), *step.named_buffers()]
            try:
                found = functional_call(step, {name: tensor.to("meta") for name, tensor in tensors}, (stream,))
                leaving = on_meta(found)
            except Exception as error:  # whatever a layer raises
                what = f"layer {number} ({type(layer).__name__}) with {describe_stream(stream)}"
                raise ConfigError(f"layers: {what}: {reason_of(error)}") from error
            stream = found
        if self.stage_id < self.num_stages - 1 and not any(each.is_floating_point() for each in as_tuple(leaving)):
            raise ConfigError(
                f"parts: {describe_stream(leaving)} leave stage {self.stage_id}; expected a tensor with a gradient"
            )
        return leaving


class SteppedLayer(nn.Module):
    """A layer with its forward step as one module, for `functional_call`."""

    def __init__(self, layer: nn.Module, forward_step: ForwardStep) -> None:
        super().__init__()
        self.layer = layer
        self._forward_step = forward_step

    def forward(self, inputs: Any) -> Any:
        return self._forward_step(self.layer, inputs)


class LayerStageEngine(StageEngine):
    """The engine of a stage that knows its shapes from `LayerStage.learn_shapes`."""

    def _send_tensor_meta(self, stream: tuple[Tensor, ...], stage: int) -> None:
        """Check before each micro-batch is sent that it has the expected shapes."""
        found, expected = describe_stream(stream), describe_stream(self.module.leaving)
        if found != expected:
            raise ConfigError(
                f"layers: {found} leave stage {self.stage_id}, but {expected} did for the first micro-batch; expected "
                "the same in all"
            )


def as_tuple(stream: Stream) -> tuple[Tensor, ...]:
    return stream if isinstance(stream, tuple) else (stream,)


def on_meta(stream: Any) -> Stream:
    """Make contiguous meta tensors like these; raise a ConfigError for what is neither a tensor nor a tuple of them."""
    for tensor in as_tuple(stream):
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            found = "a complex one" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"expected a tensor or a tuple of tensors, found {found}")
    made = tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in as_tuple(stream))
    return made if isinstance(stream, tuple) else made[0]


def describe_stream(stream: Stream) -> str:
    """Name shapes and dtypes."""
    return ", ".join(f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in as_tuple(stream))


def load_layers(layers: dict[int, nn.Module], folder: Path) -> None:
    """Load weights and buffers of a checkpoint into layers, given by number."""
    for number, layer in layers.items():
        state = read_mapped(folder / layer_file(number))
        try:
            layer.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"layers: layer {number} ({type(layer).__name__}) is not that of {folder}: {reason_of(error)}"
            ) from None


def make(layer: Layer, seed: int) -> nn.Module:
    """Return the layer, or make it; its random weights are the same in every process."""
    if isinstance(layer, nn.Module):
        return layer
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too, for good
        return layer()


def divide_layers(layers: Sequence[Layer], parts: Sequence[int] | None, stages: int) -> list[int]:
    """Divide layers among stages; return the layers per stage.

    Args:
        parts: the user's; by default, the largest stage gets the fewest parameters.
    """
    if len(layers) < stages:
        raise ConfigError(f"parts: {stages} stages for {len(layers)} layers; expected a layer for each stage")
    made = on_no_device(layers)
    if parts is None:
        costs = [1 + sum(map(torch.numel, layer.parameters())) for layer in made]
        parts = best_split(stages * [costs], lambda *_: True)
        assert parts is not None  # the filter accepts any division
    if sum(parts) != len(layers):
        raise ConfigError(f"parts: {list(parts)} sums to {sum(parts)}, but there are {len(layers)} layers")
    for number, layer in enumerate(made):
        for name, weight in layer.named_parameters():
            if weight.is_complex():
                kind = type(layer).__name__
                raise ConfigError(f"layers: {name} of layer {number} ({kind}) is complex; expected a real weight")
    return list(parts)


def on_no_device(layers: Sequence[Layer]) -> list[nn.Module]:
    """Return the layers; those of functions are made on the meta device, without memory for their weights."""
    with torch.device("meta"):
        return [make(layer, 0) for layer in layers]


def shared_weights(layers: Sequence[nn.Module]) -> list[list[tuple[int, str]]]:
    """List the trained weights that several layers share: of each the layers with its name in them."""
    places: dict[int, list[tuple[int, str]]] = {}
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if weight.requires_grad:
                places.setdefault(id(weight), []).append((number, name))
    return [found for found in places.values() if len(found) > 1]
