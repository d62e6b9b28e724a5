"""Draw a run: `python -m options.reports.report RUN_DIR` writes RUN_DIR/report.png.

Loss (training and evaluation), learning rate, throughput and peak memory over the steps, and of preferences accuracy
and margin, from metrics.jsonl alone. So it works on any machine and during the run. It takes two seconds.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.command_line import Parser
from common.quantities import GIGA, counted
from common.terminal import typed_name
from models.errors import GONE
from training.metrics.reporter import METRICS_FILE, read_metrics

REPORT_FILE = "report.png"
WIDTH, HEIGHT, DPI = 6.0, 8.0, 120  # inches a column, and dots an inch: two columns have 1440 x 960 pixels
# Of preferences: the measure of a step, `eval_` before it that of an evaluation, and the title of their panel.
JUDGED = {"rewards/accuracies": "accuracy", "rewards/margins": "margin of the rewards"}
ROOM, ROWS = 0.05, 16  # of a panel's width and height beside the curves; rows of a legend
FEW = 50  # fewer steps are drawn as points too: a single step makes no line

Lines = Sequence[dict[str, Any]]


def make_parser() -> Parser:
    parser = Parser(typed_name(), description="Draw a run's loss, learning rate, speed and memory.")
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="folder of the run (save_path)")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the picture; DIR/{REPORT_FILE} by default")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    try:
        print(draw_run(arguments.run_dir, arguments.output))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def draw_run(
    run_folder: Path, output: Path | None = None, last_step: float = math.inf, title: str | None = None
) -> Path:
    """Draw the run's metrics.jsonl as a PNG, up to a step.

    Args:
        title: the run's name in the picture; that of its folder otherwise.

    Returns:
        The picture's path.

    Raises:
        OSError: metrics.jsonl cannot be read, or the picture cannot be written.
        ValueError: there is no run, or it has no step yet.
    """
    try:
        lines = [line for line in read_metrics(run_folder / METRICS_FILE) if line["step"] <= last_step]
    except GONE:
        raise ValueError(f"{run_folder}: no run here; expected a run's save_path") from None
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise ValueError(f"{run_folder / METRICS_FILE}: no step is done yet")
    evaluations = [line for line in lines if "eval_loss" in line]
    judged = {name: title for name, title in JUDGED.items() if any(name in line for line in lines)}
    columns = 3 if judged else 2
    figure = Figure(figsize=(columns * WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    figure.suptitle(f"{title or run_folder.resolve().name}: {counted(steps[-1]['step'], 'step')}", parse_math=False)
    (loss, lr, *above), (throughput, memory, *below) = figure.subplots(2, columns)
    loss.set_title("loss")
    _line(loss, steps, "loss", label="training")
    _line(loss, evaluations, "eval_loss", label="evaluation", marker="o")
    for name in sorted(name for name in set(chain.from_iterable(evaluations)) if name.startswith("eval_loss/")):
        label = f"evaluation: {name.partition('/')[2]}"
        _line(loss, evaluations, name, label=label, marker=".", linestyle="--", linewidth=0.8)
    others = _draw_judged([*above, *below], judged, steps, evaluations)
    lr.set_title("learning rate")
    _line(lr, steps, "lr", color="tab:green")
    lr.ticklabel_format(axis="y", style="scientific", scilimits=(0, 0))
    throughput.set_title("throughput")
    throughput.set_ylabel("tokens/s")
    _line(throughput, steps, "tokens_per_s", color="tab:purple", label="tokens/s")
    if any(line.get("mfu") is not None for line in steps):
        right = throughput.twinx()
        right.set_ylabel("MFU")
        _line(right, steps, "mfu", color="tab:gray", linestyle="--", label="MFU")
        right.set_ylim(0, 1)
        throughput.legend(handles=[*throughput.lines, *right.lines], fontsize="small")
    memory.set_title("peak memory of each stage")
    memory.set_ylabel("GB of tensors\n(on a CPU: of the whole process)")
    peaks = [{"step": line["step"], **dict(enumerate(line.get("peak_memory", [])))} for line in steps]
    for stage in range(max(map(len, peaks)) - 1):
        _line(memory, peaks, stage, scale=1 / GIGA, label=f"stage {stage}")
    for panel in (lr, throughput, memory):
        panel.set_ylim(0, (1 + ROOM) * panel.dataLim.y1 if panel.dataLim.y1 > 0 else 1)
    if memory.lines:
        memory.legend(fontsize="small", ncols=1 + len(memory.lines) // ROWS, loc="center left", bbox_to_anchor=(1, 0.5))
    loss.legend(fontsize="small", ncols=2)
    first, last = lines[0]["step"], lines[-1]["step"]
    for panel in (loss, lr, throughput, memory, *others):
        panel.set_xlim(first - 0.5 - ROOM * (last - first), last + 0.5 + ROOM * (last - first))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.ticklabel_format(axis="x", style="plain", useOffset=False)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    path = output or run_folder / REPORT_FILE
    with warnings.catch_warnings():
        # A folder's name may be Chinese; matplotlib's font has no such glyphs.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(path, format="png")
    return path


def _draw_judged(panels: list[Axes], judged: dict[str, str], steps: Lines, evaluations: Lines) -> list[Axes]:
    """Draw each measure into a panel of its own; return the panels that have one, and take the others away."""
    for panel, (name, title) in zip(panels, judged.items(), strict=False):
        panel.set_title(title)
        _line(panel, steps, name, label="training")
        _line(panel, evaluations, f"eval_{name}", label="evaluation", marker="o")
        panel.legend(fontsize="small")
    for panel in panels[len(judged) :]:
        panel.remove()
    return panels[: len(judged)]


def _line(panel: Axes, lines: Lines, name: Any, marker: str | None = None, scale: float = 1, **style: Any) -> None:
    """Draw one number over the steps that have it; null leaves a gap."""
    known = [line for line in lines if name in line]
    values = [math.nan if line[name] is None else scale * line[name] for line in known]
    if known:
        marker = marker or ("." if len(known) < FEW else "")
        panel.plot([line["step"] for line in known], values, marker=marker, **style)


if __name__ == "__main__":
    main()
