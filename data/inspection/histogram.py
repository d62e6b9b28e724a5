"""The lengths of the samples as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy

from data.tokenized.dataset import Dataset

BINS = 60
SIZE, DPI = (9.0, 5.0), 120  # inches and dots an inch


def draw_lengths(dataset: Dataset, max_seq_len: int, path: Path) -> Path:
    """Draw how many samples have how many tokens, each type of record in its own colour, as a PNG.

    Raises:
        OSError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second

    types = numpy.array(dataset.types)
    kinds = sorted(set(dataset.types))
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    lengths = [dataset.lengths[types == kind] for kind in kinds]
    longest = int(dataset.lengths.max())
    axes.hist(lengths, bins=min(BINS, longest), range=(0, longest), stacked=True, label=kinds)
    axes.axvline(dataset.lengths.mean(), color="black", linewidth=0.8, linestyle="--", label="mean")
    if longest >= max_seq_len:
        axes.axvline(max_seq_len, color="tab:red", linewidth=0.8, label="max_seq_len")
    axes.set_title(f"{len(dataset):,} samples")
    axes.set_xlabel("tokens")
    axes.set_ylabel("samples")
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")
    return path
