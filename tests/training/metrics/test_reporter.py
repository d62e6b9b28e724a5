"""What a run tells: one JSON line a step for programs, a printed line every few steps where there is no terminal."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import ROOT
from training.engine.timings import PARTS
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
    )


# What a process of its own needs of this file, without the libraries that importing it would bring in.
LIGHT = (
    "import sys; from pathlib import Path; from training.metrics.reporter import Reporter\n"
    "from training.metrics.step_metrics import StepMetrics\n"
    "def metrics(step): return StepMetrics(step, 1, 2.5 / step, 1e-4, 0.75, 8, 1200, 400, 2400.0, 0.5,\n"
    "    peak_memory=[3 * 2**30, 2**31])\n"
)


class Recorder:
    """A tracker that remembers what it was told, and fails when it is asked to."""

    name = "recorder"

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed: bool | None = None
        self.fails_at = fails_at

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the line is dead")
        self.told.append((step, dict(numbers)))

    def close(self, failed: bool) -> None:
        self.closed = failed


def report(folder: Path, active: bool = True, first: int = 1, last: int = STEPS, steps_per_print: int = 3) -> None:
    with Reporter(folder, STEPS, active, steps_per_print, first) as reporter:
        for step in range(first, last + 1):
            reporter.report(metrics(step))


def strictly(line: bytes | str) -> dict[str, Any]:
    """Read JSON as the standard has it: without NaN and infinities."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    values: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return values


def steps_of(folder: Path) -> list[int]:
    return [strictly(line)["step"] for line in (folder / METRICS_FILE).read_bytes().splitlines()]


def test_each_step_is_one_json_line_with_all_keys(tmp_path: Path) -> None:
    report(tmp_path)
    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [asdict(metrics(step)) for step in range(1, 8)]
    documented = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"}
    assert documented <= {field.name for field in fields(StepMetrics)} == set(json.loads(lines[0]))


def test_a_line_is_there_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    with Reporter(tmp_path, 2, True, 1) as reporter:
        reporter.report(metrics(1))
        assert len((tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()) == 1


def test_other_ranks_write_and_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report(tmp_path, active=False)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("steps_per_print", "printed"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (100, [7])])
def test_without_a_terminal_some_steps_are_printed_and_always_the_last(
    steps_per_print: int, printed: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, steps_per_print=steps_per_print)
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == [f"{step}/7" for step in printed]
    assert err == ""


def test_a_printed_line_tells_epoch_loss_learning_rate_and_speed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Reporter(tmp_path, 5, True, 5) as reporter:
        for step in range(1, 6):
            reporter.report(metrics(step))
    line = capfd.readouterr().out
    assert line.startswith("step 5/5  epoch 2  loss 0.5000  grad_norm 0.750  lr 1.00e-04  2,400 tokens/s  ")
    assert line.endswith("00:00 left\n")


def test_the_file_is_closed_whole_when_a_step_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), Reporter(tmp_path, 3, True, 1) as reporter:
        reporter.report(metrics(1))
        raise RuntimeError("boom")
    assert json.loads((tmp_path / METRICS_FILE).read_text(encoding="utf-8"))["step"] == 1


def test_a_known_device_s_utilization_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 1, True, 1) as reporter:
        reporter.report(replace(metrics(1), mfu=0.4567))
    assert "2,400 tokens/s  MFU 46%  00:00 left" in capfd.readouterr().out
    assert read_metrics(tmp_path / METRICS_FILE)[0]["mfu"] == 0.4567


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Reporter(tmp_path, 2, True, 1) as reporter:
        reporter.report(replace(metrics(1), loss=math.nan, grad_norm=math.inf, times={"data": -math.inf}))
        reporter.report_evaluation(1, {"eval_loss": 900.0, "eval_perplexity": math.inf})
    step, evaluation = map(strictly, (tmp_path / METRICS_FILE).read_bytes().splitlines())
    assert step == asdict(metrics(1)) | {"loss": None, "grad_norm": None, "times": {"data": None}}
    assert evaluation == {"step": 1, "eval_loss": 900.0, "eval_perplexity": None}


