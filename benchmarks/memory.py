"""What training holds in memory: `python -m benchmarks.memory`, one module a part.

`lean_loss` (`benchmarks.lean_loss`): the loss without logits against the plain form. `planner` (`benchmarks.planning`):
what `--plan` predicts against what a run takes; ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import lean_loss, planning

PARTS = {"lean_loss": lean_loss, "planner": planning}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory: peaks, predicted and measured.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work")
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
