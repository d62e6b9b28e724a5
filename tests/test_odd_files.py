"""A FIFO, a folder or a device where a file is expected: nobody waits for it, and what is said is one line."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from deepspeed.launcher import runner
from rich.console import Console

from data.chat.prompts import Prompts
from data.tokenized.recipe import DataFile, Recipe
from data.tokenized.store import is_whole, open_cache
from data.tokenized.tokenizer import load_tokenizer
from models.api import read_spec
from models.checkpoint import publish
from models.checkpoint.layout import MANIFEST, RECORD, Manifest, not_found, resolve, weight_index
from models.checkpoint.tensor_files import SafetensorsFile, load_archive
from models.config_json import stop_ids
from options import RunConfig, load_config
from options.cluster.gather import hosts_of
from options.cluster.hosts import exported_variables, read_hostfile
from options.planner import links
from options.planner.kernels import KERNELS_FILE, fastest
from options.trackers.services import WandBTracker
from tests.data.caches import records, write
from training.checkpoint.folder import Best, CheckpointRecord
from training.checkpoint.run_folder import name_latest
from training.checkpoint.side_files import read_side_files
from training.config.keys import TrainConfig
from training.errors import USER_ERRORS
from training.launch import agent
from training.metrics.reporter import METRICS_FILE, Reporter
from training.metrics.tracking import open_trackers

PATIENCE = 12.0  # seconds
MOST = 2**30  # bytes
KINDS = ("fifo", "folder", "device")


def make(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@dataclass
class Case:
    """A file that something reads.

    Attributes:
        name: of the file, in the test's folder.
        reads: reads it, given the folder.
        passes: whether that is to end well; else with an error for the user that names the file.
        kinds: what may stand there.
    """

    name: str
    reads: Callable[[Path], object]
    passes: bool = True
    kinds: tuple[str, ...] = KINDS


def recipe(folder: Path) -> Recipe:
    return Recipe((DataFile(str(folder / "data.jsonl")),), str(folder), Prompts(prompt_format="plain"), max_seq_len=160)


def tokenized(folder: Path) -> Path:
    return open_cache(recipe(folder), folder / "cache", Console(quiet=True))


def made_anew(folder: Path, pattern: str, kind: str) -> None:
    """Samples are tokenized again, or found, where one file of their cache is none."""
    tokenized(folder)
    (found,) = (folder / "cache").glob(pattern)
    make(found, kind)
    assert is_whole(tokenized(folder))


def failed_before(folder: Path, kind: str) -> None:
    """A builder's last words are no file."""
    builds = folder / "cache" / "builds"
    builds.mkdir(parents=True)
    make(builds / f"{recipe(folder).identity()}.failed", kind)
    assert is_whole(tokenized(folder))


