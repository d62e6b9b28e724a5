"""Reports of a run: a JSON line a step, printed lines or a live view, and what a resumed run keeps of them."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from benchmarks.recording import run_in_terminal, screen
from tests.conftest import ROOT
from training.engine.trainer import PARTS
from training.metrics import reporter as module
from training.metrics.live_view import LiveView
from training.metrics.reporter import METRICS_FILE, Reporter, read_metrics
from training.metrics.step_metrics import StepMetrics

STEPS = 7


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        epoch=1 + step // 4,
        loss=2.5 / step,
        lr=1e-4,
        grad_norm=0.75,
        samples=8,
        tokens=1200,
        supervised=400,
        tokens_per_s=2400.0,
        seconds=0.5,
        mfu=None,
        times=dict.fromkeys(PARTS, 0.125),
        peak_memory=[3 * 2**30, 2 * 2**30],
        measures={"rewards/margins": 0.25},
    )


def line(step: StepMetrics) -> dict[str, Any]:
    """What metrics.jsonl has of a step: each measure is a number of its own."""
    values = asdict(step)
    return values | values.pop("measures")


# For programs of their own: importing this file would bring in heavy libraries.
LIGHT = (
    "import sys; from pathlib import Path; from training.metrics.reporter import Reporter\n"
    "from training.metrics.step_metrics import StepMetrics\n"
    "def metrics(step): return StepMetrics(step, 1, 2.5 / step, 1e-4, 0.75, 8, 1200, 400, 2400.0, 0.5,\n"
    "    peak_memory=[3 * 2**30, 2**31])\n"
)


class Recorder:
    """A tracker that remembers its calls, and fails at a given step."""

    name = "recorder"

    def __init__(self, fails_at: int | None = None) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed: bool | None = None
        self.fails_at = fails_at

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the line is dead")
        self.logged.append((step, dict(numbers)))

    def close(self, failed: bool) -> None:
        self.closed = failed


def report(folder: Path, first: int = 1, last: int = STEPS, steps_per_print: int = 3) -> None:
    with Reporter(folder, STEPS, steps_per_print, first) as reporter:
        for step in range(first, last + 1):
            reporter.report(metrics(step))


def reopen(folder: Path, first: int, evaluates_first: bool = False) -> None:
    """Start again without doing a step."""
    Reporter(folder, STEPS, 1, first, evaluates_first=evaluates_first).__exit__(None, None, None)


def strictly(line: bytes | str) -> dict[str, Any]:
    """Read JSON as the standard has it: without NaN and infinities."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    values: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return values


def steps_of(folder: Path) -> list[int]:
    return [strictly(line)["step"] for line in (folder / METRICS_FILE).read_bytes().splitlines()]


def test_each_step_is_a_json_line_with_all_keys_at_once(tmp_path: Path) -> None:
    with Reporter(tmp_path, STEPS, 1) as reporter:
        for step in range(1, 8):
            reporter.report(metrics(step))
            lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
            assert [json.loads(line) for line in lines] == [line(metrics(done)) for done in range(1, step + 1)]
    assert {field.name for field in fields(StepMetrics)} - {"measures"} | {"rewards/margins"} == set(
        json.loads(lines[0])
    )


@pytest.mark.parametrize(("steps_per_print", "printed"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (100, [7])])
def test_some_steps_are_printed_and_always_the_last(
    steps_per_print: int, printed: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, steps_per_print=steps_per_print)
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == [f"{step}/7" for step in printed]
    last = "step 7/7  epoch 2  loss 0.3571  grad_norm 0.750  lr 1.00e-04  2,400 tokens/s  "
    assert out.splitlines()[-1] == f"{last}00:00 left" and err == ""
    with Reporter(tmp_path, 7, 1) as reporter:
        reporter.report(replace(metrics(7), mfu=0.4567))
    assert capfd.readouterr().out == f"{last}MFU 46%  00:00 left\n"


