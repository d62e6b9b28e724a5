"""Train on the hosts of a hostfile, compare them and measure their links (docs/cluster.md)."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from training.config.keys import TrainConfig
from training.option import CommandLine, Conversions, Flags, Option, RankAction

if TYPE_CHECKING:
    from options.cluster.hostfile import ListedHosts
    from training.distributed.processes import ProcessInfo


def _add_flags(line: CommandLine) -> None:
    add = line.parser.add_argument
    add("--hostfile", metavar="FILE", help="train on several machines: lines such as node1 slots=8")
    add("--include", default="", metavar="node1@node2:0,1", help="use only these of the hostfile")
    add("--exclude", default="", metavar="node1@node2:0,1", help="use all but these of the hostfile")
    add("--check", action="store_true", help="compare the hosts, measure their links, and exit")


def _find_hosts(arguments: Namespace, process: ProcessInfo | None) -> ListedHosts | None:
    if not arguments.hostfile:
        return None
    from options.cluster.hostfile import find_hosts

    return find_hosts(arguments, process)


def _check() -> RankAction:
    from options.cluster.checking import check_run

    return check_run


def _add_conversions(conversions: Conversions) -> None:
    commands, *to_folder = conversions
    purpose = "a checkpoint of storage: local, from its hosts over ssh -> one folder"
    gather = commands.add_parser("gather", help=purpose, parents=to_folder)
    gather.set_defaults(act=_gather)
    which = gather.add_mutually_exclusive_group(required=True)
    which.add_argument("--hosts", help="those of the run, such as node1,node2")
    which.add_argument("--hostfile", metavar="FILE", help="those of the run, one a line")


def _gather(arguments: Namespace) -> None:
    from options.cluster.gather import gather_checkpoint, hosts_of

    hosts = hosts_of(arguments.hosts, arguments.hostfile)
    gather_checkpoint(arguments.input_path, hosts, arguments.save_path, arguments.overwrite)


OPTION = Option(
    TrainConfig,
    flags=Flags(
        add=_add_flags,
        needs={"include": ("hostfile",), "exclude": ("hostfile",)},
        find_hosts=_find_hosts,
        on_ranks={"check": _check},
    ),
    add_conversions=_add_conversions,
)