def wandb(folder: Path) -> None:
    package: Any = ModuleType("wandb")
    package.init = lambda **settings: len(settings["id"]) == 32 or 1 / 0
    sys.modules["wandb"] = package
    config = RunConfig.model_validate({"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 4})
    with publish.writing(folder):
        WandBTracker(config, folder, 2)


def tensorboard(folder: Path) -> None:
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 4}
    with publish.writing(folder):
        open_trackers(TrainConfig.model_validate(keys | {"tensorboard": {"enabled": True}}), folder, 2)


def reported(folder: Path, first_step: int) -> None:
    """As a run begins its reports."""
    with publish.writing(folder):
        Reporter(folder, 4, 1, first_step)


NO_SPEC: Any = None  # only folders with weights need one
CASES = [
    Case("best.json", lambda folder: Best.read(folder, 1, ""), passes=False),
    Case(RECORD, CheckpointRecord.read, passes=False),
    Case(RECORD, lambda folder: str(not_found(folder / "layer_00-model_states.pt"))),
    Case("latest", lambda folder: name_latest(folder / "step-000001"), kinds=("fifo", "device")),
    Case("latest", resolve),
    Case("latest", lambda folder: agent.inspect_host(str(folder), "no run")),
    Case(METRICS_FILE, lambda folder: agent.inspect_host(str(folder), "no run")),
    Case(METRICS_FILE, lambda folder: reported(folder, 1), kinds=("fifo", "device")),  # a new run has a new file
    Case(METRICS_FILE, lambda folder: reported(folder, 1), passes=False, kinds=("folder",)),
    Case(METRICS_FILE, lambda folder: reported(folder, 3), passes=False),
    Case(links.FILE, lambda folder: links.Links.read(folder, print)),
    Case(KERNELS_FILE, lambda folder: fastest(["eager"], lambda _: 1.0, folder / KERNELS_FILE, {})),
    Case("wandb_id", wandb, passes=False, kinds=("folder",)),
    Case("wandb_id", wandb, kinds=("fifo", "device")),
    Case("tensorboard", tensorboard, passes=False, kinds=("fifo", "device")),
    Case("config.json", read_spec, passes=False),
    Case("model.safetensors", lambda folder: SafetensorsFile(folder / "model.safetensors"), passes=False),
    Case("pytorch_model.bin", lambda folder: load_archive(folder / "pytorch_model.bin"), passes=False),
    Case("model.safetensors.index.json", weight_index),
    Case(MANIFEST, Manifest.read),
    Case("generation_config.json", stop_ids),
    Case("tokenizer_config.json", load_tokenizer, passes=False),
    Case("chat_template.jinja", load_tokenizer, passes=False),
    Case("tokenizer.json", load_tokenizer, passes=False),
    Case("tokenizer.model", load_tokenizer, passes=False),
    Case("LICENSE", lambda folder: read_side_files(folder, NO_SPEC)),
    Case(publish.MARK, publish._read_mark),
    Case("run.yml", lambda folder: load_config(str(folder / "run.yml"), []), passes=False),
    Case("hostfile", lambda folder: read_hostfile(str(folder / "hostfile"), "", ""), passes=False),
    Case("hostfile", lambda folder: hosts_of(None, str(folder / "hostfile")), passes=False),
]


@pytest.mark.parametrize(
    ("case", "kind"), [pytest.param(case, kind, id=f"{case.name}-{kind}") for case in CASES for kind in case.kinds]
)
def test_nobody_waits_for_what_is_no_file(case: Case, kind: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    make(tmp_path / case.name, kind)
    ended = outcome(lambda: case.reads(tmp_path))
    if case.passes:
        assert ended is None
    else:
        assert isinstance(ended, USER_ERRORS), ended
        assert case.name in str(ended) and "\n" not in str(ended)


@pytest.mark.parametrize(
    "pattern", [*(f"datasets/*/{name}" for name in ("meta.json", "samples.bin", "index.bin")), "digests/*.checked"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_tokenized_again_where_a_file_of_theirs_is_none(
    pattern: str, kind: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.digests.SETTLED", -1.0)
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "data.jsonl", records(3))
    assert outcome(lambda: made_anew(tmp_path, pattern, kind)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_that_is_no_file_says_nothing(kind: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "data.jsonl", records(3))
    assert outcome(lambda: failed_before(tmp_path, kind)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_is_no_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path)])
    make(tmp_path / runner.DEEPSPEED_ENVIRONMENT_NAME, kind)
    ended = outcome(exported_variables)
    assert isinstance(ended, OSError) and runner.DEEPSPEED_ENVIRONMENT_NAME in str(ended)


def outcome(work: Callable[[], object]) -> BaseException | None:
    """What a piece of work raises, in a process of its own, which may not hang."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)

    def tell() -> None:
        most = psutil.Process().memory_info().vms + MOST
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # a device may never end
        try:
            work()
            sends.send(None)
        except Exception as error:
            sends.send(error)

    child = context.Process(target=tell)
    child.start()
    sends.close()
    try:
        assert receives.poll(PATIENCE), "it waits"
        found: BaseException | None = receives.recv()
        return found
    finally:
        child.kill()
        child.join()
