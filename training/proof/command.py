"""`train_ds.py --config F --prove`: that this machine trains as it should, shown with the user's own config.

A small model of the same kind trains a few steps on the user's records, by the door, the launcher and the processes of
a real run, and one process computes the same by itself (`training.proof.reference`). Then the run is done again,
killed in the midst of a step, and resumed. The exit code is 0 when all agree and 1 when something does not.

Cost: three starts of the run and the tokenizing of its records: 48 s of processor time with two processes, 77 s with
four, shared by the cores. Everything but the certificate lies in a temporary folder.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from common.log import Log
from models.checkpoint.publish import writing
from training.config.gpu import check_gpu
from training.config.keys import TrainConfig
from training.config.sections import FP8
from training.distributed.processes import set_threads
from training.proof.certificate import short, table, write_certificate
from training.proof.comparison import Comparison, Row
from training.proof.launches import launched
from training.proof.shrink_config import SAVED, STEPS, room
from training.proof.small_run import SmallRun

NOT_PROVED, ENDED = 1, 143
WIDTH = 120  # of a table that is written to a file


def prove_run(config: TrainConfig, door: str) -> None:
    """Print what holds and what does not, write the certificate, and leave with 1 where something does not.

    Args:
        door: the script that the user started.

    Raises:
        ConfigError, CheckpointError, DataError, RunRefused: the config, the model or the records make no run.
    """
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))  # so that nothing is left under way
    check_gpu(config.model_copy(update={"fp8": FP8()}))  # which the small run leaves out
    begin, save_path = time.monotonic(), Path(config.save_path)
    with writing(save_path):
        save_path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="pipetune-proof-") as folder:
        small = SmallRun.make(config, Path(folder), room(), log)
        set_threads(1, small.spec.config.hidden_size)
        for line in small.differs:
            log.print(line)
        rows = _do(small, door, log)
    seconds = time.monotonic() - begin
    grid = small.config.model_topo.process_topology
    log.print(table(rows, f"{small.spec.family.name}, {small.config.schedule}, {grid.axes} {grid.dims}, {STEPS} steps"))
    failed = [row for row in rows if not row.holds]
    for row in failed:
        log.print(Text(f"{row.what}: {short(row.largest)} at {row.where}; expected {short(row.bound)}", "bold red"))
    with writing(save_path):
        path = write_certificate(config, small.config, small.differs, rows, seconds)
    log.print(f"{'NOT proved' if failed else 'proved'} in {seconds:.0f} s; the certificate: {path}")
    if failed:
        sys.exit(NOT_PROVED)


def _do(small: SmallRun, door: str, log: Console) -> list[Row]:
    """Run, compute the reference, run, kill and resume."""
    whole, broken = small.start(door, "run"), small.start(door, "killed")
    with _told(log, f"run in {small.config.model_topo.processes} processes") as shown, launched(whole) as run:
        run.until(run.ended, shown)
    with _told(log, "reference in one process") as shown:
        comparison = Comparison(small, whole)
        comparison.with_reference(shown)
    what = f"the run again, killed by SIGKILL in step {SAVED + 1}"
    with _told(log, what, SAVED) as shown, launched(broken, hold=SAVED + 1) as run:
        run.until(run.held, shown)
    with _told(log, f"resumed after step {SAVED}") as shown, launched(broken) as run:
        run.until(run.ended, shown)
    comparison.with_resumed(broken)
    return comparison.rows


@contextmanager
def _told(log: Console, what: str, steps: int = STEPS) -> Iterator[Callable[[int], None]]:
    """A bar while something is done, which is told the steps that are done, and a line when it is."""
    begin = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.update(task, completed=done)
    log.print(f"{what}: {steps} steps, {time.monotonic() - begin:.1f} s")