def test_an_evaluation_is_a_line_of_its_own_and_always_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers = {"eval_loss": 1.5, "eval_perplexity": 4.4817, "eval_loss/instruct": 1.25, "eval_loss/文": 2.0}
    with Reporter(tmp_path, STEPS, True, 100) as reporter:
        reporter.report_evaluation(0, {"eval_loss": 3.0})
        reporter.report(metrics(1))
        reporter.report_evaluation(1, numbers)
    assert read_metrics(tmp_path / METRICS_FILE) == [
        {"step": 0, "eval_loss": 3.0},
        asdict(metrics(1)),
        {"step": 1} | numbers,
    ]
    assert capfd.readouterr().out.splitlines() == [
        "step 0/7  eval_loss 3.0000",
        "step 1/7  eval_loss 1.5000  eval_perplexity 4.4817  eval_loss/instruct 1.2500  eval_loss/文 2.0000",
    ]


def test_other_ranks_are_silent_about_evaluations_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, STEPS, False, 1) as reporter:
        reporter.report_evaluation(1, {"eval_loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("first", range(1, 7))
def test_a_resumed_run_repeats_no_line(first: int, tmp_path: Path) -> None:
    """Killed after step 5, and resumed from any checkpoint: the file is that of the uninterrupted run."""
    report(tmp_path, last=5)
    report(tmp_path, first=first)
    assert read_metrics(tmp_path / METRICS_FILE) == [asdict(metrics(step)) for step in range(1, STEPS + 1)]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE], "nothing else is left"


def test_evaluations_are_cut_like_steps(tmp_path: Path) -> None:
    with Reporter(tmp_path, STEPS, True, 1) as reporter:
        for step in (1, 2, 3):
            reporter.report(metrics(step))
            reporter.report_evaluation(step, {"eval_loss": 1.0})
    Reporter(tmp_path, STEPS, True, 1, first_step=3).__exit__(None, None, None)
    assert steps_of(tmp_path) == [1, 1, 2, 2]
    Reporter(tmp_path, STEPS, True, 1, first_step=3, evaluates_first=True).__exit__(None, None, None)
    assert steps_of(tmp_path) == [1, 1, 2], "the run is about to make that of step 2 again"


def test_a_new_run_in_an_old_folder_leaves_nothing_of_it(tmp_path: Path) -> None:
    with Reporter(tmp_path, STEPS, True, 1) as reporter:
        reporter.report_evaluation(0, {"eval_loss": 3.0})
        reporter.report(metrics(1))
    Reporter(tmp_path, STEPS, True, 1).__exit__(None, None, None)
    assert (tmp_path / METRICS_FILE).read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"step": 5, "lo', b'{"step": 5, "loss": 0.5}', b'{"step"', b"\0\0\0", b"\xe6\x96"])
def test_what_a_kill_tore_is_dropped(torn: bytes, tmp_path: Path) -> None:
    report(tmp_path, last=4)
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(torn)
    report(tmp_path, first=5)
    assert read_metrics(tmp_path / METRICS_FILE) == [asdict(metrics(step)) for step in range(1, STEPS + 1)]


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    """Also where the torn line's step is not repeated, as its number cannot be read."""
    report(tmp_path, last=4)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).write_bytes(whole[:-20])
    report(tmp_path, first=5)
    assert steps_of(tmp_path) == [1, 2, 3, 5, 6, 7]


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    report(tmp_path, last=4)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).write_bytes(whole[:-1])
    report(tmp_path, first=5)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_lines_that_stay_are_not_touched(tmp_path: Path) -> None:
    report(tmp_path)
    before = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)
    Reporter(tmp_path, STEPS, True, 1, first_step=6).__exit__(None, None, None)
    assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(before[:5])


