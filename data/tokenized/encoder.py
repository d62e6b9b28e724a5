"""Turn a chunk of raw records into samples, and say what is to be said about them.

A bad record becomes a line; the rest of the chunk is encoded all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from data.chat.control_tokens import ControlWords, words_of
from data.errors import DataError
from data.images.image import Image
from data.records.chat import Chat
from data.records.pairs import WRONG_WAY, Judged
from data.records.raw_records import RawRecord
from data.records.reading import parse
from data.records.record import Record, origin, type_of
from data.tokenized.columns import Encoded, Tallies, check_images, fit, has_empty_answer, pack_samples
from data.tokenized.image_reader import ImageReader
from data.tokenized.meta import Tally
from data.tokenized.recipe import Recipe
from data.tokenized.tokenize import Tokens, encode_many, encode_tokens
from data.tokenized.tokenizer import load_tokenizer

# Where datasets with pictures or sound put them; said, not refused, as a text about HTML may hold the same words.
PLACEHOLDER = re.compile("<(?:image|video|audio|bbox|ref-object)>")
PLACEHOLDER_HINT = re.compile(rb"<(?:image|video|audio|bbox|ref-object)>|\\u003c", re.IGNORECASE)
IN_WORDS = "hold a placeholder such as <image>, which is trained as text, as nothing beside it has its place"
ANSWER_FIRST = "begin with an answer, which is trained without a question"
QUESTION_LAST = "end with a question that nobody answers, which is not trained"
MENDED = "have comments, or commas before a closing bracket, which are no JSON and were passed over"


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
    # Of the records, unless these were only checked; see `data.tokenized.sample_file.SampleWriter.write`.
    samples: tuple[bytes, NDArray[Any], list[tuple[int, list[Image]]]] | None = None
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

    Args:
        keep: folder for images that lie in records.

    Raises:
        DataError: the tokenizer cannot be used.
    """

    def __init__(self, recipe: Recipe, keep: Path) -> None:
        self._recipe, self._prompts = recipe, recipe.prompts
        self._images = ImageReader(recipe, keep)
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
        tokenized = iter(encode_many(list(documents), self._tokenizer, self._prompts, self._images.pictures))
        for file, raw, judged in parsed:
            whole = [next(tokenized) for _ in judged.documents]
            try:
                encoded.append(self._fitted(file, raw, judged, whole))
            except DataError as error:
                answer.bad.append(self._complaint(file, raw, error))

        _add_notes(answer, encoded)
        numbers, index, answer.tallies, pictured = pack_samples(encoded, self._recipe.max_seq_len)
        answer.samples = numbers, index, pictured
        return answer

    def _parse(self, chunk: Chunk, answer: EncodedChunk) -> list[tuple[int, RawRecord, Judged]]:
        """Parse the records, each with its file's number; what is wrong or unused goes into the answer."""
        recipe = self._recipe
        parsed: list[tuple[int, RawRecord, Judged]] = []
        for file, *fields in chunk.records:
            raw = RawRecord(*fields)
            try:
                path, format_name, columns = recipe.files[file]
                converted = parse(raw, format_name, columns, recipe.preference, self._images.looking_from(path))
            except DataError as error:
                if self._images.blind is not None:
                    raise DataError(self._complaint(file, raw, self._images.blind)) from None
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
        for document in tokens:
            self._images.check(document)

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
        for record in records:
            notes |= dict.fromkeys(_odd_order(record), place)
        tokens[0] = tokens[0]._replace(notes=tokens[0].notes | notes)

        empty = any(map(has_empty_answer, records))
        encoded = Encoded(file, raw.number, kind, empty, control, tokens, value, self._scored)
        check_images(encoded, recipe.max_seq_len)
        return encoded

    def _complaint(self, file: int, raw: RawRecord, error: DataError) -> str:
        return f"{origin(self._recipe.files[file].path, raw.number)}: {error}"

    def _tokens(self, record: Record) -> Tokens:
        return encode_tokens(record, self._tokenizer, self._prompts, self._images.pictures)


def _add_notes(answer: EncodedChunk, encoded: Sequence[Encoded]) -> None:
    """Count how many samples have which note, and keep the first one's words as an example."""
    for sample in encoded:
        notes: dict[str, str] = {}
        for document in reversed(sample.documents):
            notes |= document.notes
        answer.notes.update(notes.keys())
        answer.examples = notes | answer.examples


def _odd_order(record: Record) -> Iterator[str]:
    """Note a dialogue that begins with an answer or ends with a question, as a wrong column or order makes it."""
    if not isinstance(record, Chat):
        return
    roles = [message.role for message in record.messages if message.role != "system"]
    if roles[:1] == ["assistant"]:
        yield ANSWER_FIRST
    if roles[-1:] == ["user"]:
        yield QUESTION_LAST


def _good(encoded: Tokens | DataError) -> Tokens:
    if isinstance(encoded, DataError):
        raise encoded
    return encoded
