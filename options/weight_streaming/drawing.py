"""Draw a plan of weight streaming: memory of a device and of the host by part, and what each turn takes.

A turn has three lanes that work at once: its micro-batches are computed, its weights, sums and inputs come from host
memory, and its sums and outputs go back. Where a lane of the link is above that of the computation, the GPU waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from common.quantities import GIGA, counted, duration, gigabytes
from options.weight_streaming.schedule import Slot, own_lanes
from training.metrics.devices import HOST_LINK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from options.weight_streaming.streamed_plan import StreamedPlan

WIDTH, HEIGHT, DPI = 12.0, 7.0, 120  # inches, and dots an inch


def draw_streamed(plan: StreamedPlan, path: Path) -> Path:
    """Write the picture as a PNG."""
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    device, host, turns = figure.subplots(3, 1, height_ratios=[1, 1, 3])
    kind, main_memory = plan.basis.device, plan.basis.main_memory
    _draw_memory(device, plan.of_device, kind.memory, f"{kind.name}: {gigabytes(kind.memory or 0)} usable")
    _draw_memory(host, plan.of_host, main_memory, f"this host: {gigabytes(main_memory or 0)}")
    device.set_xlabel("memory of a device, GB")
    host.set_xlabel("memory of a host, GB")
    _draw_turns(turns, plan)
    for panel in (device, host, turns):
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

    limit = f" of {gigabytes(kind.memory)}" if kind.memory else ""
    name = f"{plan.basis.spec.family.name}, weight streaming"
    lines = [
        f"{name}: a round of {counted(len(plan.turns), 'turn')} on {plan.gpus} x {kind.name}",
        f"memory: {'fits' if plan.fits else 'does not fit'}: at most {gigabytes(plan.peak)}{limit} on a device, "
        f"{gigabytes(plan.host)} of main memory",
    ]
    if kind.known:
        lines.append(f"speed: {duration(plan.seconds)} a step, {plan.tokens_per_s:,.0f} tokens/s")
    figure.suptitle("\n".join(lines), fontsize="medium", wrap=True)
    figure.savefig(path, format="png")
    return path


def lanes(turn: Slot, a_round: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a turn's lanes, for the micro-batches of a round.

    Args:
        rounds: of a step; in all but the first the sums so far are fetched too.
    """
    number = len(own_lanes(turn.share, 0, a_round))
    fetched = turn.weights + (turn.sums if rounds > 1 else 0.0) + number * turn.enters
    return {
        "its micro-batches are computed": turn.begins + number * turn.seconds,
        "weights, sums and inputs arrive": fetched / HOST_LINK,
        "sums and outputs leave": (turn.sums + number * turn.leaves) / HOST_LINK,
    }


def _draw_memory(panel: Axes, parts: Mapping[str, int], there: int | None, limit: str) -> None:
    """Draw a bar of what memory holds, and a line where it ends, if that is known; `limit` is the line's label."""
    begin = 0.0
    for name, size in parts.items():
        panel.barh([0], [size / GIGA], left=begin, label=name)
        begin += size / GIGA
    if there:
        panel.axvline(there / GIGA, color="black", linewidth=0.8, linestyle="--", label=limit)
    panel.set_xlim(0, 1.05 * max(begin, (there or 0) / GIGA))
    panel.set_yticks([])


def _draw_turns(panel: Axes, plan: StreamedPlan) -> None:
    unit = 1.0 if plan.basis.device.known else plan.seconds
    rounds = plan.basis.micro_batches // plan.slots.a_round
    every = [lanes(turn, plan.slots.a_round, rounds) for turn in plan.turns]
    for name, colour in zip(every[0], ("tab:gray", "tab:purple", "tab:cyan"), strict=True):
        panel.stairs([turn[name] / unit for turn in every], label=name, color=colour, linewidth=1.2, baseline=None)

    forward, heads = len(plan.slots.forward), plan.slots.heads
    for border in (forward, forward + heads):
        panel.axvline(border, color="lightgray", linewidth=0.8, zorder=0)
    middles = [forward / 2, forward + heads / 2, forward + heads + len(plan.slots.backward) / 2]
    panel.set_xticks(middles, ["forward", "head", "backward"])
    panel.set_xlim(0, len(plan.turns))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("turns of a round")
    panel.set_ylabel("time, s" if plan.basis.device.known else "time, of the step")
