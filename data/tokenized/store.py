"""Keep tokenized records in a folder; one process builds a set of them for all that want it.

    datasets/<key>/     samples.bin, index.bin and meta.json of one set; the key is its recipe's
    digests/            of data files (`data.tokenized.recipe`)
    builds/             leases, and what is being written
    images/             images that lie in records, as they are, by their digests; sets in datasets/ need them

A set is written under another name and renamed last, so it is there as a whole or not at all. Every folder in
datasets/ can be removed at any time: what is missing is tokenized again, and so is what is damaged, by the digest of
meta.json, the checksum of the index, or the digest of a sample (`data.tokenized.sample_file`).

Any number of processes, on one host or on several with a shared folder, call `open_cache`. Whoever gets the recipe's
lease (`common.lease`) builds; a builder that dies loses it. If two should ever build at the same time, the set that is
renamed first counts. What went wrong is written beside the lease: those who waited fail with the same words.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from common.digests import Digests
from common.lease import Held, Lease
from common.whole_files import kept, replace_checked, sync
from data.errors import DataError
from data.images.beside_samples import KEPT
from data.paths import digests_folder
from data.tokenized.meta import meta_digest, read_meta
from data.tokenized.parallel import Tell, build
from data.tokenized.recipe import Recipe, digest_of
from data.tokenized.sample_file import DAMAGED, SampleFile

SMALL = 2**20  # bytes that are tokenized before another process has started
PATIENCE = 0.5  # seconds of waiting before a line about it
ROOT = Path(__file__).parents[__name__.count(".")]  # where imports begin
# Workers are the parallelism; a second one inside each would only fight with them.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TRANSFORMERS_VERBOSITY": "error"}

logger = logging.getLogger("pipetune")


class Cache:
    """Manage the tokenized records in a folder.

    Raises:
        DataError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.builds = folder / "builds"
        self._datasets = folder / "datasets"
        self._images = folder / KEPT
        self._digests = Digests(digests_folder(folder))
        try:
            for each in (self.builds, self._datasets):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cache_dir: {folder}: cannot be made: {error.strerror}; expected a folder for tokenized data, here or "
                "in the environment's PIPETUNE_CACHE"
            ) from None

    def find(self, recipe: Recipe) -> Path | None:
        """Find a recipe's whole set, if that needs no reading of data."""
        digests = [] if recipe.window else [self._digests.known([Path(file.path)]) for file in recipe.files]
        known = [digest for digest in digests if digest is not None]
        if len(known) < len(digests):
            return None
        found = self._datasets / recipe.key(known)
        return found if is_whole(found) else None

    def make(self, recipe: Recipe, tell: Tell, workers: int) -> Path:
        """Return a recipe's set, built if there is none. See `data.tokenized.parallel.build`.

        Raises:
            DataError: a file or a record is wrong, a file changed meanwhile, the disk is full.
        """
        identity = recipe.identity()
        found = self._datasets / recipe.key(self._take_digests(recipe, tell))
        if is_whole(found):
            return found

        partial, damaged = (self.builds / f"{identity}.{secrets.token_hex(4)}" for _ in range(2))
        try:
            if found.exists():
                logger.warning("warning: %s: these tokenized records are damaged; tokenizing anew", found)
                found.rename(damaged)
            partial.mkdir()
            build(recipe, partial, self._images, tell, workers)
            if recipe.identity() != identity:
                raise DataError(f"{recipe.names}: changed while they were being read; start again")
            sync(partial)
            try:
                partial.rename(found)
                sync(found.parent)
            except OSError:
                if not is_whole(found):  # else another host was faster
                    raise
        except OSError as error:
            raise DataError(f"{partial}: cannot be written: {error.strerror or error}") from None
        finally:
            for left in (partial, damaged):
                shutil.rmtree(left, ignore_errors=True)
        return found

    def keep(self, recipes: Sequence[Recipe]) -> None:
        """Remove all sets but those of these windows."""
        wanted = {recipe.key([]) for recipe in recipes}
        for folder in self._datasets.iterdir():
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, identity: str) -> None:
        """Remove what a killed builder of a recipe left behind; for the holder of its lease."""
        for left in self.builds.glob(f"{identity}.*/"):
            shutil.rmtree(left, ignore_errors=True)

    def _take_digests(self, recipe: Recipe, tell: Tell) -> list[str]:
        if recipe.window:
            return []
        paths = [Path(file.path) for file in recipe.files]
        total, done = recipe.size(), 0

        def count(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            tell("reading", min(done, total), total, 0)

        return [
            self._digests.known([path]) or self._digests.take([path], partial(digest_of, path, count)) for path in paths
        ]


def is_whole(folder: Path) -> bool:
    """Test whether a set is there and not known to be damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, DataError):
        meta = read_meta(folder)
        whole = meta_digest(meta) == meta["own_digest"] and SampleFile(folder).is_whole(meta["checksum"])
        return whole and not (folder / DAMAGED).exists()
    return False


def open_cache(recipe: Recipe, folder: Path, log: Console, progress: bool = True) -> Path:
    """Return the folder of a recipe's samples; tokenize them first if needed.

    Args:
        folder: of all tokenized data.
        log: gets a line that says whom this process waits for.
        progress: show a bar on a terminal, in the one process that builds.

    Raises:
        DataError: see `Cache.make`.
    """
    cache = Cache(folder)
    identity = recipe.identity()
    lease = Lease(cache.builds, f"{identity}.lease", lambda _: None)
    failure = cache.builds / f"{identity}.failed"
    builders: set[str] = set()  # that were waited for, by the tokens of their leases
    begun, told = time.monotonic(), False

    def wait(held: Held) -> None:
        nonlocal told
        if held.holder is None:
            return
        builders.add(held.holder.token)
        if not told and time.monotonic() - begun > PATIENCE:
            told = True
            log.print(f"data: {held.holder.name} tokenizes these records; waiting for it")

    try:
        if (found := lease.take_or_find(partial(cache.find, recipe), wait)) is not None:
            return found
        try:
            builder, words = kept(failure, json.loads) or ("", "")
            if builder in builders:
                raise DataError(*words.split("\n"))
            cache.sweep(identity)
            try:
                return _build(cache, recipe, folder, progress)
            except DataError as error:
                replace_checked(failure, json.dumps([lease.holder.token, str(error)]))
                raise
        finally:
            cache.sweep(identity)
            lease.release()
    except OSError as error:
        raise DataError(f"{error.filename2 or cache.builds}: cannot be written: {error.strerror}") from None


def _build(cache: Cache, recipe: Recipe, folder: Path, progress: bool) -> Path:
    """Build small sets here, and larger ones in a process of their own, which shows its progress."""
    if recipe.size() < SMALL:
        return cache.make(recipe, lambda *_: None, workers=0)
    sent = TypeAdapter(Recipe).dump_json(recipe)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(  # which ends it, should this process be interrupted
        [sys.executable, "-m", f"{__package__}.builder", str(os.getpid())],
        input=json.dumps({"recipe": sent.decode(), "folder": str(folder.resolve()), "progress": progress}),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        check=False,
    )

    result: dict[str, Any] = json.loads(ended.stdout or "{}")
    if "path" in result:
        return Path(result["path"])
    if "error" in result:
        raise DataError(*result["error"].split("\n"))

    code = ended.returncode
    reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
    hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
    raise DataError(f"the process that tokenizes the data {reason}{hint}")
