"""Optimizers by name, groups without weight decay, and the learning-rate curve."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from training.config import TrainConfig
from training.config_sections import Optimizer, Scheduler, SchedulerParams
from training.errors import ConfigError
from training.optim import build_optimizer, build_scheduler, parameter_groups, warmup_cosine

PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "betas": [0.9, 0.95]},
    "Lion": {"lr": 0.1, "betas": [0.95, 0.98], "weight_decay": 0.02},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}
CURVES = st.builds(
    SchedulerParams,
    warmup_num_steps=st.integers(0, 50),
    warmup_min_ratio=st.floats(0, 1),
    warmup_type=st.sampled_from(["log", "linear"]),
    cos_min_ratio=st.floats(0, 1),
)


def config_with(kind: Any, params: dict[str, Any], no_wd_kws: list[str] | None = None) -> TrainConfig:
    return TrainConfig(
        model_path="m",
        data_path="d",
        save_path="s",
        train_batch_size=1,
        optimizer=Optimizer(type=kind, params=params, no_wd_kws=no_wd_kws or []),
    )


def weights() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def curve(total: int, **params: Any) -> list[float]:
    return [warmup_cosine(step, total, SchedulerParams(**params)) for step in range(total)]


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


@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
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
def test_every_optimizer_goes_against_the_gradient(kind: str) -> None:
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


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("params", [{"learning_rate": 0.1}, {"lr": 0.1, "betas": 3, "momentum": 1, "rate": 0}])
def test_parameters_that_an_optimizer_does_not_take_are_refused(kind: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(config_with(kind, params), [("weight", weights())])
    assert str(caught.value).startswith(f"optimizer.params: {kind} does not take them: ")
    assert "\n" not in str(caught.value)


def test_an_optimizer_that_cannot_be_offloaded_is_refused() -> None:
    config = config_with("SGD", {"lr": 0.1})
    config.zero_optimization.offload_optimizer = {"device": "cpu"}
    with pytest.raises(ConfigError, match=r"^optimizer\.type: SGD cannot be offloaded; expected one of AdamW, Lion"):
        build_optimizer(config, [("weight", weights())])


@given(params=CURVES, total=st.integers(1, 80))
def test_the_curve_stays_between_zero_and_one_and_arrives(params: SchedulerParams, total: int) -> None:
    ratios = [warmup_cosine(step, total, params) for step in range(total)]
    assert all(0.0 <= ratio <= 1.0 + 1e-12 for ratio in ratios)
    assert ratios[0] > 0.0 or total == 1  # the only step is also the last one
    top = max(params.warmup_num_steps, 1) - 1
    if top < total - 1:
        assert ratios[: top + 1] == sorted(ratios[: top + 1])
        assert ratios[top:] == sorted(ratios[top:], reverse=True)
    if params.warmup_num_steps < total:
        assert ratios[-1] == pytest.approx(params.cos_min_ratio, abs=1e-12)


def test_the_warm_up_rises_linearly_or_with_the_logarithm() -> None:
    linear = curve(10, warmup_num_steps=4, warmup_type="linear", warmup_min_ratio=0.2, cos_min_ratio=0.1)
    assert linear[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    log = curve(10, warmup_num_steps=4, warmup_type="log")
    assert log[:4] == pytest.approx([math.log(step + 2) / math.log(5) for step in range(4)])


def test_after_the_warm_up_half_a_cosine_falls_to_the_last_step() -> None:
    ratios = curve(12, warmup_num_steps=4, cos_min_ratio=0.1)
    assert ratios[3] == 1.0
    assert ratios[7] == pytest.approx(0.55)
    assert ratios[5] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert ratios[11] == pytest.approx(0.1)


def test_a_longer_warm_up_than_the_run_never_reaches_the_top() -> None:
    assert curve(3, warmup_num_steps=6, warmup_type="linear") == pytest.approx([1 / 6, 2 / 6, 3 / 6])


@pytest.mark.parametrize("scheduler", [None, Scheduler(params=SchedulerParams(warmup_num_steps=2, cos_min_ratio=0.5))])
def test_the_scheduler_gives_each_step_its_learning_rate(scheduler: Scheduler | None) -> None:
    config = config_with("SGD", {"lr": 0.1})
    config.scheduler = scheduler
    optimizer = build_optimizer(config, [("weight", weights())])
    schedule = build_scheduler(config, optimizer, 6)
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = curve(6, warmup_num_steps=2, cos_min_ratio=0.5) if scheduler else [1.0] * 6
    assert seen == pytest.approx([0.1 * ratio for ratio in expected])