def test_what_is_printed_of_measures_is_the_objectives_to_say(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Reporter(tmp_path, 7, 1, printed={"margin": "rewards/margins"}, unprinted=("rewards", "logps")) as reporter:
        reporter.report(metrics(7))
        reporter.report_evaluation(7, {"eval_loss": 0.5, "eval_rewards/margins": 1.0, "eval_kl": 0.25})
    step, evaluation = capfd.readouterr().out.splitlines()
    assert "  margin 0.25  " in step and evaluation == "step 7/7  eval_loss 0.5000  eval_kl 0.2500"
    assert read_metrics(tmp_path / METRICS_FILE)[1]["eval_rewards/margins"] == 1.0


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Reporter(tmp_path, 2, 1) as reporter:
        reporter.report(replace(metrics(1), loss=math.nan, grad_norm=math.inf, times={"data": -math.inf}))
        reporter.report_evaluation(1, {"eval_loss": 900.0, "eval_perplexity": math.inf})
    step, evaluation = map(strictly, (tmp_path / METRICS_FILE).read_bytes().splitlines())
    assert step == line(metrics(1)) | {"loss": None, "grad_norm": None, "times": {"data": None}}
    assert evaluation == {"step": 1, "eval_loss": 900.0, "eval_perplexity": None}


def test_an_evaluation_is_a_line_of_its_own_and_always_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers = {"eval_loss": 1.5, "eval_perplexity": 4.4817, "eval_loss/instruct": 1.25, "eval_loss/文": 2.0}
    with Reporter(tmp_path, STEPS, 100) as reporter:
        reporter.report_evaluation(0, {"eval_loss": 3.0})
        reporter.report(metrics(1))
        reporter.report_evaluation(1, numbers)
    lines = read_metrics(tmp_path / METRICS_FILE)
    assert lines == [{"step": 0, "eval_loss": 3.0}, line(metrics(1)), {"step": 1} | numbers]
    assert capfd.readouterr().out.splitlines() == [
        "step 0/7  eval_loss 3.0000",
        "step 1/7  eval_loss 1.5000  eval_perplexity 4.4817  eval_loss/instruct 1.2500  eval_loss/文 2.0000",
    ]


@pytest.mark.parametrize(
    "damage", [b"[" * 200_000, b'{"step": 1, "a": ' + b"[" * 200_000, b"\0" * 99, b"{}", b"5"], ids=len
)
def test_a_damaged_line_is_passed_over(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(damage + b'\n{"step": 2}\n')
    assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 2}]
    with Reporter(tmp_path, STEPS, 1, first_step=3):
        pass
    assert (tmp_path / METRICS_FILE).read_bytes().endswith(b'{"step": 2}\n')


@pytest.mark.parametrize("first", range(1, 7))
def test_a_resumed_run_repeats_no_line(first: int, tmp_path: Path) -> None:
    """Killed after step 5, and resumed from any checkpoint: the file is that of the uninterrupted run."""
    report(tmp_path, last=5)
    before = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)
    reopen(tmp_path, first)
    assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(before[: first - 1])
    report(tmp_path, first=first)
    assert read_metrics(tmp_path / METRICS_FILE) == [line(metrics(step)) for step in range(1, STEPS + 1)]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_evaluations_are_dropped_like_steps(tmp_path: Path) -> None:
    with Reporter(tmp_path, STEPS, 1) as reporter:
        reporter.report_evaluation(0, {"eval_loss": 3.0})
        for step in (1, 2, 3):
            reporter.report(metrics(step))
            reporter.report_evaluation(step, {"eval_loss": 1.0})
    reopen(tmp_path, 3)
    assert steps_of(tmp_path) == [0, 1, 1, 2, 2]
    reopen(tmp_path, 3, evaluates_first=True)
    assert steps_of(tmp_path) == [0, 1, 1, 2], "the run evaluates after step 2 again"
    reopen(tmp_path, 1)
    assert steps_of(tmp_path) == [], "a new run keeps nothing of an old one"


@pytest.mark.parametrize(
    ("cut", "torn", "kept"),
    [
        (0, b'{"step": 5, "lo', [1, 2, 3, 4]),
        (0, b'{"step": 5, "loss": 0.5}', [1, 2, 3, 4]),
        (0, b"\0\0\0", [1, 2, 3, 4]),
        (0, b"\xe6\x96", [1, 2, 3, 4]),
        (1, b"", [1, 2, 3, 4]),  # the line's end alone is missing
        (20, b"", [1, 2, 3]),  # step 4 cannot be read, and step 5 begins a line of its own
    ],
)
def test_a_line_torn_by_a_kill_is_dropped(cut: int, torn: bytes, kept: list[int], tmp_path: Path) -> None:
    report(tmp_path, last=4)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).write_bytes(whole[: len(whole) - cut] + torn)
    report(tmp_path, first=5)
    assert steps_of(tmp_path) == [*kept, 5, 6, 7]


