"""What a plan says of a teacher."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from options.planner.command import plan_run
from tests.options.planner.helpers import config_of, llama


def arguments(**given: Any) -> Namespace:
    return Namespace(**{"devices": None, "links": None, "per_host": None, "search": False, "calibrate": False} | given)


def test_the_pass_of_a_teacher_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path)
    distillation = {"teacher": "runs/teacher", "temperature": 2.0}
    plan_run(config_of(tmp_path, 8, distillation=distillation), arguments(devices="8xV100-32G"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "distillation: the pass of runs/teacher before the first step is not planned" in printed


@pytest.mark.parametrize(("temperature", "copies"), [(1.0, 0), (2.0, 1)])
def test_a_gpu_holds_the_softened_exponentials_of_a_chunk_besides(
    temperature: float, copies: int, tmp_path: Path
) -> None:
    objective = config_of(tmp_path, 8, distillation={"teacher": "t", "temperature": temperature}).objective
    assert (objective.logit_copies(True), objective.logit_copies(False)) == (copies, 0)
