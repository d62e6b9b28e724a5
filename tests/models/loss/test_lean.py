"""Shows that the chunked loss and its gradients are those of the plain form, and in 16 bits nearer to the truth.

On a GPU from Ampere on its products are other ones, which give fp32 results; the first two tests run there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models import load_model
from models.loss import lean as lean_loss
from models.loss.interface import IGNORED
from models.loss.lean import linear_cross_entropy
from models.loss.micro_batch import token_loss

TOKENS, WIDTH, WORDS = 29, 16, 301
HALVES = [torch.bfloat16, torch.float16]
AMPERE_HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= lean_loss.AMPERE
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not AMPERE_HERE, reason="takes a GPU from Ampere on")),
]


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens and a last one of 4, taken through the softmax 2 tokens at a time; slices of 90 words."""
    for name in ("CPU_CHUNK", "GPU_CHUNK"):
        monkeypatch.setattr(lean_loss, name, 4 * WORDS * 5)
    monkeypatch.setattr(lean_loss, "CPU_CACHE", 4 * WORDS * 2)
    monkeypatch.setattr(lean_loss, "WORDS", 90)


@pytest.fixture
def problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    return Problem(hidden, weight, torch.randint(0, WORDS, (TOKENS,), generator=generator))


class Outcome(NamedTuple):
    loss: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor


def run(
    loss: Callable[..., Tensor],
    problem: Problem,
    dtype: torch.dtype,
    *options: Any,
    scale: float = 1,
    device: str = "cpu",
) -> Outcome:
    hidden, weight = (tensor.detach().to(device, dtype, copy=True).requires_grad_() for tensor in problem[:2])
    total = loss(hidden, weight, problem.targets.to(device), *options)
    (total * scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert total.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == dtype
    return Outcome(total.detach(), hidden.grad, weight.grad)


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None, z_loss_weight: float = 0.0
) -> Tensor:
    """The same with all logits at once, in the dtype of the weight."""
    logits = F.linear(hidden, weight)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    log_softmax = logits.float().log_softmax(dim=-1)
    return F.nll_loss(log_softmax, targets, reduction="sum") + z_loss_weight * log_softmax.amax(-1).square().sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.3])
def test_fp32_equals_the_plain_form(problem: Problem, cap: float | None, z_loss_weight: float, device: str) -> None:
    found = run(linear_cross_entropy, problem, torch.float32, cap, z_loss_weight, scale=0.37, device=device)
    expected = run(plain, problem, torch.float32, cap, z_loss_weight, scale=0.37)
    for mine, wanted in zip(found, expected, strict=True):
        assert error(mine, wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.3])
def test_16_bits_are_nearer_to_the_truth_than_the_plain_form(
    problem: Problem, dtype: torch.dtype, cap: float | None, z_loss_weight: float, device: str
) -> None:
    rounded = Problem(problem.hidden.to(dtype).float(), problem.weight.to(dtype).float(), problem.targets)
    truth = run(plain, rounded, torch.float32, cap, z_loss_weight)
    found = run(linear_cross_entropy, rounded, dtype, cap, z_loss_weight, device=device)
    usual = run(plain, rounded, dtype, cap, z_loss_weight, device=device)
    assert error(found.loss, truth.loss) < 1e-6
    for mine, others, true in zip(found, usual, truth, strict=True):
        assert error(mine, true) < error(others, true)
        assert error(mine, true) < 2 * torch.finfo(dtype).eps


def test_small_probabilities_of_fp16_are_kept() -> None:
    """Each of these words gets a probability that fp16 would round to nothing; together they are a gradient."""
    words = 200_001
    targets = torch.zeros(1, dtype=torch.int64)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[[0] + [1] * (words - 1)]
    problem = Problem(torch.tensor([[18.0, 0.0]]), weight, targets)
    found = run(linear_cross_entropy, problem, torch.float16, scale=1024)
    truth = run(plain, problem, torch.float32, scale=1024)
    assert 0 < truth.hidden_gradient[0, 1] / 1024 / words < torch.finfo(torch.float16).smallest_normal / 2**11
    torch.testing.assert_close(found.hidden_gradient[0, 1].float(), truth.hidden_gradient[0, 1], rtol=2e-2, atol=0)


