"""A language model on records that are tokenized while it trains."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from data.paths import cache_folder
from data.tokenized.dataset import Dataset
from options.streamed_data.stream import Stream, StreamLoader, open_stream
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.distributed.disk import Disk
from training.job import Job
from training.language_model import LanguageModel

if TYPE_CHECKING:
    from options.streamed_data import StreamKeys


class StreamedLanguageModel(LanguageModel):
    """A language model whose records come in windows."""

    dataset: Any  # a `Stream`: its samples are asked for like those of a `Dataset`
    loader_kind = StreamLoader

    @property
    def known_records(self) -> Dataset | None:
        """The records of the first window."""
        return self.dataset.first_window

    def read(self, config: TrainConfig, disk: Disk, log: Console) -> None:
        super().read(config, disk, log)
        self.order.stream_gb = cast("StreamKeys", config).stream_gb

    def begin(self, job: Job) -> None:
        """Tokenize what the first batch needs."""
        super().begin(job)
        stream, progress = self.dataset, job.progress
        if progress.known:
            stream.resume(progress.known.data.windows)
        progress.order.windows = stream.windows.made  # what becomes known of the stream goes into each checkpoint
        size = progress.order.train_batch_size
        if job.process.local_rank == 0:  # on each host one makes windows ahead, and removes old ones
            stream.until = progress.total_steps * size
        if progress.done < progress.total_steps:
            stream.take(progress.done * size, size)
        stream.waiting = partial(job.monitor.mark, "the data of the next step")  # from now on: a start takes its time

    def close(self) -> None:
        self.dataset.close()

    @staticmethod
    def first_window(config: TrainConfig, reader: RecordReader) -> Dataset:
        return stream_of(config, reader).windows.peek()

    def _sets(self, config: TrainConfig, reader: RecordReader) -> Any:
        return stream_of(config, reader), reader.read_evaluation()


def stream_of(config: TrainConfig, reader: RecordReader) -> Stream:
    """Open the records to train on, to be tokenized while training; nothing is read yet."""
    gigabytes = cast("StreamKeys", config).stream_gb
    assert gigabytes is not None
    run = hashlib.sha256(os.fsencode(Path(config.save_path).resolve())).hexdigest()[:16]
    folder = cache_folder(config.cache_dir) / "streams" / run
    sources = config.data_path, reader.folder, config.max_seq_len, reader.prompts
    return open_stream(*sources, gigabytes=gigabytes, folder=folder, **reader.how)
