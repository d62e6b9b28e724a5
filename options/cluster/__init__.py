"""Compare the hosts of a run and measure their links, without training (docs/cluster.md)."""

from __future__ import annotations

from training.config.keys import TrainConfig
from training.option import Flags, Option, RankAction


def _add_flags(flags: Flags) -> None:
    flags.parser.add_argument("--check", action="store_true", help="compare the hosts, measure their links, and exit")


def _check() -> RankAction:
    from options.cluster.checking import check_run

    return check_run


OPTION = Option(TrainConfig, add_flags=_add_flags, on_ranks={"check": _check})
