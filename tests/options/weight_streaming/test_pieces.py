"""An update of pieces whose fp32 values are split: the bits of one that keeps them whole, and rounding by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn

from options.weight_streaming import pieces as pieces_module
from options.weight_streaming.pieces import PAGE, Pieces, join, rounded_by_chance, split
from options.weight_streaming.streamed_model import StreamedModel

SIZES = {"0.embedding": 5 * PAGE + 7, "1.norm": 3, "2.head": 5 * PAGE + 7}
PART = 2 * PAGE  # of an update here
TIED = ("0.embedding", "2.head")
STEPS, SEED = 10, 7


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "AT_ONCE", PART)


class Shared:
    """What `Pieces` needs of a model: weights and sums of gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.weights = {name: torch.randn(numel).to(dtype) for name, numel in SIZES.items()}
        self.weights["2.head"].copy_(self.weights["0.embedding"])
        self.sums = {name: torch.zeros(numel) for name, numel in SIZES.items()}

    def pieces(self, process: int = 0, processes: int = 1, seed: int | None = None) -> Pieces:
        return Pieces(cast("StreamedModel", self), TIED, process, processes, seed)


def gradients() -> Iterator[dict[str, Tensor]]:
    torch.manual_seed(1)
    for _ in range(STEPS):
        yield {name: torch.randn(numel) for name, numel in SIZES.items()}


def train(shared: Shared, every: list[Pieces], make: Callable[..., torch.optim.Optimizer], saves: bool) -> list[Any]:
    optimizers = [make(each.masters.values()) for each in every]
    for step, given in enumerate(gradients()):
        for each in every:
            each.split()
        for name, gradient in given.items():
            shared.sums[name].copy_(gradient)
        for each, optimizer in zip(every, optimizers, strict=True):
            for name, master in each.masters.items():
                master.grad = each.gradient(name, each.ranges[name]) if master.numel() else None
            each.update(optimizer, step)
        if saves:
            for each in every:
                each.join()
    return optimizers


def adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, fused=True)


def cpu_adam(weights: Any) -> torch.optim.Optimizer:
    return DeepSpeedCPUAdam(list(weights), lr=1e-2)


@pytest.mark.parametrize("make", [adamw, pytest.param(cpu_adam, marks=pytest.mark.slow)])  # which is compiled
@pytest.mark.parametrize("saves", [False, True])
def test_split_values_learn_the_bits_of_whole_ones(make: Callable[..., torch.optim.Optimizer], saves: bool) -> None:
    shared = Shared(torch.bfloat16)
    whole = {name: nn.Parameter(shared.weights[name].float()) for name in ("0.embedding", "1.norm")}
    optimizer = make(whole.values())
    for given in gradients():
        whole["0.embedding"].grad = torch.stack([given[name] for name in TIED]).sum(0)
        whole["1.norm"].grad = given["1.norm"].clone()
        optimizer.step()

    pieces = shared.pieces()
    (found,) = train(shared, [pieces], make, saves)
    assert pieces.masters["0.embedding"].grad is None
    for each in pieces.slices(found):
        torch.testing.assert_close(each.master.detach(), whole[each.name].detach(), rtol=0, atol=0)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(each.state[key], optimizer.state[whole[each.name]][key], rtol=0, atol=0)
    assert torch.equal(shared.weights["0.embedding"], shared.weights["2.head"])
    changed = shared.weights["0.embedding"] != whole["0.embedding"].to(torch.bfloat16)
    ties = whole["0.embedding"].detach().view(torch.int32) & 0xFFFF == 0x8000
    assert not (changed & ~ties).any()


def test_every_upper_half_comes_back_with_every_kind_of_rest() -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (upper[:, None] | lower).flatten().view(torch.float32)
    values = values[~values.isnan()]
    weight, rest = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    split(values, weight, rest)
    back = join(weight, rest)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))

    # A cast rounds the same way, but for ties whose upper half is even.
    ties = values.view(torch.int32) & 0x1FFFF == 0x8000
    other = weight.view(torch.int16) != values.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(other, ties)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_keep_whole_values(dtype: torch.dtype) -> None:
    shared = Shared(dtype)
    pieces = shared.pieces()
    train(shared, [pieces], adamw, saves=True)
    weight = shared.weights["0.embedding"]
    assert torch.equal(weight, pieces.masters["0.embedding"].detach().to(dtype))
    assert (pieces.masters["0.embedding"].data_ptr() == weight.data_ptr()) == (dtype == torch.float32)


@pytest.mark.parametrize("seed", [None, SEED])
def test_the_number_of_processes_changes_no_bit(seed: int | None) -> None:
    found = []
    for processes in (1, 3):
        shared = Shared(torch.bfloat16)
        every = [shared.pieces(process, processes, seed) for process in range(processes)]
        optimizers = train(shared, every, adamw, saves=False)
        states: list[Tensor] = []
        for each, optimizer in zip(every, optimizers, strict=True):
            embedding = next(piece for piece in each.slices(optimizer) if piece.name == "0.embedding")
            states.append(embedding.state["exp_avg"])
        assert all(state.dtype == (torch.bfloat16 if seed else torch.float32) for state in states)
        found.append([*shared.weights.values(), torch.cat(states)])
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


def test_states_in_bf16_stay_near_those_in_fp32() -> None:
    averages = []
    for seed in (None, SEED):
        shared = Shared(torch.bfloat16)
        pieces = shared.pieces(seed=seed)
        (optimizer,) = train(shared, [pieces], adamw, saves=False)
        averages.append(next(each.state for each in pieces.slices(optimizer) if each.name == "0.embedding"))
    for key in ("exp_avg", "exp_avg_sq"):
        exact, rounded = averages[0][key], averages[1][key].float()
        assert not torch.equal(exact, rounded)
        scale = exact.abs() + exact.abs().mean()
        assert ((rounded - exact) / scale).abs().max() < STEPS * 2**-7
        assert abs(float(((rounded - exact) / scale).mean())) < 1e-4  # neither up nor down


def test_chance_depends_on_the_place_and_not_on_the_piece() -> None:
    values = torch.full((64 * PAGE + 5,), 1.0) + 2**-9  # a quarter of the way to the next bf16 number
    made = rounded_by_chance(values, "a step", 0)
    assert set(made.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert float((made > 1).float().mean()) == pytest.approx(0.25, abs=0.005)
    later = rounded_by_chance(values[2 * PAGE :], "a step", 2 * PAGE)
    assert torch.equal(later, made[2 * PAGE :])
    assert not torch.equal(rounded_by_chance(values, "another step", 0), made)
    exact = torch.randn(PAGE).to(torch.bfloat16)
    assert torch.equal(rounded_by_chance(exact.float(), "a step", 0), exact)
