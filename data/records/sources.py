"""Resolve `data_path` into files, and how much of each an epoch holds.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import islice, product
from pathlib import Path

import numpy
from numpy.typing import NDArray

from common.hub import hub_name
from data.errors import DataError
from data.paths import expanded
from data.records.hub import find_split
from data.settings import Source

TEXT_SUFFIXES = (".txt",)
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", *TEXT_SUFFIXES)
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # of a data set's files
NOTICES = product(("readme", "license", "licence", "notice"), ("", ".md", ".txt"))
DESCRIPTIONS |= {f"{name}{suffix}" for name, suffix in NOTICES}
# The words of common data sets; what is called otherwise is told in a line.
SPLIT = re.compile(r"(?<![a-z])(?:train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
SHARD = re.compile(r"(\d+)([-_. ]*of[-_. ]*)(\d{1,6})(?!\d)", re.IGNORECASE)  # 00001-of-00003
MAX_NAMES = 5  # in a line
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")  # whoever reads a file says which of them it cannot unpack
MOST_PLACES = 100_000  # files and folders that a glob may lead through


def as_sources(data_path: str | Path | Source | Sequence[str | Path | Source]) -> list[Source]:
    """Turn the entries of `data_path` into sources.

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


def files_of(source: Source, tell: Callable[[str], object] = lambda _: None) -> list[Path]:
    """List a source's files in the order in which their records are numbered.

    Args:
        tell: called with lines about what is not read, and about sets that are read as one.

    Raises:
        DataError: a path leads to nothing that can be read, or a file of a set is missing.
    """
    files: list[Path] = []
    for path in [source.path] if isinstance(source.path, str) else source.path:
        try:
            if (name := hub_name(path)) and bare_suffix(Path(path)) not in DATA_SUFFIXES:
                files += find_split(*name, source.subset, source.split or "train")
            elif source.split or source.subset:
                raise DataError(f"{path}: no name on the hub; expected neither split nor subset beside it")
            else:
                files += _expand(path, tell)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return files


def _expand(path: str, tell: Callable[[str], object]) -> list[Path]:
    place = expanded(path)
    if place.is_file():
        return [place]

    _check_link(place)
    if place.is_dir():
        files = _in_folder(place, path)
        _check_shards(files)
        _check_together(files, path)
        left = _left_out([place], place, files)
    elif place.exists():
        raise DataError(f"{path}: not a regular file; expected a file, a folder or a glob")
    else:
        matches = _matches(place, path)
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise DataError(f"{path}: not found; expected a file, a folder or a glob")
        _check_shards(files, place.name)
        left = _left_out(sorted(match for match in matches if match.is_dir()), None, files)
    if left:
        tell(f"data: not read in {path}: {left}")
    stems = sorted({re.split(r"[-_. ]*[\d.]", file.name)[0] for file in files})
    if len(stems) > 1:
        tell(f"data: {path}: {len(stems)} sets are read as one: {_some(stems)}")
    return files


def _check_link(place: Path) -> None:
    if place.is_symlink() and not place.exists():
        raise DataError(f"{place}: a link to {os.readlink(place)}, which is not there; expected the file")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def _in_folder(place: Path, path: str) -> list[Path]:
    """List a folder's data files; in a data set's repository, those of its folder `data`."""
    if not (files := _data_files(place)) and (place / "data").is_dir():
        files = _data_files(place / "data")
    if not files:
        found = (file for file in islice(_below(place, False), MOST_PLACES) if bare_suffix(file) in DATA_SUFFIXES)
        below = sorted({str(file.parent.relative_to(place)) for file in found if file.is_file()} - {"."})
        there = f"one of its folders {_some(below)}, or " if below else ""
        raise DataError(f"{path}: no data files in this folder; expected {there}{', '.join(DATA_SUFFIXES)}")
    return files


def _left_out(folders: Iterable[Path], base: Path | None, files: list[Path]) -> str:
    """Name what lies in folders and is not among the files; count it for each folder below."""
    taken, left = set(files), Counter[str]()
    for folder in folders:
        for file in islice(_below(folder, only_folders=False), MOST_PLACES):
            if file not in taken and file.is_file() and file.name.lower() not in DESCRIPTIONS:
                first, *rest = file.relative_to(base or folder.parent).parts
                left[f"{first}/" if rest else first] += 1
    return _some([f"{name} ({count:,})" if name[-1] == "/" else name for name, count in sorted(left.items())])


