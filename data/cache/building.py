"""One process builds a cache, and all others that want the same one wait for it.

Any number of processes, on one host or on several with a shared folder, call `open_cache`. Whoever gets the recipe's
lease (`data.lease`) builds; a builder that dies loses it. If two should ever build at the same time, the cache that is
renamed first counts. Beside the lease lies a note that says how far its holder is, and in the end what went wrong:
those who waited fail with the same words.

Small files are tokenized right here; for larger ones a process of its own is started (`data.cache.builder`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from data.cache.recipe import Recipe
from data.cache.store import Cache
from data.cache.tokenizing import Tell
from data.errors import DataError
from data.files.whole_files import replace_text
from data.lease import Held, Lease

SMALL = 2**20  # bytes that are tokenized before another process has started
POLL = 0.2  # seconds
NOTING = 1.0  # seconds between two notes
ROOT = Path(__file__).parents[2]
# Workers are the parallelism; a second one inside each would only fight with them.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TRANSFORMERS_VERBOSITY": "error"}


def open_cache(recipe: Recipe, folder: Path, log: Console, active: bool) -> Path:
    """The folder of a recipe's samples; they are tokenized first where nobody has done so before.

    Args:
        folder: of all tokenized data.
        active: whether this process shows progress.

    Raises:
        DataError: see `data.cache.store.Cache.make`.
    """
    cache = Cache(folder)
    identity = recipe.identity()
    lease = Lease(cache.builds, f"{identity}.lease", lambda _: None)
    note = Note(cache.builds / f"{identity}.note")
    waited_for = None
    try:
        with Bar(active) as bar:
            while (found := cache.find(recipe)) is None:
                try:
                    note.builder = lease.take().token
                    break
                except Held as held:
                    told = note.read()
                    if held.holder and told.get("builder") == held.holder.token and "progress" in told:
                        if waited_for != told["builder"]:
                            waited_for = told["builder"]
                            who = f"process {held.holder.pid} on {held.holder.host}"
                            log.print(f"data: {who} tokenizes these records; waiting for it")
                        bar.tell(**told["progress"])
                    time.sleep(POLL)
            else:
                return found
            try:
                if (found := cache.find(recipe)) is not None:
                    return found
                told = note.read()
                if waited_for is None or told.get("builder") != waited_for or "progress" in told:
                    return _build(cache, recipe, identity, folder, note, bar)
            finally:
                lease.release()
    except OSError as error:
        raise DataError(f"{cache.builds}: cannot be written: {error.strerror}") from None
    if "error" in told:
        raise DataError(*told["error"].split("\n"))
    return Path(told["path"])


class Note:
    """What a builder says: how far it is (`progress`), then where the cache is (`path`) or what went wrong (`error`).

    Attributes:
        builder: the token of this process's lease.
    """

    builder = ""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """What the last builder wrote; empty where there is nothing to read."""
        with suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            return told
        return {}

    def write(self, **more: Any) -> None:
        """Say something as the builder."""
        with suppress(OSError):  # only others are interested
            replace_text(self._path, json.dumps({"builder": self.builder} | more))


class Bar:
    """A progress bar that is there while there is progress."""

    def __init__(self, active: bool) -> None:
        self._active = active
        self._what = ""
        self._bar: Any = None

    def tell(self, what: str, done: int, total: int, records: int) -> None:
        """Show progress; see `data.cache.tokenizing.Tell`."""
        if self._bar is None or what != self._what:
            self.close()
            self._what = what
            disable = None if self._active else True  # None: only on a terminal
            self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=disable, leave=False)
        self._bar.total = total if done <= total else None  # compressed files hold more than their size
        self._bar.set_postfix_str(f"{records:,} records" if records else "", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Throttled:
    """Passes on what it is told when it was silent for some seconds, or when something else begins."""

    def __init__(self, tell: Tell, seconds: float) -> None:
        self._tell = tell
        self._seconds = seconds
        self._last = 0.0
        self._what = ""

    def __call__(self, what: str, done: int, total: int, records: int) -> None:
        if what != self._what or time.monotonic() - self._last >= self._seconds:
            self._what, self._last = what, time.monotonic()
            self._tell(what, done, total, records)


def _build(cache: Cache, recipe: Recipe, identity: str, folder: Path, note: Note, bar: Bar) -> Path:
    def tell(what: str, done: int, total: int, records: int) -> None:
        note.write(progress={"what": what, "done": done, "total": total, "records": records})

    noted = Throttled(tell, NOTING)
    noted("starting", 0, 0, 0)
    try:
        if recipe.size() < SMALL:
            path = cache.make(recipe, noted, workers=0)
        else:
            path = _build_apart(recipe, folder, noted, bar)
    except BaseException as error:
        note.write(error=str(error) if isinstance(error, DataError) else "the process that tokenized was stopped")
        cache.sweep(identity)
        raise
    note.write(path=str(path))
    return path


def _build_apart(recipe: Recipe, folder: Path, noted: Tell, bar: Bar) -> Path:
    result: dict[str, Any] = {}
    with _builder({"recipe": recipe.to_json(), "folder": str(folder.resolve())}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            if "what" in result:
                bar.tell(**result)
                noted(**result)
    if "path" in result:
        return Path(result["path"])
    if "error" in result:
        raise DataError(*result["error"].split("\n"))
    code = process.returncode
    reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
    hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
    raise DataError(f"the process that tokenizes the data {reason}{hint}")


@contextmanager
def _builder(job: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The builder's process, ended with the block."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "data.cache.builder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; how is asked below
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
        yield process
        process.wait()
    finally:
        process.kill()
        process.wait()
