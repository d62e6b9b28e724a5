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
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from common.parent import end_with_parent
from common.whole_files import replace_text
from data.chat.control_tokens import ControlWords, words_of
from data.errors import DataError
from data.records.pairs import WRONG_WAY, Judged
from data.records.raw_records import RawRecord, read_file
from data.records.reading import BadRecords, origin, parse
from data.records.record import Record, type_of
from data.tokenized.columns import Encoded, Tallies, Tally, fit, has_empty_answer, pack_samples
from data.tokenized.recipe import Recipe
from data.tokenized.sample_file import SampleFile, SampleWriter
from data.tokenized.tokenize import Tokens, encode_many, encode_tokens
from data.tokenized.tokenizer import load_tokenizer

META = "meta.json"
CHUNK_RECORDS, CHUNK_BYTES = 512, 2**18
# Where datasets with pictures or sound put them; said, not refused, as a text about HTML may hold the same words.
PLACEHOLDER = re.compile("<(?:image|video|audio|bbox|ref-object)>")
PLACEHOLDER_HINT = re.compile(rb"<(?:image|video|audio|bbox|ref-object)>|\\u003c", re.IGNORECASE)
IN_WORDS = "hold a placeholder such as <image>, which is trained as text, as Pipetune trains on text alone"
MENDED = "have comments, or commas before a closing bracket, which are no JSON and were passed over"
OTHERWISE = "the same as another one, but marked or classed otherwise"
AHEAD = 4  # chunks under way for each worker

# Takes progress: what is being done, how many of how many bytes are done, and how many records.
Tell = Callable[[str, int, int, int], None]


class Chunk(NamedTuple):
    """Hold raw records for a worker."""

    end: tuple[int, int]  # file and place of the last record, counted from 1 among that file's records
    # Which of the recipe's files each is from, and what a `RawRecord` has; bare, they cost a third to send.
    records: list[tuple[Any, ...]]


@dataclass
class EncodedChunk:
    """Hold a worker's results for a chunk, or the sum of several."""

    end: tuple[int, int]  # of the last chunk
    bad: list[str] = field(default_factory=list)  # a line for each record that cannot be used
    unused: Counter[str] = field(default_factory=Counter)  # how many records have which fields that were not used
    columns: set[str] = field(default_factory=set)  # which of the names that columns gives a record has
    # Notes to report on how records were written, and of how many.
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of each of these, the first
    samples: tuple[bytes, NDArray[Any]] | None = None  # of the records, unless these were only checked
    tallies: Tallies = field(default_factory=dict)  # what became of the records

    def add(self, later: EncodedChunk) -> None:
        """Add the counts of a later chunk."""
        self.unused.update(later.unused)
        self.notes.update(later.notes)
        self.examples = later.examples | self.examples
        for group, tally in later.tallies.items():
            self.tallies[group] = self.tallies.get(group, Tally()) + tally


