"""What a plan says of a teacher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from options.planner.command import plan_run
from tests.options.planner.helpers import config_of, llama
from tests.options.planner.test_command import arguments
from training.errors import ConfigError


def test_the_pass_of_a_teacher_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path)
    distillation = {"teacher": "runs/teacher", "temperature": 2.0}
    plan_run(config_of(tmp_path, 8, distillation=distillation), arguments(devices="8xV100-32G"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "distillation: the pass of runs/teacher before the first step is not planned" in printed
    assert "not compared: distillation.teacher: runs/teacher: not found; expected a model folder" in printed


def test_a_teacher_of_another_vocabulary_is_no_plan(
    tmp_path: Path, make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    student, teacher = make_checkpoint("llama"), tmp_path / "teacher"
    shutil.copytree(make_checkpoint("llama"), teacher)
    (teacher / "model.safetensors").unlink()  # a plan reads no weights
    config = config_of(student, 2, fp16={"enabled": False}, distillation={"teacher": str(teacher)})
    plan_run(config, arguments(devices="2xA100-80G"))
    assert "not compared" not in capsys.readouterr().out

    tokenizer = json.loads((teacher / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"content": "<other>", "id": 999})
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"another vocabulary than that of .*; expected the same tokenizer"):
        plan_run(config, arguments(devices="2xA100-80G"))


@pytest.mark.parametrize(("temperature", "copies"), [(1.0, 0), (2.0, 1)])
def test_a_gpu_holds_the_softened_exponentials_of_a_chunk_besides(
    temperature: float, copies: int, tmp_path: Path
) -> None:
    objective = config_of(tmp_path, 8, distillation={"teacher": "t", "temperature": temperature}).objective
    assert (objective.logit_copies(True), objective.logit_copies(False)) == (copies, 0)
