"""Fetch a split of a data set on the HuggingFace hub by the package `datasets`, which runs no code of it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from common.terminal import reason_of
from data.errors import DataError

COMMIT = re.compile(r"[0-9a-f]{40}")
PACKAGE, LEAST = "datasets>=4", 4  # earlier ones run a data set's own code


def find_split(name: str, revision: str | None, subset: str | None, split: str) -> list[Path]:
    """Find the Arrow files of a split in the cache of `datasets`; fetch it first where it is not there.

    Where several processes of a host ask for it, one fetches, and the others wait for the lock of `datasets`.

    Raises:
        DataError: it cannot be fetched, or the package is missing or too old.
    """
    which = f"{name} --revision {revision}" if revision else name
    get = f"hf download --repo-type dataset {which} --local-dir FOLDER"
    missing = f"{name}: not found; expected a file, a folder or a glob, such as what {get} writes"
    try:
        if int(metadata.version("datasets").partition(".")[0]) < LEAST:
            raise ImportError
        from datasets import load_dataset
        from huggingface_hub import HfApi
    except ImportError:  # of which PackageNotFoundError is one
        raise DataError(f"{missing}; or, to fetch it from the HuggingFace hub here, pip install '{PACKAGE}'") from None
    try:
        if revision and not COMMIT.fullmatch(revision):
            revision = HfApi().dataset_info(name, revision=revision).sha
        files = load_dataset(name, subset, split=split, revision=revision).cache_files
        found = [Path(file["filename"]) for file in files]
        if revision and any(revision not in file.parts for file in found):  # without a network it takes what it has
            raise LookupError(f"only another revision is in the cache: {found[0]}")
    except Exception as error:  # the hub's errors, the HTTP library's, those of files that are none
        raise DataError(f"{missing}; it was not to be had from the HuggingFace hub: {reason_of(error)}") from None
    return found
