"""Summarise the data before a run, with warnings to act on.

`table` counts per file and type of record, `facts` and `packing` sum up, `warnings` says what is probably not as it was
meant, `report` all of it. It is known from the cache; only looking for records that are both trained and evaluated on
takes time, a second for ten million samples.
"""

from __future__ import annotations

from pathlib import Path

import numpy
from rich.console import Console

from common.quantities import counted
from common.terminal import safe_line
from data.loader import Loader
from data.tokenized.dataset import Dataset
from data.tokenized.meta import Tally

LENGTHS_FILE = "lengths.png"
BINS = 60
SIZE, DPI = (9.0, 5.0), 120  # inches and dots an inch
ROWS = 20  # of the table
LONGEST_EXAMPLE = 360  # characters
LONGEST_NAME = 60  # characters of a field's name
CUT, SUPERVISED, DUPLICATES, EMPTY, SILENT = 0.1, 0.05, 0.01, 0.01, 0.01  # shares beyond which there is a warning
COLUMNS = ("file", "type", "records", "samples", "tokens", "supervised", "cut", "split", "left out", "empty answers")


def table(dataset: Dataset) -> str:
    """Count the records of each file and type, the largest first, as log lines of any width."""
    groups = sorted(dataset.tallies.items(), key=lambda group: -group[1].tokens)
    rows = [COLUMNS, *((safe_line(Path(file).name), kind, *_numbers(tally)) for (file, kind), tally in groups[:ROWS])]
    if len(groups) > ROWS:
        rest = sum((tally for _, tally in groups[ROWS:]), Tally())
        rows.append((f"{len(groups) - ROWS} more", "", *_numbers(rest)))
    if len(groups) > 1:
        rows.append(("together", "", *_numbers(dataset.total)))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, str.ljust, *[str.rjust] * (len(COLUMNS) - 2)]
    lines = []
    for row in rows:
        cells = (pad(text, width) for pad, text, width in zip(sides, row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def facts(dataset: Dataset, max_seq_len: int, what: str = "an epoch") -> list[str]:
    """Describe the whole set in lines.

    Args:
        what: the set is.
    """
    lengths = dataset.lengths
    mean, median, longest = lengths.mean(), numpy.median(lengths), lengths.max()
    tokens, supervised = int(lengths.sum(dtype=numpy.int64)), int(dataset.supervised.sum(dtype=numpy.int64))
    lines = [
        f"{what}: {counted(len(dataset), 'sample')}, {tokens:,} tokens, {supervised / tokens:.0%} of them supervised",
        f"lengths: {mean:.0f} tokens on average, median {median:.0f}, longest {longest}",
        f"duplicates: {dataset.duplicates:,} samples equal an earlier one",
    ]
    if dataset.total.cut:
        lines.append(
            f"cut to max_seq_len {max_seq_len}: {dataset.total.cut:,} records, {dataset.total.cut_at_turn:,} of them "
            f"at the end of a turn; the longest had {dataset.total.longest:,} tokens"
        )
    if unused := [f"{safe_line(name, LONGEST_NAME)} ({count:,})" for name, count in dataset.unused.items()]:
        more = f" and {len(unused) - ROWS} more" if len(unused) > ROWS else ""
        lines.append(f"fields that were not used, and in how many records: {', '.join(unused[:ROWS])}{more}")
    return lines + dataset.skipped


def warnings(dataset: Dataset, max_seq_len: int) -> list[str]:
    """Warn of what is worth a look before hours of training."""
    total, n = dataset.total, len(dataset.samples)
    supervised = total.supervised / max(total.tokens, 1)
    found = []
    if total.cut > CUT * total.records:
        found.append(
            f"{total.cut / total.records:.0%} of the records are cut: raise max_seq_len, now {max_seq_len}; "
            f"the longest record has {total.longest} tokens"
        )
    if supervised < SUPERVISED:
        found.append(
            f"only {supervised:.1%} of the tokens are trained: most of the work goes into prompts; look with --inspect"
        )
    if dataset.duplicates > DUPLICATES * n:
        found.append(
            f"{dataset.duplicates / total.samples:.0%} of the samples are exact duplicates: remove them, or give their "
            "file a repeat if they shall count more"
        )
    if total.empty > EMPTY * total.records:
        found.append(f"{total.empty:,} records have an empty answer: they teach the model to say nothing")
    if total.control:
        found.append(
            f"{total.control:,} records have the name of a control token in their words, such as an end of turn: it is "
            "read as that token, in training as on a server"
        )
    if total.equal:
        found.append(f"{counted(total.equal, 'pair')} left out, as both answers are equal within max_seq_len")
    if total.silent > SILENT * total.records:
        found.append(
            f"{total.silent / total.records:.0%} of the records are left out, as no token within max_seq_len "
            f"{max_seq_len} is trained"
        )

    for note, count, example in dataset.notes:
        found.append(f"{counted(count, 'record')}: {note}; such as {safe_line(example, LONGEST_EXAMPLE)}")
    if dataset.n_bad:
        found.append(f"{dataset.n_bad:,} bad records are left out (on_bad_record: skip)")
    return found


def overlap(dataset: Dataset, evaluation_set: Dataset) -> list[str]:
    """Warn if records are both trained and evaluated on."""
    common = int(numpy.isin(evaluation_set.digests, dataset.digests).sum())
    if not common:
        return []
    return [
        f"{common:,} of {len(evaluation_set):,} samples of the evaluation data are trained on too: eval_loss says "
        "little about new ones"
    ]


def _numbers(tally: Tally) -> tuple[str, ...]:
    share = f"{tally.supervised / tally.tokens:.0%}" if tally.tokens else "-"
    counts = [f"{count:,}" for count in (tally.records, tally.samples, tally.tokens)]
    return (
        *counts,
        share,
        *(f"{count:,}" for count in (tally.cut, tally.split, tally.silent + tally.equal, tally.empty)),
    )


def report(
    dataset: Dataset,
    evaluation_set: Dataset | None,
    loader: Loader,
    max_seq_len: int,
    folder: Path,
    log: Console,
    what: str = "an epoch",
) -> None:
    """Log what a run is about to train on, and draw the lengths into its folder.

    Args:
        what: the dataset is: an epoch, or a window of a stream.
    """
    log.print(f"records:\n{table(dataset)}")
    if evaluation_set is not None:
        log.print(f"evaluation records:\n{table(evaluation_set)}")
    for line in [*facts(dataset, max_seq_len, what), *packing(loader, len(dataset))]:
        log.print(line)
    try:
        log.print(f"lengths drawn: {draw_lengths(dataset, max_seq_len, folder / LENGTHS_FILE)}")
    except OSError as error:
        log.print(f"warning: no picture of the lengths: {error}")
    found = warnings(dataset, max_seq_len)
    for warning in found + (overlap(dataset, evaluation_set) if evaluation_set is not None else []):
        log.print(f"warning: {warning}")


def draw_lengths(dataset: Dataset, max_seq_len: int, path: Path) -> Path:
    """Draw how many samples have how many tokens, each type of record in its own colour, as a PNG.

    Raises:
        OSError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    lengths = [dataset.lengths[dataset.of_type(kind)] for kind in dataset.types]
    longest = int(dataset.lengths.max())
    axes.hist(lengths, bins=min(BINS, longest), range=(0, longest), stacked=True, label=dataset.types)
    axes.axvline(dataset.lengths.mean(), color="black", linewidth=0.8, linestyle="--", label="mean")
    if longest >= max_seq_len and not dataset.first.any():  # of a pair it limits each document
        axes.axvline(max_seq_len, color="tab:red", linewidth=0.8, label="max_seq_len")
    axes.set_title(f"{len(dataset):,} samples")
    axes.set_xlabel("tokens")
    axes.set_ylabel("samples")
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")
    return path


def packing(loader: Loader, samples: int) -> list[str]:
    """Describe in lines how samples are packed."""
    kept = f"; {loader.efficiency():.1%} of the tokens are no padding" if loader.steps_per_epoch else ""
    if not loader.packing:
        return [f"packing: off, each sample has a row of its own{kept}"]
    if loader.packing == "batch":
        return [f"packing: the samples of each batch, in rows of at most {loader.row_length} tokens{kept}"]
    rows, steps = loader.rows_per_epoch, loader.steps_per_epoch
    a_step = samples / rows * loader.batch_size
    return [
        f"packing: the whole epoch, {samples} samples in {rows} rows of at most {loader.row_length} tokens{kept}",
        f"train_batch_size counts rows: {loader.batch_size} of them hold {a_step:.0f} samples, so an epoch has {steps} "
        f"steps instead of {-(-samples // loader.batch_size)}",
    ]
