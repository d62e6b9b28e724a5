"""What a run tells: one JSON line a step for programs, a printed line every few steps where there is no terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from training.metrics import METRICS_FILE, Reporter, StepMetrics


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
    )


def report(folder: Path, active: bool = True, steps: int = 7, steps_per_print: int = 3) -> None:
    with Reporter(folder, steps, active, steps_per_print) as reporter:
        for step in range(1, steps + 1):
            reporter.report(metrics(step))


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
    report(tmp_path, steps=5, steps_per_print=5)
    line = capfd.readouterr().out
    assert line.startswith("step 5/5  epoch 2  loss 0.5000  lr 1.00e-04  2,400 tokens/s  ")
    assert line.endswith("00:00 left\n")


def test_the_file_is_closed_whole_when_a_step_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), Reporter(tmp_path, 3, True, 1) as reporter:
        reporter.report(metrics(1))
        raise RuntimeError("boom")
    assert json.loads((tmp_path / METRICS_FILE).read_text(encoding="utf-8"))["step"] == 1