def test_a_kill_while_cutting_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(tmp_path)
    before = (tmp_path / METRICS_FILE).read_bytes()

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Reporter(tmp_path, STEPS, True, 1, first_step=3)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    monkeypatch.undo()
    report(tmp_path, first=3)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_killed_process_leaves_every_step_that_it_reported(tmp_path: Path) -> None:
    code = (
        f"{LIGHT}import os, signal; reporter = Reporter(Path(sys.argv[1]), 9, True, 100)\n"
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
    with Reporter(tmp_path, STEPS, True, 100) as reporter:
        reporter.report(metrics(1))
        with no_more_room(tmp_path):
            reporter.report(metrics(2))
            reporter.report(metrics(3))
            warnings = capfd.readouterr().err
        reporter.report(metrics(4))
    assert warnings.count("warning: metrics.jsonl: File too large") == 1
    assert read_metrics(tmp_path / METRICS_FILE) == [asdict(metrics(step)) for step in range(1, 5)]


def test_trackers_get_every_number_under_a_name_of_its_own(tmp_path: Path) -> None:
    tracker = Recorder()
    with Reporter(tmp_path, 2, True, 1, trackers=[tracker]) as reporter:
        reporter.report(metrics(1))
        reporter.report(replace(metrics(2), mfu=0.5))
        reporter.report_evaluation(2, {"eval_loss": 1.5, "eval_loss/instruct": 1.25})
    (first, numbers), (_, more), (last, evaluation) = tracker.told
    assert (first, last) == (1, 2)
    assert numbers["loss"] == 2.5
    assert numbers["times/forward_backward"] == 0.125
    assert numbers["peak_memory/1"] == 2 * 2**30
    assert not {"step", "mfu", "times", "peak_memory"} & set(numbers)
    assert more["mfu"] == 0.5
    assert evaluation == {"eval_loss": 1.5, "eval_loss/instruct": 1.25}
    assert tracker.closed is False


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken, sound = Recorder(fails_at=2), Recorder()
    with Reporter(tmp_path, STEPS, True, 100, trackers=[broken, sound]) as reporter:
        for step in range(1, STEPS + 1):
            reporter.report(metrics(step))
    assert [step for step, _ in broken.told] == [1]
    assert [step for step, _ in sound.told] == steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert capfd.readouterr().err == "warning: recorder: the line is dead; it gets no more numbers of this run\n"


def test_trackers_learn_how_a_run_ended(tmp_path: Path) -> None:
    tracker = Recorder()
    with pytest.raises(RuntimeError), Reporter(tmp_path, 3, True, 1, trackers=[tracker]):
        raise RuntimeError
    assert tracker.closed is True


def test_the_time_left_counts_only_the_steps_of_this_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with Reporter(tmp_path, 110, True, 1, first_step=101) as reporter:
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
    told = f"stage 0: {layers[0]} layers, 3.2 GB  stage 1: {layers[1]} layers, 2.1 GB"
    assert told in console.file.getvalue()


def test_on_a_terminal_the_view_goes_on_where_the_run_does(tmp_path: Path) -> None:
    code = (
        f"{LIGHT}import time\n"
        "with Reporter(Path(sys.argv[1]), 7, True, 1, first_step=5, parts=(3, 4)) as reporter:\n"
        "    for step in (5, 6, 7):\n"
        "        time.sleep(0.2)\n"
        "        reporter.report(metrics(step)); reporter.report_evaluation(step, {'eval_loss': 1.0})\n"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # rows and columns
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while process.poll() is None or shown[-1:] != b"\n":
        try:
            shown += os.read(master, 65536)
        except OSError:  # the other side is closed
            break
    os.close(master)
    assert process.wait() == 0
    text = shown.decode()
    assert "step 7/7" in text and "00:00 left" in text
    assert "grad norm 0.750" in text and "▁" in text, "the curve of losses"
    assert "stage 0: 3 layers, 3.2 GB  stage 1: 4 layers, 2.1 GB" in text
    assert "step 6/7  eval_loss 1.0000\r\n" in text
    assert "grad_norm" not in text, "no printed lines beside the view"


def test_metrics_are_read_without_the_libraries_of_training() -> None:
    code = "import sys, training.metrics.reporter; assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
