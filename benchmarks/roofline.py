"""Print the plan of every run in published.yml beside what others measured, in Markdown: tables of docs/performance.md.

Nothing is measured, and no GPU is needed. It takes about a minute. tests/options/planner/test_published.py holds the
page to it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from common.quantities import GIGA
from models.api import read_spec
from models.spec import ModelSpec
from options import RunConfig
from options.planner.inputs import Basis, Workload
from options.planner.plan import Plan, fitting_parts
from options.planner.shapes import FILE as SHAPES_FILE
from training.metrics.devices import parse_devices

LINES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yml").read_text(encoding="utf-8"))
SHAPES: dict[str, dict[str, Any]] = json.loads(SHAPES_FILE.read_text(encoding="utf-8"))


@cache
def _spec(fields: str, attention: str | None) -> tuple[ModelSpec, dict[Any, Any]]:
    """Return a model of which there is nothing but config.json, and what its plans have in common."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(fields, encoding="utf-8")
        spec = read_spec(Path(folder))
    return (replace(spec, family=replace(spec.family, attention=(attention,))) if attention else spec), {}


@dataclass(frozen=True)
class Run:
    """Training on full rows.

    Attributes:
        attention: the kernel that it uses, where it is not the plan's own for these keys.
    """

    model: dict[str, Any]
    devices: str
    dims: tuple[int, int]
    batch: int
    length: int
    keys: dict[str, Any] = field(default_factory=dict)
    parts: list[int] | None = None
    attention: str | None = None

    def basis(self) -> Basis:
        spec, known = _spec(json.dumps(self.model), self.attention)
        paths = dict.fromkeys(("model_path", "data_path", "save_path"), "-")
        topology = {"process_topology": {"dims": list(self.dims)}, "parts": self.parts}
        shape = {"train_batch_size": self.batch, "max_seq_len": self.length, "model_topo": topology}
        config = RunConfig.model_validate(paths | shape | {"compile": False, "use_flash_attn": False} | self.keys)
        staged = config.zero_optimization.stage < 2
        device = parse_devices(self.devices)[1]
        return Basis(config, spec, Workload.assumed(config), device, in_stages=staged, known=known)

    def plan(self) -> Plan:
        return Plan.make(self.basis())


@dataclass(frozen=True)
class Published:
    """A run that others measured.

    Attributes:
        speed: as a whole in samples/s, or in tokens/s a GPU; None where memory ran out.
        or_devices: that the source may mean instead of the run's.
        cause: what may make the plan differ.
    """

    name: str
    speed: float | None
    unit: str
    run: Run
    or_devices: str = ""
    cause: str = ""

    def planned_speed(self, plan: Plan) -> float:
        """Return the speed in the published unit."""
        rows = self.run.batch / plan.seconds
        return rows if self.unit == "samples/s" else rows * self.run.length / plan.basis.config.model_topo.processes

    def row(self) -> list[str]:
        """Make a row of the table."""
        plan, digits = self.run.plan(), 2 if self.unit == "samples/s" else 0
        peak = f"{plan.peak / GIGA:.1f}" + ("" if plan.fits else f" > {(plan.basis.device.memory or 0) / GIGA:.1f}")
        cells = [self.name, f"{self.run.length:,}", self.run.devices]
        if self.speed is None:
            return [*cells, "OOM", "", "", peak, self.cause]
        planned = [plan, *([replace(self.run, devices=self.or_devices).plan()] if self.or_devices else [])]
        speeds = [self.planned_speed(each) for each in planned]
        differences = ", PCIe ".join(f"{speed / self.speed - 1:+.0%}" for speed in speeds)
        return [*cells, *(f"{speed:,.{digits}f}" for speed in (self.speed, speeds[0])), differences, peak, self.cause]


def published() -> Iterator[Published]:
    """Yield all runs of published.yml."""
    for line in LINES["runs"]:
        shape = SHAPES[line["model"]] | line.get("shape", {})
        for tokens, speed in line["speeds"].items():
            keys, parts = line["keys"], line.get("parts")
            run = Run(
                shape, line["devices"], tuple(line["dims"]), line["rows"], tokens, keys, parts, line.get("attention")
            )
            unit, cause = line.get("unit", "samples/s"), line.get("causes", {}).get(tokens, "")
            measured = None if speed == "oom" else float(speed)
            yield Published(line["name"], measured, unit, run, line.get("or_devices", ""), cause)


def needed_rows() -> Iterator[list[str]]:
    """Yield rows of the GPUs that models need, with the fewest that the plan lets through."""
    for line in LINES["needed"]:
        keys = {"fp16": {"enabled": True}, "use_grad_ckpt": True, "optimizer": {"type": line.get("optimizer", "AdamW")}}
        of_one = Run(SHAPES[line["model"]], "V100-32G", (1, 1), 256, line["tokens"], keys)
        runs = [replace(of_one, dims=(stages, 1)) for stages in range(1, line["gpus"] + 1)]
        fewest = 1 + bisect_left(runs, True, key=lambda run: fitting_parts(run.basis()) is not None)
        plan = runs[-1].plan()
        cells = [line["model"], line.get("optimizer", "AdamW"), f"{line['tokens']:,}", str(line["gpus"]), str(fewest)]
        yield [*cells, f"{plan.peak / GIGA:.2f}"]


def ratio_rows(rows: list[list[str]]) -> Iterator[list[str]]:
    """Yield how many times as fast as ZeRO-3 the pipeline is, by published and by planned speeds."""
    speeds = {(name, tokens): cells for name, tokens, _, *cells in rows if cells[0] != "OOM"}
    for (name, tokens), zero in speeds.items():
        if name == "llama-7b, ZeRO-3":
            found = [*speeds["llama-7b, compiled", tokens][:2], *speeds["llama-7b, not compiled", tokens][:2]]
            yield [tokens, *(f"{float(speed) / float(zero[n % 2]):.2f}" for n, speed in enumerate(found))]


def show(headings: str, rows: Iterable[list[str]]) -> list[list[str]]:
    """Print a table in Markdown, each row when it is planned."""
    print(f"| {headings} |\n|{'---|' * (headings.count('|') + 1)}")
    shown = []
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)
        shown.append(cells)
    print()
    return shown


def main() -> None:
    """Print all tables."""
    headings = "run | tokens | on | published | planned | | peak, GB | cause"
    rows = show(headings, (each.row() for each in published()))
    show("tokens | published | planned | not compiled: published | planned", ratio_rows(rows))
    show("model | optimizer | tokens | GPUs, published | fewest planned | peak, GB", needed_rows())
    print("\n".join(f"- {letter}: {cause}." for letter, cause in LINES["causes"].items()))


if __name__ == "__main__":
    main()
