"""What a run leaves on disks that no other host sees, that it resumes from there, and what it refuses.

Two ranks pass for hosts (tests/workers/hosts.py); tests/cluster has real ones.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.cases import tiered
from tests.conftest import write_records
from tests.launching import topology
from tests.ranks import Ranks, job
from tests.training.checkpoint.test_folder import flip
from training.checkpoint.folder import RECORD, CheckpointRecord, step_folder
from training.checkpoint.saved_slices import SavedOptimizer

pytestmark = [pytest.mark.launched, pytest.mark.slow]

PIPE, DATA = ({"model_topo": topology(dims)} for dims in ((2, 1), (1, 2)))
BF16 = {"bf16": {"enabled": True}}
NAMES = ("node1", "node2")
STEPS, SAVED = 4, 2

# What resumes to the last bit: keys and kind of trainer.
EXACT: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": (PIPE, "pipeline"),
    "pipeline-fp16": (PIPE | {"fp16": {"enabled": True, "initial_scale_power": 8}}, "pipeline"),
    "dualpipev": (PIPE | {"schedule": "dualpipev"}, "pipeline"),
    "replicas": (DATA | BF16, "pipeline"),
    "replicas-plain": (DATA | {"zero_optimization": {"stage": 0}}, "pipeline"),
    **{f"zero-{stage}": (DATA | {"zero_optimization": {"stage": stage}}, "zero") for stage in range(4)},
    "zero-0-bf16": (DATA | BF16 | {"zero_optimization": {"stage": 0}}, "zero"),
}
SLOW = ("pipeline", "replicas", "zero-3")


def half_rename(run: Path) -> None:
    """Leave the last checkpoint under its temporary name, as a host that dies before it renames it."""
    hidden = run / ".step-000004.partial-abc"
    hidden.mkdir()
    step_folder(run, STEPS).rename(hidden / "new")


def half_rename_first(one: Path, two: Path) -> None:
    half_rename(one)
    for run in (one, two):
        shutil.rmtree(step_folder(run, SAVED))


def swap(one: Path, two: Path) -> None:
    one.rename(one.with_name("before"))
    two.rename(one)
    one.with_name("before").rename(two)


def record_another_run(_: Path, two: Path) -> None:
    folder = step_folder(two, STEPS)
    record = CheckpointRecord.read(folder)
    assert record
    record.data.fingerprint = "another"
    record.write(folder)


def share(one: Path, two: Path) -> None:
    shutil.rmtree(two)
    two.symlink_to(one)


class Start(NamedTuple):
    """A start of a run on copies of the disks of "pipeline", to which something has happened.

    Attributes:
        happens: to the folders of the run on the two disks.
        error: what it is refused with, if it is.
        warning: what the log says otherwise.
        first: the step after which it resumes.
    """

    happens: Callable[[Path, Path], object]
    error: str = ""
    warning: str = ""
    first: int = SAVED
    keys: dict[str, Any] = {}


STARTS = {
    "damaged": Start(
        lambda _, two: flip(step_folder(two, STEPS) / "layer_03-model_states.pt"),
        warning="step-000004 is passed over: host node2: layer_03-model_states.pt is damaged: its checksum differs",
    ),
    "missing": Start(
        lambda _, two: (step_folder(two, STEPS) / "random-001.pt").unlink(),
        warning="step-000004 is passed over: host node2: random-001.pt is missing",
    ),
    "half renamed": Start(
        lambda _, two: half_rename(two),
        warning="step-000004 is passed over: host node2: no checkpoint.json: it was never finished",
    ),
    "first one half renamed": Start(
        half_rename_first, warning="step-000004 is passed over: host node1: no checkpoint.json", first=0
    ),
    "second empty": Start(
        lambda _, two: shutil.rmtree(two),
        "run holds no checkpoint on host node2, but step-000004 on host node1; expected the hosts",
    ),
    "first empty": Start(
        lambda one, _: shutil.rmtree(one),
        "run holds no checkpoint on host node1, but step-000004 on host node2; expected the hosts",
    ),
    "other order": Start(
        swap, "step-000004/layer_00-model_states.pt: not here, as it was written on host node1; expected"
    ),
    "another run": Start(
        record_another_run,
        "step-000004: on host node2 that of another run than on host node1; expected the same on all",
    ),
    "other topology": Start(
        lambda *_: None, "step-000004/layer_03-model_states.pt: not here, as it was written on host node2", keys=DATA
    ),
    "shared": Start(share, "run: hosts share it; expected a disk of its own on each, or storage: shared"),
    "not shared": Start(
        lambda *_: None,
        "run: not what rank 0 writes to; expected a folder that all hosts share, or storage: local",
        keys={"storage": "shared"},
    ),
}
SLOW_STARTS = {"damaged", "half renamed", "second empty", "first empty", "other order", "shared"}


def disks_of(folder: Path, name: str) -> list[Path]:
    return [folder / name / host for host in NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, folder: Path, make_checkpoint: Callable[..., Path]) -> Run:
    """A function that runs a job on the disks of a name, and returns its outcome."""
    records, model = folder / "records.json", make_checkpoint("llama")
    write_records(records, 16)

    def start(name: str, kind: str, keys: dict[str, Any], worker: str = "hosts") -> dict[str, Any]:
        disks = disks_of(folder, name)
        for disk in disks:
            disk.mkdir(parents=True, exist_ok=True)
        own = {"model_path": str(model), "save_path": "run", "storage": "local", "max_steps": STEPS, "max_seq_len": 128}
        case = job(folder, name, kind, **own | {"save_interval": SAVED} | keys)
        case |= {"hosts": NAMES, "disks": list(map(str, disks))}
        return ranks.jobs([case], folder, worker)[name]

    return start


Straight = Callable[[str], list[Path]]


@pytest.fixture(scope="module")
def straight(run: Run, folder: Path) -> Straight:
    """The disks of a run that nothing happened to."""
    done: set[str] = set()

    def disks(name: str) -> list[Path]:
        if name not in done:
            keys, kind = EXACT[name]
            outcome = run(name, kind, keys)
            assert outcome["error"] is None, outcome["error"]
            done.add(name)
        return [disk / "run" for disk in disks_of(folder, name)]

    return disks


def record_of(run: Path, step: int = STEPS) -> CheckpointRecord:
    record = CheckpointRecord.read(step_folder(run, step))
    assert record
    return record


def state_of(runs: list[Path]) -> dict[Any, int]:
    """Compute checksums of weights, random states and optimizer states, by host."""
    found: dict[Any, int] = {}
    for run in runs:
        record, folder = record_of(run), step_folder(run, STEPS)
        plain = [name for name in record.here if name.startswith(("layer_", "random-"))]
        found |= {(record.host, name): record.here[name].crc32 for name in plain}
        for stage in range(record.topology.stages):
            if any(f"mp_rank_{stage:02d}" in name for name in record.here):
                for piece in SavedOptimizer(folder, record.topology).slices(stage):
                    states = [state for _, state in sorted(piece.state.items())]
                    kept = [piece.master.view(-1)[piece.start :][: piece.numel], *states]
                    numbers = [each.detach().numpy().tobytes() for each in kept if isinstance(each, torch.Tensor)]
                    found[record.host, piece.name, piece.offset] = zlib.crc32(b"".join(numbers))
    return found


@pytest.mark.parametrize("name", tiered(EXACT, quick=(), slow=SLOW))
def test_a_run_goes_on_to_the_last_bit(name: str, run: Run, straight: Straight, folder: Path) -> None:
    runs, (keys, kind) = straight(name), EXACT[name]
    for each in runs:
        assert {path.name for path in step_folder(each, STEPS).iterdir()} >= {"config.json", "tokenizer.json"}
    assert_goes_on(runs, disks_of(folder, f"{name}-again"), lambda: run(f"{name}-again", kind, keys))


def assert_goes_on(runs: list[Path], again: list[Path], start: Callable[[], dict[str, Any]]) -> None:
    """Take a run up from its first checkpoint, on copies of its disks, and expect the same bits."""
    one, two = (record_of(each) for each in runs)
    assert (one.host, two.host) == NAMES
    assert one.hosts == two.hosts
    for each in runs:
        assert {path.name for path in step_folder(each, STEPS).iterdir()} == {RECORD, *record_of(each).here}
        assert (each / "latest").read_text() == "step-000004"
        assert {path.name for path in each.iterdir() if path.name.startswith(".")} == set()
    assert not (runs[1] / "metrics.jsonl").exists()
    for source, target in zip(runs, again, strict=True):
        shutil.copytree(source, target / "run")
        shutil.rmtree(step_folder(target / "run", STEPS))
    outcome = start()
    assert outcome["error"] is None
    assert f"step-00000{SAVED}, after step {SAVED}\n" in outcome["printed"]
    assert (
        "storage: local: each host has its own checkpoints in run; metrics.jsonl, config.yml and" in outcome["printed"]
    )
    assert state_of([each / "run" for each in again]) == state_of(runs)


@pytest.mark.parametrize("name", tiered(STARTS, quick=(), slow=SLOW_STARTS))
def test_a_start_names_what_happened_to_a_disk(name: str, run: Run, straight: Straight, folder: Path) -> None:
    case, copies = STARTS[name], [disk / "run" for disk in disks_of(folder, name)]
    for source, target in zip(straight("pipeline"), copies, strict=True):
        shutil.copytree(source, target)
    case.happens(*copies)
    before = [sorted(path.name for path in copy.glob("step-*")) for copy in copies]
    outcome = run(name, "pipeline", PIPE | {"max_steps": 6} | case.keys if case.error else PIPE)
    if case.error:
        assert case.error in outcome["error"], outcome["error"]
        assert len(outcome["error"].splitlines()) == 1
        assert [sorted(path.name for path in copy.glob("step-*")) for copy in copies] == before
        return
    assert outcome["error"] is None
    assert case.warning in outcome["printed"]
    assert (f", after step {case.first}\n" in outcome["printed"]) == bool(case.first)
    had = [copy for copy, names in zip(copies, before, strict=True) if "step-000004" in names]
    assert [copy for copy in copies if (copy / "step-000004.damaged").exists()] == had
    assert state_of(copies) == state_of(straight("pipeline"))
