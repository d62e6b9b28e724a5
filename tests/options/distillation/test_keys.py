"""The section `distillation`: its defaults, and what it does not go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from options import RunConfig
from options.proof.small_run import small_config
from training.config.changes import compare, settings_of

PATHS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}


def config(distillation: dict[str, Any] | None = None, **keys: Any) -> RunConfig:
    section = {"distillation": {"teacher": "t"} | (distillation or {})}
    return RunConfig.model_validate(PATHS | {"optimizer": {"params": {"lr": 1e-5}}} | section | keys)


def test_a_teacher_is_enough() -> None:
    section = config().distillation
    assert section is not None
    assert (section.top_k, section.weight, section.temperature) == (64, 1.0, 1.0)


@pytest.mark.parametrize(
    ("section", "keys", "expected"),
    [
        ({"top_k": 0}, {}, "distillation.top_k"),
        ({"weight": 0}, {}, "distillation.weight"),
        ({"weight": 1.5}, {}, "distillation.weight"),
        ({"temperature": 0}, {}, "distillation.temperature"),
        ({"tempreature": 2}, {}, "tempreature"),
        ({}, {"preference": {}}, "distillation: a teacher says what comes next, and preference has a loss of its own"),
        ({}, {"labels": ["a", "b"]}, "distillation: a teacher says what comes next, and labels has a loss of its own"),
    ],
)
def test_what_it_does_not_go_with_is_refused(section: dict[str, Any], keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        config(section, **keys)


def test_it_may_change_between_two_starts() -> None:
    then, now = settings_of(config()), settings_of(config({"temperature": 2.0}))
    (line,) = compare(then, now, "step 3", RunConfig.rules)
    assert line.endswith("distillation.temperature 1.0 -> 2.0: counts from the next step on")


def test_a_proof_is_of_fine_tuning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prove: no distillation; expected distillation=null beside it"):
        small_config(config(), None, config().model_topo, tmp_path)  # type: ignore[arg-type]
