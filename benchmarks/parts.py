"""A benchmark of several parts: the command line that all of them have.

A part is a module with `measure(folder)`, which gives figures by their JSON keys, and `table(figures)` for people.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table


class Part(Protocol):
    """What a module of a part has."""

    def measure(self, folder: Path) -> dict[str, Any]: ...

    def table(self, figures: dict[str, Any]) -> Table: ...


def against_targets(title: str, figures: Mapping[str, Any], targets: Mapping[str, str]) -> Table:
    """A table of the figures that have a target."""
    made = Table(title=title)
    for column in ("figure", "measured", "target"):
        made.add_column(column, justify="left" if column == "figure" else "right")
    for name, target in targets.items():
        made.add_row(name, f"{figures[name]:.3g}", target)
    return made


def run_parts(description: str, parts: Mapping[str, Part]) -> None:
    """Measure all parts or the one that is asked for, each in an empty folder, and print what was found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; its disk is the one measured")
    parser.add_argument("--only", choices=parts, help="measure one part alone")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    console = Console(quiet=arguments.json)
    for name in [arguments.only] if arguments.only else parts:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as folder:
            figures |= parts[name].measure(Path(folder).resolve())
        console.print(parts[name].table(figures))
    if arguments.json:
        print(json.dumps(figures))
