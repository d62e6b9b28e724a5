"""Hosts on one machine: each has its own network, name, processes, shared memory, sshd and disk at /mnt.

They are Linux namespaces on a switch that leads nowhere else. The project, its environment and the temporary folders
are the same files on all of them, as on a cluster with a shared folder. Needs root, ip, sshd and pdsh.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.slow_link import SlowLink
from tests.conftest import FAQ, ROOT
from tests.launching import eventually, topology, write_config

NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "pdsh", "nsenter", "unshare")
SSH = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"  # where ssh looks, whatever HOME says
SUBNET = "10.77.0"
BEGIN = """
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh {ssh}
mount --bind {folder}/disk /mnt
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
exec "$(command -v sshd)" -D -e -f {folder}/sshd_config
"""


def lacking() -> str | None:
    """Return why this machine cannot have hosts, or None."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    missing = [name for name in NEEDED if not shutil.which(name)]
    if missing:
        return f"hosts need {', '.join(missing)}"
    made = subprocess.run(["unshare", "-n", "-m", "-u", "-p", "-f", "true"], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


class Host:
    """A host.

    Attributes:
        name: by which the others know it.
        folder: its keys, its log, and `disk`, which it sees as /mnt.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.folder = f"node{number}", folder / f"node{number}"
        self.address = f"{SUBNET}.{number}"
        self.space = f"pipetune-{os.getpid()}-{number}"
        self._outer: subprocess.Popen[bytes] | None = None

    def start(self, switch: str) -> None:
        """Connect it to a switch and boot it."""
        run("ip", "netns", "add", self.space)
        near, far = f"pt{self.address.rpartition('.')[2]}", "eth0"
        run("ip", "-n", switch, "link", "add", near, "type", "veth", "peer", "name", far, "netns", self.space)
        run("ip", "-n", switch, "link", "set", near, "master", "br0", "up")
        run("ip", "-n", self.space, "addr", "add", f"{self.address}/24", "dev", far)
        run("ip", "-n", self.space, "link", "set", far, "up")
        self._switch, self._port = switch, near
        self.boot()

    def boot(self) -> None:
        """Run it, also after `die`."""
        script = BEGIN.format(name=self.name, folder=self.folder, ssh=SSH)
        words = ["ip", "netns", "exec", self.space, "unshare", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc"]
        with open(self.folder / "sshd.log", "wb") as log:
            self._outer = subprocess.Popen(
                [*words, "sh", "-ec", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        def listens() -> bool:
            assert self._outer and self._outer.poll() is None, self._log()
            return b"listening on" in (self.folder / "sshd.log").read_bytes()

        eventually(listens)

    @property
    def first(self) -> psutil.Process:
        """Its process 1, by this machine's number."""
        assert self._outer
        return psutil.Process(self._outer.pid).children()[0]

    def enter(self, *words: str | Path) -> list[str]:
        """Return a command line that runs another one on this host, in the project's root."""
        return ["nsenter", "-t", str(self.first.pid), "-n", "-m", "-u", "-p", "env", "-C", str(ROOT), *map(str, words)]

    def processes(self) -> dict[int, str]:
        """Return its processes but sshd: this machine's number -> command line."""
        space = os.readlink(f"/proc/{self.first.pid}/ns/pid")
        found = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    words = process.cmdline()
                    if process.status() != psutil.STATUS_ZOMBIE and words and not words[0].startswith("sshd"):
                        found[process.pid] = " ".join(words)
        found.pop(self.first.pid, None)
        return found

    def die(self) -> None:
        """Kill every process at once; its kernel still closes their connections."""
        self.first.send_signal(signal.SIGKILL)
        assert self._outer
        self._outer.wait()

    def freeze(self) -> None:
        """Suspend every process."""
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume every process."""
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)

    def freeze_sshd(self) -> None:
        """Suspend sshd, so that logins wait."""
        self.first.suspend()

    def thaw_sshd(self) -> None:
        """Resume sshd."""
        self.first.resume()

    def link(self, state: str) -> None:
        """Unplug the network cable (`down`), or plug it in (`up`)."""
        run("ip", "-n", self._switch, "link", "set", self._port, state)

    def slow(self, delay: float = 0.01, rate: float = 12.5e6, loss: float = 0.0) -> None:
        """Use another network cable (`SlowLink`) until `fast`; both ends keep their addresses."""
        near, far = f"tn{self._port}", f"tf{self._port}"
        self._slow = SlowLink((near, far), delay, rate, loss)
        run("ip", "link", "set", near, "netns", self._switch)
        run("ip", "link", "set", far, "netns", self.space)
        run("ip", "-n", self._switch, "link", "set", near, "master", "br0", "up")
        self._swap(far, "cable")

    def fast(self) -> None:
        """Use the first cable again."""
        self._swap("cable", "slow")
        run("ip", "-n", self.space, "link", "del", "slow")
        run("ip", "-n", self._switch, "link", "del", f"tn{self._port}")
        self._slow.close()

    def _swap(self, interface: str, name: str) -> None:
        """Make another interface eth0, and rename the present one."""
        here = ("ip", "-n", self.space)
        mac = subprocess.run([*here, "-br", "link", "show", "eth0"], capture_output=True, text=True, check=True)
        run(*here, "link", "set", "eth0", "down", "name", name)
        run(*here, "addr", "flush", "dev", name)
        run(*here, "link", "set", interface, "down", "name", "eth0", "address", mac.stdout.split()[2])
        run(*here, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run(*here, "link", "set", "eth0", "up")

    def stop(self) -> None:
        """Shut it down."""
        if self._outer and self._outer.poll() is None:
            self.die()
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True, check=False)

    def _log(self) -> str:
        return (self.folder / "sshd.log").read_text()


class Hosts:
    """`with Hosts(2, folder) as (node1, node2):`."""

    def __init__(self, count: int, folder: Path) -> None:
        self.hosts = [Host(number, folder) for number in range(1, count + 1)]
        self._switch = f"pipetune-{os.getpid()}-switch"
        SSH.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o755)
        known = []
        for host in self.hosts:
            for name in ("ssh", "disk"):
                (host.folder / name).mkdir(parents=True)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host.folder / "host_key")
            public = " ".join((host.folder / "host_key.pub").read_text().split()[:2])
            known.append(f"{host.name},{host.address} {public}\n")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        for host in self.hosts:
            names = {"localhost": "127.0.0.1"} | {each.name: each.address for each in self.hosts}
            names[host.name] = "127.0.1.1"  # as on Debian
            (host.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
            (host.folder / "ssh/known_hosts").write_text("".join(known))
            shutil.copy(folder / "key", host.folder / "ssh/id_ed25519")
            shutil.copy(folder / "key.pub", host.folder / "ssh/authorized_keys")
            (host.folder / "sshd_config").write_text(
                f"HostKey {host.folder}/host_key\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\n"
                "UsePAM no\nStrictModes no\nMaxStartups 100\n"
            )

    def __enter__(self) -> list[Host]:
        Path("/run/sshd").mkdir(exist_ok=True)
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        try:
            for host in self.hosts:
                host.start(self._switch)
        except BaseException:
            self.__exit__()
            raise
        return self.hosts

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.stop()
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True, check=False)


def run(*words: str | Path) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(list(map(str, words)), capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr.decode()}"


def deepspeed(hostfile: Path, *words: str | Path) -> list[str]:
    """Return the README's command."""
    return [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hostfile), *map(str, words)]


def in_two_stages(hosts: Sequence[Host], folder: Path, model: Path, *words: str, **keys: Any) -> list[str]:
    """The README's command, typed on the first host: a stage on each of two, with the shipped records.

    Args:
        folder: that both see; the run is in `folder`/run.
        keys: more of the config.
    """
    keys = {"model_path": str(model), "data_path": str(FAQ), "model_topo": topology((2, 1))} | keys
    config = write_config(folder / "run.yml", **keys)
    return hosts[0].enter(
        *deepspeed(hostfile_of(hosts, 1, folder / "hostfile"), "train_ds.py", "--config", config, *words)
    )


def hostfile_of(hosts: Sequence[Host], slots: int, path: Path) -> Path:
    path.write_text("".join(f"{host.name} slots={slots}\n" for host in hosts))
    return path


def host_errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The error lines of a run, before which pdsh puts the host's name."""
    lines = (result.stdout + result.stderr).splitlines()
    return [line for line in lines if line.partition(": ")[2].startswith("error: ")]
