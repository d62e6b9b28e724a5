"""Stages that pass rows in chunks, each chunk a unit of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepspeed.runtime.pipe import schedule
from torch import Tensor

from options.row_chunks.schedule import ChunkSchedule
from training.engine.stage_engine import StageEngine

Cuts = Sequence[int]  # tokens of each chunk


class ChunkEngine(StageEngine):
    """One stage that runs 1F1B over chunks; over whole rows it is DeepSpeed's."""

    def expect_chunks(self, cuts: Sequence[Cuts], shapes: Iterable[tuple[int, ...]]) -> None:
        """Set the chunks of the coming micro-batches, whose rows and lengths are `shapes`."""
        self._chunks = [len(each) for each in cuts]
        self._losses: dict[int, Tensor] = {}
        units = []
        for shape, sizes in zip(shapes, cuts, strict=True):
            units += [(*shape, size) for size in sizes]
        self.expect(units)

    @property
    def backward_passes(self) -> int:
        return sum(self._chunks)

    def _train_schedule(self) -> schedule.PipeSchedule:
        if max(self._chunks) == 1:
            return super()._train_schedule()
        return ChunkSchedule(self._chunks, self.num_stages, self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> schedule.PipeSchedule:
        return super()._inference_schedule(sum(self._chunks))

    def _send_tensor_meta(self, stream: tuple[Tensor, ...], stage: int) -> None:
        """Check nothing: chunks differ in length."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        super()._exec_forward_pass(buffer_id)
        self._losses[buffer_id] = self.loss

    def _exec_backward_pass(self, buffer_id: int) -> None:
        """Go back from the loss of this unit: the chunks of a row have several, and DeepSpeed knows the last one."""
        if self.is_last_stage():
            self.loss = self._losses.pop(buffer_id)
        super()._exec_backward_pass(buffer_id)

    _INSTRUCTION_MAP = StageEngine._INSTRUCTION_MAP | {
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
    }
