"""Start a run on the hosts of `--hostfile`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from common import early_signals
from options.cluster.hosts import exported_variables, read_hostfile
from training.command_line import refuse_launcher
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError
from training.launch.agent import PREFIX, RUN
from training.launch.start import announce, become_supervisor
from training.launch.supervisor import Shape

SUPERVISOR = f"{PREFIX} from {__package__}.supervisor import main; main()"
FLAGS = ("hostfile", "include", "exclude")


@dataclass(frozen=True)
class ListedHosts:
    """Hosts with the devices of each, and the words of the command line that name them."""

    devices: dict[str, list[int]]
    words: list[str]

    def launch(self, config: TrainConfig, reload: Callable[[str], TrainConfig]) -> NoReturn:
        """Replace this process by a supervisor of the same command on these hosts.

        Args:
            reload: returns the config with one more override, with which a run goes on over fewer hosts.

        Raises:
            ConfigError: there are more or fewer devices than processes.
        """
        hosts, grid, processes = self.devices, config.model_topo.process_topology, config.model_topo.processes
        early_signals.note(config.preemption_signals)
        announce(processes, f"on {', '.join(hosts)}")
        if (slots := sum(map(len, hosts.values()))) != processes:
            raise ConfigError(
                f"--hostfile: {slots} slots on {', '.join(hosts)}, but model_topo.process_topology.dims: {grid.dims} "
                f"ask for {processes} processes; expected as many, by slots=, --include or --exclude"
            )

        # Where hosts may fail, also the shapes of the run with fewer replicas.
        smaller: list[Shape] = []
        for replicas in range(config.model_topo.replicas - 1, 0, -1) if config.max_restarts else ():
            dims = config.model_topo.spread(config.model_topo.stages, replicas).process_topology.dims
            override = f"model_topo.process_topology.dims={dims}"
            with suppress(ConfigError):  # such as a batch that these replicas cannot share
                smaller.append((reload(override).model_topo.processes, [override], f"dims {dims}"))
        become_supervisor(config, SUPERVISOR, hosts=hosts, smaller=smaller, environment=exported_variables())


def find_hosts(arguments: Namespace, process: ProcessInfo | None) -> ListedHosts | None:
    """Read the hostfile, unless a supervisor has started this process there.

    Raises:
        ConfigError: a launcher has started it, or the hostfile cannot be read or leaves no host.
    """
    if RUN in os.environ:
        return None
    refuse_launcher("--hostfile", process)
    words = [f"--{name}={value}" for name in FLAGS if (value := getattr(arguments, name))]
    return ListedHosts(read_hostfile(arguments.hostfile, arguments.include, arguments.exclude), words)
