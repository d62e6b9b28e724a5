"""What the data wing costs and saves: `python -m benchmarks.data`, one module a part.

`tokenizing` (`benchmarks.tokenizing`): speed against the bare tokenizer, memory, a second start. `packing`
(`benchmarks.packing`): how little padding is left, and what that does to the speed of training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import packing, tokenizing

PARTS = {"tokenizing": tokenizing, "packing": packing}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenizing and packing: speed, memory, padding.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; it takes some 3 GB")
    parser.add_argument("--only", choices=PARTS, help="measure one part alone")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else PARTS:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as folder:
            figures |= PARTS[name].measure(Path(folder).resolve())
        if not arguments.json:
            Console().print(PARTS[name].table(figures))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
