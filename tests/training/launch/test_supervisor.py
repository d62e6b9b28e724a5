"""What a supervisor does when its processes end in one way or another; they do nothing else."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.launching import Launch, eventually, start
from training.errors import ConfigError
from training.launch.agent import inspect_host
from training.launch.hosts import AGENT, read_hostfile, remote_command
from training.launch.start import SUPERVISOR
from training.launch.supervisor import JOB

LONGEST = pytest.mark.longest

# At its nth start rank 1 ends as the nth word says, once rank 0 has begun; that one notes a step but where the word
# begins with a minus, has a child in a session of its own, and waits. Asked to leave, it leaves as a run does that has
# saved.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, rank, words = Path(sys.argv[1]), os.environ["RANK"], sys.argv[2].split(",")
with open(folder / f"starts-{rank}", "a+") as file:
    file.seek(0)
    number = len(file.readlines())
    print(" ".join(os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")), file=file)
word = words[number]


def leave(number, _):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if number == signal.SIGTERM else signal.SIG_DFL)
    (folder / f"asked-{rank}").touch()
    time.sleep(float(os.environ.get("SAVES_FOR", "0")))
    (folder / f"saved-{rank}").touch()
    sys.exit(128 + number)


if rank == "0":
    for asked in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(asked, leave)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if not word.startswith("-"):
        with open(folder / "metrics.jsonl", "a") as file:
            print('{"step": %d}' % (number + 1), file=file)
(folder / f"begun-{rank}-{number}").touch()
if word == "ends":
    sys.exit(0)
while rank == "0" or word == "waits" or not (folder / f"begun-0-{number}").exists():
    time.sleep(0.01)
if word.strip("-") == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(word.strip("-")))
"""


# It reaches a host by running there what the last word says, here, until the host is gone.
SSH = """#!/bin/sh
test -e {folder}/gone && echo "ssh: connect to host other port 22: No route to host" >&2 && exit 255
while test $# -gt 1; do shift; done
exec sh -c "$1"
"""


def words_of(folder: Path, ends: str, hosts: dict[str, list[int]] | None = None, patience: float = 60.0) -> list[str]:
    """The command of a supervisor."""
    (folder / "script.py").write_text(SCRIPT)
    job = {
        "environment": {"FOLDER": str(folder)},
        "hosts": hosts or {"": [0, 1]},
        "shapes": [(2, [], "dims [2, 1]")],
        "save_path": str(folder),
        "max_restarts": 3,
        "patience": patience,
        "signals": [signal.SIGUSR1],
        "port": None,
    }
    words = ["env", f"{JOB}={json.dumps(job)}", sys.executable, "-c", SUPERVISOR]
    return [*words, str(folder / "script.py"), str(folder), ends]


def begun(folder: Path, patience: float = 60.0, **environment: str) -> Launch:
    """A run whose two ranks wait until they are asked to leave."""
    launch = start(*words_of(folder, "waits,ends", patience=patience), **environment)
    launch.until(lambda: all((folder / f"begun-{rank}-0").exists() for rank in (0, 1)))
    return launch


def starts(folder: Path) -> int:
    assert (folder / "starts-0").read_text().splitlines()[0] == "0 2 2"
    return len((folder / "starts-1").read_text().splitlines())


