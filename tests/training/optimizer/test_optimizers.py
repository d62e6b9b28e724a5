"""Optimizers by name, what they keep, groups without weight decay, and the learning rate of each step."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from lion_pytorch import Lion
from torch import nn

from training.config.contradictions import OFFLOADED, PARAMETERS
from training.config.keys import TrainConfig
from training.config.optimization import Optimizer, OptimizerOffload, Scheduler, WarmupCosineParams, Zero
from training.errors import ConfigError
from training.optimizer.lr_schedules import LearningRate, lr_ratio
from training.optimizer.optimizers import build_optimizer, parameter_groups

PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "betas": [0.9, 0.95]},
    "Lion": {"lr": 0.1, "betas": [0.95, 0.98], "weight_decay": 0.02},
    "Adafactor": {"lr": 0.1, "eps": [None, 1e-3], "weight_decay": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}
STATE = {"AdamW": 8, "Adam": 8, "Lion": 4, "Adafactor": 4 * (64 + 32) / (64 * 32), "SGD": 4}  # bytes a parameter


def config_with(kind: Any, params: dict[str, Any], no_wd_kws: list[str] | None = None) -> TrainConfig:
    return TrainConfig(
        model_path="m",
        data_path="d",
        save_path="s",
        train_batch_size=1,
        optimizer=Optimizer(type=kind, params=params, no_wd_kws=no_wd_kws or []),
        zero_optimization=Zero(stage=0),
    )


def weights() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def test_parameters_that_match_a_pattern_get_no_weight_decay() -> None:
    names = ["1.self_attn.q_proj.weight", "1.self_attn.q_proj.bias", "1.input_layernorm.weight", "5.norm.weight"]
    named = [(name, weights()) for name in names]
    optimizer = Optimizer(no_wd_kws=[r"bias$", "norm"])
    decayed, exempt = parameter_groups(optimizer, named)
    assert [id(parameter) for parameter in decayed["params"]] == [id(named[0][1])]
    assert [id(parameter) for parameter in exempt["params"]] == [id(parameter) for _, parameter in named[1:]]
    assert "weight_decay" not in decayed
    assert exempt["weight_decay"] == 0.0


@pytest.mark.parametrize("patterns", [[], ["."]])
def test_a_group_without_parameters_is_left_out(patterns: list[str]) -> None:
    (group,) = parameter_groups(Optimizer(no_wd_kws=patterns), [("a", weights()), ("b", weights())])
    assert len(group["params"]) == 2


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Adafactor"])
def test_weight_decay_reaches_only_the_decayed_group(kind: str) -> None:
    decayed, exempt = weights(), weights()
    config = config_with(kind, {"lr": 0.1, "weight_decay": 0.5}, ["bias"])
    optimizer = build_optimizer(config, [("weight", decayed), ("bias", exempt)])
    for parameter in (decayed, exempt):
        parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(exempt.detach(), weights().detach())
    torch.testing.assert_close(decayed.detach(), weights().detach() * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("kind", PARAMS)
def test_every_optimizer_steps_against_the_gradient(kind: str) -> None:
    parameter = weights()
    optimizer = build_optimizer(config_with(kind, PARAMS[kind] | {"weight_decay": 0.0}), [("weight", parameter)])
    gradient = torch.tensor([1.0, -1.0, 2.0])
    parameter.grad = gradient.clone()
    optimizer.step()
    assert torch.equal((parameter.detach() - weights().detach()).sign(), -gradient.sign())


def test_lion_is_its_formula() -> None:
    """Algorithm 2 of arXiv:2302.06675, over three steps with changing gradients."""
    lr, (beta1, beta2), decay = 0.1, PARAMS["Lion"]["betas"], PARAMS["Lion"]["weight_decay"]
    parameter = weights()
    optimizer = build_optimizer(config_with("Lion", PARAMS["Lion"]), [("weight", parameter)])
    expected, momentum = weights().detach().double(), torch.zeros(3, dtype=torch.float64)
    for gradient in ([1.0, -1.0, 2.0], [-0.02, -3.0, 0.5], [0.1, 5.0, -9.0]):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        update = (beta1 * momentum + (1 - beta1) * torch.tensor(gradient, dtype=torch.float64)).sign()
        expected = expected - lr * (update + decay * expected)
        momentum = beta2 * momentum + (1 - beta2) * torch.tensor(gradient, dtype=torch.float64)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_lion_in_pieces_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(7, 5), torch.randn(3, 7, 5)
    results = []
    for piece in (2**24, 8):  # the last of the pieces of 8 has 3 elements
        monkeypatch.setattr("training.optimizer.optimizers.PIECE", piece)
        parameter = nn.Parameter(start.clone())
        optimizer = build_optimizer(config_with("Lion", PARAMS["Lion"]), [("weight", parameter)])
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        results.append((parameter.detach(), optimizer.state[parameter]["exp_avg"]))
    assert not torch.equal(results[0][0], start)
    for whole, pieces in zip(*results, strict=True):
        assert torch.equal(whole, pieces)


@pytest.mark.parametrize(("kind", "params"), [("SGD", {"nesterov": True}), ("Adafactor", {"eps": 3})])
def test_values_that_an_optimizer_does_not_take_are_refused(kind: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(config_with(kind, params | {"lr": 0.1}), [("weight", weights())])
    assert str(caught.value).startswith(f"optimizer.params: {kind} does not accept them: ")
    assert "\n" not in str(caught.value)


def test_the_parameters_that_a_config_may_have_are_those_of_the_optimizers() -> None:
    offloaded = {"AdamW": DeepSpeedCPUAdam, "Adam": DeepSpeedCPUAdam, "Lion": DeepSpeedCPULion}
    for known, kinds in (
        (PARAMETERS, {kind: getattr(torch.optim, kind, Lion) for kind in PARAMS}),
        (OFFLOADED, offloaded),
    ):
        taken = {kind: [*signature(made).parameters][1:] for kind, made in kinds.items()}
        assert {kind: set(names) for kind, names in known.items()} == {
            kind: set(names) - {"adamw_mode"} for kind, names in taken.items()
        }


@pytest.mark.parametrize("kind", PARAMS)
def test_state_bytes_of_a_matrix(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(64, 32))
    optimizer = build_optimizer(config_with(kind, PARAMS[kind]), [("weight", parameter)])
    parameter.grad = torch.ones(64, 32)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() > 1]
    assert sum(tensor.nbytes for tensor in tensors) / parameter.numel() == STATE[kind]


@pytest.mark.parametrize(
    "scheduler",
    [None, Scheduler(params=WarmupCosineParams(warmup_num_steps=2, cos_min_ratio=0.5)), Scheduler(type="WSD")],
)
def test_the_scheduler_gives_each_step_its_learning_rate(scheduler: Scheduler | None) -> None:
    config = config_with("SGD", {"lr": 0.1})
    config.scheduler = scheduler
    optimizer = build_optimizer(config, [("weight", weights())])
    rates = LearningRate(optimizer, scheduler, 6)
    seen = [rates.set(step) for step in range(1, 7)]
    assert {group["lr"] for group in optimizer.param_groups} == {seen[-1]}
    expected = [lr_ratio(step, 6, scheduler) if scheduler else 1.0 for step in range(6)]
    assert seen == pytest.approx([0.1 * ratio for ratio in expected])


@pytest.mark.longest
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_a_compiled_optimizer_takes_the_steps_of_torch(kind: str) -> None:
    """Weight decay included: Adam adds it to the gradient (L2), AdamW takes it off the weight."""
    params = PARAMS["AdamW"] | {"lr": 1e-3, "weight_decay": 0.5}
    torch.manual_seed(0)
    start, gradients = torch.randn(1000), torch.randn(10, 1000)
    ends = []
    for config in (config_with(kind, params), offloaded(config_with(kind, params))):
        parameter = nn.Parameter(start.clone())
        optimizer = build_optimizer(config, [("w", parameter)])
        assert isinstance(optimizer, DeepSpeedCPUAdam) == config.zero_optimization.offloads
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


def offloaded(config: TrainConfig) -> TrainConfig:
    config.zero_optimization = Zero(stage=1, offload_optimizer=OptimizerOffload(device="cpu"))
    return config


@pytest.mark.longest
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_a_compiled_optimizer_resumes_to_the_last_bit(kind: str) -> None:
    """From any step: the kernel, which takes minutes to compile, remembers the steps before."""
    config = offloaded(config_with(kind, PARAMS["AdamW"] | {"lr": 1e-3}))
    torch.manual_seed(0)
    gradients = torch.randn(60, 1000)

    def begun(weight: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(weight.clone())
        return parameter, build_optimizer(config, [("w", parameter)])

    weight, optimizer = begun(torch.randn(1000))
    for gradient in gradients:
        resumed, other = begun(weight)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in (weight, resumed):
            each.grad = gradient.clone()
        optimizer.step()
        other.step()
        torch.testing.assert_close(resumed, weight, rtol=0, atol=0)
