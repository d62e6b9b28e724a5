"""A language model on records that are tokenized while it trains (`stream_gb`)."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from data.streaming.stream import Stream, StreamLoader, open_stream
from data.tokenized.dataset import Dataset
from data.tokenized.store import cache_folder
from training.config.keys import TrainConfig
from training.data_setup import RecordReader
from training.job import Job
from training.language_model import LanguageModel


class StreamedLanguageModel(LanguageModel):
    """A language model whose records come in windows."""

    dataset: Any  # a `Stream`: its samples are asked for like those of a `Dataset`
    loader_kind = StreamLoader

    @property
    def known_records(self) -> Dataset | None:
        """The records of the first window."""
        return self.dataset.first_window

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

    def _sets(self, config: TrainConfig, reader: RecordReader) -> Any:
        return stream_of(config, reader), reader.read_evaluation()


def stream_of(config: TrainConfig, reader: RecordReader) -> Stream:
    """Open the records to train on, to be tokenized while training; nothing is read yet."""
    assert config.stream_gb is not None
    run = hashlib.sha256(os.fsencode(Path(config.save_path).resolve())).hexdigest()[:16]
    folder = cache_folder(config.cache_dir) / "streams" / run
    sources = config.data_path, reader.folder, config.max_seq_len, reader.prompts
    return open_stream(*sources, gigabytes=config.stream_gb, folder=folder, **reader.how)
