"""Draw a timeline: a picture of one step, and a trace of all steps for ui.perfetto.dev and chrome://tracing.

The picture has a row per rank, a colour per kind of work, and micro-batch numbers in the bars of a row, upright where
one of them is narrow, none where one is too narrow for that; numbers of a rank's second stage (dualpipev) have a prime.
With weight streaming the bars of a rank are its turns, one after the other. Of rows in chunks, the numbers count the
chunks of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from training.schedule.instructions import WORK
from training.schedule.walk import TimeSpan

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weights": "#ffbe7d",
    "head": "#e45756",
    "send": "#72b7b2",
    "receive": "#b279a2",
    "exchange": "#72b7b2",
    "optimizer": "#54a24b",
    "data": "#eeca3b",
    "idle": "#e6e6e6",
}
WIDTH, HEIGHT, ROW, DPI = 16.0, 1.8, 0.45, 120  # inches: picture, frame, one rank; dots per inch
NARROW, NARROWEST = 0.012, 0.006  # share of the width: the narrowest bar that a number fits into, and an upright one


def draw_timeline(rows: Sequence[Sequence[TimeSpan]], names: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG of one step, given its spans by rank and the names of the ranks."""
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.patches import Patch

    figure = Figure(figsize=(WIDTH, HEIGHT + ROW * len(rows)), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    panel.set_title(title)
    every_span = list(chain.from_iterable(rows))
    begin = min(span.begin for span in every_span)
    end = max(span.end for span in every_span)
    for row, spans in enumerate(rows):
        for kind, colour in COLOURS.items():
            bars = [(span.begin - begin, span.end - span.begin) for span in spans if span.kind == kind]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
        stages = {span.stage for span in spans if span.kind in WORK}
        second = max(stages) if len(stages) == 2 else None
        numbered = [span for span in spans if span.kind in WORK]
        narrowest = min((span.end - span.begin for span in numbered), default=0.0) / (end - begin)
        upright = 90 if narrowest <= NARROW else 0
        for span in numbered if narrowest > NARROWEST else ():
            middle = (span.begin + span.end) / 2 - begin
            text = f"{span.micro_batch}'" if span.stage == second else f"{span.micro_batch}"
            panel.text(middle, row, text, ha="center", va="center", fontsize=6, color="white", rotation=upright)
    panel.set_xlim(0, end - begin)
    panel.set_xlabel("seconds")
    panel.set_yticks(range(len(rows)), names)
    panel.invert_yaxis()
    drawn = {span.kind for span in every_span}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small", frameon=False)
    figure.savefig(path, format="png")


def trace(steps: Mapping[int, Sequence[Sequence[TimeSpan]]], names: Sequence[str]) -> dict[str, Any]:
    """Convert spans by step and rank to the Trace Event Format, in microseconds.

    The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    events: list[dict[str, Any]] = []
    for rank, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for step, rows in steps.items():
        events += [
            {
                "ph": "X",
                "name": span.kind if span.micro_batch is None else f"{span.kind} {span.micro_batch}",
                "cat": span.kind,
                "pid": span.rank,
                "tid": 0,
                "ts": round(span.begin * 1e6, 1),
                "dur": round((span.end - span.begin) * 1e6, 1),
                "args": {"step": step, "stage": span.stage, "micro_batch": span.micro_batch},
            }
            for span in chain.from_iterable(rows)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
