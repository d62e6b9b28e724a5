"""Shows that the installed package does what a clone's scripts do, under one name, whatever else is called `data`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from email import message_from_string
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from common.version import VERSION
from options import load_config
from tests.conftest import FAQ, ROOT, save_tokenizer
from tests.environments import environment
from tests.launching import metrics, run, topology, write_config

REQUIREMENTS = ROOT / "requirements.txt"
NEEDED = ("common", "data", "models", "options", "training", "pipetune", "configs")
FILES = ("train_ds.py", "train_ds_zero.py", "convert_model.py", "demo.py", "setup.py", "pyproject.toml")
TEXTS = ("README.md", "LICENSE", "MANIFEST.in", *(each.name for each in ROOT.glob("requirements*.txt")))


def copied(target: Path) -> Path:
    """What the package is built from; a build leaves files behind."""
    for name in NEEDED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, *TEXTS):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copied(folder / "source")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True)
    return next(folder.glob("pipetune-*.whl"))


@pytest.fixture(scope="module")
def pipetune(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own that shares the tests' other packages."""
    python = environment(tmp_path_factory.mktemp("package") / "environment", "--no-deps", str(wheel))
    return python.with_name("pipetune")


def said(*words: str | Path, cwd: Path) -> str:
    """What a command prints, far from the clone."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_name_is_the_only_one(pipetune: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A script beside files of the wings' names gets its own files, and Pipetune's by their long names."""
    for name in ("common", "data", "models", "options", "training"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    (tmp_path / "script.py").write_text(
        "import json, sys\n"
        "import common, data, models, options, training\n"
        "import pipetune\n"
        "from pipetune.models.spec import ModelSpec\n"
        "assert common.OWN and data.OWN and models.OWN and options.OWN and training.OWN\n"
        "assert pipetune.train.__module__ == 'pipetune.training.api'\n"
        "assert isinstance(pipetune.load_model(sys.argv[1]).spec, ModelSpec)\n"
        "print(json.dumps([pipetune.__version__, pipetune.encode.__module__, str(pipetune.INSTALLED)]))\n"
    )
    printed = said(pipetune.with_name("python"), "script.py", make_checkpoint("mixtral"), cwd=tmp_path)
    assert json.loads(printed.splitlines()[-1]) == [VERSION, "pipetune.data.tokenized.tokenize", "True"]


@pytest.mark.longest
@pytest.mark.launched
def test_its_commands_are_entry_points(pipetune: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
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
def test_version_help_and_a_misspelt_command(pipetune: Path, tmp_path: Path) -> None:
    assert said(pipetune, "--version", cwd=tmp_path) == f"pipetune {VERSION}\n"
    assert "train-zero" in said(pipetune, "--help", cwd=tmp_path)
    for word, expected in (("trian", "did you mean train?"), ("xyzzy", "expected one of train, ")):
        wrong = subprocess.run([pipetune, word], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith(f"error: {word}: no such command; {expected}")
    clone = [sys.executable, "-m", "pipetune", "--version"]
    assert said(*clone, cwd=ROOT) == f"pipetune {VERSION}\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "train-zero", "plan", "convert", "demo", "report", "init", "completion"])
def test_usage_names_the_typed_command(pipetune: Path, command: str, tmp_path: Path) -> None:
    assert said(pipetune, command, "--help", cwd=tmp_path).startswith(f"usage: pipetune {command} ")


@pytest.mark.slow
def test_init_writes_a_config_once(pipetune: Path, tmp_path: Path) -> None:
    assert "pipetune plan --config run.yml" in said(pipetune, "init", "run.yml", cwd=tmp_path)
    assert load_config(str(tmp_path / "run.yml"), []).model_topo.process_topology.dims == [8, 1]
    schema = (tmp_path / "run.yml").read_text(encoding="utf-8").splitlines()[0].partition("$schema=")[2]
    assert Path(schema).read_text() == (ROOT / "configs" / "pipetune.schema.json").read_text()
    (tmp_path / "run.yml").write_text("mine")
    again = subprocess.run([pipetune, "init", "run.yml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "expected the name of a new file" in again.stderr
    assert (tmp_path / "run.yml").read_text() == "mine"


@pytest.mark.slow
def test_bash_completes_commands_and_options(pipetune: Path, tmp_path: Path) -> None:
    (tmp_path / "complete.sh").write_text(said(pipetune, "completion", "bash", cwd=tmp_path))
    script = """
    source complete.sh
    for words in "pipetune pl" "pipetune plan --dev" "pipetune convert pp_to_hg --lay"; do
      COMP_WORDS=($words) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
      _shtab_pipetune
      echo "${COMPREPLY[*]}"
    done
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plan", "--devices", "--layout"], done.stderr


@pytest.mark.slow
def test_the_wheel_describes_itself(pipetune: Path) -> None:
    found = metadata("pipetune", pipetune)
    text = found.get_payload()
    assert isinstance(text, str)
    dead = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("http")]
    assert "# Pipetune" in text
    assert dead == []
    needed = [Requirement(each) for each in found.get_all("Requires-Dist", [])]
    assert {each.name for each in needed if each.marker is None} == {each.name for each in packages(REQUIREMENTS)}
    assert {"dev", "gpu", "onnx", "wandb", "swanlab", "mlflow", "datasets"} <= set(found.get_all("Provides-Extra", []))


def test_constraints_lie_in_the_ranges() -> None:
    """Every package has a version that the tests run with, one that the requirements allow."""
    ranges = {each.name: each.specifier for each in packages(REQUIREMENTS)}
    exact = {each.name: each.specifier for each in packages(ROOT / "constraints.txt")}
    assert exact.keys() | {"deepspeed"} == ranges.keys()
    for name, specifier in exact.items():
        (pinned,) = specifier
        assert pinned.operator == "=="
        assert pinned.version in ranges[name], name


@pytest.mark.longest
@pytest.mark.launched
def test_the_lowest_versions_train(wheel: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An environment with the lowest version of each requirement keeps them when the wheel comes, and trains."""
    lowest = {each.name: bound for each in packages(REQUIREMENTS) if (bound := lower_bound(each))}
    del lowest["torch"]  # 2 GB; the machine with torch 2.11 is another test
    pinned = [f"{name}=={version}" for name, version in lowest.items()]
    python = environment(tmp_path / "lowest", *pinned, str(wheel))
    report = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found = said(python, "-c", report, *lowest, cwd=tmp_path).split()
    assert [Version(each) for each in found] == [Version(each) for each in lowest.values()]
    folder = make_checkpoint("llama")
    save_tokenizer(folder)
    config = write_config(
        tmp_path / "run.yml", model_path=str(folder), data_path=str(FAQ), model_topo=topology((2, 1)), max_steps=3
    )
    done = run(python.with_name("pipetune"), "train", "--config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3]


@pytest.mark.longest
def test_another_transformers_in_range_stays(wheel: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An environment with the highest other version that the requirements allow keeps all that it has, and plans."""
    (needed,) = (each for each in packages(REQUIREMENTS) if each.name == "transformers")
    own = f"setuptools=={version('setuptools')}"  # which torch would replace
    python = environment(tmp_path / "other", "--no-deps", f"{needed},!={version('transformers')}", own)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    before = {path.name for path in site.iterdir()}
    said(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    added = {path.name for path in site.iterdir()} - before
    assert {name.partition("-")[0] for name in added} == {"pipetune"}
    assert before <= {path.name for path in site.iterdir()}
    found = said(python, "-c", "import transformers; print(transformers.__version__)", cwd=tmp_path).strip()
    assert found in needed.specifier
    assert found != version("transformers")
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "model_topo": topology((2, 1))}
    config = write_config(tmp_path / "run.yml", **keys)
    command = python.with_name("pipetune")
    assert "plan.png" in said(command, "plan", "--config", config, "--devices", "2xA100-80G", cwd=tmp_path)


def packages(file: Path) -> list[Requirement]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]


def lower_bound(requirement: Requirement) -> str | None:
    return next((each.version for each in requirement.specifier if each.operator in (">=", "==")), None)


def metadata(name: str, command: Path) -> Message:
    """The metadata of an installed package."""
    (folder,) = command.parents[1].glob(f"lib/python*/site-packages/{name}-*.dist-info")
    return message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
