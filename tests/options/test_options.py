"""An option is one folder: it comes and goes without an edit of the core."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest

from options import RunConfig
from options.reference import SCHEMA, schema
from tests.conftest import FAQ, ROOT
from tests.launching import metrics, topology, write_config
from training.callbacks import Callback
from training.command_line import make_parser, parse_arguments, run_entry_point
from training.config.changes import FREE, compare, settings_of
from training.config.keys import TrainConfig
from training.config.yaml_file import load_config_of
from training.engine.pipeline import PipelineTrainer
from training.engine.trainer import Trainer
from training.errors import ConfigError
from training.job import Task
from training.measures import Measures
from training.option import (
    Action,
    CommandLine,
    EntryPoint,
    Flags,
    IsOverride,
    Option,
    find_action,
    rank_action,
    wrap_trainer,
)
from training.runs import run_callbacks

GREETED = "hello from the flag"


class DummyKeys(TrainConfig):
    """A run with a dummy."""

    dummy_size: int = 3
    """How large the dummy is."""

    dummy_mode: str | None = None
    """Which dummy."""

    def contradictions(self) -> Any:
        yield from super().contradictions()
        if self.dummy_size > self.train_batch_size:
            yield f"dummy_size: {self.dummy_size} is more than train_batch_size; expected less"


class DummyCallback(Callback):
    def __init__(self, size: int) -> None:
        self.size = size


def dummy_callbacks(config: DummyKeys, _: Task) -> Sequence[Callback]:
    return [DummyCallback(config.dummy_size)] if config.dummy_mode else []


def first_callbacks(config: DummyKeys, _: Task) -> Sequence[Callback]:
    return [DummyCallback(0)] if config.dummy_mode else []


def add_flags(line: CommandLine) -> None:
    line.parser.add_argument("--greet", action="store_true", help=line.staged("greet"))
    line.parser.add_argument("--greet-all", action="store_true")
    line.parser.add_argument("--loudly", action="store_true")
    line.parser.add_argument("--watch", action="store_true")


def check_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace, is_override: IsOverride) -> None:
    if arguments.greet and not any(map(is_override, arguments.overrides)):
        parser.error("--greet: expected an override")


def write_first(arguments: argparse.Namespace, entry: EntryPoint) -> None:
    arguments.config = str(arguments.config).replace("{}", "staged" if entry.in_stages else "whole")


def greet(config: DummyKeys, arguments: argparse.Namespace, entry: EntryPoint) -> None:
    print(GREETED, config.dummy_size)


class Watched(PipelineTrainer):
    pass


def watch(arguments: argparse.Namespace, kind: type[Trainer]) -> type[Trainer]:
    return Watched if arguments.watch else kind


def greet_all(config: DummyKeys, process: Any, monitor: Any, in_stages: bool) -> bool:
    return in_stages


DUMMY: Option[Any] = Option(
    DummyKeys,
    before="save_path",
    rules={"dummy_mode": FREE},
    callbacks=dummy_callbacks,
    first_callbacks=first_callbacks,
    flags=Flags(
        add=add_flags,
        needs={"loudly": ("greet", "greet_all")},
        check=check_flags,
        prepare=write_first,
        acts={"greet": Action(greet, reads_model=lambda config: False)},
        on_ranks={"greet_all": lambda: greet_all},
        wrap_trainer=watch,
    ),
)


class WithDummy(DummyKeys, RunConfig):
    """A whole run, and a dummy."""

    options = (*RunConfig.options, DUMMY)


def read(tmp_path: Path, kind: type[TrainConfig] = WithDummy, **keys: Any) -> TrainConfig:
    return load_config_of(kind, write_config(tmp_path / "run.yml", model_path="m", data_path="d", **keys))


def test_a_new_option_has_keys_where_it_wants_them(tmp_path: Path) -> None:
    config = read(tmp_path, dummy_size=2)
    names = list(config.dump())
    assert names[names.index("save_path") - 1] == "dummy_size"  # a key that is none is left out
    rest = [name for name in WithDummy.model_fields if not name.startswith("dummy")]
    assert rest == list(RunConfig.model_fields)
    with pytest.raises(ConfigError, match=r"run\.yml: dummy_size: 99 is more than train_batch_size; expected less$"):
        read(tmp_path, dummy_size=99)
    with pytest.raises(ConfigError, match=r"unknown key dummy_sise; did you mean dummy_size\?$"):
        read(tmp_path, dummy_sise=2)


def test_a_new_option_has_rules(tmp_path: Path) -> None:
    then = settings_of(read(tmp_path))
    assert then["dummy_size"] == 3
    same = settings_of(read(tmp_path, dummy_mode="other"))
    assert compare(then, same, "step-1", WithDummy.rules) == []
    with pytest.raises(ConfigError, match=r"^dummy_size: 4, but step-1 was trained with 3"):
        compare(then, settings_of(read(tmp_path, dummy_size=4)), "step-1", WithDummy.rules)


def test_a_new_option_has_callbacks(tmp_path: Path) -> None:
    def names(config: TrainConfig) -> list[str]:
        found = run_callbacks(config, cast(Task, None), [Measures()])
        return [str(each.size) if isinstance(each, DummyCallback) else type(each).__name__ for each in found]

    core = ["Measures", "Reporting", "BadSteps"]
    assert names(read(tmp_path, dummy_mode="one")) == ["0", *core, "Totals", "3", "BoundedMemory"]
    assert names(read(tmp_path)) == [*core, "Totals", "BoundedMemory"]


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str, in_stages: bool = True) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train_ds.py", *words])
    return parse_arguments(WithDummy, "", in_stages)


@pytest.mark.parametrize("in_stages", [True, False])
def test_a_flag_may_act_in_place_of_training(
    in_stages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets a config that another hook may have written, and no model is looked for."""
    folder = tmp_path / ("staged" if in_stages else "whole")
    folder.mkdir()
    read(folder)
    words = "--config", str(tmp_path / "{}" / "run.yml"), "--greet", "dummy_size=2"
    asked = parsed(monkeypatch, *words, in_stages=in_stages)
    assert rank_action(WithDummy.options, asked) is None

    def load(process: object) -> TrainConfig:
        return load_config_of(WithDummy, asked.config, asked.overrides)

    def train(*_: object) -> bool:
        raise AssertionError

    run_entry_point(WithDummy, asked, load, train, in_stages)
    assert capsys.readouterr().out == f"{GREETED} 2\n"


