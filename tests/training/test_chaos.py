"""One run through many accidents ends bit-equal to the run that nobody disturbed, and nothing of the user's is touched.

Kills of a rank, of the launcher and of all processes, SIGTERM inside a save, a second start, a full disk and a file
that cannot be read come in a random order that is the same each time. The save folder lies on a small file system of
its own where the test may mount one, so that the disk is really full; elsewhere that accident is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from models.conversion.to_huggingface import pp_to_hg
from tests.conftest import write_records
from tests.disks import fill, small_disk
from tests.launching import DEEPSPEED, Launch, error_lines, supervised, topology, write_config
from tests.training.checkpoint.test_resume import finished, losses
from training.checkpoint.folder import RECORD, step_folders
from training.launch.agent import free_port

pytestmark = [pytest.mark.launched, pytest.mark.slow]

DISK = 64  # MB of the run's file system: a dozen checkpoints
# Root without these two cannot read what nobody may: CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2), given up by
# PR_CAPBSET_DROP (24) before the command takes this process over.
OBEYING_FILE_MODES = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("accidents", [3, pytest.param(50, marks=pytest.mark.longest)])
def test_accidents_change_no_bit(accidents: int, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    write_records(records, 80)
    model = make_checkpoint("bloom", hidden_dropout=0.1, attention_dropout=0.1)
    with small_disk(tmp_path / "disk", DISK) as (disk, may_fill):
        keys = {
            "model_path": str(model),
            "data_path": str(records),
            "max_steps": 12 * accidents,
            "train_batch_size": 8,
            "save_interval": 3,
            "bf16": {"enabled": True},
            "model_topo": topology((2, 1)),
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
        }
        straight = write_config(tmp_path / "2x1-straight.yml", **keys)
        config = write_config(tmp_path / "2x1-disturbed.yml", save_path=str(disk / "run"), **keys)
        finished(straight)
        run = DisturbedRun(config, disk / "run", random.Random(11))
        untouched = belongings(run.folder, model, records)
        kinds = [kind for kind in ACCIDENTS if may_fill or kind is not disk_full]
        chosen = kinds * math.ceil(accidents / len(kinds))
        run.generator.shuffle(chosen)
        for accident in chosen[:accidents]:
            accident(run)
            assert digests(untouched) == untouched, accident.__name__
        assert run.steps_done() < 12 * accidents, "the run was through before the last accident"
        run.finish()

        assert run.losses() == losses(straight)
        assert digests(untouched) == untouched
        for folder, name in ((straight.with_suffix(""), "straight"), (run.folder, "disturbed")):
            pp_to_hg(folder, tmp_path / name)
        weights = [load_file(tmp_path / name / "model.safetensors") for name in ("straight", "disturbed")]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class DisturbedRun:
    """The run that meets the accidents.

    Attributes:
        folder: its save_path.
        generator: of what happens when.
    """

    def __init__(self, config: Path, folder: Path, generator: random.Random) -> None:
        self.folder, self.generator = folder, generator
        self.config = config

    def start(self, script: str = "train_ds.py", **environment: str) -> Launch:
        """Start it, bound by file modes as any user is."""
        words = ("--num_gpus", "2", "--master_port", str(free_port()), script, "--config", self.config)
        return Launch(sys.executable, "-c", OBEYING_FILE_MODES, *DEEPSPEED, *words, environment=environment)

    def finish(self) -> None:
        done = supervised(2, "train_ds.py", "--config", self.config)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def losses(self) -> list[tuple[int, float]]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    def steps_done(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def whole(self) -> list[Path]:
        """Its checkpoints, newest first."""
        return [folder for folder in step_folders(self.folder) if (folder / RECORD).is_file()]

    def unfinished(self) -> set[Path]:
        """Checkpoints that are being written, or were left half-written."""
        return set(self.folder.glob(".step-*.partial-*"))

    def leases(self) -> set[Path]:
        """Each start that takes over a dead one's lease gives it its next number."""
        return set(self.folder.glob("pipetune-lease-*"))

    def advance(self, launch: Launch, inside_save: bool = False) -> None:
        """Let the run do a few steps, or begin a save."""
        left_before, goal = self.unfinished(), self.steps_done() + self.generator.randrange(1, 6)
        launch.until(lambda: self.steps_done() >= goal, pause=0.0005)
        if inside_save:
            launch.until(lambda: self.unfinished() - left_before, pause=0.0005)


