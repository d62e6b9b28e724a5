"""A run ends with its totals and the next commands, for each kind of run."""

from __future__ import annotations

from typing import Any

import pytest

from options.reports.totals import next_commands, totals_of
from training.checkpoint.folder import Best


def line(step: int, loss: float | None) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 100, "samples": 4, "seconds": 2.0}


def test_totals_count_all_steps_and_pass_over_losses_that_are_no_numbers() -> None:
    lines = [line(1, 3.0), line(2, 2.5), {"step": 2, "eval_loss": 2.4}, line(3, None)]
    best = Best(checkpoint="step-000002", step=2, measure="eval_error", value=0.05561)
    assert dict(totals_of(lines, best)) == {
        "steps": "3, 12 samples",
        "time of the steps": "00:06",
        "speed": "50 tokens/s",
        "loss": "3.0000 first, 2.5000 last",
        "best evaluation": "step-000002, eval_error 0.0556",
    }
    assert totals_of([{"step": 0, "eval_loss": 2.4}], best) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({}, ["python demo.py --model runs/a", "pp_to_hg --input-path runs/a --save-path runs/a-hf"]),
        ({"newest_is_best": False}, ["demo.py", "runs/a-hf --best"]),
        ({"adapter": True}, ["demo.py", "runs/a-hf --merge"]),
        ({"says_words": False}, ["pp_to_hg"]),
        ({"is_language_model": False}, ["load_trained('runs/a')"]),
    ],
)
def test_the_next_commands_fit_the_run(kind: dict[str, bool], words: list[str]) -> None:
    usual = {"is_language_model": True, "says_words": True, "adapter": False, "newest_is_best": True}
    commands = next_commands("runs/a", **(usual | kind))
    assert len(commands) == len(words)
    assert all(word in command for word, command in zip(words, commands, strict=True))
