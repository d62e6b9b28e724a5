"""Run the parts of a benchmark from one command line, and show their figures.

A part is a function that measures in an empty folder and returns a report. The same module's workers are started by
`benchmarks.workers` with `--work NAME --given JSON`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Report(NamedTuple):
    """What a part measured, for `--json` and for people."""

    figures: dict[str, Any]
    table: Table


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Make a table with its first column to the left."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def against_targets(title: str, **figures: tuple[float, str]) -> Report:
    """Report figures, each with its target, which may be empty."""
    rows = ((name, f"{figure:.3g}", target) for name, (figure, target) in figures.items())
    table = table_of(title, ("figure", "measured", "target"), rows)
    return Report({name: figure for name, (figure, _) in figures.items()}, table)


def run_parts(
    description: str,
    parts: Mapping[str, Callable[[Path], Report]],
    workers: Mapping[str, Callable[..., None]] | None = None,
) -> None:
    """Measure all parts or some, each in an empty folder; print figures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; its disk is the one measured")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"of: {', '.join(parts)}")
    for name in ("--work", "--given", "--local_rank"):  # of a worker
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        (workers or {})[arguments.work](arguments.folder, **json.loads(arguments.given))
        return
    figures: dict[str, Any] = {}
    console = Console(quiet=arguments.json)
    for name in arguments.only or parts:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as folder:
            report = parts[name](Path(folder).resolve())
        figures |= report.figures
        console.print(report.table)
    if arguments.json:
        print(json.dumps(figures))
