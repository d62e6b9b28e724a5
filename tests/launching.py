"""Starting the real launchers from tests, and reading what they leave.

No launch has a time limit: a slow machine is no error. One that hangs is noticed by what does not move. A line of
output, a file that appears or grows in the folders of the files on its command line, and a few seconds of processor
time each count as movement; where none of them comes for `IDLE` seconds, or nothing but processor time for `BUSY`
seconds of it, the whole tree of processes is killed and the test fails with the end of what was printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.torch import load_file
from torch import Tensor

from models.conversion.to_huggingface import pp_to_hg
from tests.conftest import ROOT
from training.launch.agent import free_port
from training.launch.start import SUPERVISOR
from training.launch.supervisor import JOB

DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
IDLE = 600.0  # seconds without any movement: a hang
BUSY = 3600.0  # seconds of processor time without a line or a file: a loop without end
PULSE = 5.0  # seconds of processor time that count as movement: threads that merely wake up now and then use less
CHECK = 2.0  # seconds between two looks
TAIL = 4000  # characters
OFFLOAD = {  # keys of a config: the optimizer is torch's, on the CPU
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


class Hang(AssertionError):
    """Nothing moved for long."""


def heed_signals() -> None:
    """Let a command be ended by signals that the tests' own process ignores, as under nohup or behind an `&`."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class Launch:
    """A command under way; what it prints goes to files, so that it never waits for a reader.

    Args:
        words: the command; the folders of the files that it names are watched.
        environment: on top of the tests' own.
        folder: where it runs; the project's root where absent.

    Attributes:
        pid: of the process that was started.
    """

    def __init__(self, *words: str | Path, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
        self.words = [str(word) for word in words]
        self._printed = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        files = [Path(word) for word in words[1:] if os.path.isabs(word)]
        self._folders = {path.parent for path in files if ROOT not in path.parents and path.is_file()}
        self._process = subprocess.Popen(
            self.words,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._printed[0],
            stderr=self._printed[1],
            start_new_session=True,
            preexec_fn=heed_signals,  # noqa: PLW1509
        )
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self._text(0)

    @property
    def stderr(self) -> str:
        """The same, on standard error."""
        return self._text(1)

    def poll(self) -> int | None:
        """The exit code, or None while it is under way."""
        return self._process.poll()

    def until(self, condition: Callable[[], object], pause: float = 0.01) -> None:
        """Wait until something holds that the command brings about; it must be under way until then."""
        looked = time.monotonic()
        self._movement = Movement(looked)
        while not condition():
            assert self.poll() is None, f"it ended before:\n{self._tail()}"
            if time.monotonic() - looked > CHECK:
                self._look()
                looked = time.monotonic()
            time.sleep(pause)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended."""
        self._movement = Movement(time.monotonic())
        try:
            while True:
                try:
                    code = self._process.wait(CHECK)
                    return subprocess.CompletedProcess(self.words, code, self.stdout, self.stderr)
                except subprocess.TimeoutExpired:
                    self._look()
        finally:
            self.kill()

    def family(self) -> list[psutil.Process]:
        """Its process and those below it that are alive."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End all of its processes at once by SIGKILL, where there are any."""
        family = self.family()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self._process.wait()
        psutil.wait_procs(family)

    def _look(self) -> None:
        sizes = [os.fstat(file.fileno()).st_size for file in self._printed]
        hang = self._movement.hang(
            time.monotonic(), self._files() | set(enumerate(sizes)), processor_times(self.family())
        )
        if hang:
            tail = self._tail()
            self.kill()
            raise Hang(f"{hang}: {' '.join(self.words)}\n{tail}")

    def _files(self) -> set[tuple[Any, int]]:
        found: set[tuple[Any, int]] = set()
        for folder in self._folders:
            for parent, _, names in os.walk(folder):  # which passes over what is removed meanwhile
                for path in (Path(parent, name) for name in names):
                    with suppress(OSError):
                        found.add((path, path.stat().st_size))
        return found

    def _text(self, number: int) -> str:
        file = self._printed[number]
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0).decode(errors="replace")

    def _tail(self) -> str:
        return self.stdout[-TAIL:] + self.stderr[-TAIL:]


