"""Where a run's records come from: the entries of `data_path`, their files, and how much of each an epoch holds.

An entry is a path (a file, a list of files, a glob, or a folder, whose data files are taken in the order of their
names) or a `Source`, which adds how often its records are taken and which layout they have.

The mixture. `repeat` says how often an epoch holds each record of a source: 3 is three times, 0.5 a half of them, 2.5
all twice and a half of them once more. `weight` says which share of the epoch a source gets: shares are the weights
divided by their sum, and the epoch holds as many records as all the sources together. So with weights a source that is
larger than its share is thinned out, a smaller one is repeated, and the number of steps stays. Which half is taken is
drawn once from the seed and is the same in every epoch. An epoch is thus a fixed set of records; only their order
changes from epoch to epoch.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from data.errors import DataError
from data.paths import expanded
from data.records.formats import COLUMNS, FORMATS

TEXT_FILE = "text_file"  # a format of files, not of records: one file is one text
TEXT_SUFFIXES = (".txt",)
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", *TEXT_SUFFIXES)
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # of a data set's files
DESCRIPTIONS |= {"readme.txt", "license.txt", "licence.txt", "notice.txt"}
SPLITS = re.compile(r"(?<![a-z])(?:train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")  # whoever reads a file says which of them it cannot unpack
MOST_PLACES = 100_000  # files and folders that a glob may lead through


class Source(BaseModel):
    """One entry of `data_path`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str | list[str] = Field(min_length=1)
    """A file, a folder or a glob, or a list of them."""

    repeat: float = Field(default=1, gt=0, le=10_000, allow_inf_nan=False)
    """How often an epoch holds each record; fractions are allowed."""

    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The share of the epoch, relative to the weights of the other entries, which then need one each; not together with
    `repeat`."""

    format: str | None = None
    """The format of the records (docs/data.md#records), or `text_file`: a whole file is one text. Recognised without
    the key."""

    columns: dict[str, str] = {}
    """What the records call a format's fields, `{prompt: my_question}`; of messages also what their `role` and
    `content` are called, and who speaks as `user`, `assistant`, `system` and `tool`."""

    @field_validator("format", mode="after")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        names = [*FORMATS, TEXT_FILE]
        if name is not None and name not in names:
            raise ValueError(f"expected one of {', '.join(names)}, found {name!r}")
        return name

    @field_validator("columns", mode="after")
    @classmethod
    def _fields(cls, columns: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(columns.keys() - COLUMNS):
            raise ValueError(f"{unknown[0]}: no format has this field; expected some of {', '.join(sorted(COLUMNS))}")
        if repeated := [theirs for theirs, count in Counter(columns.values()).items() if count > 1]:
            raise ValueError(f"{repeated[0]}: expected it for one field, found it for several")
        return columns

    @model_validator(mode="after")
    def _one_of_them(self) -> Source:
        if self.weight is not None and "repeat" in self.model_fields_set:
            raise ValueError("expected either repeat or weight, found both")
        return self


def as_sources(data_path: str | Path | Source | Sequence[str | Path | Source]) -> list[Source]:
    """The entries of `data_path`, paths made sources.

    Raises:
        DataError: there is none, or only some of them have a weight.
    """
    entries = [data_path] if isinstance(data_path, (str, Path, Source)) else data_path
    sources = [entry if isinstance(entry, Source) else Source(path=str(entry)) for entry in entries]
    if not sources:
        raise DataError("data_path: expected at least one file, found an empty list")
    weighted = sum(source.weight is not None for source in sources)
    if 0 < weighted < len(sources):
        raise DataError(f"data_path: expected a weight for all {len(sources)} entries or for none, found {weighted}")
    return sources


def files_of(source: Source) -> list[Path]:
    """The files of a source, in the order in which their records are numbered.

    Raises:
        DataError: a path leads to nothing that can be read.
    """
    files: list[Path] = []
    for path in [source.path] if isinstance(source.path, str) else source.path:
        try:
            files += _expand(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return files


def _expand(path: str) -> list[Path]:
    place = expanded(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        return _in_folder(place, path)
    if place.exists():
        raise DataError(f"{path}: not a regular file; expected a file, a folder or a glob")
    files = sorted(match for match in _matches(place, path) if match.is_file())
    if not files:
        hub = f" (the hub's: hf download {path} --repo-type dataset)" if re.fullmatch(r"[\w-]+/[\w.-]+", path) else ""
        raise DataError(f"{path}: not found; expected a file, a folder or a glob{hub}")
    return files


def _in_folder(place: Path, path: str) -> list[Path]:
    """The data files of a folder; of a data set's repository, those of its folder `data`."""
    if not (files := _data_files(place)) and (place / "data").is_dir():
        files = _data_files(place / "data")
    if not files:
        below = [entry.name for entry in sorted(place.iterdir()) if entry.is_dir() and _data_files(entry)]
        there = f"one of its folders {', '.join(below)}, or " if below else ""
        raise DataError(f"{path}: no data files in this folder; expected {there}{', '.join(DATA_SUFFIXES)}")
    _check_together(files, path)
    return files


def _check_together(files: list[Path], path: str) -> None:
    """Refuse a folder's files where nobody would train on all of them."""
    kinds = {bare_suffix(file) in TEXT_SUFFIXES: file for file in files}
    if len(kinds) > 1:
        one = kinds[False].with_name(f"*{bare_suffix(kinds[False])}*")
        told = f"holds a text, {kinds[True].name}, beside other data"
        raise DataError(f"{path}: {told}; expected one kind, such as {one}, or a list of both")
    named = {file: words for file in files if (words := SPLITS.findall(file.name))}
    splits = {frozenset(map(str.lower, words)) for words in named.values()}
    if len(splits) > 1:
        file = min(named, key=lambda file: [word.lower() for word in named[file]] != ["train"])
        word = named[file][0]
        one = file.with_name(f"{'' if file.name.startswith(word) else '*'}{word}*")
        names = ", ".join(sorted(frozenset().union(*splits)))
        raise DataError(f"{path}: holds the splits {names}; expected one of them, such as {one}")


def _data_files(place: Path) -> list[Path]:
    """Without hidden ones (macOS leaves some beside each file) and what `datasets` kept of its own computations."""
    files = (file for file in place.iterdir() if file.name.lower() not in DESCRIPTIONS)
    saved = (place / "state.json").exists()
    files = (file for file in files if not (file.name.startswith(".") or (saved and file.name.startswith("cache-"))))
    return sorted(file for file in files if bare_suffix(file) in DATA_SUFFIXES and file.is_file())


def _matches(pattern: Path, path: str) -> set[Path]:
    """What a glob matches, found part by part: `/**` would be under way for hours before it gave anything."""
    start = Path(pattern.anchor)
    found = {start}
    seen = 0
    parts = pattern.relative_to(start).parts
    for number, part in enumerate(parts, start=1):
        before, found = found, set()
        for place in before:
            if part == "**":
                matches = _below(place, only_folders=number < len(parts))
            else:
                matches = (place / name for name in glob.iglob(part, root_dir=place))
            for match in matches:
                found.add(match)
                seen += 1
                if seen > MOST_PLACES:
                    raise DataError(f"{path}: leads to more than {MOST_PLACES:,} places; expected a narrower glob")
    return found


def _below(place: Path, only_folders: bool) -> Iterator[Path]:
    """A place and what is in it at any depth, hidden names aside: what two stars match."""
    yield place
    for folder, folders, files in os.walk(place, followlinks=True):  # passes over what it may not read
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in folders)
        if not only_folders:
            yield from (Path(folder, name) for name in files if not name.startswith("."))


