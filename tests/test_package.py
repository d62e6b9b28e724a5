"""Shows that the installed package does what a clone's scripts do, under one name, whatever else is called `data`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.version import VERSION
from tests.conftest import FAQ, ROOT, save_tokenizer
from tests.environments import environment
from tests.launching import metrics, run, topology, write_config

NEEDED = ("common", "data", "models", "training", "pipetune")
FILES = ("train_ds.py", "train_ds_zero.py", "convert_model.py", "demo.py", "setup.py", "pyproject.toml")
TEXTS = ("requirements.txt", "README.md", "LICENSE")


def copied(target: Path) -> Path:
    """What the package is built from; a build leaves files behind."""
    for name in NEEDED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, *TEXTS):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def pipetune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own that shares the tests' other packages."""
    folder = tmp_path_factory.mktemp("package")
    source = copied(folder / "source")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = folder.glob("pipetune-*.whl")
    python = environment(folder / "environment", "--no-deps", str(wheel))
    return python.with_name("pipetune")


def said(*words: str | Path, cwd: Path) -> str:
    """What a command prints, far from the clone."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_name_is_the_only_one(pipetune: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A script beside files of the wings' names gets its own files, and Pipetune's by their long names."""
    for name in ("common", "data", "models", "training"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    (tmp_path / "script.py").write_text(
        "import json, sys\n"
        "import common, data, models, training\n"
        "import pipetune\n"
        "from pipetune.models.spec import ModelSpec\n"
        "assert common.OWN and data.OWN and models.OWN and training.OWN\n"
        "assert pipetune.train.__module__ == 'pipetune.training.api'\n"
        "assert isinstance(pipetune.load_model(sys.argv[1]).spec, ModelSpec)\n"
        "print(json.dumps([pipetune.__version__, pipetune.encode.__module__, str(pipetune.INSTALLED)]))\n"
    )
    printed = said(pipetune.with_name("python"), "script.py", make_checkpoint("mixtral"), cwd=tmp_path)
    assert json.loads(printed.splitlines()[-1]) == [VERSION, "pipetune.data.tokenized.tokenize", "True"]


@pytest.mark.slow
@pytest.mark.launched
def test_its_commands_are_the_doors(pipetune: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    save_tokenizer(folder)
    records = json.loads(FAQ.read_text(encoding="utf-8"))
    (tmp_path / "records.json").write_text(json.dumps(records * 80), encoding="utf-8")  # another process tokenizes them
    assert (tmp_path / "records.json").stat().st_size > 2**20
    keys = {"data_path": str(tmp_path / "records.json"), "model_topo": topology((2, 1)), "max_steps": 3}
    config = write_config(tmp_path / "run.yml", model_path=str(tmp_path / "layers"), **keys)
    said(pipetune, "convert", "hg_to_pp", "--input-path", folder, "--save-path", "layers", cwd=tmp_path)
    assert "plan.png" in said(pipetune, "plan", "--config", config, "--devices", "2xA100-80G", cwd=tmp_path)
    assert "samples" in said(pipetune, "inspect", "--config", config, cwd=tmp_path)
    done = run(pipetune, "train", "--config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3]
    said(pipetune, "convert", "pp_to_hg", "--input-path", "run", "--save-path", "hf", cwd=tmp_path)
    said(pipetune, "demo", "--model", "hf", "--prompt", "hello", "--max-new-tokens", "4", "--greedy", cwd=tmp_path)


@pytest.mark.slow
def test_what_there_is_it_tells(pipetune: Path, tmp_path: Path) -> None:
    assert said(pipetune, "--version", cwd=tmp_path) == f"pipetune {VERSION}\n"
    assert "train-zero" in said(pipetune, "--help", cwd=tmp_path)
    wrong = subprocess.run([pipetune, "trian"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode and wrong.stderr.startswith("error: trian: no such command; expected one of train")
    clone = [sys.executable, "-m", "pipetune", "--version"]
    assert said(*clone, cwd=ROOT) == f"pipetune {VERSION}\n"
