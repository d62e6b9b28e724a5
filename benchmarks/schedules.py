"""Draw 1F1B over whole rows and over rows in chunks, side by side, as the planner simulates them.

`python -m benchmarks.schedules docs/pictures/chunks.png`: 4 stages, 4 rows, 4 chunks a row; backward passes take twice
as long as forward ones.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from pathlib import Path

from options.planner.simulation import simulate

STAGES, ROWS, CHUNKS = 4, 4, 4
COLOURS = (("tab:blue", "lightsteelblue"), ("tab:orange", "navajowhite"))  # of every second row: forward, backward


def draw(path: Path) -> None:
    """Write the picture as a PNG."""
    from matplotlib.figure import Figure

    panels = Figure(figsize=(12, 4), dpi=100, layout="constrained").subplots(2, 1, sharex=True)
    for panel, chunks in zip(panels, (1, CHUNKS), strict=True):
        seconds = [1 / chunks] * STAGES
        simulated = simulate("1f1b", seconds, [2 * each for each in seconds], ROWS, chunks=chunks)
        colours = dict(zip(range(ROWS), cycle(COLOURS), strict=False))
        for span in simulated.spans:
            assert span.micro_batch is not None
            row, chunk = divmod(span.micro_batch, chunks)
            forward, backward = colours[row]
            bar = [(span.begin, span.end - span.begin)]
            colour = forward if span.kind == "forward" else backward
            panel.broken_barh(bar, (span.stage - 0.45, 0.9), facecolors=colour, edgecolor="white", linewidth=0.5)
            name = f"{row + 1}" if chunks == 1 else f"{row + 1}{'abcdefgh'[chunk]}"
            panel.text((span.begin + span.end) / 2, span.stage, name, ha="center", va="center", fontsize=6)
        panel.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
        panel.invert_yaxis()
        rows = "whole rows" if chunks == 1 else f"rows in {chunks} chunks"
        panel.set_title(f"{rows}: bubble {simulated.bubble:.1%}", fontsize="medium", loc="left")
    panels[-1].set_xlabel("time; a row's forward pass through a stage takes 1; forward dark, backward light")
    panels[0].figure.savefig(path, format="png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw 1F1B over whole rows and over rows in chunks.")
    parser.add_argument("path", type=Path, help="of the PNG")
    draw(parser.parse_args().path)
