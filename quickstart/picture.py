"""One picture of a run: loss, learning rate, throughput and memory above the timeline of two steps."""

from __future__ import annotations

from pathlib import Path

import numpy
from matplotlib.image import imread, imsave

from options.reports.report import draw_run
from options.timeline.session import CHART_FILE

PICTURE = "picture.png"


def draw_picture(run_folder: Path, target: Path) -> Path:
    """Draw the run's curves, and its timeline below them where it recorded one.

    Raises:
        OSError, ValueError: as `options.reports.report.draw_run`.
    """
    # The run's own folder is called checkpoints, in every quickstart.
    parts = [imread(draw_run(run_folder, title=target.resolve().parent.name))]
    if (run_folder / CHART_FILE).is_file():
        parts.append(imread(run_folder / CHART_FILE))
    width = max(part.shape[1] for part in parts)
    rows = []
    for part in parts:
        left = (width - part.shape[1]) // 2
        row = numpy.ones((part.shape[0], width, 3), part.dtype)
        row[:, left : left + part.shape[1]] = part[:, :, :3]
        rows.append(row)
    imsave(target, numpy.concatenate(rows))
    return target
