"""1F1B over rows in chunks: rows that are longer than a stage's memory pass it in parts.

Forward passes go through the rows in order, and through the chunks of each in order. Backward passes go through the
rows in order, and through the chunks of each from the last to the first, as keys and values of a chunk get gradients
from all behind it (`models.attention.chunks`). So a stage of p does p - 1 - s + n - 1 forward passes before its first
backward pass, for rows of up to n chunks (Seq1F1B, arXiv:2406.03488); then one of each in turn.

With chunks that take equally long, R rows of n chunks have a bubble of (p - 1) / (R n + p - 1) (n - 1 of the passes
ahead cost no time, only memory), where whole rows have (p - 1) / (R + p - 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)


class ChunkSchedule(PipeSchedule):
    """The instructions of one stage's training step; a unit, in place of a micro-batch, is a chunk of its rows.

    Args:
        chunks: into how many chunks the rows of each micro-batch are cut.
        stages: how many there are.
        stage: whose instructions these are.

    Attributes:
        unit: what it is, in a word.
        backward_order: the units in the order of their backward passes.
    """

    unit = "chunk"

    def __init__(self, chunks: Sequence[int], stages: int, stage: int) -> None:
        super().__init__(sum(chunks), stages, stage)
        self.backward_order: list[int] = []
        for first, behind in pairwise(accumulate(chunks, initial=0)):
            self.backward_order += reversed(range(first, behind))
        # Each stage is one unit ahead of the next, so that its messages meet those of its neighbours.
        self._ahead = min(self.micro_batches, stages - 1 - stage + max(chunks) - 1)

    def num_pipe_buffers(self) -> int:
        """Count the units that this stage keeps at a time: those ahead, and the one in work."""
        return min(self.micro_batches, self._ahead + 1)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions, a pass at a time.

        Both ends of a border do a gradient's message before that of an activation, so no two wait for each other.
        """
        free = list(reversed(range(self.num_pipe_buffers())))
        buffers: dict[int, int] = {}

        for unit in range(self._ahead):
            buffers[unit] = free.pop()
            yield [*self._received(buffers[unit]), *self._forward(buffers[unit]), *self._sent(buffers[unit])]

        for number, unit in enumerate(self.backward_order):
            coming, buffer = self._ahead + number, None
            if coming < self.micro_batches:
                if number == 0:  # later ones arrive when a gradient has left
                    buffers[coming] = free.pop()
                    yield self._received(buffers[coming])
                buffer = buffers[coming]
                yield self._forward(buffer)

            yield [*self._gradient_received(buffers[unit]), *([] if buffer is None else self._sent(buffer))]
            yield [BackwardPass(buffers[unit]), *self._gradient_sent(buffers[unit])]

            free.append(buffers.pop(unit))
            if coming + 1 < self.micro_batches:
                buffers[coming + 1] = free.pop()
                yield self._received(buffers[coming + 1])

        yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _received(self, buffer: int) -> list[PipeInstruction]:
        return [] if self.is_first_stage else [RecvActivation(buffer)]

    def _forward(self, buffer: int) -> list[PipeInstruction]:
        """Pass a unit forward; the first stage loads its tokens, the last one its labels."""
        loaded = [LoadMicroBatch(buffer)] if self.is_first_stage or self.is_last_stage else []
        return [*loaded, ForwardPass(buffer)]

    def _sent(self, buffer: int) -> list[PipeInstruction]:
        return [] if self.is_last_stage else [SendActivation(buffer)]

    def _gradient_received(self, buffer: int) -> list[PipeInstruction]:
        return [] if self.is_last_stage else [RecvGrad(buffer)]

    def _gradient_sent(self, buffer: int) -> list[PipeInstruction]:
        return [] if self.is_first_stage else [SendGrad(buffer)]
