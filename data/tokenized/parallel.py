"""Tokenize records into a file of samples, on several cores.

Records are read here, one after the other, handed to workers in chunks, and written in their order. At any time a few
chunks for each worker are under way, so memory does not grow with the data. Workers are forked once the tokenizer is
loaded, so they share it.

A bad record stops the tokenizing, not the reading: the rest is checked and all bad records are reported together.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from common.parent import end_with_parent
from common.whole_files import replace_text
from data.errors import DataError
from data.records.raw_records import RawRecord, read_file
from data.records.reading import BadRecords
from data.records.record import origin
from data.tokenized.encoder import Chunk, EncodedChunk, Encoder
from data.tokenized.meta import META, Tally, meta_digest
from data.tokenized.recipe import Recipe
from data.tokenized.sample_file import SampleFile, SampleWriter

CHUNK_RECORDS, CHUNK_BYTES = 512, 2**18
OTHERWISE = "the same as another one, but marked or classed otherwise"
AHEAD = 4  # chunks under way for each worker

# Takes progress: what is being done, how many of how many bytes are done, and how many records.
Tell = Callable[[str, int, int, int], None]


def build(recipe: Recipe, folder: Path, keep: Path, tell: Tell, workers: int) -> None:
    """Write the samples of a recipe, and what there is to say about them, into an empty folder.

    Args:
        keep: folder for images that lie in records.
        workers: processes to fork; 0 does everything here.

    Raises:
        DataError: a file or a record is wrong, or no trained token is left; a window may be empty.
    """
    window, total = recipe.window, EncodedChunk((len(recipe.files), 0))
    skipped: list[str] = []
    bad = BadRecords(recipe.on_bad_record, skipped.append)

    def stopped() -> bool:
        return bool(bad.count) and recipe.on_bad_record == "stop"

    with SampleWriter(folder) as writer:
        answers = _in_order(Encoder(recipe, keep), _chunks(recipe, tell), workers, stopped)
        for answer in answers:
            for line in answer.bad:
                bad.add(line)
            total.columns |= answer.columns
            if answer.samples is not None and not stopped():
                writer.write(*answer.samples)
                total.add(answer)
            if window is not None and (writer.size >= window.n_bytes or stopped()):
                total.end = answer.end if next(answers, None) else total.end  # no empty window at the end of an epoch
                break
        bad.finish()

    samples = SampleFile(folder)
    if window is None:
        _check_rest(recipe, samples.column("value"), sum(total.tallies.values(), Tally()), bad.count)
        for file in recipe.files:
            for name, theirs in file.columns.items():
                if theirs not in total.columns:
                    what = f"no record has {theirs!r}; expected what some call their {name}"
                    raise DataError(f"{file.path}: columns: {what}")
    if recipe.preference and recipe.preference.kind in ("marked", "classes") and len(odd := samples.contradictions()):
        total.notes[OTHERWISE] = len(odd)
        number, record = (int(samples.column(name)[odd[0]]) for name in ("file", "record"))
        total.examples[OTHERWISE] = origin(recipe.files[number].path, record)
    _write_meta(folder, samples, total, bad.count, skipped)


def _write_meta(folder: Path, samples: SampleFile, total: EncodedChunk, n_bad: int, skipped: list[str]) -> None:
    """Write what there is to say about the samples beside them."""
    digests = samples.column("digest")
    meta = {
        "fingerprint": sha256(digests.tobytes()).hexdigest(),
        "duplicates": len(digests) - len(numpy.unique(digests)),
        "tallies": [[file, kind, asdict(tally)] for (file, kind), tally in total.tallies.items()],
        "n_bad": n_bad,
        "skipped": skipped,
        "unused": dict(total.unused.most_common()),
        "notes": [[note, count, total.examples[note]] for note, count in total.notes.most_common()],
        "end": total.end,
        "checksum": samples.checksum(),
    }
    meta["own_digest"] = meta_digest(meta)
    replace_text(folder / META, json.dumps(meta))


def _check_rest(recipe: Recipe, values: NDArray[Any], total: Tally, n_bad: int) -> None:
    """Refuse a set of which nothing is left, or one class of marked answers alone, and say what became of the rest.

    Args:
        values: of the samples that are left.
    """
    limit = recipe.max_seq_len
    rest = [
        (total.silent, f"no token is trained within max_seq_len {limit}", "a larger limit"),
        (total.equal, f"both answers are equal within max_seq_len {limit}", "answers that differ"),
        (n_bad, "bad records are skipped", "some that can be read"),
    ]
    reasons = [(f"{reason} ({count:,})", expected) for count, reason, expected in rest if count]
    why = ", ".join(reason for reason, _ in reasons)
    if not len(values):
        raise DataError(f"{recipe.names}: {why}; expected {reasons[0][1]}")

    if recipe.preference and recipe.preference.kind == "marked" and values.min() == values.max():
        found = "undesirable" if values[0] == 0 else "desirable"
        found += f" (of the others {why})" if why else ""
        raise DataError(f"{recipe.names}: all {len(values):,} answers are {found}; expected some of either kind")


def _chunks(recipe: Recipe, tell: Tell) -> Iterator[Chunk]:
    """Split the records into chunks of about equal work."""
    total, done, records = recipe.size(), 0, 0
    chunk: list[tuple[Any, ...]] = []
    size = 0
    first, skip = recipe.window[:2] if recipe.window else (0, 0)
    for file, (path, format_name, _) in list(enumerate(recipe.files))[first:]:
        before = skip if file == first else 0
        later = islice(read_file(Path(path), format_name), before, None)
        for place, record in enumerate(later, start=before + 1):
            chunk.append((file, *record))
            size += _size(record)
            if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
                done, records = done + size, records + len(chunk)
                yield Chunk((file, place), chunk)
                chunk, size = [], 0
                tell("tokenizing", done, total, records)
    if chunk:
        yield Chunk((file, place), chunk)


def _size(record: RawRecord) -> int:
    """Estimate the bytes of a raw record."""
    if isinstance(record.value, dict):  # a row of a table
        return sum(map(_length, record.value.values()))
    return len(record.value)


def _length(field: Any) -> int:
    """Estimate the bytes of a field; nearly all of those of a row with images are theirs."""
    if isinstance(field, dict):
        return sum(len(each) for each in field.values() if isinstance(each, bytes))
    if isinstance(field, list):
        return len(field) + sum(_length(each) for each in field if isinstance(each, (bytes, dict)))
    return len(field) if isinstance(field, (str, bytes)) else 0


def _in_order(
    encoder: Encoder, chunks: Iterable[Chunk], workers: int, only_check: Callable[[], bool]
) -> Iterator[EncodedChunk]:
    """Yield the answers for all chunks in their order."""
    if not workers:
        yield from (encoder.encode(chunk, only_check()) for chunk in chunks)
        return
    global _encoder  # noqa: PLW0603  # what the workers get by being forked
    _encoder = encoder
    gc.freeze()  # what all share is neither looked through nor copied any more
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        pool.submit(int).result()  # all are forked now, before anything here starts a thread
        waiting: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, chunk, only_check()))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder: Encoder


def _encode(chunk: Chunk, only_check: bool) -> EncodedChunk:
    answer = _encoder.encode(chunk, only_check)
    gc.collect()  # a few objects; while the chunk's thousands were there, it would be many times a chunk
    return answer


def _start_worker(parent: int) -> None:
    """Collect garbage between chunks only, and end when the process that feeds this one was killed."""
    gc.disable()
    end_with_parent(parent)
