"""Manage the folder of tokenized data: layout, integrity and how a cache gets there.

    datasets/<key>/samples.arrow, meta.json     one tokenized set of files; the key is the recipe's
    digests/                                    of data files (`data.tokenized.recipe`)
    builds/                                     locks, and what is being written (`data.tokenized.opening`)

A cache is written under another name and renamed last, so it is there as a whole or not at all. Every folder in
datasets/ can be removed at any time: what is missing is tokenized again, and so is what is damaged. Whether it is, tell
the digest of meta.json and the samples' checksums, compared when they are used (`data.tokenized.sample_file`).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.whole_files import read_regular, sync
from data.errors import DataError
from data.paths import expanded
from data.tokenized.parallel import META, SAMPLES, Tell, build, digest_of
from data.tokenized.recipe import Digests, Recipe
from data.tokenized.sample_file import DAMAGED, SampleFile

logger = logging.getLogger("pipetune")


def default_folder() -> Path:
    """Return PIPETUNE_CACHE, else the user's folder for caches."""
    if named := os.environ.get("PIPETUNE_CACHE"):
        return expanded(named)
    try:
        return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pipetune"
    except DataError:
        raise DataError("cache_dir: this user has no home folder to cache in; expected a folder") from None


class Cache:
    """Manage the tokenized data in a folder.

    Raises:
        DataError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.builds = folder / "builds"
        self._datasets = folder / "datasets"
        self._digests = Digests(folder / "digests")
        try:
            for each in (self.builds, self._datasets):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cache_dir: {folder}: cannot be made: {error.strerror}; expected a folder for tokenized data, here or "
                "in the environment's PIPETUNE_CACHE"
            ) from None

    def find(self, recipe: Recipe) -> Path | None:
        """Find a recipe's whole cache, if that needs no reading of data."""
        digests = [] if recipe.window else [self._digests.known(Path(file.path)) for file in recipe.files]
        known = [digest for digest in digests if digest is not None]
        if len(known) < len(digests):
            return None
        found = self._datasets / recipe.key(known)
        return found if is_whole(found) else None

    def make(self, recipe: Recipe, tell: Tell, workers: int) -> Path:
        """Return a recipe's cache, built if there is none. See `data.tokenized.parallel.build`.

        Raises:
            DataError: a file or a record is wrong, a file changed meanwhile, the disk is full.
        """
        identity = recipe.identity()
        found = self._datasets / recipe.key(self._take_digests(recipe, tell))
        if is_whole(found):
            return found
        if found.exists():
            logger.warning("warning: %s: these tokenized records are damaged; tokenizing anew", found)
        self.sweep(identity)
        partial = self.builds / f"{identity}.{secrets.token_hex(4)}"
        try:
            partial.mkdir()
            build(recipe, partial, tell, workers)
            if recipe.identity() != identity:
                raise DataError(f"{recipe.names}: changed while they were being read; start again")
            self._publish(partial, found)
        except OSError as error:
            raise DataError(f"{partial}: cannot be written: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return found

    def keep(self, recipes: Sequence[Recipe]) -> None:
        """Remove all samples but those of these windows."""
        kept = {recipe.key([]) for recipe in recipes}
        for folder in self._datasets.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, identity: str) -> None:
        """Remove what a killed builder of a recipe left behind; for the holder of its lock."""
        for left in self.builds.glob(f"{identity}.*/"):
            shutil.rmtree(left, ignore_errors=True)

    def _take_digests(self, recipe: Recipe, tell: Tell) -> list[str]:
        if recipe.window:
            return []
        paths = [Path(file.path) for file in recipe.files]
        total, done = recipe.size(), 0

        def told(count: int) -> None:
            nonlocal done
            done += count
            tell("reading", min(done, total), total, 0)

        return [self._digests.known(path) or self._digests.take(path, told) for path in paths]

    def _publish(self, partial: Path, place: Path) -> None:
        if place.exists() and not is_whole(place):
            damaged = self.builds / f"{place.name}.{secrets.token_hex(4)}"
            place.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        sync(partial)
        try:
            partial.rename(place)
            sync(place.parent)
        except OSError:
            if not is_whole(place):  # else another host was faster
                raise


def is_whole(folder: Path) -> bool:
    """Test whether a cache is there and not known to be damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, DataError):
        meta, count = read_meta(folder), len(SampleFile(folder / SAMPLES))
        noted = sum(tally["samples"] for _, _, tally in meta["tallies"])
        return digest_of(meta) == meta["own_digest"] and count == noted and not (folder / DAMAGED).exists()
    return False


def read_meta(folder: Path) -> dict[str, Any]:
    """Read what the builder wrote about the samples."""
    meta: dict[str, Any] = json.loads(read_regular(folder / META))
    return meta
