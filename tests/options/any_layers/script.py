"""A user's script: own layers, own random data, own loss, own keys. `script.py CONFIG` starts its own launcher."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from options.any_layers import Pipeline, PipelineConfig
from training.config.yaml_file import load_config_of


class Config(PipelineConfig):
    # Of the hidden layers.
    width: int = 16
    # What the last layer takes; another number than width is a mistake.
    taken: int = 16
    # Whether the second layer is the last but one, too.
    again: bool = False


class Noisy(Dataset[Any]):
    """Points in the plane, in another place each time, and in which quadrant they were."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)  # so that a run can be killed in its middle
        point = torch.randn(2, generator=torch.Generator().manual_seed(number))
        return point + 0.1 * torch.randn(2), 2 * (point[0] > 0).long() + (point[1] > 0)


def layers(config: Config) -> list[Any]:
    shared = [nn.Linear(config.width, config.width)] if config.again else []
    return [
        lambda: nn.Linear(2, config.width),
        *shared,
        nn.GELU,
        lambda: nn.Dropout(0.2),
        lambda: nn.BatchNorm1d(config.width),
        *shared,
        lambda: nn.Linear(config.taken, 4),
    ]


def main() -> None:
    config = load_config_of(Config, sys.argv[-1])
    Pipeline(layers(config), loss=F.cross_entropy, config=config).train(Noisy(), eval_dataset=Noisy())
    print("and on")


if __name__ == "__main__":
    main()
