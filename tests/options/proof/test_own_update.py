"""The proof's own learning rate and optimizer agree with the run's, and disagree with a run's that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from options.proof.comparison import UPDATE_BOUND, Row, compare_row
from options.proof.reference import own_optimizer, own_rate
from training.config.keys import TrainConfig
from training.optimizer import lr_schedules, optimizers
from training.optimizer.lr_schedules import LearningRate

STEPS = 8
TIED = ("0.embed_tokens.weight", "2.lm_head.weight")
NAMES = (TIED[0], "1.up.weight", "1.norm.weight", "1.q.bias", "1.up.lora_B", "1.norm.lora_B")
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}, "no_wd_kws": ["norm", "lm_head"]}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}}


def config_of(optimizer: dict[str, Any], scheduler: dict[str, Any] | None = None, **keys: Any) -> TrainConfig:
    needed = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8, "max_steps": STEPS}
    return TrainConfig.model_validate(needed | {"optimizer": optimizer, "scheduler": scheduler} | keys)


def updates(config: TrainConfig) -> Row:
    """The row "updates" for a run that builds its update from the shared builders, on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    first = {name: torch.randn(8, 4, generator=generator) for name in NAMES}
    run = {name: torch.nn.Parameter(weight.clone()) for name, weight in first.items()}
    own = {name: weight.clone().requires_grad_() for name, weight in first.items()}
    optimizer = optimizers.build_optimizer(config, run.items(), [TIED])
    rate = LearningRate(optimizer, config.scheduler, STEPS)
    expected = own_optimizer(config, own, TIED)
    row = Row("updates of the weights", UPDATE_BOUND)
    for step in range(1, STEPS + 1):
        before = {name: weight.detach().clone() for name, weight in own.items()}
        for name in NAMES:
            # Some as small as Adam's eps, which would not matter otherwise.
            size = 1e-8 if name == "1.q.bias" else 1.0
            gradient = torch.randn(8, 4, generator=generator) * size
            run[name].grad, own[name].grad = gradient.clone(), gradient.clone()
        rate.set(step)
        optimizer.step()
        for group in expected.param_groups:
            group["lr"] = own_rate(config, step) * group.get("lr_ratio", 1.0)
        expected.step()
        found, wanted = ({name: weight.detach() for name, weight in each.items()} for each in (run, own))
        compare_row(row, f"step {step}, {{}}".format, found, wanted, None, before)
    return row


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAM,
        ADAM | {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-6}},
        ADAM | {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        ADAM | {"type": "Adafactor", "params": {"lr": 1e-2}},
        ADAM | {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}},
    ],
    ids=lambda optimizer: str(optimizer["type"]),
)
def test_a_sound_run_holds(optimizer: dict[str, Any]) -> None:
    row = updates(config_of(optimizer, COSINE, zero_optimization={"stage": 0}))  # Adafactor needs weights apart
    assert row.holds and row.count == STEPS * len(NAMES), row


@pytest.mark.parametrize("params", [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-2}])
def test_b_of_adapters_has_a_rate_of_its_own(params: dict[str, Any]) -> None:
    config = config_of(ADAM | {"params": params}, COSINE, lora={"lr_ratio": 16})
    row = updates(config)
    assert row.holds and row.count == STEPS * len(NAMES), row
    parameters = [(name, torch.nn.Parameter(torch.ones(2))) for name in NAMES]
    optimizer = optimizers.build_optimizer(config, parameters, [TIED])
    LearningRate(optimizer, None, STEPS).set(1)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in parameters:
        assert rates[id(weight)] == params["lr"] * (16 if name.endswith("lora_B") else 1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["WarmupCosineLR", "linear", "constant", "WSD"]),
    warm_up=st.integers(0, 12),
    warmup_type=st.sampled_from(["log", "linear"]),
    least=st.floats(0, 1),
    lowest=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_the_rate_is_the_runs_in_every_schedule(
    kind: str, warm_up: int, warmup_type: str, least: float, lowest: float, decay: float
) -> None:
    params = {"warmup_num_steps": warm_up, "warmup_type": warmup_type, "warmup_min_ratio": least}
    params |= {"WarmupCosineLR": {"cos_min_ratio": lowest}, "constant": {}}.get(kind, {"min_ratio": lowest})
    params |= {"decay_ratio": decay} if kind == "WSD" else {}
    config = config_of(ADAM, {"type": kind, "params": params})
    assert config.scheduler
    for step in range(1, STEPS + 1):
        ratio = lr_schedules.lr_ratio(step - 1, STEPS, config.scheduler)
        assert own_rate(config, step) == pytest.approx(1e-3 * ratio, rel=1e-9, abs=1e-15)