class Movement:
    """What has moved of a command, look by look.

    Args:
        now: in seconds, as all moments here.
    """

    def __init__(self, now: float) -> None:
        self._seen: set[tuple[Any, int]] = set()
        self._times: dict[int, float] = {}
        self._last = now
        self._used = 0.0  # seconds of processor time since the last line or file
        self._pulse = 0.0  # how much of it had been used at the last movement

    def hang(self, now: float, sizes: set[tuple[Any, int]], times: dict[int, float]) -> str:
        """Look again, and say what kind of a hang it is, or nothing.

        Args:
            sizes: names of files and outputs with their sizes. A size that was there before is no movement: a file
                that is written anew over and over, as a heartbeat is, says nothing about progress.
            times: seconds of processor time, by process.
        """
        self._used += sum(max(0.0, used - self._times.get(process, 0.0)) for process, used in times.items())
        self._times = times
        if sizes - self._seen:
            self._seen |= sizes
            self._used = self._pulse = 0.0
            self._last = now
        elif self._used - self._pulse >= PULSE:
            self._pulse = self._used
            self._last = now
        if self._used > BUSY:
            return f"{self._used:.0f} s of processor time without a line of output or a file"
        return f"nothing moved for {now - self._last:.0f} s" if now - self._last > IDLE else ""


def processor_times(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Seconds of processor time by process, of those that are alive."""
    times = {}
    for process in processes:
        try:
            spent = process.cpu_times()
        except psutil.Error:
            continue
        times[process.pid] = spent.user + spent.system
    return times


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of its own, as Linux says."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        (caught,) = (line.split()[1] for line in status if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that is brought about by what no `Launch` watches."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > IDLE:
            raise Hang(f"nothing came of it for {IDLE:.0f} s")
        time.sleep(0.01)


def start(*words: str | Path, **environment: str) -> Launch:
    """Start a command from the project's root."""
    return Launch(*words, environment=environment)


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the project's root and keep what it prints."""
    return start(*words, **environment).end()


def start_deepspeed(processes: int, *words: str | Path) -> Launch:
    """Start `deepspeed --num_gpus N ...`"""
    return start(*DEEPSPEED, "--num_gpus", str(processes), "--master_port", str(free_port()), *words)


def deepspeed(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`deepspeed --num_gpus N ...`"""
    return start_deepspeed(processes, *words).end()


def start_supervised(processes: int, *words: str | Path) -> Launch:
    """Start `train_ds.py ...` in N processes as `python train_ds.py` does: 5 s sooner than by DeepSpeed's launcher."""
    job: dict[str, Any] = {"shape": (processes, [], ""), "port": None}
    job |= {"save_path": "", "max_restarts": 0, "patience": IDLE, "signals": []}
    return start(sys.executable, "-c", SUPERVISOR, *words, **{JOB: json.dumps(job), "DS_ACCELERATOR": "cpu"})


def supervised(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    return start_supervised(processes, *words).end()


def torchrun(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc_per_node N ...`"""
    return run(*TORCHRUN, "--nproc_per_node", str(processes), "--master_port", str(free_port()), *words)


def write_config(path: Path, **keys: Any) -> Path:
    """A YAML file of a run: small defaults for tests, and what is given on top."""
    defaults: dict[str, Any] = {
        "save_path": str(path.with_suffix("")),
        "train_batch_size": 8,
        "max_seq_len": 256,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}},
    }
    path.write_text(yaml.safe_dump(defaults | keys), encoding="utf-8")
    return path


def topology(dims: Sequence[int], parts: Sequence[int] | None = None) -> dict[str, Any]:
    """The `model_topo` section."""
    axes = ["pipe", "data", "model"][: len(dims)]
    section: dict[str, Any] = {"process_topology": {"axes": axes, "dims": list(dims)}}
    return section | ({"parts": list(parts)} if parts else {})


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; of a run under way without one that is not yet whole."""
    *lines, _ = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def steps_done(config: Path) -> int:
    """How many lines a run has reported, of the config whose name its folder has."""
    path = config.with_suffix("") / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def trained_weights(config: Path) -> dict[str, Tensor]:
    """The weights of a run's newest checkpoint, under their names in a HuggingFace folder."""
    pp_to_hg(config.with_suffix(""), config.with_suffix(".hf"))
    return load_file(config.with_suffix(".hf") / "model.safetensors")


def error_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a command printed as the user's mistake, without the page that it ends with."""
    lines = (result.stdout + result.stderr).splitlines()
    return [re.sub(r" \(see docs/[\w-]+\.md\)$", "", line) for line in lines if line.startswith("error: ")]