def test_a_kill_while_lines_are_dropped_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(tmp_path)
    before = (tmp_path / METRICS_FILE).read_bytes()

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Reporter(tmp_path, STEPS, 1, first_step=3)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    monkeypatch.undo()
    report(tmp_path, first=3)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_killed_process_leaves_every_step_that_it_reported(tmp_path: Path) -> None:
    code = (
        f"{LIGHT}import os, signal; reporter = Reporter(Path(sys.argv[1]), 9, 100)\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "for step in (1, 2, 3): reporter.report(metrics(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False).returncode == -9
    assert steps_of(tmp_path) == [1, 2, 3]


@contextmanager
def no_more_room(folder: Path) -> Iterator[None]:
    """Let no file of this process grow beyond half a line more than metrics.jsonl has now."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (folder / METRICS_FILE).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_no_run_and_loses_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, STEPS, 100) as reporter:
        reporter.report(metrics(1))
        with no_more_room(tmp_path):
            reporter.report(metrics(2))
            reporter.report(metrics(3))
            warnings = capfd.readouterr().err
        reporter.report(metrics(4))
    assert warnings.count("warning: metrics.jsonl: File too large") == 1
    assert read_metrics(tmp_path / METRICS_FILE) == [line(metrics(step)) for step in range(1, 5)]


def test_trackers_receive_every_number_and_how_the_run_ended(tmp_path: Path) -> None:
    tracker, failed = Recorder(), Recorder()
    with Reporter(tmp_path, 2, 1, trackers=[tracker]) as reporter:
        reporter.report(metrics(1))
        reporter.report(replace(metrics(2), mfu=0.5))
        reporter.report_evaluation(2, {"eval_loss": 1.5, "eval_loss/instruct": 1.25})
    (first, numbers), (_, more), (last, evaluation) = tracker.logged
    assert (first, last) == (1, 2)
    assert (numbers["loss"], numbers["times/forward_backward"], numbers["peak_memory/1"]) == (2.5, 0.125, 2 * 2**30)
    assert not {"step", "mfu", "times", "peak_memory"} & set(numbers)
    assert more["mfu"] == 0.5
    assert evaluation == {"eval_loss": 1.5, "eval_loss/instruct": 1.25}
    with pytest.raises(RuntimeError), Reporter(tmp_path, 3, 1, trackers=[failed]) as reporter:
        reporter.report(metrics(1))
        raise RuntimeError
    assert (tracker.closed, failed.closed, steps_of(tmp_path)) == (False, True, [1])


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken, sound = Recorder(fails_at=2), Recorder()
    with Reporter(tmp_path, STEPS, 100, trackers=[broken, sound]) as reporter:
        for step in range(1, STEPS + 1):
            reporter.report(metrics(step))
    assert [step for step, _ in broken.logged] == [1]
    assert [step for step, _ in sound.logged] == steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert capfd.readouterr().err == "warning: recorder: the line is dead; it gets no more numbers of this run\n"


def test_the_time_left_counts_only_the_steps_of_this_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with Reporter(tmp_path, 110, 1, first_step=101) as reporter:
        now += 60
        reporter.report(metrics(101))
        now += 20
        reporter.report(metrics(102))
    left = [line.rsplit("  ", 1)[1] for line in capfd.readouterr().out.splitlines()]
    assert left == ["09:00 left", "05:20 left"]


@pytest.mark.parametrize(("parts", "layers"), [((3, 4), (3, 4)), ((5, 2, 2, 1), (6, 4))])
def test_the_view_has_the_layers_of_each_stage(parts: tuple[int, ...], layers: tuple[int, int]) -> None:
    """Of two chunks with `schedule: dualpipev`."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    view = LiveView(console, 7, parts)
    view.show(metrics(3), "00:09")
    view.close()
    assert isinstance(console.file, io.StringIO)
    assert f"stage 0: {layers[0]} layers, 3.2 GB  stage 1: {layers[1]} layers, 2.1 GB" in console.file.getvalue()


def test_a_resumed_run_has_a_live_view_on_a_terminal(tmp_path: Path) -> None:
    """What is printed meanwhile, by print and by the run's log, stands above it."""
    code = (
        f"{LIGHT}import time; from common.log import Log; log = Log()\n"
        "with Reporter(Path(sys.argv[1]), 7, 1, first_step=5, parts=(3, 4)) as reporter:\n"
        "    for step in (5, 6, 7):\n"
        "        time.sleep(0.2)\n"
        "        reporter.report(metrics(step)); reporter.report_evaluation(step, {'eval_loss': 1.0})\n"
        "        log.print(f'saved: {step}')\n"
    )
    exit_code, printed = run_in_terminal([sys.executable, "-c", code, str(tmp_path)])
    assert exit_code == 0
    *above, progress, loss, speed, memory, after = map(plain, screen(printed))
    assert above[::2] == [f"step {step}/7  eval_loss 1.0000" for step in (5, 6, 7)]
    assert above[1::2] == [f"saved: {step}" for step in (5, 6, 7)]
    assert progress.startswith("step 7/7  epoch 1  ") and progress.rstrip().endswith("  00:00 left")
    assert loss.startswith("loss 0.3571  █") and "▁" in loss, "the curve of losses"
    assert speed.startswith("lr 1.00e-04  grad norm 0.750  2,400 tokens/s")
    assert memory.rstrip() == "stage 0: 3 layers, 3.2 GB  stage 1: 4 layers, 2.1 GB" and after == ""


def plain(text: str) -> str:
    """A line without its colours."""
    return Text.from_ansi(text).plain
