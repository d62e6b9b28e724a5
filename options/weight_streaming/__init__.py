"""Keep the weights in host memory; the GPUs take turns at all layers (docs/weight-streaming.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator
from typing_extensions import Self

from options.planner.own_plan import SelfPlannedOption
from options.weight_streaming.schedule import WEIGHT_STREAMING
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.schedule.instructions import Schedule

if TYPE_CHECKING:
    from options.planner.inputs import Basis
    from options.weight_streaming.schedule import StreamedDivision
    from options.weight_streaming.streamed_plan import StreamedPlan
    from training.engine.trainer import Trainer


class StreamingKeys(TrainConfig):
    """A run whose weights may lie in host memory."""

    schedule: Literal[Schedule, "weight_streaming"] = "1f1b"  # type: ignore[assignment]  # one more than the core's
    """The order of a stage's work: `1f1b`, one forward, one backward; `dualpipev`, which gives each stage two
    chunks of the layers, so that stages wait less where a step has few micro-batches
    (docs/parallelism.md#dims-and-parts); or `weight_streaming`, for models larger than the GPUs: weights and optimizer
    lie in host memory, and the GPUs of a host take turns at all layers (docs/weight-streaming.md)."""

    @property
    def weights_on_host(self) -> bool:
        return self.schedule == WEIGHT_STREAMING

    def contradictions(self) -> Iterator[str]:
        if self.weights_on_host:
            yield from _contradictions(self)
        yield from super().contradictions()
        if self.weights_on_host and self.optimizer.type == "Adafactor":
            yield "schedule: weight_streaming cuts the weights, which Adafactor needs whole; expected another schedule"
        if self.weights_on_host and self.bf16.bf16_optimizer_states and not self.bf16.enabled:
            yield "bf16.bf16_optimizer_states: not without bf16.enabled; expected both, or neither"

    @model_validator(mode="after")
    def _leave_out_zero(self) -> Self:
        if self.weights_on_host:  # in place of ZeRO, each process updates pieces of its own
            self.zero_optimization = self.zero_optimization.model_copy(update={"stage": 0})
        return self

    def check_entry_point(self, in_stages: bool) -> None:
        super().check_entry_point(in_stages)
        if self.weights_on_host and not in_stages:
            raise ConfigError("schedule: weight_streaming is a pipeline's; expected train_ds.py, or no schedule")


def _contradictions(config: StreamingKeys) -> Iterator[str]:
    """Yield a line for each key that turns at all layers leave nothing to do, or that they do not know yet."""
    if not config.is_planned:
        missing = "options.planner, which cuts the turns, is not among the options"
        yield f"schedule: weight_streaming: {missing}; expected another schedule"
    topo, needless = config.model_topo, "weight_streaming keeps in host memory anyway"
    masters = "the optimizer's weights are fp32"
    for unlike, key, expected in (
        (topo.tensor > 1 or topo.sequence > 1, "model_topo", "no model axis and no sequence"),
        (config.bf16.bf16_master_weights_and_grads, "bf16.bf16_master_weights_and_grads", f"none, as {masters}"),
        (config.fp16.fp16_master_weights_and_grads, "fp16.fp16_master_weights_and_grads", f"none, as {masters}"),
        (config.lora is not None and config.lora.base, "lora.base", "none"),
        (config.offload_activations, "offload_activations", f"false, as {needless} what blocks need"),
        (config.offload_gradients, "offload_gradients", f"false, as {needless} sums of gradients"),
        (config.data_types, "data_types", "none, as sums are fp32"),
    ):
        if unlike:
            yield f"{key}: not with schedule: weight_streaming; expected {expected}, or another schedule"


def _trainer(config: StreamingKeys, in_stages: bool) -> type[Trainer] | None:
    if not config.weights_on_host:
        return None
    from options.weight_streaming.trainer import WeightStreamingTrainer

    return WeightStreamingTrainer


def _fastest(basis: Basis, gpus: int) -> StreamedPlan | None:
    from options.weight_streaming.plan import Streaming

    streaming = Streaming(basis, gpus)
    return streaming.best() or streaming.smallest()


def _divide(basis: Basis) -> StreamedDivision:
    from options.weight_streaming.plan import divide

    return divide(basis)


OPTION = SelfPlannedOption(StreamingKeys, trainer=_trainer, schedule=WEIGHT_STREAMING, fastest=_fastest, divide=_divide)
