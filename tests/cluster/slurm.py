"""Slurm on the hosts: a controller on the first, a daemon on each. Needs slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Host
from tests.launching import eventually

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
CONFIG = """
ClusterName=pipetune
SlurmctldHost={first}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={names} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def lacking() -> str | None:
    """Return why this machine cannot run Slurm, or None."""
    missing = [name for name in NEEDED if not shutil.which(name)]
    return f"Slurm needs {', '.join(missing)}" if missing else None


class Slurm:
    """`with Slurm(hosts, folder) as slurm:`."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        folder.chmod(0o755)
        names = ",".join(host.name for host in hosts)
        (folder / "slurm.conf").write_text(CONFIG.format(first=hosts[0].name, folder=folder, names=names))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which looks for none until it is used

    def command(self, *words: str | Path, host: int = 0) -> list[str]:
        """Return a command line that runs one of Slurm's programs on a host."""
        return self._hosts[host].enter("env", f"SLURM_CONF={self._folder}/slurm.conf", *words)

    def ask(self, *words: str | Path) -> str:
        """Run one of its programs, and return what it prints."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def __enter__(self) -> Slurm:
        key = self._folder / "munge.key"
        key.write_bytes(bytes(range(64)))
        key.chmod(0o600)
        files = {"key-file": key} | {f"{each}-file": self._folder / f"munge.{each}" for each in ("pid", "log", "seed")}
        words = [f"--{name}={path}" for name, path in files.items()]
        socket = f"--socket={self._folder}/munge.socket"
        self._started = [self._start("munged", "--foreground", "--force", socket, *words)]
        self._started.append(self._start(*self.command("slurmctld", "-D")))
        for number in range(len(self._hosts)):
            self._started.append(self._start(*self.command("slurmd", "-D", host=number)))
        eventually(lambda: self._state() == {"idle"})
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait()

    def _state(self) -> set[str]:
        done = subprocess.run(self.command("sinfo", "-h", "-o", "%T"), capture_output=True, text=True, check=False)
        return set(done.stdout.split())

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self._folder / "daemons.log", "ab") as log:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
