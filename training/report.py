"""Draw a run: `python -m training.report RUN_DIR` writes RUN_DIR/report.png.

Loss (training and evaluation), learning rate, throughput and peak memory over the steps, from metrics.jsonl alone; so
it also works while the run goes on, and on any machine. It takes two seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.metrics.reporter import METRICS_FILE, read_metrics

REPORT_FILE = "report.png"
SIZE, DPI = (12.0, 8.0), 120  # inches and dots an inch: 1440 x 960 pixels
GIB = 2**30
FEW = 50  # so many steps are drawn as points too: one alone makes no line

Lines = Sequence[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a run's loss, learning rate, throughput and memory.")
    parser.add_argument("run_dir", type=Path, help="folder of the run (save_path)")
    parser.add_argument("--output", type=Path, help=f"where the picture goes; RUN_DIR/{REPORT_FILE} by default")
    arguments = parser.parse_args()
    try:
        print(draw(arguments.run_dir, arguments.output))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def draw(run_folder: Path, output: Path | None = None) -> Path:
    """Draw the run's metrics.jsonl as a PNG.

    Returns:
        Where the picture is.

    Raises:
        OSError: metrics.jsonl cannot be read or the picture not be written.
        ValueError: no step is done yet.
    """
    lines = read_metrics(run_folder / METRICS_FILE)
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise ValueError(f"{run_folder / METRICS_FILE}: no step is done yet")
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    figure.suptitle(f"{run_folder.resolve().name}: {steps[-1]['step']} steps", parse_math=False)
    panels = figure.subplots(2, 2)
    _draw_loss(panels[0, 0], steps, [line for line in lines if "eval_loss" in line])
    _draw_lr(panels[0, 1], steps)
    _draw_throughput(panels[1, 0], steps)
    _draw_memory(panels[1, 1], steps)
    for panel in panels.flat:
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    path = output or run_folder / REPORT_FILE
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing"
        )  # a folder's name may be Chinese, matplotlib's font is not
        figure.savefig(path, format="png")
    return path


def _draw_loss(panel: Axes, steps: Lines, evaluations: Lines) -> None:
    panel.set_title("loss")
    _line(panel, steps, "loss", label="training")
    if evaluations:
        _line(panel, evaluations, "eval_loss", label="evaluation", marker="o")
        for name in sorted({name for line in evaluations for name in line if name.startswith("eval_loss/")}):
            kind = name.partition("/")[2]
            _line(panel, evaluations, name, label=f"evaluation: {kind}", marker=".", linestyle="--", linewidth=0.8)
        panel.legend(fontsize="small")


def _draw_lr(panel: Axes, steps: Lines) -> None:
    panel.set_title("learning rate")
    _line(panel, steps, "lr", color="tab:green")
    panel.ticklabel_format(axis="y", style="scientific", scilimits=(0, 0))
    _begin_at_zero(panel)


def _draw_throughput(panel: Axes, steps: Lines) -> None:
    panel.set_title("throughput")
    panel.set_ylabel("tokens/s")
    _line(panel, steps, "tokens_per_s", color="tab:purple", label="tokens/s")
    _begin_at_zero(panel)
    if any(line.get("mfu") is not None for line in steps):
        right = panel.twinx()
        right.set_ylabel("MFU")
        _line(right, steps, "mfu", color="tab:gray", linestyle="--", label="MFU")
        right.set_ylim(0, 1)
        panel.legend(handles=[*panel.lines, *right.lines], fontsize="small")


def _draw_memory(panel: Axes, steps: Lines) -> None:
    panel.set_title("peak memory of each stage")
    panel.set_ylabel("GiB")
    stages = max(len(line.get("peak_memory", [])) for line in steps)
    for stage in range(stages):
        known = [line for line in steps if len(line.get("peak_memory", [])) > stage]
        peaks = [line["peak_memory"][stage] / GIB for line in known]
        panel.plot([line["step"] for line in known], peaks, label=f"stage {stage}", marker=_marker(known))
    if stages:
        panel.legend(fontsize="small", ncols=2)
    _begin_at_zero(panel)


def _line(panel: Axes, lines: Lines, name: str, marker: str | None = None, **style: Any) -> None:
    """One number over the steps that have it; what was not finite leaves a gap."""
    known = [line for line in lines if name in line]
    values = [float("nan") if line[name] is None else line[name] for line in known]
    panel.plot([line["step"] for line in known], values, marker=marker or _marker(known), **style)


def _begin_at_zero(panel: Axes) -> None:
    highest = panel.dataLim.ymax  # infinite where nothing is drawn
    panel.set_ylim(0, 1.1 * highest if 0 < highest < math.inf else 1)


def _marker(lines: Lines) -> str:
    return "." if len(lines) < FEW else ""


if __name__ == "__main__":
    main()
