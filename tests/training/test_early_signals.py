"""Signals that come while an entry point still imports."""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.cases import tiered
from tests.conftest import FAQ
from tests.launching import TORCHRUN, Launch, catches, start, start_deepspeed, topology, write_config
from training.launch.agent import free_port

LAUNCHERS: dict[str, Callable[..., Launch]] = {
    "deepspeed": start_deepspeed,
    "torchrun": lambda count, *words: start(
        *TORCHRUN, "--nproc_per_node", str(count), "--master_port", str(free_port()), *words
    ),
}
TOLD = "stopped before step 1 of this start: this start trained nothing"


@pytest.mark.parametrize(
    ("number", "entry_point", "who"),
    tiered(
        product(
            (signal.SIGTERM.value, signal.SIGINT.value, signal.SIGHUP.value),
            ("train_ds.py", "train_ds_zero.py"),
            ("rank", "launches"),
        ),
        quick=["15-train_ds.py-launches", "2-train_ds_zero.py-rank"],
        slow=["15-train_ds.py-rank", "2-train_ds_zero.py-launches", "1-train_ds.py-rank"],
    ),
)
def test_a_request_in_the_imports_ends_in_a_line(number: int, entry_point: str, who: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yml", model_path="m", data_path=str(FAQ))
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if who == "rank" else {}
    launch = start(sys.executable, entry_point, "--config", config, **place)
    launch.until(lambda: catches(launch.pid, number) and catches(launch.pid, signal.SIGUSR1), pause=0.0)
    launch.family()[0].send_signal(number)
    result = launch.end()
    assert (result.returncode, result.stderr) == (128 + number, "")
    assert TOLD in result.stdout


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "loading"),
    [(signal.SIGUSR1, False), pytest.param(signal.SIGTERM, True, id="while_weights_load")],
)
def test_a_request_before_the_first_step_is_heeded(
    number: signal.Signals, loading: bool, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A preemption in the imports, a stop while weights load."""
    model = make_checkpoint("llama")
    config = write_config(tmp_path / "run.yml", model_path=str(model), data_path=str(FAQ), max_steps=2)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port())
    launch = start(sys.executable, "train_ds.py", "--config", config, **place)
    if loading:
        launch.until(lambda: "steps: 2 of" in launch.stdout)  # the line before the weights
    else:
        launch.until(lambda: catches(launch.pid, number), pause=0.0)
    launch.family()[0].send_signal(number)
    result = launch.end()
    assert result.returncode == 128 + number, result.stdout + result.stderr
    assert "stopped before step 1 of 2: this start trained nothing" in result.stdout
    assert not list(config.with_suffix("").glob("step-*")) and "Traceback" not in result.stderr


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_ranks_of_a_launcher_that_are_asked_in_the_imports_end_without_a_traceback(
    launcher: str, tmp_path: Path
) -> None:
    """As a cluster asks that signals every process."""
    config = write_config(tmp_path / "run.yml", model_path="m", data_path=str(FAQ), model_topo=topology((1, 2)))
    launch = LAUNCHERS[launcher](2, "train_ds.py", "--config", config)
    launch.until(lambda: len(ranks_of(launch)) == 2, pause=0.0)
    for rank in ranks_of(launch):
        rank.send_signal(signal.SIGTERM)
    result = launch.end()
    assert result.returncode != 0
    printed = result.stdout + result.stderr
    assert printed.count(TOLD) == 1, printed
    assert 'train_ds.py", line' not in printed, printed  # torchrun prints a traceback of its own for any exit code


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("asks", [True, False], ids=["asks for rank 0", "waits for others"])
def test_a_request_while_a_rank_waits_for_the_others_ends_it(
    asks: bool, number: signal.Signals, tmp_path: Path
) -> None:
    """In torch's store, whose waits Python cannot interrupt: rank 0 does not answer, or has not met the others."""
    config = write_config(tmp_path / "run.yml", model_path="m", data_path=str(FAQ), model_topo=topology((1, 2)))
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, descriptor = server.getsockname()[1], -1 if asks else server.detach()
        launch = start(sys.executable, "train_ds.py", "--config", config, **place, MASTER_PORT=str(port))
        if asks:
            server.setblocking(False)
            launch.until(lambda: select.select([server], [], [], 0)[0])
        else:
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
            launch.until(lambda: store.check(["pipetune-/1"]))
        begin = time.monotonic()
        launch.family()[0].send_signal(number)
        result = launch.end()
    assert result.returncode in (-number, 128 + number), result.stdout + result.stderr
    assert time.monotonic() - begin < 30  # of the 90 s, or 30 min, that it would wait
    assert "Traceback" not in result.stderr


def ranks_of(launch: Launch) -> list[psutil.Process]:
    """Those that catch the signals of a run by now."""
    found = []
    for process in launch.family():
        with suppress(psutil.Error):
            if "RANK" in process.environ() and catches(process.pid, signal.SIGUSR1):
                found.append(process)
    return found
