"""Show by a small run that a user's own one computes what it should, on the user's own machine (docs/proof.md)."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace
from typing import TYPE_CHECKING

from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.option import Action, CommandLine, EntryPoint, Flags, Option

if TYPE_CHECKING:
    from training.engine.trainer import Trainer


def _add_flags(line: CommandLine) -> None:
    prove = line.staged("compare a small run with one process, and exit")
    line.parser.add_argument("--prove", action="store_true", help=prove)
    line.parser.add_argument("--record", metavar="FOLDER", help=SUPPRESS)  # where ranks of a proof record steps


def _prepare(arguments: Namespace, entry: EntryPoint) -> None:
    """Refuse another entry point, and a launcher."""
    if arguments.prove and not entry.in_stages:
        raise ConfigError("--prove: proves pipelines; expected train_ds.py")
    if arguments.prove and entry.process is not None:
        raise ConfigError("--prove: starts processes of its own, on this machine; expected python train_ds.py")


def _prove(config: TrainConfig, arguments: Namespace, entry: EntryPoint) -> None:
    from options.proof.command import prove_run

    prove_run(config, sys.argv[0])


def _record(arguments: Namespace, kind: type[Trainer]) -> type[Trainer]:
    if not arguments.record:
        return kind
    from options.proof.recorder import make_recorder

    return make_recorder(arguments.record, kind)


FLAGS = Flags(add=_add_flags, prepare=_prepare, acts={"prove": Action(_prove)}, wrap_trainer=_record)
OPTION = Option(TrainConfig, flags=FLAGS)
