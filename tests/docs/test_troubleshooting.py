"""The lines that docs/troubleshooting.md explains are the program's, and so are the exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint.publish import publish_folder
from models.errors import CheckpointError
from options import load_config
from options.planner.command import DOES_NOT_FIT
from tests.conftest import ROOT
from tests.docs.pages import text_of
from training.errors import ConfigError, RunRefused, describe_error

PAGE = text_of("docs/troubleshooting.md")
LINES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
KEYS: dict[str, Any] = {"model_path": "model", "data_path": "records.json", "save_path": "run", "train_batch_size": 10}
# What is printed by code that only a run, a GPU or another host reaches: words of the line, which the source has.
SOURCES = {
    "being trained by": "training/distributed/rank_monitor.py",
    "expected one run a folder": "training/distributed/rank_monitor.py",
    "does not compute in bf16; expected fp16": "training/config/gpu.py",
    "such as one for CUDA 12.6 (cu126)": "training/config/gpu.py",
    "expected a wheel of": "training/config/gpu.py",
    "cannot be combined with a pipeline": "training/config/keys.py",
    "proves pipelines; expected train_ds.py": "options/proof/__init__.py",
    "no token is trained within max_seq_len": "data/tokenized/parallel.py",
    "no usable tokenizer: expected one of the files": "data/tokenized/tokenizer.py",
    "not found; expected a model folder": "models/checkpoint/layout.py",
    "in front of the command, or modelscope download --model": "common/hub.py",
    "out of memory: stage": "options/planner/resources.py",
    "the gradient's norm": "training/bad_steps.py",
    "(max_bad_steps)": "training/bad_steps.py",
    "died without an error: killed from outside, for example because memory ran out": (
        "training/distributed/failure_detector.py"
    ),
    "ask for": "training/distributed/joining.py",
}


@pytest.mark.parametrize("words", SOURCES)
def test_a_line_is_in_the_source(words: str) -> None:
    assert any(words in line for line in LINES)
    source = re.sub(r'"\s*\n\s*f?"', "", (ROOT / SOURCES[words]).read_text(encoding="utf-8"))
    assert words in source


@pytest.mark.parametrize(
    "overrides",
    [
        ["max_seq_length=512"],
        ["train_micro_batch_size_per_gpu=2", "model_topo.process_topology.dims=[2,2]"],
    ],
)
def test_a_mistake_in_a_config_is_told_so(overrides: list[str], tmp_path: Path) -> None:
    path = tmp_path / "my.yml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in KEYS.items()))
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    assert str(refused.value).replace(f"{tmp_path}/", "").removeprefix("my.yml: ") in "\n".join(LINES)


def test_parts_are_told_so(tmp_path: Path) -> None:
    path = tmp_path / "my.yml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in KEYS.items()))
    overrides = ["model_topo.process_topology.dims=[2,1]", "model_topo.parts=[3,3]"]
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides).parts_for(5)
    assert str(refused.value) in LINES


def test_a_folder_that_exists_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError) as refused, publish_folder(tmp_path / "hf"):
        pass
    assert str(refused.value).replace(str(tmp_path), "../llm/smollm2") in LINES


def test_exit_codes() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(codes) == ["0", "1", "2", "130"]
    assert describe_error(ConfigError("x"))[0] == describe_error(RunRefused("x"))[0] == 2
    assert describe_error(KeyError("x"))[0] == 1 == DOES_NOT_FIT
    assert describe_error(KeyboardInterrupt())[0] == 130
    # A run without a finite loss raises RunRefused, one without memory ConfigError.
    rows = re.findall(r"^\| `([^`]+)` \| (\d) \|", PAGE, re.MULTILINE)
    mended = [line for line, code in rows if code == "2"]
    assert len(rows) == 4 and ["out of memory" in mended[0], "the loss is nan" in mended[1]] == [True, True]
