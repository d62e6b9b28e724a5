"""Jobs one after the other on a machine that nobody watches, each in processes of its own.

A job is a command that leaves its figures with `benchmarks.ranks.tell`, or only prints. It gets a time limit, is killed
with all that it started, and whatever becomes of it is one row: its figures, or why there are none and the end of what
it printed; the others go on. Each row is printed as it comes and appended to a file of JSON lines, so that nothing is
lost when the machine goes. A job whose estimate does not fit into the minutes that are left is said to be left out, and
shorter ones behind it still get their turn. Before `--wheels` is installed nothing is needed but the standard library
and packaging, which transformers brings.
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
from typing import Any

from benchmarks import wheels
from benchmarks.ranks import RESULT, ROOT, environment

SLACK = 3.0  # times its estimate that a job may take
TAIL_LINES, TAIL_WIDTH = 25, 300
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Refused)\b.*")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        minutes: that it takes, start included: an estimate.
        command: without the folder for its figures, which `--folder` names where `tells`.
        needs: modules without which it is left out.
        obstacle: why it is left out in any case.
        tells: whether it leaves figures; else the last line that it prints counts.
    """

    name: str
    minutes: float
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    obstacle: str = ""
    tells: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def parser(prog: str, description: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """The command line that all benchmarks of this kind have."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    made.add_argument("--wheels", type=Path, metavar="FOLDER", help="install what is missing from this folder first")
    made.add_argument("--minutes", type=float, default=60.0, help="start nothing that would take longer (%(default)g)")
    made.add_argument("--only", nargs="+", choices=list(names), metavar="NAME", help=f"of: {', '.join(names)}")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the script")
    made.set_defaults(began=time.monotonic())  # installing takes some of the minutes
    made.add_argument("--results", type=Path, default=Path("runs") / f"{prog.rpartition('.')[2]}.jsonl")
    return made


def prepare(arguments: argparse.Namespace, gpus: int) -> int | None:
    """Install the wheels and say what is not as requirements.txt has it; how many GPUs there are, None for a CPU.

    Args:
        gpus: that the benchmark needs.

    Raises:
        SystemExit: there are fewer, or the wheels cannot be installed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job that is under way ends as well
    if arguments.wheels:
        say(*wheels.install(arguments.wheels))
        if site.ENABLE_USER_SITE:  # where pip installs if it may not write elsewhere; it may be new
            site.addsitedir(site.getusersitepackages())
        importlib.invalidate_caches()
    say(*wheels.differences())
    if arguments.device == "cpu":
        return None
    import torch

    found = torch.cuda.device_count()
    if found < gpus:
        sys.exit(f"error: GPUs of this machine: {found}; expected at least {gpus}, or --device cpu to try the script")
    return found


def run_all(jobs: Sequence[Job], arguments: argparse.Namespace, words: Callable[[Row], str]) -> list[Row]:
    """Run jobs in their order; their rows.

    Args:
        words: figures for people, in a line.
    """
    end = arguments.began + 60 * arguments.minutes
    chosen = [job for job in jobs if not arguments.only or job.name in arguments.only]
    say(
        f"{len(chosen)} ways, {sum(job.minutes for job in chosen):.1f} minutes by estimate; {arguments.minutes:g} given"
    )
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for job in chosen:
            left = end - time.monotonic()
            obstacle = _obstacle(job, left)
            # On a CPU, where the script is tried, a slow machine is no error.
            limit = left if arguments.device == "cpu" else min(SLACK * 60 * job.minutes, left)
            row = {"left_out": obstacle} if obstacle else _run(job, Path(folder) / job.name, limit)
            rows.append({"way": job.name, **row})
            with open(arguments.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            say(*_lines(rows[-1], words))
    missed = [row["way"] for row in rows if "left_out" in row]
    failed = [row["way"] for row in rows if "reason" in row]
    for what, names in (("left out", missed), ("failed", failed)):
        say(*([f"{what}: {', '.join(names)}"] if names else []))
    say(f"rows: {arguments.results.resolve()}")
    return rows


def say(*lines: str) -> None:
    """Print at once: whoever reads this may never see the end."""
    for line in lines:
        print(line, flush=True)


def _obstacle(job: Job, left: float) -> str | None:
    """Why a job is not started."""
    if job.obstacle:
        return job.obstacle
    missing = [module for module in job.needs if not find_spec(module)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if 60 * job.minutes > left:
        return f"it takes {job.minutes:g} minutes by estimate, and {left / 60:.1f} are left"
    return None


def _run(job: Job, folder: Path, limit: float) -> Row:
    """A job's row.

    Args:
        limit: seconds that it may take.
    """
    folder.mkdir()
    command = [*job.command, *(["--folder", str(folder)] if job.tells else [])]
    begin = time.monotonic()
    with open(folder / "printed", "wb") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"HF_HUB_OFFLINE": "1"} | dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            reason = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"killed after {limit:.0f} s"
        finally:  # also where the user presses Ctrl-C
            _kill(process)
    seconds = time.monotonic() - begin
    lines = [
        line[:TAIL_WIDTH] for line in (folder / "printed").read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    told = folder / RESULT
    if not reason and job.tells and not told.is_file():
        reason = "it left no figures"
    row = {"seconds": seconds}
    if told.is_file():  # also of one that failed when it had measured, as some do at their exit
        row |= json.loads(told.read_text(encoding="utf-8"))
    if not reason:
        return row if job.tells else row | {"said": lines[-1] if lines else ""}
    errors = [found[0] for line in lines if (found := _ERROR.search(line))]
    why = (errors or lines or ["it printed nothing"])[-1]
    return row | {"reason": f"{reason}: {why}", "tail": lines[-TAIL_LINES:]}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a job with all that it started, in whatever session."""
    for child in _below(process.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with suppress(ProcessLookupError):  # whoever outlived its parents, in the session that the job began
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _below(process: int) -> list[int]:
    """All that a process started and what these started, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(status.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _lines(row: Row, words: Callable[[Row], str]) -> list[str]:
    name = f"{row['way']:<20}"
    if "left_out" in row:
        return [f"{name} left out: {row['left_out']}"]
    measured = set(row) - {"way", "seconds", "reason", "tail"}
    lines = [f"{name} {words(row)}  ({row['seconds']:.0f} s)"] if measured else []
    if "reason" in row:
        lines += [f"{name} FAILED: {row['reason']}", *(f"    | {line}" for line in row["tail"])]
    return lines
