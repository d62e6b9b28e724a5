"""Global batches of a stream, which are all full: the stream has no end."""

from __future__ import annotations

from data.loader import GlobalBatch, Loader
from data.streaming.stream import Stream


class StreamLoader(Loader):
    """Cuts a stream into global batches; how many an epoch has is not known.

    A batch's tensors can be made until the one after the next is cut.
    """

    data: Stream

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of a step, counted from 0."""
        return self.batch_of(self.data.take(step * self.batch_size, self.batch_size))

    def epoch(self, step: int) -> int:
        """In which a step that was cut begins, counted from 0."""
        return self.data.epoch(step * self.batch_size)

    def _count_steps(self, drop_last: bool) -> int:
        return 0
