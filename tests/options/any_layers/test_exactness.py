"""Losses, gradients and weights of a `Pipeline` are those of the plain nn.Sequential in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from options.any_layers.config import PipelineConfig
from options.any_layers.samples import SampleLoader
from options.any_layers.stage import make
from tests.cases import tiered
from tests.launching import topology
from tests.options.any_layers.nets import NETS
from tests.ranks import Ranks

pytestmark = pytest.mark.launched

STEPS = 4
LR = 0.5
SGD = {"type": "SGD", "params": {"lr": LR}}  # in proportion to the gradient, unlike Adam's steps
DIMS = [(1, 1), (2, 1), (1, 2)]


class Case(NamedTuple):
    net: str
    dims: tuple[int, int]
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.net}-{self.dims[0]}x{self.dims[1]}{self.variant}"

    @property
    def keys(self) -> dict[str, Any]:
        """Of the config."""
        return {
            "save_path": "unused",
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": SGD,
            "gradient_clipping": 0.5,
            "model_topo": topology(self.dims, None if self.variant == "-auto" else NETS[self.net].parts[self.dims[0]]),
            "zero_optimization": {"stage": 0 if self.variant == "-without_zero" else 1},
            "use_grad_ckpt": self.variant == "-recomputed",
        }


CASES = [Case(net, dims) for net in NETS for dims in DIMS]
CASES += [Case("convolutions", (2, 2)), Case("mixed", (2, 2))]
CASES += [Case("tied", (2, 1), "-without_zero"), Case("tied", (2, 2)), Case("tied", (3, 1)), Case("t5", (2, 2))]
CASES += [Case("mixed", (2, 1), "-without_zero"), Case("perceptron", (2, 1), "-auto")]
CASES += [Case("mixed", (2, 1), "-recomputed"), Case("own_step", (2, 1), "-recomputed")]


@pytest.fixture(scope="module")
def folder(ranks: Ranks, asked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the outcomes of all cases lie that this session asks for."""
    folder = tmp_path_factory.mktemp("any_model")
    chosen = [case for case in CASES if case.name in asked]
    described = [
        {
            "name": case.name,
            "net": case.net,
            "steps": STEPS,
            "keys": case.keys,
            "config": {"model_path": "unused", "data_path": "unused", **case.keys},
        }
        for case in chosen
    ]
    ranks.run_all("any_layers", described, folder)
    return folder


class Outcome(NamedTuple):
    losses: list[float]
    alone: float
    evaluated: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def all_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A weight that layers share has a name in each."""
    return model.named_parameters(remove_duplicate=False)


def reference(case: Case) -> Outcome:
    """The same steps without Pipetune's engine and without micro-batches."""
    net = NETS[case.net]
    config = PipelineConfig.model_validate(case.keys | {"model_topo": topology((1, 1))})
    loader = SampleLoader(net.dataset(), config.model_copy(update={"train_micro_batch_size_per_gpu": 48}))
    model = nn.Sequential(*(make(layer, config.seed + number) for number, layer in enumerate(net.layers())))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}

    def loss_of(numbers: list[int]) -> torch.Tensor:
        ((inputs, labels),) = loader.micro_batches(loader.batch_of(numbers), 0)
        first = inputs if len(inputs) > 1 else inputs[0]
        outputs = reduce(lambda stream, layer: net.forward_step(layer, stream), model, first)
        return net.loss(outputs, labels if len(labels) > 1 else labels[0])

    for step in range(STEPS):
        loss = loss_of(loader.batch(step).samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if not step:
            gradients = {name: weight.grad.clone() for name, weight in all_names(model) if weight.grad is not None}
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), case.keys["gradient_clipping"], norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        alone, evaluated = loss_of([0]).item(), loss_of(list(range(48))).item()  # of 50, in micro-batches of 4
    return Outcome(losses, alone, evaluated, gradients, {name: weight.detach() for name, weight in all_names(model)})


# In each `make test` two nets in two stages, in `make test-slow` every net, and what else there is once.
QUICK = ["mixed-2x1", "tied-2x1"]
SLOW = [f"{net}-2x1" for net in NETS if net not in ("mixed", "tied", "t5_own_head")]
SLOW += ["mixed-1x[12]", "*-2x1-*"]


@pytest.mark.parametrize("case", tiered(CASES, QUICK, SLOW))
def test_a_pipeline_computes_what_one_process_does(case: Case, folder: Path) -> None:
    expected = reference(case)
    tensors: dict[str, torch.Tensor] = {}
    for stage in range(case.dims[0]):
        tensors |= load_file(folder / f"{case.name}.stage{stage}.safetensors")
    found = json.loads((folder / f"{case.name}.json").read_text())
    assert expected.losses[-1] != expected.losses[0]
    torch.testing.assert_close(found["losses"], expected.losses, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["alone"], expected.alone, atol=1e-5, rtol=1e-5)
    assert found["evaluated"].keys() == {"eval_loss"}
    torch.testing.assert_close(found["evaluated"]["eval_loss"], expected.evaluated, atol=1e-5, rtol=1e-5)
    times = 2 if case.variant == "-recomputed" else 1
    assert found["forwards"] == times * STEPS * 16 // 4 // case.dims[1]
    assert max(found["norms"]) > case.keys["gradient_clipping"], "nothing was clipped"
    for what, wanted in (("gradient", expected.gradients), ("weight", expected.weights)):
        assert {name for name in tensors if name.startswith(what)} == {f"{what}/{name}" for name in wanted}
        for name, tensor in wanted.items():
            torch.testing.assert_close(tensors[f"{what}/{name}"], tensor, atol=1e-5, rtol=1e-4)