def test_a_flag_may_act_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = parsed(monkeypatch, "--config", "run.yml", "--greet-all", "--loudly")
    assert rank_action(WithDummy.options, asked) is greet_all
    assert find_action(WithDummy.options, asked) is None


def test_a_flag_may_wrap_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in (["--watch"], Watched), ([], PipelineTrainer):
        asked = parsed(monkeypatch, "--config", "run.yml", *words)
        assert wrap_trainer(WithDummy.options, asked, PipelineTrainer) is expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--config run.yml --greet-all --plan", "--prove, --check, --greet and --greet-all: expected one of them"),
        ("--config run.yml --loudly", "--loudly needs --greet or --greet-all"),
        ("--config run.yml --greet", "--greet: expected an override"),
        ("--config run.yml --dry-run", "--dry-run needs --auto"),
        ("--config run.yml --devices 2xV100", "--devices needs --plan or --dry-run"),
        ("--config run.yml --plan --per-host 2", "--per-host needs --links"),
        ("--auto --model m --data d", "--auto, --model, --data and --save: expected all of them, or --config"),
        ("--auto --model m --data d --save s --plan", "--check, --greet and --greet-all need --config"),
    ],
)
def test_flags_that_do_not_go_together(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, *words.split())
    assert f"{line} (" in capsys.readouterr().err


def test_the_usage_says_that_one_source_of_the_config_is_needed() -> None:
    shown = [make_parser(RunConfig, in_stages=in_stages).format_usage() for in_stages in (True, False)]
    assert "(--config CONFIG | --auto)" in shown[0] and "[-h] --config CONFIG [" in shown[1]


def test_a_flag_that_needs_a_pipeline_is_hidden_without() -> None:
    for in_stages in (True, False):
        text = make_parser(WithDummy, in_stages=in_stages).format_help()
        shown = [flag for flag in ("--auto", "--search", "--prove", "--greet ") if flag in text]
        assert len(shown) == (4 if in_stages else 0) and "--plan" in text and "--record" not in text


@pytest.mark.parametrize("option", RunConfig.options, ids=lambda option: option.keys.__name__)
def test_a_key_of_an_option_that_is_gone_is_unknown(option: Option[Any], tmp_path: Path) -> None:
    left = tuple(each for each in RunConfig.options if each is not option)
    bases = tuple(each.keys for each in left if each.keys is not TrainConfig) or (TrainConfig,)
    kind = cast(type[TrainConfig], type("Without", bases, {"options": left, "__module__": __name__}))
    for key in option.keys.model_fields.keys() - TrainConfig.model_fields.keys():
        with pytest.raises(ConfigError, match=rf"run\.yml: unknown key {key}(;|$)") as refused:
            read(tmp_path, kind, **{key: 1})
        assert "\n" not in str(refused.value)
    assert read(tmp_path, kind)


def test_the_config_has_the_keys_of_the_list() -> None:
    assert {*RunConfig.__bases__, TrainConfig} == {TrainConfig, *(option.keys for option in RunConfig.options)}
    named = [name for option in RunConfig.options for name in option.keys.model_fields]
    assert {*TrainConfig.model_fields, *named} == RunConfig.model_fields.keys()
    assert SCHEMA.read_text(encoding="utf-8") == schema()


