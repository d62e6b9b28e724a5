"""A plan as a picture."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from common.quantities import GIGA, counted, gigabytes
from options.planner.plan import Plan
from options.planner.tables import MEMORY, room, speed
from training.config.keys import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

PICTURE = "plan.png"
DPI = 120
# Of one row and the next: forward, backward.
ROWS = (("tab:blue", "lightsteelblue"), ("tab:orange", "navajowhite"))
STEP = "the optimizer's step,\nwhere it needs more\nthan activations"
DRAWN = {name: name for name in MEMORY[:4]} | {
    "step": STEP,
    "beyond": "kernels, and what was\nmeasured on top",
}  # of plan.png, from below


def place_of_picture(config: TrainConfig) -> tuple[Path, str]:
    """Find where to draw a plan: into `save_path`, or here where that would make folders elsewhere.

    Returns:
        the file, and for the log why it is here, if it is.
    """
    folder = Path(config.save_path)
    if folder.parent.exists() or folder.resolve().is_relative_to(Path.cwd()):
        return folder / PICTURE, ""
    return Path(PICTURE), f" in this folder, as {folder.parent} is not there yet"


def draw_plan(plan: Plan, path: Path) -> Path:
    """Draw memory and time of the stages as a PNG."""
    from matplotlib.figure import Figure  # takes a second
    from matplotlib.ticker import MaxNLocator

    basis, device = plan.basis, plan.basis.device
    of_stages = [stage.memory for stage in plan.stages]
    memory = {name: numpy.array(list(map(attrgetter(name), of_stages))) / GIGA for name in DRAWN}
    # Activations and what the step needs are never in memory together.
    stepping = memory["step"] > memory["activations"]
    memory["activations"] = numpy.where(stepping, 0.0, memory["activations"])
    memory["step"] = numpy.where(stepping, memory["step"], 0.0)

    stages, bottom = numpy.arange(len(plan.stages)), numpy.zeros(len(plan.stages))
    figure = Figure(figsize=(max(9.0, 4.0 + 0.35 * len(stages)), 6), dpi=DPI, layout="constrained")

    whole: SubFigure | Figure = figure
    if basis.row_chunks > 1:
        figure.set_figheight(8)
        panels: Any = figure.subfigures(2, 1, height_ratios=(3, 1))
        whole = panels[0]
        _draw_chunks(plan, panels[1].subplots())
    above, below = whole.subplots(2, 1, sharex=True)
    for name, heights in memory.items():
        if heights.any():
            above.bar(stages, heights, bottom=bottom, label=DRAWN[name])
        bottom += heights
    limits = [(each.memory or 0) / GIGA for each in basis.of_stages]
    if device.memory is not None:
        sizes = " and ".join(dict.fromkeys(gigabytes(each.memory or 0) for each in basis.of_stages))
        usable = f"{device.name}: {sizes} usable"
        above.hlines(limits, stages - 0.5, stages + 0.5, color="black", linewidth=0.8, linestyle="--", label=usable)
    above.set_ylabel("peak of a process, GB")

    unit = 1.0 if plan.knows_seconds else plan.seconds
    times, step = [stage.seconds / unit for stage in plan.stages], plan.seconds / unit
    below.bar(stages, times, color="tab:gray", label="a stage's own work in a step")
    below.axhline(step, color="tab:red", linewidth=0.8, label=f"the whole step; bubble {plan.bubble:.1%}")
    below.set_ylabel("time, s" if plan.knows_seconds else "time, of the step")
    below.set_xlabel("stage")
    below.set_xlim(-0.75, len(stages) - 0.25)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    for panel, top in ((above, max(bottom.max(), *limits)), (below, step)):
        panel.set_ylim(0, 1.05 * top)
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    lines = [f"{basis.spec.family.name}, {counted(len(stages), 'stage')} of {plan.parts}", f"memory: {room(plan)}"]
    lines += [f"speed: {speed(plan)}"] if plan.knows_seconds else []
    figure.suptitle("\n".join(lines), fontsize="medium", wrap=True)
    figure.savefig(path, format="png")
    return path


def _draw_chunks(plan: Plan, panel: Axes) -> None:
    """Draw when stages work on which chunk: of each row in colours of its own, lighter backward."""
    simulated, bars = plan.simulated(plan.enough), defaultdict[tuple[int, str], list[tuple[float, float]]](list)
    for span in simulated.spans:
        assert span.micro_batch is not None
        forward, backward = ROWS[span.micro_batch // plan.basis.row_chunks % 2]
        colour = forward if span.kind == "forward" else backward
        bars[span.stage, colour].append((span.begin / simulated.seconds, (span.end - span.begin) / simulated.seconds))
    for (stage, colour), of_stage in bars.items():
        panel.broken_barh(of_stage, (stage - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    panel.set_yticks(range(len(plan.stages)))
    panel.invert_yaxis()
    panel.set_xlim(0, 1)
    panel.set_ylabel("stage")
    rows = counted(plan.enough, "micro-batch")
    panel.set_xlabel(f"time of {rows}, each in {counted(plan.basis.row_chunks, 'chunk')}: forward dark, backward light")
