"""A plan as a picture: what fills each stage's memory, and how long each stage works in a step."""

from __future__ import annotations

from pathlib import Path

from training.plan.plan import Plan
from training.plan.tables import GB

FILE = "plan.png"
DPI = 120


def draw(plan: Plan, path: Path) -> Path:
    """Draw it as a PNG."""
    from matplotlib.figure import Figure  # takes a second

    stages = range(len(plan.stages))
    memory = [stage.memory for stage in plan.stages]
    figure = Figure(figsize=(max(7.0, 1.5 + 0.35 * len(stages)), 6), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    bottom = [0.0] * len(memory)
    layers = {
        "weights": [each.weights for each in memory],
        "gradients": [each.gradients for each in memory],
        "optimizer": [each.optimizer for each in memory],
        "activations or step": [max(each.activations, each.step) for each in memory],
    }
    for label, sizes in layers.items():
        heights = [size / GB for size in sizes]
        above.bar(stages, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limit = plan.basis.device.memory
    if limit is not None:
        above.axhline(limit / GB, color="black", linewidth=0.8, linestyle="--", label=plan.basis.device.name)
    above.set_ylabel("peak memory, GB")
    above.legend(fontsize="small")
    above.set_title(f"{plan.basis.spec.family.name}, parts {_shortened(plan.parts)}", fontsize="medium")
    slowest = max(stage.seconds for stage in plan.stages)
    below.bar(stages, [stage.seconds / slowest for stage in plan.stages], color="tab:gray")
    below.set_ylabel("time, of the slowest stage")
    below.set_xlabel("stage")
    figure.savefig(path, format="png")
    return path


def _shortened(parts: list[int], most: int = 16) -> str:
    shown = ", ".join(map(str, parts[:most]))
    return f"[{shown}, ...]" if len(parts) > most else f"[{shown}]"
