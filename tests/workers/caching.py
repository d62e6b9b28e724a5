"""One of several processes that start at the same time and want the same samples.

usage: caching.py JOB.json: {"data", "tokenizer", "limit", "cache", "go"}. It waits for the file `go`, and
prints {"fingerprint", "built", "told"} or {"error", "built", "told"}.
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from data.errors import DataError
from data.tokenized import store
from data.tokenized.loading import load_dataset


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    told = io.StringIO()
    result: dict[str, Any] = {}
    with (
        patch.object(store, "SMALL", 0),
        patch.object(store, "_build", wraps=store._build) as build,
    ):
        print("ready", flush=True)
        while not Path(job["go"]).exists():
            time.sleep(0.01)
        try:
            log = Console(file=told, soft_wrap=True)
            dataset = load_dataset(
                job["data"], job["tokenizer"], job["limit"], "plain", cache_dir=job["cache"], log=log
            )
            result["fingerprint"] = dataset.fingerprint()
        except DataError as error:
            result["error"] = str(error)
    print(json.dumps(result | {"built": build.call_count, "told": told.getvalue()}), flush=True)


if __name__ == "__main__":
    main()
