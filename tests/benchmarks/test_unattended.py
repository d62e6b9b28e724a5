"""Jobs that nobody watches: one that dies, hangs or lies is a row, and the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu, gpus
from benchmarks.unattended import ROWS, SLACK, Job, Row, parser, run_all
from tests import launching
from tests.conftest import ROOT

WRITES = "import sys, json; open(sys.argv[2] + '/result.json', 'w').write(json.dumps({'speed': 7}))"
DIES = "import sys; print('loading'); print('torch.OutOfMemoryError: too much'); print('noise'); sys.exit(3)"
HANGS = """
import subprocess, sys, time
apart = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(apart.pid, flush=True)
time.sleep(600)
"""


def job(name: str, script: str, minutes: float = 0.5, figures: bool = True, **more: Any) -> Job:
    return Job(name, minutes, [sys.executable, "-c", script], has_figures=figures, **more)


def run(jobs: list[Job], folder: Path, *words: str) -> list[Row]:
    """The rows; the same must stand in the file."""
    out = folder / "deep" / "out"
    options = parser("benchmarks.some", "", [each.name for each in jobs])
    rows = run_all(jobs, options.parse_args(["--out", str(out), *words]), str)
    assert [json.loads(line) for line in (out / ROWS).read_text(encoding="utf-8").splitlines()] == rows
    return rows


def test_failures_are_rows_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        job("dies", DIES),
        job("forgets", "print('done')"),
        job("crashes", "import os; os.abort()"),
        job("late", WRITES + "; sys.exit('at exit')"),
        job("lacks", WRITES, needs=("no_such_package",)),
        job("writes", WRITES),
        job("prints", "print('first'); print('2 passed')", figures=False),
    ]
    rows = {row["way"]: row for row in run(jobs, tmp_path)}
    assert list(rows) == [each.name for each in jobs]
    assert rows["dies"]["reason"] == "exit code 3: OutOfMemoryError: too much"
    assert rows["dies"]["tail"] == ["loading", "torch.OutOfMemoryError: too much", "noise"]
    assert rows["forgets"]["reason"] == "it left no figures: done"
    assert rows["crashes"]["reason"].startswith("ended by SIGABRT")
    assert (rows["late"]["speed"], rows["late"]["reason"]) == (7, "exit code 1: at exit")
    assert rows["lacks"]["left_out"] == "no_such_package is not installed"
    assert rows["writes"]["speed"] == 7
    assert rows["prints"]["said"] == "2 passed"
    printed = capsys.readouterr().out
    *_, table = printed.partition("\n\n")
    fates = {line[:19].strip(): line[19:28].strip() for line in table.splitlines()[:-1]}
    failed = dict.fromkeys(("dies", "forgets", "crashes", "late"), "FAILED")
    assert fates == failed | {"lacks": "left out", "writes": "ok", "prints": "ok"}
    assert "    | noise" in printed


@pytest.mark.slow
def test_one_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    hanging, after = run([job("hangs", HANGS, minutes=3 / 60 / SLACK), job("writes", WRITES)], tmp_path)
    assert hanging["reason"].startswith("killed after 3 s")
    launching.eventually(lambda: ended(int(hanging["tail"][0])))
    assert after["speed"] == 7


def ended(process: int) -> bool:
    """Return whether it is there no more, or only waits to be counted."""
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_job_ends_with_the_command_that_is_terminated(tmp_path: Path) -> None:
    script = f"""
import sys
from benchmarks.unattended import Job, parser, prepare, run_all
words = ["--device", "cpu", "--out", {str(tmp_path / "out")!r}]
options = parser("benchmarks.some", "", ["hangs"]).parse_args(words)
prepare(options, gpus=1)
run_all([Job("hangs", 1, [sys.executable, "-c", {HANGS!r}], has_figures=False)], options, str)
"""
    launch = launching.start(sys.executable, "-c", script)
    launch.until(lambda: len(launch.family()) == 3)
    job, apart = launch.family()[1:]
    psutil.Process(launch.pid).terminate()
    assert launch.end().returncode == 143
    launching.eventually(lambda: ended(job.pid) and ended(apart.pid))


def test_what_does_not_fit_into_the_minutes_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job("first", WRITES, 1.0), job("long", WRITES, 3.0), job("short", WRITES, 0.5)]
    rows = run(jobs, tmp_path, "--minutes", "2")
    assert [row.get("speed") for row in rows] == [7, None, 7]
    assert rows[1]["left_out"].startswith("it takes 3 minutes by estimate, and ")
    assert "\nlong               left out " in capsys.readouterr().out


def test_only_those_that_are_asked_for_run_in_the_order_of_value(tmp_path: Path) -> None:
    jobs = [job(name, WRITES) for name in ("first", "second", "third")]
    assert [row["way"] for row in run(jobs, tmp_path, "--only", "third", "first")] == ["first", "third"]


def test_the_tables_begin_with_the_checks() -> None:
    names = [each.name for each in gpu.jobs(full=False, cpu=False)]
    assert names[:6] == ["kernels", "attention", "parity", "race", "offload-off", "offload-on"]
    assert len(set(names)) == len(names)
    assert not any(each.obstacle for each in gpu.jobs(full=False, cpu=False))
    full = {each.name: each.minutes for each in gpu.jobs(full=True, cpu=False)}
    assert full["eager"] > next(each.minutes for each in gpu.jobs(full=False, cpu=False) if each.name == "eager")
    two, four = gpus.jobs(2), gpus.jobs(4)
    assert two[0].name == gpus.REFERENCE
    assert [each.name for each in two if each.obstacle] == ["exact-2x2", "exact-four-stages", "2x2", "four-stages"]
    assert not any(each.obstacle for each in four)


def test_nothing_is_imported_that_the_wheels_would_bring() -> None:
    script = "import sys, benchmarks.gpu, benchmarks.gpus; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "pydantic", "yaml", "psutil", "rich"}.isdisjoint(loaded.stdout.split())


@pytest.mark.parametrize("module", ["benchmarks.gpu", pytest.param("benchmarks.gpus", marks=pytest.mark.slow)])
def test_too_few_gpus_are_refused_in_a_line(module: str) -> None:
    found = launching.run(sys.executable, "-m", module, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 1
    assert found.stderr.startswith("error: GPUs: 0; expected at least ")
    assert len(found.stderr.splitlines()) == 1