class Encoder:
    """Turn chunks of raw records into samples.

    Raises:
        DataError: the tokenizer cannot be used.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._prompts = recipe, recipe.prompts
        self._scored = recipe.preference is not None and recipe.preference.scored
        if recipe.preference is not None:
            if recipe.preference.kind == "classes":
                self._prompts = replace(recipe.prompts, mask="all")
            elif recipe.prompts.mask == "all":
                raise DataError("mask: a preference is one of answers, so prompts never count; expected another mask")
        self._tokenizer = load_tokenizer(recipe.tokenizer)
        self._control_words = ControlWords(self._tokenizer)

    def encode(self, chunk: Chunk, only_check: bool) -> EncodedChunk:
        """Parse the records and, unless they are only to be checked, tokenize and cut them."""
        answer = EncodedChunk(chunk.end)
        parsed = self._parse(chunk, answer)
        if only_check:
            return answer

        # All documents of the chunk at once, as the tokenizer is fastest so.
        encoded = []
        documents = chain.from_iterable(judged.documents for *_, judged in parsed)
        tokenized = iter(encode_many(list(documents), self._tokenizer, self._prompts))
        for file, raw, judged in parsed:
            whole = [next(tokenized) for _ in judged.documents]
            try:
                encoded.append(self._fitted(file, raw, judged, whole))
            except DataError as error:
                answer.bad.append(self._complaint(file, raw, error))

        _add_notes(answer, encoded)
        numbers, index, answer.tallies = pack_samples(encoded, self._recipe.max_seq_len)
        answer.samples = numbers, index
        return answer

    def _parse(self, chunk: Chunk, answer: EncodedChunk) -> list[tuple[int, RawRecord, Judged]]:
        """Parse the records, each with its file's number; what is wrong or unused goes into the answer."""
        recipe = self._recipe
        parsed: list[tuple[int, RawRecord, Judged]] = []
        for file, *fields in chunk.records:
            raw = RawRecord(*fields)
            try:
                _, format_name, columns = recipe.files[file]
                converted = parse(raw, format_name, columns, recipe.preference)
            except DataError as error:
                answer.bad.append(self._complaint(file, raw, error))
            else:
                alone = (Judged(type_of(record), (record,)) for record in converted.records)
                parsed += [(file, raw, judged) for judged in converted.judged or alone]
                answer.unused.update(converted.unused)
                answer.columns.update(converted.columns)
        return parsed

    def _fitted(self, file: int, raw: RawRecord, judged: Judged, whole: Sequence[Tokens | DataError]) -> Encoded:
        """Shorten a sample's documents where they are too long, and note what is odd about them.

        Raises:
            DataError: one of the documents is bad, or too long.
        """
        recipe = self._recipe
        kind, records, value = judged
        tokens = fit(records, list(map(_good, whole)), recipe.max_seq_len, recipe.truncate, self._tokens)

        # The raw bytes are searched first, in a fraction of the time; a row of a table has none.
        control = self._control_words.possible(raw.value) and any(map(self._control_words.found, records))
        found = None
        if not isinstance(raw.value, bytes) or PLACEHOLDER_HINT.search(raw.value):
            words = chain.from_iterable(map(words_of, records))
            found = next(filter(None, map(PLACEHOLDER.search, words)), None)

        place = origin(recipe.files[file].path, raw.number)
        notes = {}
        if raw.kind == "mended":
            notes[MENDED] = place
        if found:
            notes[IN_WORDS] = f"{found.group()} in {place}"
        if kind == "pair" and value < 0:
            notes[WRONG_WAY] = f"{place} ({value:g})"
        tokens[0] = tokens[0]._replace(notes=tokens[0].notes | notes)

        empty = any(map(has_empty_answer, records))
        return Encoded(file, raw.number, kind, empty, control, tokens, value, self._scored)

    def _complaint(self, file: int, raw: RawRecord, error: DataError) -> str:
        return f"{origin(self._recipe.files[file].path, raw.number)}: {error}"

    def _tokens(self, record: Record) -> Tokens:
        return encode_tokens(record, self._tokenizer, self._prompts)


def _add_notes(answer: EncodedChunk, encoded: Sequence[Encoded]) -> None:
    """Count how many samples have which note, and keep the first one's words as an example."""
    for sample in encoded:
        notes: dict[str, str] = {}
        for document in reversed(sample.documents):
            notes |= document.notes
        answer.notes.update(notes.keys())
        answer.examples = notes | answer.examples


def _good(encoded: Tokens | DataError) -> Tokens:
    if isinstance(encoded, DataError):
        raise encoded
    return encoded


def build(recipe: Recipe, folder: Path, tell: Tell, workers: int) -> None:
    """Write the samples of a recipe, and what there is to say about them, into an empty folder.

    Args:
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
        answers = _in_order(Encoder(recipe), _chunks(recipe, tell), workers, stopped)
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


def meta_digest(meta: dict[str, Any]) -> str:
    """Digest all notes beside the samples, except the digest itself."""
    noted = {name: value for name, value in meta.items() if name != "own_digest"}
    return sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest()


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
        return sum(len(field) for field in record.value.values() if isinstance(field, (str, list)))
    return len(record.value)


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
