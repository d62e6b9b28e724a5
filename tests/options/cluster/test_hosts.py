"""The hosts of a hostfile: how they are read, and what their supervisor does when one is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from options.cluster.hostfile import SUPERVISOR
from options.cluster.hosts import read_hostfile, remote_command
from tests.conftest import ROOT
from tests.launching import start
from tests.training.launch.test_supervisor import of_run, words_of
from training.errors import ConfigError
from training.launch.agent import AGENT, inspect_host

# It reaches a host by running there what the last word says, here, until the host is gone.
SSH = """#!/bin/sh
test -e {folder}/gone && echo "ssh: connect to host other port 22: No route to host" >&2 && exit 255
while test $# -gt 1; do shift; done
exec sh -c "$1"
"""


def test_a_host_without_slots_takes_no_part(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\ufeffnode1 slots=0\nnode2 slots=2\n", encoding="utf-8")
    assert read_hostfile(str(tmp_path / "hosts"), "", "") == {"node2": [0, 1]}
    for include, exclude in (("node1", ""), ("", "node2"), ("", "node1@node2")):
        with pytest.raises(ConfigError, match="hosts: no slot is left; expected hosts that --include and --exclude"):
            read_hostfile(str(tmp_path / "hosts"), include, exclude)


def test_the_shipped_hostfile_is_an_example_of_the_format(tmp_path: Path) -> None:
    """As it is shipped it names no host, and what it recommends says so in one line."""
    shipped = ROOT / "hostfile"
    with pytest.raises(ConfigError) as refused:
        read_hostfile(str(shipped), "", "")
    assert str(refused.value) == f"--hostfile {shipped}: names no host; expected lines such as: node1 slots=8"
    text = shipped.read_text(encoding="utf-8")
    (tmp_path / "hosts").write_text(text.replace("# node", "node"), encoding="utf-8")
    assert read_hostfile(str(tmp_path / "hosts"), "", "") == {"node1": [*range(8)], "node2": [*range(8)]}
    assert text.index("python train_ds.py --hostfile") < text.index("deepspeed --hostfile")


@pytest.mark.parametrize("text", ["node1\n", "node1 slots=2\nnode1 slots=2\n"])
def test_a_line_that_is_none_is_told_without_the_launchers_words(text: str, tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"node1; expected lines such as: node1 slots=8$"):
        read_hostfile(str(hosts), "", "")


@pytest.mark.parametrize(
    ("include", "exclude", "line"),
    [
        ("work1:", "", "--include 'work1:': expected hosts, with the numbers of slots or all, as node1@node2:0,1"),
        ("work1:0-1", "", "--include 'work1:0-1': expected hosts, with "),
        ("", "work1:a", "--exclude 'work1:a': expected hosts, with "),
        ("work1:0,", "", "--include 'work1:0,': expected hosts, with "),
        ("@work1", "", "--include '@work1': expected hosts, with "),
        (
            "work9",
            "",
            "--hostfile {hosts}: Hostname 'work9' not found in hostfile; expected hosts and slots that stand ",
        ),
        ("work1:7", "", "--hostfile {hosts}: No slot '7' specified on host 'work1'; expected hosts and slots that st"),
    ],
)
def test_a_filter_that_names_no_slots_is_refused(include: str, exclude: str, line: str, tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("work1 slots=2\nwork2 slots=2\n", encoding="utf-8")
    assert read_hostfile(str(hosts), "work1:0@work2", "") == {"work1": [0], "work2": [0, 1]}
    with pytest.raises(ConfigError) as caught:
        read_hostfile(str(hosts), include, exclude)
    assert str(caught.value).startswith(line.format(hosts=hosts))


def test_two_names_of_a_machine_are_inspected_side_by_side(tmp_path: Path) -> None:
    """An inspection kills what is left of the run, but no other inspection."""
    other = start("sh", "-c", remote_command(*AGENT, str(tmp_path), "a run"))
    agents: list[psutil.Process] = []

    def runs() -> bool:
        agents[:] = [each for each in other.family() if "agent import main" in " ".join(each.cmdline())]
        return bool(agents)

    other.until(runs)
    agents[-1].suspend()  # so that it is still there
    inspect_host(str(tmp_path), "a run")
    agents[-1].resume()
    assert other.end().returncode == 0


def test_a_signal_ends_the_wait_for_hosts(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    hosts: dict[str, list[int]] = {"": [0], "other": [0]}
    words = words_of(tmp_path, "waits,ends", program=SUPERVISOR, hosts=hosts, smaller=[], environment={})
    launch = start(*words, PATH=f"{ssh.parent}:{os.environ['PATH']}")
    launch.until((tmp_path / "begun-1-0").exists)
    (tmp_path / "gone").touch()
    next(each for each in of_run(tmp_path) if each.environ()["RANK"] == "1").kill()
    launch.until(lambda: "waiting up to 1 min" in launch.stderr)
    psutil.Process(launch.pid).terminate()
    result = launch.end()
    assert result.returncode == 128 + signal.SIGTERM
    *_, waiting, last = result.stderr.splitlines()
    assert "for hosts: host other: ssh: connect to host other port 22: No route to host" in waiting
    assert last == "error: host other: a process was killed by SIGKILL; an end was asked for before it could go on"
    assert (tmp_path / "starts-1").read_text() == "0 2 1\n" and not of_run(tmp_path)