def ranks_of(launch: Launch) -> list[psutil.Process]:
    """The processes that train, by rank."""
    found = {}
    for member in launch.family():
        for word in words(member):
            if word.startswith("--local_rank="):
                found[word] = member
    return [found[word] for word in sorted(found)]


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def rank_killed(run: DisturbedRun) -> None:
    launch = run.start()
    run.advance(launch, inside_save=run.generator.random() < 0.5)
    family = launch.family()
    run.generator.choice(ranks_of(launch)).kill()
    assert launch.end().returncode != 0
    psutil.wait_procs(family)


def launcher_killed(run: DisturbedRun) -> None:
    """The runner, or the process between it and the ranks: the ranks end with it."""
    launch = run.start()
    run.advance(launch, inside_save=run.generator.random() < 0.5)
    family = launch.family()
    between = [member for member in family if "deepspeed.launcher.launch" in words(member)]
    run.generator.choice([family[0], *between[:1]]).kill()
    psutil.wait_procs(family)


def all_killed(run: DisturbedRun) -> None:
    launch = run.start()
    run.advance(launch, inside_save=run.generator.random() < 0.5)
    launch.kill()


def stopped_in_a_save(run: DisturbedRun) -> None:
    launch = run.start()
    run.advance(launch, inside_save=True)
    family = launch.family()
    os.killpg(launch.pid, signal.SIGTERM)
    assert launch.end().returncode != 0
    psutil.wait_procs(family)  # the launcher is gone before the ranks have saved


def second_start(run: DisturbedRun) -> None:
    """The first one waits in a step meanwhile: a start takes as long as many steps."""
    go = run.config.with_name("go")
    go.unlink(missing_ok=True)
    before, fault = run.leases(), f"waits:0:{run.generator.randrange(2, 7)}"
    launch = run.start("tests/workers/faulty.py", FAULT=fault, WAITS_FOR=str(go))
    launch.until(lambda: run.leases() - before)
    second = run.start().end()
    errors = error_lines(second)
    assert second.returncode != 0 and len(errors) == 1 and "is being trained by" in errors[0], second.stdout
    go.touch()
    run.advance(launch)
    launch.kill()


def disk_full(run: DisturbedRun) -> None:
    """A checkpoint cannot be written, the run goes on, and space comes back."""
    launch = run.start()
    run.advance(launch)
    filler = fill(run.folder.parent)
    launch.until(lambda: "could not be saved" in launch.stdout)
    filler.unlink()
    run.advance(launch)
    launch.kill()


def unreadable_file(run: DisturbedRun) -> None:
    """A start that cannot read a checkpoint's file ends in one line that names it; the checkpoint stays what it was."""
    if not run.whole():
        launch = run.start()
        launch.until(run.whole)
        launch.kill()
    newest = run.whole()[0]
    file = run.generator.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    before, mode = set(run.folder.iterdir()) - run.leases(), file.stat().st_mode
    file.chmod(0)
    done = run.start().end()
    file.chmod(mode)
    errors = error_lines(done)
    assert done.returncode != 0 and len(errors) == 1, done.stdout + done.stderr
    assert file.name in errors[0] and "Permission denied" in errors[0], errors
    assert before <= set(run.folder.iterdir())


ACCIDENTS: tuple[Callable[[DisturbedRun], None], ...] = (
    rank_killed,
    launcher_killed,
    all_killed,
    stopped_in_a_save,
    second_start,
    disk_full,
    unreadable_file,
)


def belongings(run_folder: Path, model: Path, records: Path) -> dict[Path, str]:
    """What the user has: the model, the records, and files of theirs beside the run's own."""
    mine = run_folder / "mine"
    mine.mkdir(parents=True)
    for path in (mine / "notes.txt", run_folder / "notes.md", run_folder.parent / "step-000003"):
        path.write_text("not Pipetune's", encoding="utf-8")
    theirs = [*mine.iterdir(), run_folder / "notes.md", run_folder.parent / "step-000003", records, *model.iterdir()]
    return digests(dict.fromkeys(theirs, ""))


def digests(files: dict[Path, str]) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
