"""A vision transformer in two stages, on images that are made here: which of four shapes is in the noise?

deepspeed --num_gpus 2 examples/vit.py [SAVE_PATH]
python examples/vit.py                          starts the launcher itself

It takes less than a minute on two CPU cores. `--num_gpus 4` trains two replicas; the same command after a kill goes on
from the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Pipetune is not installed, it lies one folder up

from options.any_layers import Pipeline, load_trained

SIZE, PATCH, WIDTH, BLOCKS = 24, 6, 48, 4
SHAPES = 4
SAVE_PATH = "runs/vit"


class Shapes(Dataset[tuple[Tensor, int]]):
    """A bar that stands, one that lies, a square or a cross, somewhere in the noise: [1, SIZE, SIZE] and its number."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + number)  # each image has its own, the same each time
        image = 0.3 * torch.randn(1, SIZE, SIZE, generator=generator)
        kind = number % SHAPES
        y, x = torch.randint(4, SIZE - 4, (2,), generator=generator).tolist()
        if kind in (0, 3):
            image[:, y - 4 : y + 4, x] += 3
        if kind in (1, 3):
            image[:, y, x - 4 : x + 4] += 3
        if kind == 2:
            image[:, y - 2 : y + 2, x - 2 : x + 2] += 3
        return image, kind


class Patches(nn.Module):
    """Images [B, 1, SIZE, SIZE] -> tokens [B, T, WIDTH] that know their place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.places


class Head(nn.Module):
    """The mean of the tokens -> logits [B, SHAPES]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, SHAPES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(tokens).mean(1))


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith(("--local_rank", "--local-rank"))]
    save_path = words[0] if words else SAVE_PATH
    layers = [Patches, *[block] * BLOCKS, Head]  # not made yet: each process makes those of its stage
    pipeline = Pipeline(
        layers,
        loss=F.cross_entropy,
        parts=[3, 3],
        save_path=save_path,
        train_batch_size=32,
        train_micro_batch_size_per_gpu=8,
        n_epoches=8,
        optimizer={"type": "AdamW", "params": {"lr": 2e-3}},
        scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}},
        steps_per_print=10,
    )
    pipeline.train(Shapes(0, 512))
    if os.environ["RANK"] == "0":
        model = nn.Sequential(*(make() for make in layers))
        load_trained(model, save_path)
        images, kinds = default_collate([Shapes(10_000, 200)[number] for number in range(200)])
        with torch.no_grad():
            right = (model.eval()(images).argmax(-1) == kinds).float().mean()
        print(f"right on 200 other images: {right:.0%}")


if __name__ == "__main__":
    main()