# Options that no other one is made of: each may be deleted alone.
ALONE = "cluster distillation exports proof scores streamed_data timeline trackers weight_streaming".split()
PACKAGES = ("common", "data", "models", "options", "training")


@cache
def imported(file: Path) -> set[str]:
    """The packages of options that a file may import, now or later."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("options.")}


@pytest.mark.parametrize("name", ALONE)
def test_an_option_is_imported_by_the_list_alone(name: str) -> None:
    files = chain.from_iterable(
        (ROOT / top).rglob("*.py") for top in ("common", "data", "models", "options", "training")
    )
    others = [file for file in files if ROOT / "options" / name not in file.parents]
    users = [file for file in others if f"options.{name}" in imported(file)]
    assert users in ([], [ROOT / "options" / "__init__.py"])


FOLDERS = sorted(path.parent for path in (ROOT / "options").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_option_names_its_page(folder: Path) -> None:
    first = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or "").splitlines()[0]
    page = re.search(r"docs/[\w-]+\.md", first)
    assert page and (ROOT / page[0]).is_file()
    assert (ROOT / "tests" / "options" / folder.name).is_dir()


@pytest.mark.parametrize("folder", ["common", "data", "models", "training"])
def test_the_tests_of_the_core_need_no_option(folder: str) -> None:
    """`options` alone they may import, where they want a config as users write it."""
    needed = re.compile(rf"^\s*(?:from|import) options\.(?:{'|'.join(each.name for each in FOLDERS)})\b", re.MULTILINE)
    files = (ROOT / "tests" / folder).rglob("*.py")
    assert [str(file) for file in files if needed.search(file.read_text(encoding="utf-8"))] == []


def tree_without(option: str, folder: Path) -> Path:
    """Copy the code, without an option and what stands on it: neither in the list nor on the disk."""
    gone = [option]
    for other in FOLDERS:
        if f"options.{option}" in (other / "__init__.py").read_text(encoding="utf-8") and other.name != option:
            gone.append(other.name)

    for name in ("common", "data", "models", "training", "options", "train_ds.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for name in gone:
        shutil.rmtree(folder / "options" / name)
    listed = folder / "options" / "__init__.py"
    lines = listed.read_text(encoding="utf-8").splitlines(keepends=True)
    named = re.compile(rf"^ +(?:{'|'.join(gone)})[.,]")
    listed.write_text("".join(line for line in lines if not named.match(line)), encoding="utf-8")
    return folder


ROWS = "train_micro_batch_size_per_gpu"
GONE = {  # a flag, and overrides with what is said of each
    "planner": (
        "--plan",
        {"rebalance=true": "unknown key rebalance", f"{ROWS}=auto": f"{ROWS}: auto is for the planner"},
    ),
    "proof": ("--prove", {}),
    "cluster": ("--hostfile", {}),
    "weight_streaming": ("", {"schedule=weight_streaming": "'1f1b' or 'dualpipev', found 'weight_streaming'"}),
}


@pytest.mark.parametrize("option", GONE)
def test_what_an_option_that_is_gone_brought_is_refused(option: str, tmp_path: Path) -> None:
    folder, (flag, lines) = tree_without(option, tmp_path), GONE[option]
    config = write_config(tmp_path / "run.yml", model_path="m", data_path="d")

    def last_line(*words: str) -> str:
        launched = [sys.executable, "train_ds.py", "--config", str(config), *words]
        ended = subprocess.run(launched, cwd=folder, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "") and "Traceback" not in ended.stderr
        return ended.stderr.splitlines()[-1]

    if flag:
        assert last_line(flag).startswith(f"error: unrecognized arguments: {flag}")
    for key, line in lines.items():
        assert line in last_line(key)


IMPORT_ALL = """
import importlib, pkgutil, sys
option, *packages = sys.argv[1:]
import options
for name in packages:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith(f"options.{option}")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", GONE)
def test_all_else_is_imported_without_an_option(option: str, tmp_path: Path) -> None:
    packages = PACKAGES if option in ALONE else [name for name in PACKAGES if name != "options"]
    words = [sys.executable, "-c", IMPORT_ALL, option, *packages]
    ended = subprocess.run(words, cwd=tree_without(option, tmp_path), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.launched
def test_a_run_without_the_planner_says_what_it_does_in_place_of_it(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    topo = topology((2, 1))
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "max_steps": 2, "model_topo": topo}
    config = write_config(tmp_path / "run.yml", use_grad_ckpt="auto", **keys)
    words = [sys.executable, "train_ds.py", "--config", str(config)]
    folder = tree_without("planner", tmp_path)
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for line in ("parts: auto, as many", "gradient checkpointing: auto, all blocks, as nothing", "attention: torch's"):
        assert ended.stdout.count(line) == 1
    assert [line["step"] for line in metrics(config.with_suffix(""))] == [1, 2]
