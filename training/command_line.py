"""What both training doors offer on the command line."""

from __future__ import annotations

import argparse

from rich.console import Console

from data.inspect import show_samples
from data.tokenize import load_tokenizer
from models.checkpoint.layout import resolve
from training.config import TrainConfig
from training.run_data import read_data


def parse_arguments(description: str) -> argparse.Namespace:
    """The words after the door's name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--inspect", type=int, default=0, metavar="N", help="print the first N samples and leave")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override keys of the config")
    return parser.parse_intermixed_args()


def inspect(config: TrainConfig, count: int) -> None:
    """Print the first samples as they would be trained."""
    folder = resolve(config.model_path)
    console = Console()
    dataset = read_data(config, folder, console)
    show_samples(dataset.samples[:count], load_tokenizer(folder), console)
