"""Jobs one after the other on a machine that nobody watches, each in processes of its own.

A job is a command that leaves its figures with `benchmarks.workers.write_figures`, or only prints. It gets a time limit
and is killed with all that it started. Whatever becomes of it is one row: its figures, or why there are none and the
end of what it printed; the others go on. `--out` has everything, written as it comes, so that nothing is lost when the
machine goes: rows.jsonl, log.txt with all that jobs print, and table.txt, which is also printed last. A job whose
estimate does not fit into the minutes that are left is left out, and shorter ones behind it still get their turn.
Before `--wheels` is installed nothing is needed but the standard library and packaging, which transformers brings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from benchmarks import wheels
from benchmarks.workers import RESULT, ROOT, environment

ROWS, LOG, TABLE = "rows.jsonl", "log.txt", "table.txt"
WIDTH = 110  # of a line of the table
SLACK = 3.0  # times its estimate that a job may take
TAIL_LINES, TAIL_WIDTH = 25, 300
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Refused)\b.*")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        minutes: that it takes, start included: an estimate.
        command: without the folder for its figures, which `--folder` names if it `has_figures`.
        needs: modules without which it is left out.
        obstacle: why it is left out in any case.
        has_figures: whether it leaves figures; else the last line that it prints counts.
    """

    name: str
    minutes: float
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    obstacle: str = ""
    has_figures: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def parser(prog: str, description: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """Make the command line that all benchmarks of this kind have."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    made.add_argument("--wheels", type=Path, metavar="FOLDER", help="install what is missing from this folder first")
    made.add_argument("--minutes", type=float, default=9.0, help="start nothing that would take longer (%(default)g)")
    made.add_argument("--only", nargs="+", choices=list(names), metavar="NAME", help=f"of: {', '.join(names)}")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the script")
    made.set_defaults(began=time.monotonic())  # installing takes some of the minutes
    made.add_argument("--out", type=Path, default=Path("runs") / prog.rpartition(".")[2], help="folder of results")
    return made


def prepare(arguments: argparse.Namespace, gpus: int) -> int | None:
    """Install the wheels, report what differs from requirements.txt, import everything, and count GPUs.

    Args:
        gpus: that the benchmark needs.

    Returns:
        The number of GPUs; None for a CPU.

    Raises:
        SystemExit: there are fewer, or a package cannot be installed or imported.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job that is under way ends as well
    if arguments.wheels:
        say(*wheels.install(arguments.wheels))
        if site.ENABLE_USER_SITE:  # where pip installs if it may not write elsewhere; it may be new
            site.addsitedir(site.getusersitepackages())
        importlib.invalidate_caches()
    say(*wheels.differences())
    found = None
    if arguments.device != "cpu":
        import torch

        found = torch.cuda.device_count()
        if found < gpus:
            sys.exit(f"error: GPUs: {found}; expected at least {gpus}, or --device cpu to try the script")
    wheels.check_imports()
    return found


def run_all(
    jobs: Sequence[Job],
    arguments: argparse.Namespace,
    words: Callable[[Row], str],
    missed: Callable[[Row, Sequence[Row]], str] = lambda row, rows: "",
) -> list[Row]:
    """Run jobs in their order; return their rows.

    Args:
        words: shows figures in a line.
        missed: names the goals that a row misses, beside those before it.
    """
    end = arguments.began + 60 * arguments.minutes
    chosen = [job for job in jobs if not arguments.only or job.name in arguments.only]
    say(
        f"{len(chosen)} ways, {sum(job.minutes for job in chosen):.1f} minutes by estimate; {arguments.minutes:g} given"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    table: list[str] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, open(arguments.out / LOG, "ab+") as log:
        for job in chosen:
            left = end - time.monotonic()
            obstacle = _obstacle(job, left)
            # On a CPU, where the script is tried, a slow machine is no error.
            limit = left if arguments.device == "cpu" else min(SLACK * 60 * job.minutes, left)
            row = {"left_out": obstacle} if obstacle else _run(job, Path(folder) / job.name, limit, log)
            row = {"way": job.name, **row}
            rows.append(row | ({"missed": goals} if "reason" not in row and (goals := missed(row, rows)) else {}))
            with open(arguments.out / ROWS, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            say(line_of(rows[-1], words), *(f"    | {line}" for line in rows[-1].get("tail", ())))
            table = [line_of(row, words)[:WIDTH] for row in rows]
            (arguments.out / TABLE).write_text("\n".join(table) + "\n", encoding="utf-8")
    say("", *table, f"results: {arguments.out.resolve()}")
    return rows


def line_of(row: Row, words: Callable[[Row], str]) -> str:
    """Show a row in a line: what became of it, seconds, figures or reasons."""
    fates = {"left_out": "left out", "reason": "FAILED", "missed": "missed"}
    fate = next((fates[key] for key in fates if key in row), "ok")
    text = row.get("left_out") or row.get("reason") or "; ".join(filter(None, (row.get("missed"), words(row))))
    return f"{row['way']:<18} {fate:<9} {row.get('seconds', 0):4.0f} s  {text}"


def say(*lines: str) -> None:
    """Print at once: whoever reads this may never see the end."""
    for line in lines:
        print(line, flush=True)


def _obstacle(job: Job, left: float) -> str | None:
    """Say why a job is not started."""
    if job.obstacle:
        return job.obstacle
    missing = [module for module in job.needs if not find_spec(module)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if 60 * job.minutes > left:
        return f"it takes {job.minutes:g} minutes by estimate, and {left / 60:.1f} are left"
    return None


def _reason(code: int) -> str:
    """Say why a command with this exit code failed; empty where it did not."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _run(job: Job, folder: Path, limit: float, log: IO[bytes]) -> Row:
    """Run a job; return its row.

    Args:
        limit: seconds that it may take.
        log: gets what it prints, at its end.
    """
    folder.mkdir()
    log.write(f"\n---- {job.name}\n".encode())
    log.flush()
    printed_from = log.seek(0, os.SEEK_END)
    command = [*job.command, *(["--folder", str(folder)] if job.has_figures else [])]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | {"HF_HUB_OFFLINE": "1"} | dict(job.environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
        reason = _reason(code)
    except subprocess.TimeoutExpired:
        reason = f"killed after {limit:.0f} s"
    finally:  # also where the user presses Ctrl-C
        kill_all(process)
    seconds = time.monotonic() - begin
    log.seek(printed_from)
    lines = [line[:TAIL_WIDTH] for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    figures = folder / RESULT
    if not reason and job.has_figures and not figures.is_file():
        reason = "it left no figures"
    row = {"seconds": seconds}
    if figures.is_file():  # also of one that failed when it had measured, as some do at their exit
        row |= json.loads(figures.read_text(encoding="utf-8"))
    if not reason:
        said = lines[-1] if lines else ""
        return row if job.has_figures else row | {"said": said}
    errors = [found[0] for line in lines if (found := _ERROR.search(line))]
    why = (errors or lines or ["it printed nothing"])[-1]
    return row | {"reason": f"{reason}: {why}", "tail": lines[-TAIL_LINES:]}


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a job with all that it started, in whatever session."""
    import psutil  # which `--wheels` may have brought

    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    with suppress(ProcessLookupError):  # whoever outlived its parents, in the session that the job began
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
