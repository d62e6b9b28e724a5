"""Runs over two hosts that `python train_ds.py --hostfile` starts: faults, restarts, stops, and wrong hosts."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from tests.cases import tiered
from tests.cluster.hosts import Host, hostfile_of
from tests.cluster.test_faults import begun, get_power, lose_power, refuse_the_key, take_the_key
from tests.conftest import FAQ, ROOT
from tests.launching import (
    Launch,
    error_lines,
    eventually,
    metrics,
    start,
    steps_done,
    topology,
    trained_weights,
    write_config,
)
from tests.models.helpers import assert_same_bits

pytestmark = pytest.mark.launched

STEPS, FAULTS = 200, 10
PATIENCE = 0.5  # minutes, after which a frozen host is taken for one


def configured(path: Path, model: Path, dims: tuple[int, int] = (2, 1), **keys: Any) -> Path:
    keys = {"max_steps": STEPS, "save_interval": 3, "max_restarts": 2 * FAULTS, "timeout_minutes": PATIENCE} | keys
    return write_config(path, model_path=str(model), data_path=str(FAQ), model_topo=topology(dims), **keys)


def command(hosts: list[Host], config: Path, slots: int = 1) -> list[str]:
    hostfile = hostfile_of(hosts, slots, config.with_suffix(".hosts"))
    return hosts[0].enter(sys.executable, "train_ds.py", "--config", config, "--hostfile", hostfile)


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def undisturbed(hosts: list[Host], model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of a run that nothing happens to."""
    config = configured(tmp_path_factory.mktemp("undisturbed") / "run.yml", model)
    result = start(*command(hosts, config)).end()
    assert result.returncode == 0 and "restart" not in result.stderr, result.stderr
    return trained_weights(config)


def processes(host: Host, *words: str) -> list[psutil.Process]:
    """Return a host's processes with all of these words in their command lines."""
    return [psutil.Process(number) for number, line in host.processes().items() if all(word in line for word in words)]


def supervisor(hosts: list[Host]) -> psutil.Process:
    return processes(hosts[0], "options.cluster.supervisor")[0]


def rank_killed(hosts: list[Host], generator: random.Random) -> None:
    processes(generator.choice(hosts), "-u train_ds.py")[0].kill()


def rank_stopped(hosts: list[Host], generator: random.Random) -> None:
    processes(generator.choice(hosts), "-u train_ds.py")[0].suspend()


def agent_killed(hosts: list[Host], generator: random.Random) -> None:
    processes(generator.choice(hosts), "-c import sys", "training.launch.agent")[0].kill()


def ssh_killed(hosts: list[Host], generator: random.Random) -> None:
    processes(hosts[0], "ssh -o", f"-- {generator.choice(hosts).name} ")[0].kill()


def frozen(hosts: list[Host], _: random.Random) -> None:
    hosts[1].freeze()


def killed(hosts: list[Host], _: random.Random) -> None:
    hosts[1].die()
    hosts[1].boot()


def power_lost(hosts: list[Host], _: random.Random) -> None:
    lose_power(hosts[1])


def cable_pulled(hosts: list[Host], _: random.Random) -> None:
    hosts[1].link("down")


def mend(hosts: list[Host], fault: Callable[..., None]) -> None:
    """Repair the host once the run has noticed the fault."""
    if fault is power_lost:
        get_power(hosts[1])
    elif fault is cable_pulled:
        hosts[1].link("up")


KINDS = (rank_killed, rank_stopped, agent_killed, ssh_killed, frozen, killed, power_lost, cable_pulled)


@pytest.mark.longest
def test_random_faults_change_no_bit(
    hosts: list[Host], model: Path, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    config, generator = configured(tmp_path / "run.yml", model), random.Random(7)
    faults = [*KINDS, *generator.choices(KINDS, k=FAULTS - len(KINDS))]
    generator.shuffle(faults)
    launch = start(*command(hosts, config))
    for number, fault in enumerate(faults, start=1):
        goal, errors = steps_done(config) + generator.randrange(2, 7), launch.stderr.count("error: ")
        wait_for(launch, lambda: steps_done(config), goal)
        fault(hosts, generator)
        if fault in (power_lost, cable_pulled):
            wait_for(launch, lambda: launch.stderr.count("error: "), errors + 1)
            mend(hosts, fault)
        wait_for(launch, lambda: launch.stderr.count("restart "), number)
        print(fault.__name__, launch.stderr.splitlines()[-1])
    result = launch.end()
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in metrics(config.with_suffix(""))] == list(range(1, STEPS + 1))
    assert_same_bits(trained_weights(config), undisturbed)
    eventually(lambda: not any(host.processes() for host in hosts))


def wait_for(launch: Launch, count: Callable[[], int], goal: int) -> None:
    launch.until(lambda: count() >= goal)


@pytest.fixture
def slow_link(hosts: list[Host]) -> Iterator[None]:
    hosts[1].slow(delay=0.02, rate=12.5e6, loss=0.01)
    yield
    hosts[1].fast()