def bare_suffix(file: Path) -> str:
    """The suffix of a file's name, in small letters and without that of a compression."""
    name = Path(file.name.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED_SUFFIXES else name).suffix


def mixture(sources: Sequence[Source], sizes: Sequence[int], seed: int) -> NDArray[numpy.int64]:
    """The records that an epoch holds, as their numbers over all sources in order, from 0.

    A record that is taken twice stands twice; the numbers are ascending.

    Args:
        sizes: how many records each source has.

    Raises:
        DataError: a source without records.
    """
    for source, size in zip(sources, sizes, strict=True):
        if not size:
            raise DataError(f"{source.path}: no usable records; expected at least one")
    chosen = []
    first = 0
    for number, (size, count) in enumerate(zip(sizes, _counts(sources, sizes), strict=True)):
        whole, rest = divmod(count, size)
        # Each source draws by itself, so that a record more in one does not change which half another gives.
        drawn = numpy.random.default_rng([seed, number]).choice(size, rest, replace=False, shuffle=False)
        times = numpy.full(size, whole, dtype=numpy.int64)
        times[drawn] += 1
        chosen.append(numpy.repeat(numpy.arange(first, first + size, dtype=numpy.int64), times))
        first += size
    return numpy.concatenate(chosen)


def _counts(sources: Sequence[Source], sizes: Sequence[int]) -> list[int]:
    """How many records an epoch takes from each source; at least one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return [max(1, round(source.repeat * size)) for source, size in zip(sources, sizes, strict=True)]
    return [max(1, round(sum(sizes) * weight / sum(weights))) for weight in weights]
