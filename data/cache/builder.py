"""The process that builds a cache: `python -m data.cache.builder`, started by `data.cache.building`.

It gets a folder and a recipe on its standard input, and writes its progress and last its result to its standard output,
one JSON object a line. It is a process of its own because a training process must not fork: that has threads and a GPU.
And it does without torch, so it starts in half the time and takes 140 MB instead of 400.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

INTERVAL = 0.2  # seconds between two lines of progress
BEHIND = 10  # how far a run comes first that trains meanwhile, in the system's steps of niceness


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.nice(BEHIND)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then takes it for absent
    from data.cache.building import Throttled
    from data.cache.recipe import Recipe
    from data.cache.store import Cache
    from data.errors import DataError

    job = json.loads(sys.stdin.readline())
    parent = os.getppid()

    def tell(what: str, done: int, total: int, records: int) -> None:
        if os.getppid() != parent:  # killed: nobody waits for this cache any more
            os._exit(1)
        print(json.dumps({"what": what, "done": done, "total": total, "records": records}), flush=True)

    try:
        recipe = Recipe.from_json(job["recipe"])
        path = Cache(Path(job["folder"])).make(recipe, Throttled(tell, INTERVAL), workers=len(os.sched_getaffinity(0)))
        result = {"path": str(path)}
    except DataError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
