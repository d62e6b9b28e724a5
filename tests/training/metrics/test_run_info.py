"""run.json: what a run was made of, and nothing that should stay secret."""

from __future__ import annotations

import json
import math
import os
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from common.version import VERSION
from tests.conftest import ROOT
from training.config.keys import TrainConfig
from training.metrics import run_info
from training.metrics.run_info import git_state, write_run_info

CONFIG = TrainConfig.model_validate(
    {
        "model_path": "模型/llama",
        "data_path": "d",
        "save_path": "s",
        "train_batch_size": 8,
        "model_topo": {"process_topology": {"axes": ["pipe", "data"], "dims": [4, 2]}},
    }
)
PARTS = [2, 3, 3, 2]


def written(folder: Path, first_step: int = 1) -> dict[str, Any]:
    write_run_info(folder, CONFIG, PARTS, first_step)
    info: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return info


def test_run_info_describes_the_run(tmp_path: Path) -> None:
    before = datetime.now(timezone.utc).replace(microsecond=0)
    info = written(tmp_path)
    assert info["versions"].items() >= {"torch": torch.__version__, "deepspeed": metadata.version("deepspeed")}.items()
    assert {"python", "transformers", "numpy"} <= set(info["versions"])
    assert info["versions"]["pipetune"] == VERSION
    assert info["config"] == CONFIG.dump()
    assert info["topology"] == {
        "processes": 8,
        "stages": 4,
        "replicas": 2,
        "axes": ["pipe", "data"],
        "dims": [4, 2],
        "parts": PARTS,
    }
    machine = info["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory"] > 2**28
    assert machine["host"]
    assert machine["cpu"]
    assert len(machine["gpus"]) == torch.cuda.device_count()
    started = datetime.fromisoformat(info["started"])
    assert before <= started <= datetime.now(timezone.utc)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_version_is_that_of_the_project() -> None:
    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_packages_that_are_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_info, "PACKAGES", ["torch", "no-such-package"])
    assert set(written(tmp_path)["versions"]) - {"cuda"} == {"pipetune", "python", "torch"}


def test_no_secret_of_the_environment_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SOMETHING_ELSE")
    for number, name in enumerate(names):
        monkeypatch.setenv(name, f"hunter2-{number}")
    written(tmp_path)
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert "hunter2" not in text
    assert not any(name in text for name in names)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a hook that runs the tests sets some
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "code.py").write_text("1\n")
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", "https://me:hunter2@example.com/code.git")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_revision_of_the_code_and_uncommitted_changes(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_info, "CODE", repository)
    (repository / "notes.txt").write_text("not part of the code\n")
    assert written(tmp_path)["git"] == {"revision": git(repository, "rev-parse", "HEAD"), "modified": False}
    assert "hunter2" not in (tmp_path / "run.json").read_text(encoding="utf-8")
    (repository / "code.py").write_text("2\n")
    assert git_state(repository) == {"revision": git(repository, "rev-parse", "HEAD"), "modified": True}


def test_no_revision_without_git(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = repository / "a copy of the code"
    inside.mkdir()
    assert git_state(inside) is None, "the repository around it is another one"
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert git_state(empty) is None, "no commit yet"
    monkeypatch.setattr(run_info, "CODE", tmp_path)
    assert written(tmp_path)["git"] is None
    monkeypatch.setenv("PATH", "")
    assert git_state(repository) is None, "git is not installed"


def test_a_resumed_run_keeps_earlier_entries(tmp_path: Path) -> None:
    first, second, third = written(tmp_path), written(tmp_path, 5), written(tmp_path, 9)
    assert [info["first_step"] for info in (first, second, third)] == [1, 5, 9]
    assert first.pop("earlier") == []
    assert second.pop("earlier") == [first]
    assert third["earlier"] == [first, second]
    assert written(tmp_path)["earlier"] == [], "a new run in the folder begins anew"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"started": 1}', '{"earlier": 5}', "[" * 200_000], ids=len)
def test_a_damaged_file_does_not_stop_a_resume(damage: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(damage)
    assert written(tmp_path, 5)["earlier"] == []


def test_infinity_is_null(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"gradient_clipping": math.inf})
    write_run_info(tmp_path, config, PARTS)
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert "Infinity" not in text
    assert "模型/llama" in text
    assert json.loads(text)["config"]["gradient_clipping"] is None
