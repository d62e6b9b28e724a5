"""Build a cache in one process while all others that want it wait.

Any number of processes, on one host or on several with a shared folder, call `open_cache`. Whoever gets the recipe's
lease (`common.lease`) builds; a builder that dies loses it. If two should ever build at the same time, the cache that
is renamed first counts. What went wrong is written beside the lease: those who waited fail with the same words.

Small files are tokenized right here; for larger ones a process of its own is started (`data.tokenized.builder`), which
shows how far it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from common.lease import Held, Lease
from common.whole_files import kept, replace_checked
from data.errors import DataError
from data.tokenized.recipe import Recipe
from data.tokenized.store import Cache

SMALL = 2**20  # bytes that are tokenized before another process has started
POLL = 0.2  # seconds
PATIENCE = 0.5  # seconds of waiting before a word about it
ROOT = Path(__file__).parents[__name__.count(".")]  # where imports begin
# Workers are the parallelism; a second one inside each would only fight with them.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TRANSFORMERS_VERBOSITY": "error"}


def open_cache(recipe: Recipe, folder: Path, log: Console, progress: bool = True) -> Path:
    """Return the folder of a recipe's samples; tokenize them first if needed.

    Args:
        folder: of all tokenized data.
        log: gets a line that says whom this process waits for.
        progress: show a bar on a terminal, in the one process that builds.

    Raises:
        DataError: see `data.tokenized.store.Cache.make`.
    """
    cache = Cache(folder)
    identity = recipe.identity()
    lease = Lease(cache.builds, f"{identity}.lease", lambda _: None)
    failure = cache.builds / f"{identity}.failed"
    builders: set[str] = set()  # that were waited for, by the tokens of their leases
    begun, told = time.monotonic(), False
    try:
        while (found := cache.find(recipe)) is None:
            try:
                token = lease.take().token
                break
            except Held as held:
                if held.holder:
                    builders.add(held.holder.token)
                if held.holder and not told and time.monotonic() - begun > PATIENCE:
                    told = True
                    who = f"process {held.holder.pid} on {held.holder.host}"
                    log.print(f"data: {who} tokenizes these records; waiting for it")
                time.sleep(POLL)
        else:
            return found
        try:
            if (found := cache.find(recipe)) is not None:
                return found
            builder, words = kept(failure, json.loads) or ("", "")
            if builder in builders:
                raise DataError(*words.split("\n"))
            try:
                return _build(cache, recipe, folder, progress)
            except DataError as error:
                replace_checked(failure, json.dumps([token, str(error)]))
                raise
        finally:
            cache.sweep(identity)
            lease.release()
    except OSError as error:
        raise DataError(f"{error.filename2 or cache.builds}: cannot be written: {error.strerror}") from None


def _build(cache: Cache, recipe: Recipe, folder: Path, progress: bool) -> Path:
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
