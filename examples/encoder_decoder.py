"""An encoder and a decoder, as T5 has them, in two stages: it learns to sort digits.

deepspeed --num_gpus 2 examples/encoder_decoder.py [SAVE_PATH]
python examples/encoder_decoder.py              starts the launcher itself

Three tensors of three dtypes flow from layer to layer: what the encoder made of the source, which of it is padding, and
the decoder's ids, which become hidden states on the second stage. It takes less than a minute on two CPU cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Pipetune is not installed, it lies one folder up

from training import Pipeline, load_trained

LONGEST, WIDTH, BLOCKS = 8, 64, 2
BEGIN, PAD, WORDS = 10, 11, 12  # beside the ten digits
IGNORED = -100
SAVE_PATH = "runs/encoder_decoder"
LAYER: dict[str, Any] = {
    "nhead": 4,
    "dim_feedforward": 2 * WIDTH,
    "dropout": 0.0,
    "batch_first": True,
    "norm_first": True,
}

Stream = tuple[Tensor, Tensor, Tensor]  # source, its padding, target


class Sorting(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Up to LONGEST digits, and the same in order: ((source, target so far), labels), each [LONGEST]."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(self.first + number)
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        digits = torch.randint(10, (length,), generator=generator)
        room = (0, LONGEST - length)
        wanted = digits.sort().values
        before = torch.cat([torch.tensor([BEGIN]), wanted[:-1]])
        return (F.pad(digits, room, value=PAD), F.pad(before, room, value=PAD)), F.pad(wanted, room, value=IGNORED)


class Embedding(nn.Module):
    """Ids [B, LONGEST] -> hidden states that know their place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LONGEST, WIDTH) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places


class Source(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Stream:
        source, target = inputs
        return self.embedding(source), source == PAD, target


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, **LAYER)

    def forward(self, stream: Stream) -> Stream:
        source, padding, target = stream
        return self.layer(source, src_key_padding_mask=padding), padding, target


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()

    def forward(self, stream: Stream) -> Stream:
        source, padding, target = stream
        return source, padding, self.embedding(target)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, **LAYER)
        self.register_buffer("later", torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1))

    def forward(self, stream: Stream) -> Stream:
        source, padding, target = stream
        seen = self.layer(target, source, tgt_mask=self.later, memory_key_padding_mask=padding)
        return source, padding, seen


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, stream: Stream) -> Tensor:
        return self.out(self.norm(stream[2]))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over the rows, of the mean over the tokens of each: any number of micro-batches gives the same."""
    tokens = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return (tokens.sum(1) / (labels != IGNORED).sum(1)).mean()


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    save_path = words[0] if words else SAVE_PATH
    layers = [Source, *[Encoder] * BLOCKS, Target, *[Decoder] * BLOCKS, Head]
    pipeline = Pipeline(
        layers,
        loss=loss,
        parts=[1 + BLOCKS, 2 + BLOCKS],
        save_path=save_path,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=16,
        n_epoches=5,
        optimizer={"type": "AdamW", "params": {"lr": 3e-3}},
        scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20}},
        steps_per_print=20,
    )
    pipeline.train(Sorting(0, 2048))
    if os.environ["RANK"] == "0":
        model = nn.Sequential(*(make() for make in layers))
        load_trained(model, save_path)
        show(model.eval())


@torch.no_grad()
def show(model: nn.Module) -> None:
    """Sort what it has not seen, one digit after the other."""
    right = 0
    for (source, _), labels in (Sorting(10_000, 40)[number] for number in range(40)):
        length = int((labels != IGNORED).sum())
        target = torch.full((1, LONGEST), PAD)
        target[0, 0] = BEGIN
        answer: list[int] = []
        for place in range(length):
            answer.append(int(model((source.unsqueeze(0), target))[0, place].argmax()))
            if place + 1 < LONGEST:
                target[0, place + 1] = answer[-1]
        right += answer == labels[:length].tolist()
    print(f"{source[:length].tolist()} -> {answer}")
    print(f"sorted right: {right} of 40")


if __name__ == "__main__":
    main()
