"""Whole jobs, case by case (see `cases.py`), in two processes.

Its cases are {"name", "kind": "pipeline" | "zero", "config": {...}, "events": {step, or a mark of the failure
detector: what happens when it is done}}. Events: "stop" sends this process SIGTERM; "remove FOLDER"
removes a folder. Writes <folder>/<name>.json: what the job printed, its error or exit code, and the learning rate of
each update, by step, as the optimizer saw it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.distributed.rank_monitor import RankMonitor
from training.engine.trainer import Trainer
from training.errors import USER_ERRORS, RunRefused
from training.metrics.reporter import Reporter
from training.metrics.step_metrics import StepMetrics
from training.optimizer.lr_schedules import LearningRate
from training.runs import train_language_model as run_job
from training.runs import trainer_kind


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    process = ProcessInfo.from_environment()
    assert process is not None
    outcome: dict[str, Any] = {"error": None, "code": 0, "used": {}}
    printed = io.StringIO()
    report, set_rate, mark = Reporter.report, LearningRate.set, RankMonitor.mark
    seen: list[float] = []

    def set_and_forget(self: LearningRate, step: int) -> float:
        seen.clear()
        return set_rate(self, step)

    def reported(self: Reporter, metrics: StepMetrics) -> None:
        report(self, metrics)
        if seen:
            outcome["used"][metrics.step] = seen[-1]
        happen(case["events"].get(str(metrics.step)), process.rank)

    def marked(self: RankMonitor, what: str) -> None:
        mark(self, what)
        happen(case["events"].get(what), process.rank)

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    patched = patch.object(Reporter, "report", reported), patch.object(LearningRate, "set", set_and_forget)
    with patched[0], patched[1], patch.object(RankMonitor, "mark", marked), contextlib.redirect_stdout(printed):
        try:
            with RankMonitor(process, config.model_topo.stage_of(process.rank), config.timeout_minutes) as monitor:
                ended(lambda: run_job(config, process, monitor, kind_of(case, config)), outcome)
        finally:
            hook.remove()
    outcome["printed"] = printed.getvalue()
    if process.rank == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(outcome))
    torch.distributed.barrier()


def kind_of(case: dict[str, Any], config: TrainConfig) -> type[Trainer]:
    return trainer_kind(config, case["kind"] == "pipeline")


def ended(run: Callable[[], object], outcome: dict[str, Any]) -> None:
    try:
        run()
    except (*USER_ERRORS, RunRefused) as error:
        outcome["error"] = str(error)
    except SystemExit as leaving:
        outcome["code"] = leaving.code


def happen(event: str | None, rank: int) -> None:
    if event == "stop" and rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if event and event.startswith("remove ") and rank == 0:
        shutil.rmtree(event.removeprefix("remove "))