@pytest.mark.longest
@pytest.mark.usefixtures("slow_link")
def test_a_slow_and_lossy_link_changes_no_bit(
    hosts: list[Host], model: Path, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    config = configured(tmp_path / "run.yml", model, timeout_minutes=30)
    result = start(*command(hosts, config)).end()
    assert result.returncode == 0 and "restart" not in result.stderr, result.stderr
    assert_same_bits(trained_weights(config), undisturbed)


@pytest.mark.longest
def test_a_run_goes_on_with_fewer_replicas_until_its_host_is_back(
    hosts: list[Host], model: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path / "run.yml", model, (2, 2), max_steps=1000)
    launch = begun(command(hosts, config, slots=2), config.with_suffix(""))
    lose_power(hosts[1])
    launch.until(lambda: "restart 1 of" in launch.stderr)
    assert "it goes on with dims [2, 1] on node1\n" in launch.stderr
    advance(launch, config)
    get_power(hosts[1])
    rank_killed(hosts[:1], random.Random(0))
    launch.until(lambda: "restart 2 of" in launch.stderr)
    assert "it goes on with dims [2, 2] on node1, node2\n" in launch.stderr
    advance(launch, config)
    supervisor(hosts).terminate()
    result = launch.end()
    assert result.returncode == 128 + signal.SIGTERM
    assert "stopped after step" in result.stdout
    assert not any(host.processes() for host in hosts)


def advance(launch: Launch, config: Path) -> None:
    """Wait for a few steps of a run that has just restarted."""
    resumed = launch.stdout.count("resumed: ")
    launch.until(lambda: launch.stdout.count("resumed: ") > resumed)
    done = steps_done(config)
    launch.until(lambda: steps_done(config) > done + 2)


@pytest.mark.longest
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_supervisor(number: int, hosts: list[Host], model: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "run.yml", model, max_steps=1000)
    launch = begun(command(hosts, config), config.with_suffix(""))
    supervisor(hosts).send_signal(number)
    result = launch.end()
    assert result.returncode == (128 + number if number != signal.SIGKILL else -number), result.stderr
    eventually(lambda: not any(host.processes() for host in hosts))
    assert "restart" not in result.stderr
    saved = int((config.with_suffix("") / "latest").read_text().rpartition("-")[2])
    assert saved == steps_done(config)


def forget_keys(host: Host) -> None:
    known = host.folder.with_name("node1") / "ssh/known_hosts"
    known.rename(known.with_name("kept_hosts"))


def know_keys(host: Host) -> None:
    known = host.folder.with_name("node1") / "ssh/known_hosts"
    known.with_name("kept_hosts").rename(known)


def nothing(_: Host) -> None:
    """The hostfile is wrong."""


GOOD = "node1 slots=1\nnode2 slots=1\n"
# The hostfile; what happens to the second host, and what mends it; what the error says.
WRONG: dict[str, tuple[str, Callable[[Host], None], Callable[[Host], None], str]] = {
    "slots": ("node1 slots=1\nnode2 slots=2\n", nothing, nothing, "3 slots on node1, node2, but model_topo."),
    "line": ("node1 slots=1\nnode2 slot=1\n", nothing, nothing, "bad entry: node2 slot=1"),
    "name": ("node1 slots=1\nnode7 slots=1\n", nothing, nothing, "host node7: ssh: Could not resolve hostname node7"),
    "key": (GOOD, refuse_the_key, take_the_key, "ssh-copy-id node2"),
    "host key": (GOOD, forget_keys, know_keys, "log in once by hand, ssh node2"),
    "off": (GOOD, lose_power, get_power, "host node2: ssh: connect to host node2 port 22: "),
}


@pytest.mark.parametrize("name", tiered(WRONG, quick=(), slow=["key"]))
def test_what_is_wrong_with_hosts_is_named(name: str, hosts: list[Host], model: Path, tmp_path: Path) -> None:
    text, fault, mended, message = WRONG[name]
    config = configured(tmp_path / "run.yml", model)
    words = command(hosts, config)
    config.with_suffix(".hosts").write_text(text)
    fault(hosts[1])
    try:
        result = start(*words).end()
    finally:
        mended(hosts[1])
    assert result.returncode == 2
    (line,) = error_lines(result)
    assert message in line and "expected" in line
    assert "Traceback" not in result.stderr


@pytest.mark.longest
def test_a_folder_that_a_host_lacks_is_named(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    """/mnt is each host's own disk."""
    folder = hosts[0].folder / "disk/project"
    folder.mkdir()
    words = command(hosts, configured(tmp_path / "run.yml", model))
    result = start(*words[: words.index(str(ROOT))], "/mnt/project", *in_folder(words)).end()
    assert result.returncode == 2
    (line,) = error_lines(result)
    assert "host node2: " in line and "/mnt/project" in line and line.endswith("on every host")


def in_folder(words: list[str]) -> list[str]:
    """Return the words of a command after its folder, with the script's whole path."""
    return [str(ROOT / word) if word == "train_ds.py" else word for word in words[words.index(str(ROOT)) + 1 :]]
