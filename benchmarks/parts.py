"""Run the parts of a benchmark from one command line.

A part is a function that measures in an empty folder and returns its figures, and one that makes a table of them. The
same module's workers are started by `benchmarks.ranks` with `--work NAME --given JSON`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
Part = tuple[Callable[[Path], Figures], Callable[[Figures], Table]]


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Make a table with its first column to the left."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def against_targets(title: str, figures: Figures, targets: Mapping[str, str]) -> Table:
    """Make a table of the figures that have a target."""
    rows = ((name, f"{figures[name]:.3g}", target) for name, target in targets.items())
    return table_of(title, ("figure", "measured", "target"), rows)


def run_parts(
    description: str, parts: Mapping[str, Part], workers: Mapping[str, Callable[..., None]] | None = None
) -> None:
    """Measure all parts or one, each in an empty folder; print figures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; its disk is the one measured")
    parser.add_argument("--only", choices=parts, help="measure one part alone")
    for name in ("--work", "--given", "--local_rank"):  # of a worker
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        (workers or {})[arguments.work](arguments.folder, **json.loads(arguments.given))
        return
    figures: Figures = {}
    console = Console(quiet=arguments.json)
    for name in [arguments.only] if arguments.only else parts:
        measure, table = parts[name]
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as folder:
            figures |= (found := measure(Path(folder).resolve()))
        console.print(table(found))
    if arguments.json:
        print(json.dumps(figures))
