"""A run whose launcher is killed saves and ends, and a second start while it trains is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import write_records
from tests.launching import (
    DEEPSPEED,
    IDLE,
    TORCHRUN,
    Launch,
    error_lines,
    eventually,
    metrics,
    start,
    steps_done,
    topology,
    write_config,
)
from training.checkpoint.folder import RECORD, step_folders
from training.distributed.rank_monitor import LEASE
from training.launch.agent import free_port

pytestmark = pytest.mark.launched

SAMPLES = 80
STEPS = 10
WAITS_IN = 3  # the step in which rank 0 waits for the test


@pytest.fixture
def config(make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run whose rank 0 waits for a file, `go`, in step WAITS_IN."""
    monkeypatch.setenv("FAULT", f"waits:0:{WAITS_IN}")
    monkeypatch.setenv("WAITS_FOR", str(tmp_path / "go"))
    write_records(tmp_path / "data.json", SAMPLES)
    return write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(tmp_path / "data.json"),
        model_topo=topology((2, 1)),
        save_interval=2,
    )


def words(launcher: str, config: Path) -> list[str | Path]:
    command = [*TORCHRUN, "--nproc_per_node", "2"] if launcher == "agent" else [*DEEPSPEED, "--num_gpus", "2"]
    return [*command, "--master_port", str(free_port()), "tests/workers/faulty.py", "--config", config]


def family(launch: Launch) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by kind; under torchrun the first one is the agent."""
    first, *others = launch.family()
    found: dict[str, list[psutil.Process]] = {"runner": [first], "agent": [first], "launch.py": [], "rank": []}
    for each in others:
        found["launch.py" if "deepspeed.launcher.launch" in each.cmdline() else "rank"].append(each)
    return found


@pytest.mark.longest  # one of the kinds is among the accidents of test_chaos.py
@pytest.mark.parametrize("killed", ["runner", "launch.py", "agent"])
def test_ranks_save_and_end_when_their_launcher_is_killed(killed: str, config: Path) -> None:
    launch = start(*words(killed, config))
    try:
        launch.until(lambda: steps_done(config) == WAITS_IN - 1)
        running = family(launch)
        assert len(running["rank"]) == 2
        connections = [each for rank in running["rank"] for each in rank.net_connections()]
        assert {each.laddr.ip for each in connections if each.status == "LISTEN"} == {"127.0.0.1"}
        for each in running[killed]:
            each.kill()
    finally:
        (config.parent / "go").touch()
    _, alive = psutil.wait_procs(running["rank"] + running["launch.py"], timeout=IDLE)
    assert alive == []
    launch.end()
    assert launch.stderr.count("error: the launcher is gone") == 1
    run_folder = config.with_suffix("")
    newest = step_folders(run_folder)[0]
    assert (newest / RECORD).is_file()
    assert newest.name == f"step-{steps_done(config):06d}"
    assert steps_done(config) < STEPS
    assert list(run_folder.glob(f"{LEASE}-*")) == []


@pytest.mark.longest
@pytest.mark.parametrize("receiver", ["rank", "launch.py"])
def test_whoever_gets_a_preemption_signal_saves(receiver: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm cannot requeue the job, as there is none, which is a warning."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    launch = start(*words("runner", config))
    try:
        launch.until(lambda: steps_done(config) == WAITS_IN - 1)
        ranks = family(launch)["rank"]
        family(launch)[receiver][-1].send_signal(signal.SIGUSR1)
    finally:
        (config.parent / "go").touch()
    result = launch.end()
    psutil.wait_procs(ranks, timeout=IDLE)
    newest = step_folders(config.with_suffix(""))[0]
    assert (newest / RECORD).is_file()
    assert newest.name == f"step-{steps_done(config):06d}"
    assert steps_done(config) < STEPS
    if receiver == "rank":
        assert result.returncode != 0
        assert result.stdout.count("warning: requeue: job 4711 is not started again: ") == 1
    else:  # DeepSpeed's runner then ends with 0
        assert launch.stderr.count("error: the launcher is gone") == 1


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, *(pytest.param(time, marks=pytest.mark.longest) for time in range(2, 21))])
def test_of_two_starts_one_trains(time: int, config: Path) -> None:
    """The other one leaves in one line and changes nothing, each time."""
    both = [start(*words("runner", config)) for _ in range(2)]
    try:
        eventually(lambda: any(launch.poll() is not None for launch in both))
    finally:
        (config.parent / "go").touch()
    refused, trained = (launch.end() for launch in sorted(both, key=lambda launch: launch.poll() is None))
    assert refused.returncode == 2, refused.stdout + refused.stderr + trained.stderr
    (line,) = error_lines(refused)
    assert f"save_path: {config.with_suffix('')}: is being trained by process" in line
    assert "Traceback" not in refused.stderr
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run_folder = config.with_suffix("")
    assert [each["step"] for each in metrics(run_folder)] == list(range(1, STEPS + 1))
    assert list(run_folder.glob(f"{LEASE}-*")) == []
