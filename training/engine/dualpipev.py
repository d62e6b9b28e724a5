"""The schedule DualPipeV (`schedule: dualpipev`): a V of chunks that fills the pipeline's bubble.

The layers are cut into 2P chunks. Stage s of P holds the s-th and the s-th last one (`VScheduleModel`), so
micro-batches run down the stages and up again, and the first stage has the loss. A stage begins with the second chunk
of one micro-batch while others are still in the first, and so waits less. What waiting is left is filled with the
gradients of weights, which no other stage needs (`training.schedule.zero_bubble`). DeepSpeed's engine does the rest.

Cost: twice the messages, one to two more micro-batches' activations of a chunk, and at least 2P micro-batches in a
step, which `data.loader` makes of any batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed import comm
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

from training.distributed.waiting import wait
from training.engine.stage_engine import StageEngine
from training.schedule.zero_bubble import FilledSchedule, LaunchP2P, WeightPass


class VScheduleEngine(DualPipeVEngine, StageEngine):
    """A stage with two chunks. What DualPipeVEngine does with one of them is a StageEngine's."""

    _p2p_ops: list[Any]
    _under_way: tuple[
        Any, ...
    ] = ()  # messages that were launched: requests, and the operations that hold their tensors

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Each chunk receives all micro-batches, in the same order."""
        shapes = list(shapes)
        self._shapes_of_chunk = iter(shapes), iter(shapes)

    def _train_schedule(self) -> FilledSchedule:
        return FilledSchedule(self.micro_batches, self.num_stages, self.stage_id)

    def _receive_activations(self, buffer_id: int, phase: int) -> None:
        stream = self.module.activations_like(*next(self._shapes_of_chunk[phase]))
        self._recv_specs[phase] = False, [(tensor.shape, tensor.dtype) for tensor in stream]
        DualPipeVEngine._exec_recv_activations(self, buffer_id, phase)

    def _run_backward(self, buffer_id: int, phase: int) -> None:
        DualPipeVEngine._exec_backward_pass(self, buffer_id, phase)
        self.module.weight_gradients[phase].close()

    def _run_weight_pass(self, phase: int) -> None:
        self._running_engine_backward = True  # as DeepSpeed does around a backward pass
        try:
            self.module.weight_gradients[phase].compute()
        finally:
            self._running_engine_backward = False

    def _launch(self) -> None:
        operations, self._p2p_ops = self._p2p_ops, []
        if operations:
            self._under_way += ((comm.batch_isend_irecv(operations), operations),)

    def _commit(self) -> None:
        self._launch()  # what was queued since the last launch; no message is dropped
        for requests, _ in self._under_way:
            for request in requests:
                wait(request)
        self._under_way = ()

    _INSTRUCTION_MAP = DualPipeVEngine._INSTRUCTION_MAP | {
        schedule.RecvActivation: _receive_activations,
        schedule.BackwardPass: _run_backward,
        schedule.ReduceTiedGrads: StageEngine._exec_reduce_tied_grads,
        schedule.CommitP2P: _commit,
        LaunchP2P: _launch,
        WeightPass: _run_weight_pass,
    }
