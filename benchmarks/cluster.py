"""What several hosts cost, and how soon a lost one is noticed: hosts made of namespaces, the real launchers, ssh.

python -m benchmarks.cluster [--json] [--only start fault restart placement]. Needs root, ip, sshd and pdsh. Both
hosts share this machine's cores, so what they compute counts for nothing here; their network, processes and disks are
their own.

- `extra_start_s`: from the command to the first step with a stage on each of two hosts, beyond both on one; medians.
- `detect_dead_host_s`, `detect_cut_link_s`: from a host's death, or a link's cut, to the line that names the host.
- `all_gone_s`: until no process of the run is left on any host, the cut one included; the longer of both.
- `recover_s`: with max_restarts, from the line that says that a run starts again to its next step.
- `placement`: a step over a slow link as `--plan` predicts it from measured links, as a share of what it takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import RECORDS, make_model
from benchmarks.ranks import ROOT
from tests.cluster.hosts import Host, Hosts, deepspeed, hostfile_of, lacking
from tests.launching import Launch, eventually, metrics, run, start

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
STARTS = 3  # of each kind, in turn
SLOW = {"delay": 0.01, "rate": 1.25e6}  # seconds each way; bytes/s, of which a step of this model asks a few seconds
STEPS = 26  # of a run whose second epoch is held against its plan
TARGETS = {
    "extra_start_s": 15.0,
    "detect_dead_host_s": 10.0,
    "detect_cut_link_s": 30.0,
    "all_gone_s": 40.0,
    "recover_s": 60.0,
}
PLACEMENT = 0.15  # by how much a predicted step may differ from a measured one


class Cluster:
    """Two hosts, and runs on them.

    Args:
        folder: that both see.
    """

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts, self._folder, self._runs = hosts, folder, 0
        self.hostfile = hostfile_of(hosts, 1, folder / "hostfile")
        make_model(folder / "model")
        (folder / "model/config.json").write_text(json.dumps(MODEL), encoding="utf-8")

    def config(self, **keys: Any) -> tuple[Path, Path]:
        """A config of a run of its own, and that run's folder."""
        self._runs += 1
        path, save_path = self._folder / f"run{self._runs}.yml", self._folder / f"run{self._runs}"
        given = {
            "model_path": str(self._folder / "model"),
            "data_path": str(RECORDS),
            "save_path": str(save_path),
            "cache_dir": str(self._folder / "cache"),
            "from_scratch": True,
            "train_batch_size": 8,
            "max_seq_len": 512,
            "max_steps": 1000,
            "tensorboard": {"enabled": False},
            "model_topo": {"process_topology": {"dims": [2, 1]}},
        }
        path.write_text(yaml.safe_dump(given | keys), encoding="utf-8")
        return path, save_path

    def start(self, config: Path, *words: str) -> Launch:
        """The README's command on both hosts."""
        return start(*self.hosts[0].enter(*deepspeed(self.hostfile, "train_ds.py", "--config", config, *words)))

    def gone(self) -> bool:
        return not any(host.processes() for host in self.hosts)


def starts(cluster: Cluster) -> dict[str, float]:
    """Seconds from the command to the first step, on one host and on both."""
    taken: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(STARTS):
        for kind, times in taken.items():
            config, save_path = cluster.config(max_steps=1)
            begin = time.monotonic()
            if kind == "two":
                launch = cluster.start(config)
            else:
                alone = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
                launch = start(*cluster.hosts[0].enter(*alone, "train_ds.py", "--config", config))
            launch.until(partial(steps_of, save_path))
            times.append(time.monotonic() - begin)
            launch.end()
            eventually(cluster.gone)
    one, two = (statistics.median(times) for times in taken.values())
    return {"one_host_start_s": one, "two_hosts_start_s": two, "extra_start_s": two - one}


def faults(cluster: Cluster) -> dict[str, float]:
    """Seconds until a lost host is named, and until nothing is left."""
    here, lost = cluster.hosts
    dead, after_death = loss(cluster, lost.die, [here])
    lost.boot()
    cut, after_cut = loss(cluster, partial(lost.link, "down"), cluster.hosts)
    lost.link("up")
    return {"detect_dead_host_s": dead, "detect_cut_link_s": cut, "all_gone_s": max(after_death, after_cut)}


def loss(cluster: Cluster, fault: Callable[[], object], hosts: list[Host]) -> tuple[float, float]:
    """Seconds until the second host is named, and until the command and all processes of `hosts` have ended."""
    config, save_path = cluster.config()
    launch = cluster.start(config)
    launch.until(lambda: len(steps_of(save_path)) > 5)
    begin = time.monotonic()
    fault()
    named = moment(lambda: "host node2" in launch.stderr)
    gone = moment(lambda: launch.poll() is not None and not any(host.processes() for host in hosts))
    return named - begin, gone - begin


def restarts(cluster: Cluster) -> dict[str, float]:
    """Seconds from a restart to the next step."""
    config, save_path = cluster.config(max_restarts=1, save_interval=5)
    door = "train_ds.py", "--config", config, "--hostfile", cluster.hostfile
    launch = start(*cluster.hosts[0].enter(sys.executable, *door))
    launch.until(lambda: len(steps_of(save_path)) > 7)
    victim = next(number for number, words in cluster.hosts[1].processes().items() if " train_ds.py" in words)
    psutil.Process(victim).kill()
    launch.until(lambda: "restart 1 of 1" in launch.stderr)
    begin, done = time.monotonic(), len(steps_of(save_path))
    launch.until(lambda: "resumed: " in launch.stdout and len(steps_of(save_path)) != done)
    seconds = time.monotonic() - begin
    launch.kill()
    eventually(cluster.gone)
    return {"recover_s": seconds}


def placement(cluster: Cluster) -> dict[str, float]:
    """A slow link: the speed that is predicted once links and stages are measured, and a run's.

    In tokens/s, as the batches of a run are of several lengths.
    """
    config, save_path = cluster.config(max_steps=STEPS)
    cluster.hosts[1].slow(**SLOW)
    try:
        for words in (["--check"], []):
            done = cluster.start(config, *words).end()
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        cluster.hosts[1].fast()
    planned = run(sys.executable, "train_ds.py", "--config", config, "--plan")
    (line,) = (line for line in planned.stdout.splitlines() if line.startswith("speed: "))
    steps = steps_of(save_path)[STEPS // 2 :]
    measured = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
    predicted = float(line.split()[-2].replace(",", ""))
    return {"predicted_tokens_per_s": predicted, "measured_tokens_per_s": measured, "placement": measured / predicted}


def steps_of(save_path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl so far."""
    return metrics(save_path) if (save_path / "metrics.jsonl").exists() else []


def moment(condition: Callable[[], object]) -> float:
    """When it came to hold."""
    while not condition():
        time.sleep(0.05)
    return time.monotonic()


PARTS = {"start": starts, "fault": faults, "restart": restarts, "placement": placement}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure runs on several hosts.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    if reason := lacking():
        sys.exit(f"error: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="benchmark-cluster-", dir=ROOT))
    figures: dict[str, float] = {}
    (folder / "hosts").mkdir()
    try:
        with Hosts(2, folder / "hosts") as hosts:
            cluster = Cluster(hosts, folder)
            for part in arguments.only:
                figures |= PARTS[part](cluster)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("figure", "measured", "target", title="several hosts")
    for name, value in figures.items():
        target = f"at most {TARGETS[name]:g}" if name in TARGETS else ""
        table.add_row(name, f"{value:.2f}", f"1 ± {PLACEMENT}" if name == "placement" else target)
    Console().print(table)


if __name__ == "__main__":
    main()
