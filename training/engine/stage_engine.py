"""Change DeepSpeed's pipeline engines, 1F1B and DualPipeV: what differs from DeepSpeed 0.19.8, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.utils.timer import NoopTimer
from torch import Tensor

from training.distributed.communication import wait
from training.engine.gradients import clip
from training.schedule.zero_bubble import FilledSchedule, LaunchP2P, WeightPass


class StageEngine(PipelineEngine):
    """One stage that runs DeepSpeed's 1F1B."""

    loss: Tensor

    @classmethod
    def adopt(cls, engine: PipelineEngine) -> StageEngine:
        """Turn the engine that `deepspeed.initialize` made into one of this class."""
        engine.__class__ = cls
        assert isinstance(engine, cls)
        engine.timers = NoopTimer()  # DeepSpeed's keep two CUDA events per step, for times that nobody prints
        if hasattr(engine.optimizer, "scaled_global_norm"):
            _allow_uneven_groups(engine)
        if isinstance(engine.optimizer, BF16_Optimizer):
            _allow_empty_norm(engine)
        return engine

    @property
    def backward_passes(self) -> int:
        """How many a step has."""
        return int(self.micro_batches)

    def expect(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Set the shapes of the next batch's micro-batches, which every rank knows from the loader.

        DeepSpeed would send them before each micro-batch, and wait for the device to read them.

        Args:
            shapes: arguments of the module's `activations_like` for each micro-batch of this replica, in order.
        """
        self._shapes = iter(list(shapes))

    def _exec_recv_activations(self, buffer_id: int) -> None:
        inputs = tuple(
            torch.empty_like(tensor, device=self.device) for tensor in self.module.activations_like(*next(self._shapes))
        )
        for tensor in inputs:
            p2p.recv(tensor, self.prev_stage)
            tensor.requires_grad_(tensor.is_floating_point())
        self.pipe_buffers["inputs"][buffer_id] = inputs

    def _exec_recv_grads(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        self.grad_layer: Any = [torch.empty_like(tensor) for tensor in outputs if tensor.is_floating_point()]
        for gradient in self.grad_layer:
            p2p.recv(gradient, self.next_stage)

    def _send_tensor_meta(self, stream: tuple[Tensor, ...], stage: int) -> None:
        """Check the shapes that the receiver expects, where DeepSpeed would send them once."""
        expected = self.module.activations_like(*stream[1].shape)
        for tensor, like in zip(stream, expected, strict=True):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), (tensor.shape, tensor.dtype, like)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        """Run one backward pass for all tensors that a stage sent.

        DeepSpeed runs one for each tensor. With hidden states and router sums that is twice the work, and ZeRO's hooks
        would take each gradient for complete after the first. Inputs that the loss does not depend on (router sums
        without a router loss) get the zeros that the previous stage waits for. The stage with the loss lets go of its
        outputs and of the loss's graph; DeepSpeed keeps them, and with them the inputs and their gradients, until the
        next micro-batches overwrite them.
        """
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if isinstance(outputs, tuple) and not self.is_last_stage():
            differentiable = [tensor for tensor in outputs if tensor.is_floating_point()]
            joined = _Joined.apply(self.grad_layer, *differentiable)
            self.pipe_buffers["outputs"][buffer_id] = joined
            self.grad_layer = torch.ones_like(joined)
        super()._exec_backward_pass(buffer_id)
        received = () if self.is_first_stage() else self.pipe_buffers["inputs"][buffer_id]
        for tensor in received:
            if tensor.requires_grad and tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None
            self.loss = self.loss.detach()

    def _exec_reduce_tied_grads(self) -> None:
        """Add up the gradients of the two ends of a tied model, wherever the optimizer keeps them.

        DeepSpeed looks only where its bf16 optimizer or torch keeps them; ZeRO with fp32 accumulation (CPU offload)
        uses `grad_accum`, and the ends would drift apart.
        """
        of_zero = getattr(self.optimizer, "get_gradient_for_reduction", lambda weight: weight.grad)
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = weight._hp_grad if self.using_bf16_optimizer else of_zero(weight)
            torch.distributed.all_reduce(gradient, group=group)

    @torch.no_grad()
    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages and tensor-parallel ranks; in fp32 without ZeRO, DeepSpeed uses the stage's.

        Drop gradients that are not finite, as DeepSpeed does with ZeRO.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        counted = [parameter for parameter in parameters if not parameter.ds_pipe_replicated]
        squares = torch.zeros((), device=self.device)
        if counted:
            squares += torch.stack([parameter.grad.float().square().sum() for parameter in counted]).sum()
        torch.distributed.all_reduce(squares, group=self.grid.get_model_parallel_group())
        norm = squares.sqrt()
        self._global_grad_norm = norm
        if not norm.isfinite():
            self.zero_grad()
            return
        clip(self.optimizer, parameters, self.gradient_clipping(), norm)

    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP | {
        schedule.RecvActivation: _exec_recv_activations,
        schedule.RecvGrad: _exec_recv_grads,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
    }


class VScheduleEngine(DualPipeVEngine, StageEngine):
    """One stage that runs DualPipeV (`schedule: dualpipev`): two chunks of layers, in a V, to shrink the bubble.

    Stage s of P holds the s-th and the s-th last of 2P chunks (`VScheduleModel`), so micro-batches run down the stages
    and up again, and the first stage has the loss. A stage works on the second chunk of one micro-batch while others
    are in the first, and waits less. The weights' gradients, which no other stage needs, fill the remaining waits
    (`training.schedule.zero_bubble`).

    Cost: twice the messages, activations of one to two more micro-batches per chunk, and at least 2P micro-batches per
    step, which `data.loader` makes of any batch.
    """

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


class _Joined(torch.autograd.Function):
    """Join several tensors into one, whose backward pass gives each of them its known gradient."""

    @staticmethod
    def forward(context: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        context.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, context.gradients = context.gradients, []  # the graph stays until a unit takes its place
        return None, *gradients


def _allow_empty_norm(engine: PipelineEngine) -> None:
    """Give a process without weights of its own a zero norm, as DeepSpeed 0.19.8 cannot stack an empty list.

    A tensor-parallel rank that shares the head of a tied model may have none.
    """
    gradients = engine.optimizer.get_grads_for_norm

    def at_least_one(for_clipping: bool = False) -> Any:
        found = gradients(for_clipping=for_clipping)
        return found if for_clipping or found[0] else ([torch.zeros(1, device=engine.device)], found[1])

    engine.optimizer.get_grads_for_norm = at_least_one


def _allow_uneven_groups(engine: PipelineEngine) -> None:
    """Compute the gradient norm also where stages have different numbers of parameter groups.

    DeepSpeed 0.19.8 sums each group over the stages in a collective of its own. A stage without weights that
    `no_wd_kws` matches joins one fewer, and all deadlock.
    """
    optimizer = engine.optimizer
    own = len(optimizer.bit16_groups)
    largest = torch.tensor(own, device=engine.device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    most = int(largest)

    def norm() -> Tensor:
        parts = []
        for group in range(most):
            parameters = optimizer.params_in_partition[group] if group < own else []
            if optimizer.cpu_offload:
                parts.append(optimizer.complete_grad_norm_calculation_for_cpu_offload(parameters))
            else:
                gradients = optimizer.averaged_gradients[group] if group < own else []
                parts.append(optimizer.get_grad_norm_direct(gradients, parameters))
        return combine_grad_norm_groups(parts)

    optimizer.scaled_global_norm = norm
