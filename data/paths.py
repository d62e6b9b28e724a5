"""Expand home folders in paths, know where caches and tokenizers lie, and read small files whole."""

from __future__ import annotations

import errno
import os
from itertools import chain
from pathlib import Path

from common.whole_files import regular
from data.errors import DataError

MOST_BYTES = 2**20  # far above any config or chat template
TOKENIZER_FILES = "tokenizer* vocab* merges* *.model *.tiktoken tekken.json *.jinja config.json".split()
TOKENIZER_FILES += ["additional_chat_templates/*", "special_tokens_map.json", "added_tokens.json"]
TOKENIZER_FILES += ["chat_template.json", "preprocessor_config.json", "processor_config.json"]


def expanded(path: str | Path) -> Path:
    """Replace `~` and `~user` in a path.

    Raises:
        DataError: nobody knows where that is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: no such user, or no home folder; expected a path without ~") from None


def with_home(path: str) -> str:
    """Expand a path given as text; one without `~` stays as it was written."""
    return str(expanded(path)) if path.startswith("~") else path


def read_small(path: str | Path) -> bytes:
    """Read a regular file's bytes; a pipe or a device might never end.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `MOST_BYTES`.
        ValueError: the path holds a NUL.
    """
    with open(path, "rb", opener=regular) as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES / 1e6:.0f} MB")
    return content


def tokenizer_files(folder: Path) -> list[Path]:
    """List all files in a model's folder that decide how it tokenizes and prompts."""
    found = set(chain.from_iterable(map(folder.glob, TOKENIZER_FILES)))
    return sorted(file for file in found if file.is_file())


def cache_folder(named: str | Path | None) -> Path:
    """Return the folder of all caches: `cache_dir` where it is given."""
    return expanded(named) if named else default_folder()


def digests_folder(cache_dir: str | Path | None) -> Path:
    """Return the folder with notes of files' digests."""
    return cache_folder(cache_dir) / "digests"


def default_folder() -> Path:
    """Return PIPETUNE_CACHE, else the user's folder for caches."""
    if named := os.environ.get("PIPETUNE_CACHE"):
        return expanded(named)
    try:
        return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pipetune"
    except DataError:
        raise DataError("cache_dir: this user has no home folder to cache in; expected a folder") from None
