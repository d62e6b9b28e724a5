"""A timeline as a picture: one row a rank, one colour a kind of work, the micro-batches' numbers in the bars.

Where a rank has two stages (dualpipev), the numbers of the second one have a prime.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from training.schedule.instructions import WORK
from training.schedule.simulation import Span

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weights": "#ffbe7d",
    "send": "#72b7b2",
    "receive": "#b279a2",
    "exchange": "#72b7b2",
    "optimizer": "#54a24b",
    "data": "#eeca3b",
    "idle": "#e6e6e6",
}
WIDTH, HEIGHT, ROW, DPI = 16.0, 1.8, 0.45, 120  # inches: of the picture, of its frame, of a rank; dots an inch
NARROWEST = 0.012  # of the width: a bar that a number fits into


def draw(rows: Sequence[Sequence[Span]], names: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG of one step.

    Args:
        rows: the spans by rank.
        names: of the ranks.

    Raises:
        OSError: it cannot be written.
    """
    figure = Figure(figsize=(WIDTH, HEIGHT + ROW * len(rows)), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    panel.set_title(title)
    begin = min(span.begin for spans in rows for span in spans)
    end = max(span.end for spans in rows for span in spans)
    for row, spans in enumerate(rows):
        for kind, colour in COLOURS.items():
            bars = [(span.begin - begin, span.end - span.begin) for span in spans if span.kind == kind]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
        first = min(span.stage for span in spans)
        for span in spans:
            if span.kind in WORK and span.end - span.begin > NARROWEST * (end - begin):
                middle = (span.begin + span.end) / 2 - begin
                text = f"{span.micro_batch}" if span.stage == first else f"{span.micro_batch}'"
                panel.text(middle, row, text, ha="center", va="center", fontsize=6, color="white")
    panel.set_xlim(0, end - begin)
    panel.set_xlabel("seconds")
    panel.set_yticks(range(len(rows)), names)
    panel.invert_yaxis()
    shown = {span.kind for spans in rows for span in spans}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small", frameon=False)
    figure.savefig(path, format="png")