def of_run(folder: Path) -> list[psutil.Process]:
    """Return the ranks that work in a folder, and what they have started: all have it in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FOLDER") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# How each start ends; how many there are; the exit code; how the last line begins and ends.
ENDS: dict[str, tuple[str, int, int, str, str]] = {
    "passes": ("dies,1,ends", 3, 0, "", "it goes on with dims [2, 1]"),
    "a mistake": ("2,ends", 1, 2, "", ""),
    "cannot begin again at once": ("dies,-2,ends", 3, 0, "", "it goes on with dims [2, 1]"),
    "cannot begin again": ("dies,-2,-2,ends", 3, 2, "error: this machine: ended with exit code 2", "does not pass"),
    "asked": ("143,ends", 1, 143, "", ""),
    "taken away": ("138,ends", 1, 138, "", ""),
    "too often": (
        "dies,dies,dies,dies,ends",
        4,
        137,
        "error: this machine: a process was killed by SIGKILL",
        "no restart is left (max_restarts: 3)",
    ),
    "does not pass": ("dies,-1,-7,ends", 3, 7, "error: this machine: ended with exit code 7", "does not pass"),
    "never begins": (
        "-dies,-dies,-dies,ends",
        3,
        137,
        "error: this machine: ",
        "in a row came to no step, ",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_fault_is_followed_by_a_restart(name: str, tmp_path: Path) -> None:
    words, number, code, begin, end = ENDS[name]
    launch = start(*words_of(tmp_path, words))
    result = launch.end()
    assert (starts(tmp_path), result.returncode) == (number, code), result.stderr
    *_, last = ["", *result.stderr.splitlines()]
    assert last.startswith(begin) and end in last
    assert result.stderr.count("restart") >= number - 1
    assert not of_run(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_between_the_entry_point_and_the_ranks_starts_none(number: signal.Signals, tmp_path: Path) -> None:
    """The entry point has blocked it; it is heeded once the supervisor can."""
    words = words_of(tmp_path, "ends")
    blocked = f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [{number}]); os.kill(os.getpid(), {number})"
    place = words.index(SUPERVISOR)
    result = start(*words[:place], f"{blocked}; {SUPERVISOR}", *words[place + 1 :]).end()
    assert result.returncode == 128 + number and "this start trained nothing" in result.stdout, result.stderr
    assert not (tmp_path / "starts-0").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_a_supervisor(number: signal.Signals, tmp_path: Path) -> None:
    launch = begun(tmp_path)
    assert len(of_run(tmp_path)) == 3  # two ranks and what one of them has started
    psutil.Process(launch.pid).send_signal(number)
    result = launch.end()
    assert result.returncode == (-number if number == signal.SIGKILL else 128 + number)
    eventually(lambda: not of_run(tmp_path))
    assert starts(tmp_path) == 1 and "restart" not in result.stderr


# Slurm tells each process of a step. Half a minute is what other launchers give.
@pytest.mark.parametrize(
    ("receiver", "seconds"),
    [
        ("supervisor", 1),
        pytest.param("agent", 1, marks=pytest.mark.slow),
        ("everybody", 1),
        pytest.param("supervisor", 40, marks=LONGEST),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_ranks_save_before_a_run_ends(receiver: str, seconds: int, number: signal.Signals, tmp_path: Path) -> None:
    launch = begun(tmp_path, SAVES_FOR=str(seconds))
    _, agent, *ranks = launch.family()
    asked = {"supervisor": [psutil.Process(launch.pid)], "agent": [agent]}
    asked["everybody"] = [*asked["supervisor"], agent, *ranks]
    for process in asked[receiver]:
        process.send_signal(number)
    assert launch.end().returncode == 128 + number
    assert (tmp_path / "saved-0").exists() and starts(tmp_path) == 1


def test_a_later_signal_ends_a_save_at_once(tmp_path: Path) -> None:
    launch = begun(tmp_path, SAVES_FOR="1000")
    psutil.Process(launch.pid).send_signal(signal.SIGUSR1)
    launch.until((tmp_path / "asked-0").exists)
    psutil.Process(launch.pid).terminate()
    assert launch.end().returncode == 128 + signal.SIGUSR1
    assert not of_run(tmp_path) and not (tmp_path / "saved-0").exists()


def test_a_host_without_slots_takes_no_part(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\ufeffnode1 slots=0\nnode2 slots=2\n", encoding="utf-8")
    assert read_hostfile(str(tmp_path / "hosts"), "", "") == {"node2": [0, 1]}
    for include, exclude in (("node1", ""), ("", "node2"), ("", "node1@node2")):
        with pytest.raises(ConfigError, match="hosts: no slot is left; expected hosts that --include and --exclude"):
            read_hostfile(str(tmp_path / "hosts"), include, exclude)


def test_the_shipped_hostfile_is_an_example_of_the_format(tmp_path: Path) -> None:
    """As it is shipped it names no host, and what it recommends says so in one line."""
    shipped = ROOT / "hostfile"
    with pytest.raises(ConfigError, match="expected lines such as: node1 slots=8"):
        read_hostfile(str(shipped), "", "")
    text = shipped.read_text(encoding="utf-8")
    (tmp_path / "hosts").write_text(text.replace("# node", "node"), encoding="utf-8")
    assert read_hostfile(str(tmp_path / "hosts"), "", "") == {"node1": [*range(8)], "node2": [*range(8)]}
    assert text.index("python train_ds.py --hostfile") < text.index("deepspeed --hostfile")


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


def test_a_rank_that_never_leaves_is_killed(tmp_path: Path) -> None:
    launch = begun(tmp_path, patience=1.0, SAVES_FOR="1000")
    psutil.Process(launch.pid).terminate()
    assert launch.end().returncode == 128 + signal.SIGTERM
    assert not of_run(tmp_path) and not (tmp_path / "saved-0").exists()


@pytest.mark.slow
def test_what_a_dead_agent_leaves_is_killed_first(tmp_path: Path) -> None:
    launch = begun(tmp_path)
    before, (_, agent, *_) = of_run(tmp_path), launch.family()
    agent.kill()
    result = launch.end()
    assert result.returncode == 0 and starts(tmp_path) == 2
    assert "this machine: a process was killed by SIGKILL; nothing of the run was left after" in result.stderr
    assert before and not any(each.is_running() for each in before)


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


def test_tests_under_nohup_end_what_they_start() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = start("sh", "-c", "kill -HUP $$; echo alive").end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.returncode, result.stdout) == (-signal.SIGHUP, "")


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path) -> None:
    """As under nohup."""
    launch = start("sh", "-c", 'trap "" HUP; exec "$0" "$@"', *words_of(tmp_path, "waits"))
    launch.until((tmp_path / "begun-1-0").exists)
    psutil.Process(launch.pid).send_signal(signal.SIGHUP)
    psutil.Process(launch.pid).send_signal(signal.SIGTERM)
    assert launch.end().returncode == 128 + signal.SIGTERM


def test_a_signal_ends_the_wait_for_hosts(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    words = words_of(tmp_path, "waits,ends", {"": [0], "other": [0]})
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
