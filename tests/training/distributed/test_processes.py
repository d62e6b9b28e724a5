"""Which GPUs and cores the processes of a run get, and how long they wait for each other."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
import torch

from common import phases
from tests.launching import topology, torchrun
from training.config.keys import TrainConfig
from training.distributed import joining, script
from training.distributed.failure_detector import ANSWER, LATE
from training.distributed.joining import SMALL, LossyStream, set_threads
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError, RunRefused
from training.launch.start import SUPERVISOR, launch
from training.launch.supervisor import JOB

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 1}
GPUS = 8  # of the machine, however many a user may see


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that can only be counted."""

    def count() -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        slices = (visible or "").startswith("MIG-")  # of which CUDA shows a process the first alone
        return 1 if slices else len(visible.split(",")) if visible else GPUS

    monkeypatch.setattr(torch.cuda, "device_count", count)


def launched(number: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The job that an entry point hands to its supervisor."""
    found: list[str] = []

    def execv(_: str, words: list[str]) -> None:
        stops = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        assert stops <= signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        found.extend(words)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv(JOB, "")
    monkeypatch.setattr(sys, "argv", ["train_ds.py", "--config", "run.yml"])
    launch(TrainConfig.model_validate(KEYS | {"model_topo": topology((number, 1))}))
    assert found == [sys.executable, "-c", SUPERVISOR, *sys.argv]
    job: dict[str, Any] = json.loads(os.environ[JOB])
    return job


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("visible", "number", "refusal"),
    [
        (None, 2, None),
        ("", 2, None),
        ("7,2,3", 2, None),
        ("GPU-5ebe9f43,GPU-ac33420d", 2, None),
        ("4,5", 3, "this machine has 2 GPUs"),
        ("MIG-7d3c", 1, None),
        ("MIG-7d3c,MIG-a2f1", 1, None),
        ("MIG-7d3c,MIG-a2f1", 2, r"names slices of GPUs \(MIG\), .* expected one process, or whole GPUs$"),
    ],
)
def test_a_run_takes_the_gpus_that_its_user_chose(
    visible: str | None, number: int, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' environment is the user's, in which rank n takes the nth of the visible GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            launched(number, monkeypatch)
        return
    job = launched(number, monkeypatch)
    assert job["shape"] == [number, [], f"dims [{number}, 1]"] and "environment" not in job
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(("rank", "kind"), [(0, ConfigError), (3, RunRefused)])
def test_rank_0_alone_says_that_other_processes_were_started_than_dims_ask_for(
    rank: int, kind: type[Exception]
) -> None:
    asked = TrainConfig.model_validate(KEYS | {"model_topo": topology((2, 1))}).model_topo
    joining.check_number(ProcessInfo(rank, 2, 0, 2), asked)
    with pytest.raises(kind, match=r"\[2, 1\] ask for 2 processes, but 4 were started; expected --num_gpus 2"):
        joining.check_number(ProcessInfo(rank, 4, 0, 4), asked)


@pytest.mark.parametrize("minutes", [0.25, 15, 29, 30, 31, 600])
def test_a_hang_is_found_before_an_operation_gives_up(minutes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector names the rank at fault; an operation's timeout would only name one that waits for it."""
    waits: list[timedelta] = []

    def join(process: ProcessInfo, patience: timedelta, port: int | None) -> None:
        waits.append(patience)
        raise RunRefused

    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setattr(phases, "enter", lambda *_, **__: None)
    config = TrainConfig.model_validate(KEYS | {"timeout_minutes": minutes})
    with pytest.raises(RunRefused):
        script.run_or_launch(config, ProcessInfo(0, 1, 0, 1), lambda *_: False)
    assert waits[0] > timedelta(minutes=minutes, seconds=ANSWER + LATE)


CORES = 8


@pytest.mark.parametrize(
    ("user", "processes", "hidden_size", "threads"),
    [
        (None, 1, SMALL, CORES),
        (None, 3, 4096, CORES // 3),
        (None, 2 * CORES, 4096, 1),
        (None, 1, SMALL - 1, 1),
        ("", 2, 4096, CORES // 2),  # set to nothing is not set
        ("3", 1, 4096, None),
        ("3", 2, 64, None),
        ("1", 1, 4096, None),
    ],
)
def test_cores_are_divided_unless_the_user_says_otherwise(
    user: str | None, processes: int, hidden_size: int, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that torch read from OMP_NUM_THREADS stays."""
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", user)
    set_threads(processes, hidden_size)
    assert found == ([] if threads is None else [threads])


SHARE = """
import os, sys, torch
os.sched_getaffinity = lambda _: range(6)
from training.distributed.joining import set_threads
from training.distributed.processes import ProcessInfo
process = ProcessInfo.from_environment()
set_threads(process.local_size)
if process.rank == 0:
    print("threads:", torch.get_num_threads())
"""


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(("user", "threads"), [("", 3), ("1", 1), ("2", 2)])
def test_what_torchrun_sets_is_not_what_its_user_sets(
    user: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several processes it sets OMP_NUM_THREADS=1 where its user did not."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    if user:
        monkeypatch.setenv("OMP_NUM_THREADS", user)
    (tmp_path / "share.py").write_text(SHARE)
    result = torchrun(2, tmp_path / "share.py")
    assert f"threads: {threads}" in result.stdout.splitlines(), result.stderr
    assert ("Setting OMP_NUM_THREADS" in result.stderr) == (not user)


def test_a_line_that_nobody_reads_any_more_ends_no_run() -> None:
    """As of a terminal that was closed, or a pipe whose reader ended with the launcher: the run still has to save."""
    reader, writer = os.pipe()
    os.close(reader)
    pipe = open(writer, "w", encoding="utf-8", buffering=1)
    with pytest.raises(BrokenPipeError):
        print("step 1", file=pipe)
    print("step 2", file=cast(TextIO, LossyStream(pipe)), flush=True)
    with suppress(BrokenPipeError):  # of what is left in it
        pipe.close()