def plant_rate(change: Callable[[int, float], float]) -> Callable[[pytest.MonkeyPatch], None]:
    real = lr_schedules.lr_ratio
    return lambda patch: patch.setattr(lr_schedules, "lr_ratio", lambda step, *rest: change(step, real(step, *rest)))


def plant_earlier_rate(patch: pytest.MonkeyPatch) -> None:
    real = lr_schedules.lr_ratio
    patch.setattr(lr_schedules, "lr_ratio", lambda step, *rest: real(max(0, step - 1), *rest))


def plant_params(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = optimizers._BUILDERS["AdamW"]
        patch.setitem(optimizers._BUILDERS, "AdamW", lambda groups, **params: real(groups, **(params | changes)))

    return plant


def plant_groups(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = optimizers.parameter_groups

        def changed(*arguments: Any) -> list[dict[str, Any]]:
            groups = real(*arguments)
            change(groups)
            return groups

        patch.setattr(optimizers, "parameter_groups", changed)

    return plant


def plant_second_groups_rate(patch: pytest.MonkeyPatch) -> None:
    real = LearningRate.set

    def set_rates(self: LearningRate, step: int) -> float:
        rate = real(self, step)
        self._optimizer.param_groups[1]["lr"] = rate * 2
        return rate

    patch.setattr(LearningRate, "set", set_rates)


def plant_lonely_ends(patch: pytest.MonkeyPatch) -> None:
    """Forget that the embedding is the head too, whose name is in no_wd_kws."""
    real = optimizers.parameter_groups
    patch.setattr(optimizers, "parameter_groups", lambda optimizer, parameters, *_: real(optimizer, parameters))


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a constant rate": plant_rate(lambda step, ratio: 1.0),
    "a straight fall": plant_rate(lambda step, ratio: ratio if step < 2 else 1 - step / STEPS),
    "a rate of the step before": plant_earlier_rate,
    "weight decay times ten": plant_params(weight_decay=1.0),
    "betas exchanged": plant_params(betas=(0.999, 0.9)),
    "eps ignored": plant_params(eps=1e-8),
    "no_wd_kws ignored": plant_groups(lambda groups: [group.pop("weight_decay", None) for group in groups]),
    "no decay anywhere": plant_groups(lambda groups: [group.update(weight_decay=0.0) for group in groups]),
    "the second group's rate": plant_second_groups_rate,
    "a tied weight by one name": plant_lonely_ends,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_shared_builders_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ADAM | {"params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}}
    assert updates(config_of(optimizer, COSINE)).holds
    PLANTED[fault](monkeypatch)
    assert not updates(config_of(optimizer, COSINE)).holds


def test_deepspeeds_optimizers_on_the_cpu_have_their_own_default_weight_decay() -> None:
    offload = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    config = config_of({"params": {"lr": 1e-3}}, **offload)
    weights = {"1.up.weight": torch.ones(2, 2, requires_grad=True)}
    assert own_optimizer(config, weights, None).param_groups[0]["weight_decay"] == 0.0
    plain = config.model_copy(update={"zero_force_ds_cpu_optimizer": False})
    assert own_optimizer(plain, weights, None).param_groups[0]["weight_decay"] == 0.01
