"""The DualPipeV schedule (`schedule: dualpipev`): two chunks per stage, in a V, to shrink the pipeline bubble.

The layers are split into 2P chunks. Stage s of P holds the s-th and the s-th last one (`VScheduleModel`), so
micro-batches run down the stages and up again, and the first stage has the loss. A stage works on the second chunk of
one micro-batch while others are in the first, and waits less. The weights' gradients, which no other stage needs, fill
the remaining waits (`training.schedule.zero_bubble`). DeepSpeed's engine does the rest.

Cost: twice the messages, activations of one to two more micro-batches per chunk, and at least 2P micro-batches per
step, which `data.loader` makes of any batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed import comm
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

from training.distributed.communication import wait
from training.engine.stage_engine import StageEngine
from training.schedule.zero_bubble import FilledSchedule, LaunchP2P, WeightPass


class VScheduleEngine(DualPipeVEngine, StageEngine):
    """A stage with two chunks; everything about a single chunk comes from StageEngine."""

    _p2p_ops: list[Any]
    _in_flight: tuple[Any, ...] = ()  # launched messages: requests, and the operations that hold their tensors

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Set the shapes to receive: both chunks get all micro-batches, in the same order."""
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
        self._running_engine_backward = True  # DeepSpeed sets it around a backward pass
        try:
            self.module.weight_gradients[phase].compute()
        finally:
            self._running_engine_backward = False

    def _launch(self) -> None:
        operations, self._p2p_ops = self._p2p_ops, []
        if operations:
            self._in_flight += ((comm.batch_isend_irecv(operations), operations),)

    def _commit(self) -> None:
        self._launch()  # what was queued since the last launch
        for requests, _ in self._in_flight:
            for request in requests:
                wait(request)
        self._in_flight = ()

    _INSTRUCTION_MAP = DualPipeVEngine._INSTRUCTION_MAP | {
        schedule.RecvActivation: _receive_activations,
        schedule.BackwardPass: _run_backward,
        schedule.ReduceTiedGrads: StageEngine._exec_reduce_tied_grads,
        schedule.CommitP2P: _commit,
        LaunchP2P: _launch,
        WeightPass: _run_weight_pass,
    }
