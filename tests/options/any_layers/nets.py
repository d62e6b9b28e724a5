"""Small models of layers that belong to no family, with their data and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from options.any_layers.stage import ForwardStep, Layer, Loss

Mixed = tuple[Tensor, Tensor, Tensor]


class Net(NamedTuple):
    """Attributes:
    parts: by the number of stages.
    forward_step: see `Pipeline`.
    """

    layers: Callable[[], list[Any]]
    loss: Loss
    dataset: Callable[[], Dataset[Any]]
    parts: dict[int, list[int]]
    forward_step: ForwardStep = nn.Module.__call__


class Embed(nn.Module):
    """Token ids [B, S] and their padding [B, S] bool become three tensors of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Mixed:
        ids, padding = inputs
        return padding, ids % 3, self.embedding(ids)


class Mix(nn.Module):
    """A linear layer that leaves out padding, scaled by a class of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.scales = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]))
        self.shift = nn.Buffer(torch.full((12,), 0.1))

    def forward(self, stream: Mixed) -> Mixed:
        padding, kinds, hidden = stream
        changed = torch.tanh(self.linear(hidden)) * self.scales[kinds].unsqueeze(-1) + self.shift
        return padding, kinds, hidden + changed.masked_fill(padding.unsqueeze(-1), 0.0).transpose(0, 1).transpose(0, 1)


class Pool(nn.Module):
    """One number a row, for a regression."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 1)

    def forward(self, stream: Mixed) -> Tensor:
        padding, _, hidden = stream
        return self.out(hidden.masked_fill(padding.unsqueeze(-1), 0.0).mean(1)).squeeze(-1)


class Compare(nn.Module):
    """One number a row: how far its words are like those of an embedding, whose weight this layer has too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.words = embedding.weight

    def forward(self, stream: Mixed) -> Tensor:
        padding, _, hidden = stream
        return torch.tanh(hidden.masked_fill(padding.unsqueeze(-1), 0.0).mean(1) @ self.words.T).mean(1)


def tied() -> list[Layer]:
    """Three layers with one weight, one of them in the middle."""
    first, second = Embed(), Embed()
    second.embedding.weight = first.embedding.weight
    return [first, Mix(), Again(second), Compare(first.embedding)]


class Again(nn.Module):
    """Adds a second look at the words."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, stream: Mixed) -> Mixed:
        padding, kinds, hidden = stream
        return padding, kinds, hidden + self.embed((kinds, padding))[2]


def t5(head: bool = False) -> list[Layer]:
    """transformers' T5, cut by the example; `head` gives it one of its own."""
    from examples import encoder_decoder

    model = encoder_decoder.new_model()
    if head:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    return list(encoder_decoder.cut(model))


def sorted_digits() -> Dataset[Any]:
    from examples import encoder_decoder

    return encoder_decoder.Sorting(0, 50)


def loss_of_words(outputs: Tensor, labels: Tensor) -> Tensor:
    from examples import encoder_decoder

    return encoder_decoder.loss(outputs, labels)


def ready_made() -> list[Layer]:
    """torch's own layers, which take single tensors; `padded_step` passes the padding around them."""
    blocks = [nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return [nn.Embedding(20, 12), *blocks, nn.Linear(12, 1)]


def padded_step(layer: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    hidden, padding = inputs
    if isinstance(layer, nn.TransformerEncoderLayer):
        return layer(hidden, src_key_padding_mask=padding), padding
    if isinstance(layer, nn.Embedding):
        return layer(hidden), padding
    return layer(hidden.masked_fill(padding.unsqueeze(-1), 0.0).mean(1)).squeeze(-1)


def seeded(make: Callable[[], list[Layer]]) -> Callable[[], list[Layer]]:
    """The same weights each time."""

    def layers() -> list[Layer]:
        torch.manual_seed(7)
        return make()

    return layers


class Turn(nn.Module):
    """Turns pairs of numbers by the angles of a complex buffer, as Llama's own code does."""

    turns: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(width // 2), torch.arange(width // 2) / 5))

    def forward(self, hidden: Tensor) -> Tensor:
        pairs = torch.view_as_complex(hidden.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2).to(hidden.dtype)


def perceptron() -> list[Layer]:
    return [nn.Linear(10, 32), Turn(32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)]


def convolutions() -> list[Layer]:
    return [
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(72, 4),
    ]


def made_later() -> list[Layer]:
    """Functions that make layers, which each process calls for its own stage."""
    return [lambda: nn.Linear(10, 32), nn.ReLU, lambda: nn.Linear(32, 4)]


def vectors() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(50, 10, generator=generator), torch.randint(4, (50,), generator=generator))


def images() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(50, 1, 8, 8, generator=generator), torch.randint(4, (50,), generator=generator))


class Sentences(Dataset[Any]):
    """Two inputs and two labels a sample."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Any:
        ids = (torch.arange(6) * (number + 3)) % 20
        return (ids, torch.arange(6) >= 2 + number % 5), (ids.float().mean(), torch.tensor(1.0 + number % 2))


def weighted_square(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    wanted, weight = labels
    return (weight * (outputs - wanted) ** 2).mean()


NETS = {
    "perceptron": Net(seeded(perceptron), nn.CrossEntropyLoss(), vectors, {1: [7], 2: [3, 4]}),
    "convolutions": Net(seeded(convolutions), F.cross_entropy, images, {1: [6], 2: [3, 3]}),
    "mixed": Net(seeded(lambda: [Embed(), Mix(), Mix(), Pool()]), weighted_square, Sentences, {1: [4], 2: [2, 2]}),
    "tied": Net(seeded(tied), weighted_square, Sentences, {1: [4], 2: [1, 3], 3: [2, 1, 1]}),
    "t5": Net(seeded(t5), loss_of_words, sorted_digits, {1: [7], 2: [3, 4]}),
    "t5_own_head": Net(seeded(lambda: t5(head=True)), loss_of_words, sorted_digits, {1: [7], 2: [3, 4]}),
    "made_later": Net(made_later, F.cross_entropy, vectors, {1: [3], 2: [1, 2]}),
    "own_step": Net(seeded(ready_made), weighted_square, Sentences, {1: [4], 2: [2, 2]}, padded_step),
}
