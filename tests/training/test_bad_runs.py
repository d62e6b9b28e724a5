"""What a user can get wrong: one clear line on one rank, exit code 2, and nobody left waiting.

The message names the file or key, and what was expected. Mistakes that only one rank can see (a layer
file that only the second stage reads) end all ranks as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train_ds
from models.conversion.to_pipeline import hg_to_pp
from tests.conftest import write_records
from tests.launching import deepspeed, error_lines, run, supervised, topology, torchrun, write_config

pytestmark = pytest.mark.launched

TWO_STAGES = topology((2, 1), [3, 2])


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


@pytest.fixture
def pipeline_model(model: Path, tmp_path: Path) -> Path:
    hg_to_pp(model, tmp_path / "pp")
    return tmp_path / "pp"


def config(tmp_path: Path, model: Path, **keys: Any) -> Path:
    data = tmp_path / "data.json"
    if not data.exists():
        write_records(data, 16)
    defaults: dict[str, Any] = {"model_path": str(model), "data_path": str(data), "model_topo": TWO_STAGES}
    return write_config(tmp_path / "run.yml", **(defaults | keys))


def assert_refused(result: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert result.returncode == code, result.stdout + result.stderr
    lines = error_lines(result)
    assert len(lines) == 1, result.stdout + result.stderr
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        pytest.param({"modle_path": "x"}, ("run.yml", "modle_path", "model_path?"), id="unknown_key"),
        pytest.param({"model_topo": topology((4, 1))}, ("dims", "[4, 1]", "2 were started"), marks=pytest.mark.longest),
    ],
)
def test_mistakes_found_by_a_launched_run(
    keys: dict[str, Any], words: tuple[str, ...], tmp_path: Path, model: Path
) -> None:
    assert_refused(deepspeed(2, "train_ds.py", "--config", config(tmp_path, model, **keys)), *words)


@pytest.mark.slow
def test_a_layer_that_only_the_second_stage_misses(tmp_path: Path, pipeline_model: Path) -> None:
    (pipeline_model / "layer_04-model_states.pt").unlink()
    path = config(tmp_path, pipeline_model)
    assert_refused(supervised(2, "train_ds.py", "--config", path), "layer_04-model_states.pt", "not found")


@pytest.mark.longest
def test_torchrun_tells_it_once_too(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08")
    path = config(tmp_path, tmp_path / "model")
    result = torchrun(2, "train_ds.py", "--config", path)
    assert result.returncode != 0  # torchrun reports its own code, and a summary of its own
    assert len(error_lines(result)) == 1
    assert "model.safetensors" in error_lines(result)[0]


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "data file": ({"data_path": "absent.json"}, ("absent.json", "not found")),
    "model folder": ({"model_path": "absent"}, ("absent", "not found")),
    "no whole batch": (
        {"dataloader_drop_last": True, "train_batch_size": 32},
        ("train_batch_size", "32", "16 samples"),
    ),
    "processes without end": (
        {"model_topo": topology((4096, 1))},
        ("dims", "[4096, 1]", "4096 processes", "this machine"),
    ),
    "a file in the way": ({"save_path": "LICENSE", "data_path": "none.json"}, ("save_path", "LICENSE", "folder")),
}
TIERS: dict[str, Any] = {"processes without end": (), "data file": pytest.mark.slow}


@pytest.mark.parametrize(
    ("keys", "words"),
    [pytest.param(*MISTAKES[name], id=name, marks=TIERS.get(name, pytest.mark.longest)) for name in MISTAKES],
)
def test_mistakes_found_by_a_run_that_starts_itself(
    tmp_path: Path, model: Path, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = config(tmp_path, model, **({"model_topo": topology((1, 1))} | keys))
    assert_refused(run(sys.executable, "train_ds.py", "--config", path), *words)


@pytest.mark.slow
def test_inspect_needs_no_launcher(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, model)

    def inspected(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train_ds.py", "--config", str(path), "--inspect", "2", *words])
        train_ds.main()
        return capsys.readouterr().out

    printed = inspected()
    assert "sample 1" in printed and "sample 2" in printed and "sample 3" not in printed
    assert "What is Pipetune?" in printed
    page = tmp_path / "samples.html"
    assert f"2 samples in {page}" in inspected("--html", str(page))
    assert "What is Pipetune?" in re.sub("<[^>]*>", "", page.read_text(encoding="utf-8"))  # each token is an element
    (tmp_path / "data.json").write_text('[{"type": "instruct",\n "instruct": 1 2}]')
    with pytest.raises(SystemExit, match="2"):
        inspected()
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for word in ("data.json", "record 1: not JSON", "character 37"):
        assert word in line