def _check_shards(files: list[Path], pattern: str = "*") -> None:
    """Refuse a numbered set of which a file is missing that the pattern would match."""
    sets: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for file in files:
        if SHARD.search(file.name):
            stem, number, of, total, tail = SHARD.split(file.name, maxsplit=1)
            sets.setdefault((str(file.parent), stem, total), {})[int(number)] = [number, of, tail]

    for (folder, stem, total), there in sets.items():
        # The other files are called like the first one that is there; a set may be counted from 1.
        number, of, tail = next(iter(there.values()))
        width, suffixes = len(number), "".join(Path(f"_{tail}").suffixes)
        begin = 1 if 0 not in there and int(total) in there else 0
        missing = [place for place in range(begin, begin + int(total)) if place not in there]
        names = [f"{stem}{place:0{width}}{of}{total}{suffixes}" for place in missing]
        if any(fnmatch(name, pattern) for name in names):
            also = f" (or {int(total):0{width}}, counted from 1)" if 0 in missing else ""
            raise DataError(f"{folder}: {_some(names)}{also} not found; expected all {int(total)} files of the set")


def _check_together(files: list[Path], path: str) -> None:
    """Refuse a folder's files where nobody would train on all of them."""
    texts = [file for file in files if bare_suffix(file) in TEXT_SUFFIXES]
    tables = [file for file in files if file not in texts]
    if texts and tables:
        one = tables[-1].with_name(f"*{bare_suffix(tables[-1])}*")
        problem = f"holds a text, {texts[-1].name}, beside other data"
        raise DataError(f"{path}: {problem}; expected one kind, such as {one}, or a list of both")

    named = {file: found[0] for file in files if (found := SPLIT.search(file.name))}
    splits = {word.lower(): file.with_name(f"*{word}*") for file, word in named.items()}
    if len(splits) > 1:
        one = splits.get("train") or next(iter(splits.values()))
        raise DataError(f"{path}: holds the splits {', '.join(sorted(splits))}; expected one of them, such as {one}")


def _data_files(place: Path) -> list[Path]:
    """Drop hidden files (macOS leaves some beside each file) and the caches of `datasets`."""
    hidden = (".", "cache-") if (place / "state.json").exists() else (".",)
    files = [
        file for file in place.iterdir() if not file.name.startswith(hidden) and file.name.lower() not in DESCRIPTIONS
    ]

    # A link without a suffix may have been one to data.
    found = [file for file in files if bare_suffix(file) in ("", *DATA_SUFFIXES)]
    for file in found:
        _check_link(file)
    return sorted(file for file in found if bare_suffix(file) and file.is_file())


def _matches(pattern: Path, path: str) -> set[Path]:
    """Match a glob part by part, since `/**` would run for hours before its first result."""
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
                if number == len(parts) or not match.suffix:
                    _check_link(match)
                found.add(match)
                seen += 1
                if seen > MOST_PLACES:
                    raise DataError(f"{path}: leads to more than {MOST_PLACES:,} places; expected a narrower glob")
    return found


def _below(place: Path, only_folders: bool) -> Iterator[Path]:
    """List a folder and all below it, hidden names aside: what two stars match."""
    yield place
    for folder, folders, files in os.walk(place, followlinks=True):  # passes over what it may not read
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in folders)
        if not only_folders:
            yield from (Path(folder, name) for name in files if not name.startswith("."))


def bare_suffix(file: Path) -> str:
    """Return a file's suffix in small letters, without that of a compression."""
    name = Path(file.name.lower())
    if name.suffix in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    return name.suffix


def mixture(sources: Sequence[Source], sizes: Sequence[int], seed: int) -> NDArray[numpy.int64]:
    """Choose an epoch's records, as their numbers over all sources in order, from 0.

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
    first = 0  # number of the source's first record
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
    """Count an epoch's records from each source; at least one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return [max(1, round(source.repeat * size)) for source, size in zip(sources, sizes, strict=True)]
    return [max(1, round(sum(sizes) * weight / sum(weights))) for weight in weights]
