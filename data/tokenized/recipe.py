"""Describe what to tokenize and how: the key of a cache.

The key digests all that the samples depend on: the files' contents, how each is read, the tokenizer's files, the
prompts, the limit, and the code that makes samples (its modules, as a version number would be forgotten one day).
Paths and times are not in it, so a copy of the data on another machine has the same key.

Digests of files' contents are remembered (`common.digests`), so that a second start reads no data.

A window of records that are tokenized while a run trains is known by where it begins: nobody reads such a set twice for
a key.

Cost: 1 s for each GB at the first start, a few microseconds later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from common.digests import file_digest
from common.digests import stamp as stamp_of
from data.chat.prompts import Prompts, template_in_file
from data.errors import DataError
from data.paths import tokenizer_files
from data.settings import AS_THE_MODEL, NAMED, OnBadRecord, Pixels, Truncate, Wanted

LAYOUT = 4  # of the cache's files
# Modules that no sample depends on: they carry samples and store them, or come later. Any other counts.
CARRIERS = "tokenized/builder tokenized/store tokenized/recipe"
LATER = "tokenized/dataset tokenized/loading inspection/ loader packing "
LATER += "images/ahead images/collation images/messages images/worker"
LIBRARIES = ("tokenizers", "transformers", "jinja2")


class DataFile(NamedTuple):
    """Hold a file, its records' format and their names of fields, as in `data.records.sources.Source`."""

    path: str
    format: str | None = None
    columns: dict[str, str] = {}  # nobody changes it


class Window(NamedTuple):
    """Hold a stretch of the records of many files."""

    file: int  # the first one, as a place in the recipe's files
    skip: int  # how many of that file's records come before
    n_bytes: int  # of samples; the window ends with the chunk of records that reaches them, or with the last file
    contents: str  # what tells the files' contents from others


@dataclass(frozen=True)
class Recipe:
    """Hold a set of files and what to do with their records."""

    files: tuple[DataFile, ...]  # in the order of their samples
    tokenizer: str  # folder of the tokenizer
    prompts: Prompts  # its format is named
    max_seq_len: int  # longest sample in tokens
    on_bad_record: OnBadRecord = "stop"  # stop before training, or leave the record out
    truncate: Truncate = "turns"  # what becomes of a dialogue of more tokens
    preference: Wanted | None = None  # which kind of preference records they are; none where absent
    window: Window | None = None  # which of the records; all where absent
    pixels: Pixels = AS_THE_MODEL  # of images in the records

    @property
    def names(self) -> str:
        """Name the files, for a person."""
        first = ", ".join(file.path for file in self.files[:3])
        return first if len(self.files) <= 3 else f"{first} and {len(self.files) - 3} more files"

    def size(self) -> int:
        """Sum the bytes of all files; for a window, estimate its own.

        Raises:
            DataError: one is missing.
        """
        if self.window is None:
            return sum(stamp(Path(file.path))[0] for file in self.files)
        size = 0
        for file in self.files[self.window.file :]:
            size += stamp(Path(file.path))[0]
            if size >= self.window.n_bytes:
                return self.window.n_bytes
        return size

    def identity(self) -> str:
        """Tell recipes apart without reading their data: processes that wait for each other have the same.

        Raises:
            DataError: a file is missing.
        """
        if self.window is not None:
            return self.key([])
        paths = [Path(file.path) for file in self.files]
        return _digest([self._settings, [(str(path.resolve()), stamp(path)) for path in paths]])

    def key(self, digests: list[str]) -> str:
        """Return the name of the cache.

        Args:
            digests: of the files' contents; of no use for a window.
        """
        if self.window is not None:
            return _digest([self._settings, self.window, self.files])
        return _digest([self._settings, list(zip(digests, self._how, strict=True))])

    def settings_digest(self, sizes: Sequence[int]) -> str:
        """Digest what the user asked for, independent of the code's version.

        Args:
            sizes: of the files, in bytes.
        """
        return _digest([self._wishes, list(zip(sizes, self._how, strict=True))])

    @property
    def _how(self) -> list[DataFile]:
        """List how each file is read, which depends on its name too."""
        return [file._replace(path="".join(Path(file.path.lower()).suffixes[-2:])) for file in self.files]

    @cached_property
    def _wishes(self) -> list[Any]:
        prompts = asdict(self.prompts)
        if (named := prompts["prompt_format"]) not in NAMED:
            prompts["prompt_format"] = ["template", template_in_file(named)]
        limits: list[Any] = [self.max_seq_len, self.truncate, self.on_bad_record]
        limits += [self.preference] if self.preference else []
        limits += [self.pixels] if any(self.pixels) else []
        return [prompts, *limits, tokenizer_digest(Path(self.tokenizer))]

    @cached_property
    def _settings(self) -> list[Any]:
        return [LAYOUT, *self._wishes, code_digest(), [version(library) for library in LIBRARIES]]


def tokenizer_digest(folder: Path) -> str:
    """Digest what `tokenizer_files` lists."""
    files = tokenizer_files(folder)
    return _digest([(str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])


@cache
def code_digest() -> str:
    """Digest the modules that turn records into samples."""
    package = Path(__file__).parent.parent
    modules = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")}
    others = tuple(f"{CARRIERS} {LATER}".split())
    counted = sorted((name, path) for name, path in modules.items() if not name.startswith(others))
    return _digest([(name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in counted])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def stamp(path: Path) -> list[int]:
    """Return what changes whenever the file does; see `common.digests.stamp`.

    Raises:
        DataError: there is no such file.
    """
    try:
        return stamp_of(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def digest_of(path: Path, count: Callable[[int], Any] = lambda _: None) -> str:
    """Digest a file, as `common.digests.file_digest` does; DataError where it cannot be read."""
    try:
        return file_digest(path, count)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
