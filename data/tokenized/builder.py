"""Build a cache in its own process (`python -m data.tokenized.builder`, from `data.tokenized.store`).

It gets a recipe and a folder on its standard input, and writes the cache's path, or what went wrong, to its standard
output. It is a process of its own because a training process must not fork: that has threads and a GPU. And it does
without torch, so it starts in half the time and takes 140 MB instead of 400.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tqdm import tqdm

from common.parent import end_with_parent

BEHIND = 10  # how far a run comes first that trains meanwhile, in the system's steps of niceness


class ProgressBar:
    """Show a bar on a terminal for each task; see `data.tokenized.parallel.Tell`.

    Args:
        disable: as tqdm takes it.
    """

    def __init__(self, disable: bool | None) -> None:
        self._disable = disable
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int, records: int) -> None:
        if what != self._what:
            if self._bar is not None:
                self._bar.close()
            self._what = what
            self._bar = tqdm(desc=what, unit="B", unit_scale=True, disable=self._disable, leave=False)
        self._bar.total = total if done <= total else None  # compressed files hold more than their size
        self._bar.set_postfix_str(f"{records:,} records" if records else "", refresh=False)
        self._bar.update(done - self._bar.n)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(int(sys.argv[1]))  # before the imports, which take seconds
    os.nice(BEHIND)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then takes it for absent
    from data.errors import DataError
    from data.tokenized.recipe import Recipe
    from data.tokenized.store import Cache

    job = json.loads(sys.stdin.readline())
    progress = ProgressBar(disable=None if job["progress"] else True)  # None: only on a terminal
    try:
        cache = Cache(Path(job["folder"]))
        recipe = TypeAdapter(Recipe).validate_json(job["recipe"])
        path = cache.make(recipe, progress, workers=len(os.sched_getaffinity(0)))
        result = {"path": str(path)}
    except DataError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
