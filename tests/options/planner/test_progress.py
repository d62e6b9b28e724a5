"""What a search shows of itself: nothing for two seconds, then a bar on a terminal and lines in a pipe."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path

import pytest

from common.log import Log
from options.planner import progress
from options.planner.command import plan_run
from options.planner.progress import each_of, searching
from tests.options.planner.auto.helpers import auto, outline
from tests.options.planner.helpers import config_of, llama
from tests.options.planner.test_command import arguments


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless the test moves it."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def shown(clock: list[float], seconds: list[float], terminal: bool = False) -> str:
    """What is printed of a search whose plans take so long, with a loop inside of the last one."""
    printed = StringIO()
    with searching(Log(file=printed, width=80, force_terminal=terminal)):
        for number, each in enumerate(each_of(seconds, "plans")):
            clock[0] += each
            inner = [0, 1] if number == len(seconds) - 1 else []
            assert list(each_of(inner, "numbers of stages")) == inner
    return printed.getvalue()


def test_a_short_search_says_nothing(clock: list[float]) -> None:
    assert shown(clock, [0.5, 0.5, 0.9]) == "" and shown(clock, [0.5, 0.5, 0.9], terminal=True) == ""


def test_a_long_one_says_now_and_then_in_a_pipe_how_much_is_done(clock: list[float]) -> None:
    lines = shown(clock, [1.0, 1.5, 1.0, 9.5, 30.0]).splitlines()
    assert lines == [
        "searching: 2 of 5 plans",
        "searching: 4 of 5 plans",
        "searching: 0 of 2 numbers of stages",
    ]


def test_a_long_one_has_a_bar_on_a_terminal_which_goes_at_the_end(clock: list[float]) -> None:
    printed = shown(clock, [1.0, 1.5, 1.0], terminal=True)
    assert "searching" in printed and "2/3" in printed and "plans" in printed
    assert printed.endswith("\x1b[2K"), "the line is cleared"


def test_loops_outside_of_a_search_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(each_of(range(3), "plans")) == [0, 1, 2] and "".join(capsys.readouterr()) == ""


@pytest.mark.slow
def test_all_that_searches_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--search`, the advice of a plan that does not fit, weight streaming, and `--auto`."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    llama(tmp_path, num_hidden_layers=8)
    plan_run(config_of(tmp_path, 2), arguments(devices="2xA100-80G", search=True))
    printed = capsys.readouterr().out
    assert " combinations\n" in printed and " plans\n" in printed
    llama(tmp_path)
    with pytest.raises(SystemExit):
        plan_run(config_of(tmp_path, 1), arguments(devices="1xT4"))
    printed = capsys.readouterr().out
    for what in ("changes", "numbers of stages", "divisions into turns"):
        assert f" {what}\n" in printed
    auto(outline(tmp_path / "model", num_hidden_layers=8), tmp_path / "run", devices="4xA100-80G", dry_run=True)
    assert " combinations\n" in capsys.readouterr().out
