"""Which callbacks a run has of the planner, and where they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from options.planner import OPTION
from options.planner.keys import PlannerKeys
from tests.launching import topology
from tests.options.planner.helpers import config_of
from training.engine.pipeline import PipelineTrainer
from training.engine.zero import ZeroTrainer
from training.job import Task
from training.runs import language_model, model_callbacks

FIRST, REPORTS = ["DataSummary", "Planning", "Mfu"], ["Reporting", "BadSteps"]


@pytest.mark.parametrize(
    ("keys", "measured"),
    [({}, ["Feedback"]), ({"schedule": "weight_streaming", "fp16": {"enabled": False}}, [])],
    ids=["1f1b", "weight_streaming"],
)
def test_what_settles_a_run_comes_first_and_what_measures_it_last(
    keys: dict[str, Any], measured: list[str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, 2, export_hf=True, profile_steps=[1, 2], preference={"loss": "dpo"}, **keys)
    names = [type(each).__name__ for each in model_callbacks(config, language_model(config, PipelineTrainer))]
    begin, end = names.index("Reporting"), names.index("BoundedMemory")
    assert names[:3] == FIRST and len(names[3:begin]) == len(config.objective.callbacks(cast(Any, None)))
    assert names[begin:end] == [*REPORTS, "StaleDrafts", "TellImages", "ProfiledSteps", *measured, "Totals"]
    assert names[end + 1 :] == ["ExportHF"]


def test_without_stages_nothing_is_measured_and_a_scripts_layers_have_no_plan(tmp_path: Path) -> None:
    config = cast(PlannerKeys, config_of(tmp_path, 1))
    task = language_model(config, ZeroTrainer)
    assert OPTION.callbacks(config, task) == [] and len(OPTION.first_callbacks(config, task)) == 2
    layers = cast(Task, object())
    assert [*OPTION.callbacks(config, layers), *OPTION.first_callbacks(config, layers)] == []


def test_a_config_with_parts_is_not_rebalanced(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, rebalance=True, save_interval=2)
    assert config.dump()["rebalance"] and not config.with_parts([3, 2]).dump()["rebalance"]
    config_of(tmp_path, 2, rebalance=False, model_topo=topology((2, 1), (3, 2)))
