"""What both training doors do with their command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console

from data.inspect import show_samples
from models.checkpoint.layout import resolve
from training import distributed
from training.config import TrainConfig
from training.distributed import Place, exit_on_user_error
from training.lifeline import Lifeline
from training.run_data import RecordReader


def parse_arguments(description: str) -> argparse.Namespace:
    """The words after the door's name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--inspect", type=int, default=0, metavar="N", help="print the first N samples and leave")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override keys of the config")
    return parser.parse_intermixed_args()


def open_door(
    arguments: argparse.Namespace,
    load: Callable[[Place | None], TrainConfig],
    run: Callable[[TrainConfig, Place, Lifeline], None],
) -> None:
    """Inspect the data, start the launcher, or be one rank of a run.

    Args:
        arguments: see `parse_arguments`.
        load: gives the checked config.
        run: the whole job of one rank.
    """
    place = Place.from_environment()
    with exit_on_user_error(place):
        config = load(place)
        if arguments.inspect:
            inspect(config, arguments.inspect)
        elif place is None:
            distributed.launch(config.model_topo, sys.argv)
        else:
            # The watchdog must find a hang, and name the rank, before the process group gives up.
            distributed.start(place, config.model_topo, timedelta(minutes=max(30, 2 * config.timeout_minutes)))
            with Lifeline(place, config.model_topo.stage_of(place.rank), config.timeout_minutes) as lifeline:
                run(config, place, lifeline)
            distributed.stop()


def inspect(config: TrainConfig, count: int) -> None:
    """Print the first samples as they would be trained."""
    console = Console()
    reader = RecordReader.of(config, resolve(config.model_path), console)
    show_samples(reader.read("data", config.data_paths).samples[:count], reader.tokenizer, console)
