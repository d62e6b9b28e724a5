"""A real Slurm starts a run by srun alone, and a job that is preempted saves, is requeued and resumes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Host
from tests.cluster.slurm import Slurm, lacking
from tests.conftest import FAQ
from tests.launching import eventually, metrics, run, topology, write_config

pytestmark = [pytest.mark.launched, pytest.mark.longest]


@pytest.fixture(scope="module")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := lacking():
        pytest.skip(reason)
    with Slurm(hosts, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def config(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(FAQ),
        model_topo=topology((2, 1)),
        max_steps=1000,
    )


def steps(config: Path) -> list[int]:
    folder = config.with_suffix("")
    return [line["step"] for line in metrics(folder)] if (folder / "metrics.jsonl").exists() else []


def found(host: Host, program: str, word: str) -> list[int]:
    """Return a host's processes of a program with a word in the command line."""
    processes = host.processes().items()
    return [number for number, line in processes if line.split()[0].endswith(program) and word in line]


def test_srun_is_a_launcher(slurm: Slurm, config: Path) -> None:
    train = (".venv/bin/python", "train_ds.py", "--config", config)
    done = run(*slurm.command("srun", "--nodes", "2", "--ntasks", "2", *train, "max_steps=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(config) == [1, 2]
    other = run(
        *slurm.command("srun", "--nodes", "2", "--ntasks", "2", *train, "model_topo.process_topology.dims=[3,1]")
    )
    assert other.returncode != 0 and "2 were started; expected" in other.stderr and "srun --ntasks 3" in other.stderr


def assert_it_resumes(slurm: Slurm, hosts: list[Host], config: Path, job: str, log: Path) -> None:
    """Preempt a job, and check that it saves, is requeued and resumes."""
    eventually(lambda: len(steps(config)) > 2)
    slurm.ask("scancel", "--signal=USR1", job)
    eventually(lambda: f"requeue: Slurm is asked to start job {job} again" in log.read_text())
    eventually(lambda: not any(found(host, "python", "train_ds.py") for host in hosts))
    done = len(steps(config))
    assert f"stopped after step {done} of 1000" in log.read_text() and "warning: requeue" not in log.read_text()
    eventually(lambda: len(steps(config)) > done + 2)
    assert f"resumed: {config.with_suffix('')}/step-{done:06d}" in log.read_text()


def test_a_job_is_saved_requeued_and_resumed(slurm: Slurm, hosts: list[Host], config: Path) -> None:
    log = config.parent / "job.log"
    here = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=1", "--time=600", f"--output={log}")
    job = slurm.ask("sbatch", "--parsable", *here, "examples/slurm.sbatch", config).strip()
    try:
        assert_it_resumes(slurm, hosts, config, job, log)
        (launcher,) = found(hosts[1], "slurmstepd:", f"[{job}.")
        psutil.Process(launcher).send_signal(signal.SIGKILL)
        eventually(lambda: not any(found(host, "python", "train_ds.py") for host in hosts))
        assert "error: the launcher is gone" in log.read_text()
        assert steps(config) == list(range(1, len(steps(config)) + 1))
    finally:
        slurm.ask("scancel", job)


def test_one_task_starts_its_processes_itself_and_passes_signals_on(
    slurm: Slurm, hosts: list[Host], config: Path
) -> None:
    """The signal reaches the supervisor, its agent and the ranks at once, as all are of the step."""
    log = config.parent / "job.log"
    here = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=1", f"--output={log}")
    job = slurm.ask("sbatch", "--parsable", *here, "examples/slurm.sbatch", config).strip()
    try:
        assert_it_resumes(slurm, hosts, config, job, log)
    finally:
        slurm.ask("scancel", job)
