"""What a supervisor does when its processes end in one way or another; they do nothing else."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launching import Launch, eventually, start
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


def words_of(folder: Path, ends: str, patience: float = 60.0, program: str = SUPERVISOR, **more: object) -> list[str]:
    """The command of a supervisor; `more` is what its job has besides."""
    (folder / "script.py").write_text(SCRIPT)
    job = more | {
        "shape": (2, [], "dims [2, 1]"),
        "save_path": str(folder),
        "max_restarts": 3,
        "patience": patience,
        "signals": [signal.SIGUSR1],
        "port": None,
    }
    words = ["env", f"FOLDER={folder}", f"{JOB}={json.dumps(job)}", sys.executable, "-c", program]
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
            environment = process.environ()
            of_folder = environment.get("FOLDER") == str(folder) and "RANK" in environment
            if of_folder and process.status() != psutil.STATUS_ZOMBIE:
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
    eventually(lambda: len(of_run(tmp_path)) == 3)  # two ranks, and what one has started
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