@pytest.mark.parametrize("offset", [1.0, 8.0, 200.0])
def test_a_frequent_word_of_fp16_does_not_overflow(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is a sum over many tokens, in which a dimension of the hidden states far from 0 stands out."""
    monkeypatch.setattr(lean_loss, "CPU_CHUNK", 2**28)  # all tokens in one product
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, WIDTH, generator=generator)
    hidden[:, 3] += offset
    targets = torch.randint(0, WORDS, (1024,), generator=generator)
    targets[::8] = 7
    weight = torch.randn(WORDS, WIDTH, generator=generator) / offset
    rounded = Problem(hidden.half().float(), weight.half().float(), targets)
    truth = run(plain, rounded, torch.float32, scale=1 / 8)
    found = run(linear_cross_entropy, rounded, torch.float16, scale=1 / 8)
    for mine, true in zip(found, truth, strict=True):
        assert error(mine, true) < 2 * torch.finfo(torch.float16).eps


def test_the_largest_of_equal_logits_share_the_z_loss(problem: Problem) -> None:
    """Of whole numbers, as their sums are exact: with others a library's kernels may round equal words otherwise."""
    alike = Problem(problem.hidden.round(), problem.weight[:1].round().repeat(WORDS, 1), problem.targets)
    found = run(linear_cross_entropy, alike, torch.float32, None, 0.3)
    expected = run(plain, alike, torch.float32, None, 0.3)
    assert error(found.weight_gradient, expected.weight_gradient) < 1e-5


def test_a_loss_without_gradients_is_the_same(problem: Problem) -> None:
    with torch.no_grad():
        loss = linear_cross_entropy(problem.hidden.requires_grad_(), problem.weight.requires_grad_(), problem.targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(*problem).detach())


@pytest.mark.parametrize(("frozen", "trained"), [("hidden", "weight"), ("weight", "hidden")])
def test_what_is_frozen_gets_no_gradient(problem: Problem, frozen: str, trained: str) -> None:
    expected = getattr(run(plain, problem, torch.float32), f"{trained}_gradient")
    getattr(problem, trained).requires_grad_()
    linear_cross_entropy(*problem).backward()
    assert getattr(problem, frozen).grad is None
    torch.testing.assert_close(getattr(problem, trained).grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_no_token_gives_zero_and_zero_gradients(problem: Problem, dtype: torch.dtype) -> None:
    nothing = Problem(problem.hidden[:0], problem.weight, problem.targets[:0])
    found = run(linear_cross_entropy, nothing, dtype, None, 0.3)
    assert float(found.loss) == 0
    assert found.hidden_gradient.shape == (0, WIDTH)
    assert torch.equal(found.weight_gradient, torch.zeros(WORDS, WIDTH, dtype=dtype))


def test_a_tied_weight_gets_the_gradients_of_both_ends(problem: Problem) -> None:
    ids = problem.targets.roll(1)
    gradients = []
    for loss in (linear_cross_entropy, plain):
        weight = problem.weight.clone().requires_grad_()
        loss(F.embedding(ids, weight), weight, problem.targets).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_autocast_rounds_the_operands_alone(problem: Problem) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = run(linear_cross_entropy, problem, torch.float32)
    for mine, wanted in zip(found, run(linear_cross_entropy, problem, torch.bfloat16), strict=True):
        torch.testing.assert_close(mine, wanted.float())


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any result had, but for the weight and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() != WORDS * WIDTH:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_logits_of_all_tokens_are_never_there(problem: Problem, dtype: torch.dtype) -> None:
    with LargestTensor() as largest:
        run(linear_cross_entropy, problem, dtype, 3.0, 0.3)
    assert largest.elements == 5 * WORDS


@pytest.fixture(params=["llama-tied", "bloom", "gemma2", "baichuan2-7b", "chatglm3"])
def model(request: pytest.FixtureRequest, make_case: Callable[..., Path]) -> Iterator[Any]:
    yield load_model(make_case(request.param), torch.float32)


def test_every_kind_of_head_is_computed_as_it_projects(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    vocabulary, width = model.head.projection().shape
    hidden = torch.randn(2, 13, width, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 13), generator=generator)
    labels[0, 3:7] = IGNORED
    weight = model.head.lm_head.weight
    logits = model.head.project(hidden)[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = token_loss(hidden, labels, model.head)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), wanted, rtol=1e-5, atol=1e-6)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double().cpu() - truth.double()).norm() / truth.double().norm())
