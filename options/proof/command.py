"""`train_ds.py --config F --prove`: check that this machine trains the user's config correctly.

A small model of the same kind trains a few steps on the user's records, with the script, launcher and processes of a
real run, and one process computes the same steps (`options.proof.reference`). Then the run is repeated, killed in the
middle of a step, and resumed; its export is read back. The exit code is 0 if all results agree, else 1.

Cost: three starts of the run and tokenizing its records: 48 s of processor time with two processes, 77 s with four,
shared by the cores. Everything but the certificate, proof.json, is in a temporary folder.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.log import Log
from common.whole_files import replace_text
from models.checkpoint.publish import writing
from options.proof.comparison import Comparison, Row
from options.proof.exports import compare_exports, plan_exports
from options.proof.small_run import SAVED, STEPS, SmallRun
from training.checkpoint.folder import step_folder
from training.config.gpu import check_gpu
from training.config.keys import TrainConfig
from training.config.precision import FP8
from training.distributed.joining import set_threads
from training.metrics.run_info import CODE, git_state, machine, versions
from training.metrics.step_metrics import to_json

CERTIFICATE = "proof.json"
NOT_PROVED, ENDED = 1, 143
WIDTH = 120  # columns of a table in a file


def prove_run(config: TrainConfig, script: str) -> None:
    """Print the results, write the certificate, and exit with 1 if a property fails.

    Args:
        script: that the user started.

    Raises:
        ConfigError, CheckpointError, DataError, RunRefused: the config, the model or the records are unusable.
    """
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))  # so that a run's processes are killed
    check_gpu(config.model_copy(update={"fp8": FP8()}))  # the small run has no fp8
    begin, save_path = time.monotonic(), Path(config.save_path)
    with writing(save_path):
        save_path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="pipetune-proof-") as folder:
        small = SmallRun.make(config, Path(folder), log)
        set_threads(1, small.spec.config.hidden_size)
        small.differs.extend(plan_exports(small.spec)[1])
        for line in small.differs:
            log.print(line)
        rows = _run_all(small, script, log)
    seconds = time.monotonic() - begin
    grid = small.config.model_topo.process_topology
    log.print(table(rows, f"{small.spec.family.name}, {small.config.schedule}, {grid.axes} {grid.dims}, {STEPS} steps"))
    failed = [row for row in rows if not row.holds]
    for row in failed:
        log.print(Text(f"{row.what}: {_short(row.largest)} at {row.where}; expected {_short(row.bound)}", "bold red"))
    with writing(save_path):
        path = write_certificate(config, small.config, small.differs, rows, seconds)
    log.print(f"{'NOT proved' if failed else 'proved'} in {seconds:.0f} s; the certificate: {path}")
    if failed:
        sys.exit(NOT_PROVED)


def _run_all(small: SmallRun, script: str, log: Console) -> list[Row]:
    """Let another model fill the cache, run, compute the reference, export, run again, kill and resume."""
    whole, broken = small.start(script, "run"), small.start(script, "killed")
    if small.config.objective.formula().begins_alone:
        small.write_weights(small.config.seed + 1)
        with _progress(log, "another model leaves its reference in the cache", 1) as show:
            small.start(script, "other", max_steps=1).run(show)
        small.write_weights(small.config.seed)
    with _progress(log, f"run in {small.config.model_topo.processes} processes") as show:
        whole.run(show)
    with _progress(log, "reference in one process") as show:
        comparison = Comparison(small, whole)
        comparison.compare_reference(show)
    exported = compare_exports(small, step_folder(whole.folder, STEPS))
    with _progress(log, f"the run again, killed by SIGKILL in step {SAVED + 1}", SAVED) as show:
        broken.run(show, hold=SAVED + 1)
    with _progress(log, f"resumed after step {SAVED}") as show:
        broken.run(show)
    comparison.compare_resumed(broken)
    return [*comparison.rows, *exported]


@contextmanager
def _progress(log: Console, what: str, steps: int = STEPS) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, which takes the number of completed steps, and log a line at the end."""
    begin = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.update(task, completed=done)
    log.print(f"{what}: {steps} steps, {time.monotonic() - begin:.1f} s")


def table(rows: Sequence[Row], title: str) -> Table:
    """Build the table, with a row for each property."""
    made = Table(title=title, title_justify="left")
    for heading in ("property", "compared", "largest", "bound", "verdict", "where"):
        made.add_column(heading, justify="right" if heading in ("compared", "largest", "bound") else "left")
    for row in rows:
        verdict = Text("holds", "green") if row.holds else Text("FAILS", "bold red")
        where = row.where if row.largest else ""
        made.add_row(row.what, f"{row.count:,}", _short(row.largest), _short(row.bound), verdict, where)
    return made


def _short(value: float) -> str:
    """Format a difference or a bound."""
    return f"{value:.1e}" if value else "0"


def write_certificate(
    config: TrainConfig, small: TrainConfig, differs: Sequence[str], rows: Sequence[Row], seconds: float
) -> Path:
    """Write proof.json to `save_path`, atomically, and return its path.

    Args:
        differs: lines on how the small run differs from the user's.
    """
    path = Path(config.save_path) / CERTIFICATE
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if torch.cuda.is_available() else {}
    content = {
        "proved": all(row.holds for row in rows),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config_sha256": hashlib.sha256(to_json(config.dump())).hexdigest(),
        "versions": versions() | nccl,
        "git": git_state(CODE),
        "machine": machine(),
        "dims": config.model_topo.process_topology.dims,
        "small_dims": small.model_topo.process_topology.dims,
        "differs": list(differs),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
        "small_config": small.dump(),
    }
    replace_text(path, to_json(content, indent=2).decode() + "\n")
    return path
