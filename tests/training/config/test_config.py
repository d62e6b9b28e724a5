"""Loading the YAML file of a run: defaults, overrides, sections, and what DeepSpeed receives of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from pydantic import BaseModel

from options import load_config
from training.config.deepspeed_config import check_device, deepspeed_config
from training.config.deepspeed_keys import REFUSED, WHY_REFUSED
from training.config.foreign_names import FOREIGN
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo, ProcessTopology
from training.config.optimization import ConstantParams, LinearParams, WarmUp, WarmupCosineParams, WSDParams
from training.config.precision import BF16, FP16
from training.config.section import Section
from training.errors import ConfigError

REQUIRED = {"model_path": "model", "data_path": "records.json", "save_path": "run", "train_batch_size": "8"}
LR = {"optimizer": {"params": {"lr": 1e-5}}}


def write(tmp_path: Path, *lines: str, leave_out: str = "") -> Path:
    own = [f"{key}: {value}" for key, value in REQUIRED.items() if key != leave_out]
    path = tmp_path / "run.yml"
    path.write_text("\n".join([*own, *lines]) + "\n", encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The one line with which a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_topology(stages: int, parts: list[int] | None) -> TrainConfig:
    topo = ModelTopo(process_topology=ProcessTopology(dims=[stages, 1]), parts=parts)
    return TrainConfig(model_path="m", data_path="d", save_path="s", train_batch_size=1, model_topo=topo)


def test_four_keys_are_enough(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.model_path, config.data_path, config.save_path) == ("model", ["records.json"], "run")
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.n_epoches) == (8, 1, 1)
    assert (config.gradient_clipping, config.zero_optimization.stage, config.optimizer.type) == (1.0, 1, "AdamW")
    assert (config.model_topo.stages, config.model_topo.replicas, config.scheduler) == (1, 1, None)
    assert not (config.from_scratch or config.use_grad_ckpt or config.dataloader_drop_last)
    assert config.use_flash_attn == config.compile == "auto"


@pytest.mark.parametrize(("name", "other"), [("n_epoches", "n_epochs"), ("n_epochs", "n_epoches")])
def test_n_epochs_is_n_epoches(name: str, other: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{name}: 3")
    assert load_config(path).n_epoches == 3
    assert load_config(path, [f"{name}=4"]).n_epoches == 4
    assert load_config(path, [f"{other}=5"]).n_epoches == 5


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("+2E3", 2e3), (".5e1", 5.0)])
def test_numbers_with_an_exponent_are_numbers(text: str, value: float, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"optimizer: {{params: {{lr: {text}}}}}")).optimizer.params["lr"] == value
    config = load_config(write(tmp_path), [f"optimizer.params.lr={text}", f"save_path=run{text}"])
    assert (config.optimizer.params["lr"], config.save_path) == (value, f"run{text}")


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer: {params: {lr: 0.1, betas: [0.9, 0.99]}}", "seed: 1")
    words = ["seed=7", "optimizer.params.betas=[0.8, 0.9]", "scheduler.params.warmup_num_steps=5", "seed=8"]
    config = load_config(path, [*words, "data_path=[a.json, b.json]"])
    assert config.seed == 8
    assert config.optimizer.params == {"lr": 0.1, "betas": [0.8, 0.9]}
    assert config.scheduler is not None
    assert config.scheduler.params.warmup_num_steps == 5
    assert config.data_path == ["a.json", "b.json"]


def test_an_override_changes_only_its_section(tmp_path: Path) -> None:
    path = write(tmp_path, "bf16: &on {enabled: true}", "tensorboard: *on")
    config = load_config(path, ["tensorboard.enabled=false"])
    assert (config.bf16.enabled, config.tensorboard.enabled) == (True, False)
    config = load_config(write(tmp_path, "scheduler:"), ["scheduler.type=linear"])
    assert config.scheduler is not None and config.scheduler.type == "linear"


def test_a_tilde_becomes_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(write(tmp_path), ["model_path=~/m", "save_path=~/run", "resume=~/run/step-000002"])
    found = (config.model_path, config.save_path, config.resume)
    assert found == (f"{tmp_path}/m", f"{tmp_path}/run", f"{tmp_path}/run/step-000002")


def test_yaml_anchors_and_merge_keys(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "bf16: &half {enabled: false}", "fp16: {<<: *half, loss_scale: 8}"))
    assert (config.fp16.enabled, config.fp16.loss_scale) == (False, 8)


def test_deepspeed_receives_its_own_keys_alone(tmp_path: Path) -> None:
    zero = "zero_optimization: {stage: 1, offload_optimizer: {device: cpu, pin_memory: true}, reduce_bucket_size: 1e6}"
    lines = ["communication_data_type: fp32", "data_types: {grad_accum_dtype: bf16}", "bf16: {enabled: true}"]
    lines += ["gradient_accumulation_steps: 8", "zero_allow_untested_optimizer: false"]
    resolved = deepspeed_config(load_config(write(tmp_path, *lines, zero, "zero_force_ds_cpu_optimizer: false")))
    received = DeepSpeedConfig(resolved)
    assert received.communication_data_type == torch.float32
    assert (received.grad_accum_dtype, received.gradient_accumulation_steps) == ("bf16", 8)
    assert (received.bfloat16_config.enabled, received.zero_allow_untested_optimizer) == (True, False)
    assert received.zero_config.reduce_bucket_size == 1e6
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 1e6
    assert resolved["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert (resolved["train_batch_size"], resolved["gradient_clipping"]) == (8, 1.0)
    assert resolved.keys().isdisjoint({"model_path", "n_epoches", "optimizer", "scheduler", "model_topo", "seed"})


@pytest.mark.parametrize(("section", "known"), [(BF16, DeepSpeedBF16Config), (FP16, DeepSpeedFP16Config)])
def test_bf16_and_fp16_have_deepspeeds_keys(section: type[Section], known: type[BaseModel]) -> None:
    assert section.model_fields.keys() - {"fused_optimizer"} == known.model_fields.keys()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (
            {"reduce_bucket_siz": 5},
            "reduce_bucket_siz: DeepSpeed does not have it; did you mean zero_optimization.reduce_buc",
        ),
        ({"reduce_bucket_size": "x"}, "reduce_bucket_size: expected a whole number"),
        ({"offload_param": {"device": "tape"}}, "offload_param.device: expected 'none', "),
    ],
)
def test_zero_keys_are_checked_by_deepspeed_before_a_model_is_built(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_device(TrainConfig.model_validate(REQUIRED | {"zero_optimization": section}))
    assert str(caught.value).startswith(f"zero_optimization.{reason}")


def test_untested_keys_of_deepspeed_are_refused(tmp_path: Path) -> None:
    assert not REFUSED & TrainConfig.model_fields.keys()
    for key in REFUSED - FOREIGN.keys():
        assert refusal(write(tmp_path), f"{key}=1").endswith(f": {key}: {WHY_REFUSED}")


def test_axes_in_either_order(tmp_path: Path) -> None:
    lines = "model_topo: {process_topology: {axes: [data, pipe], dims: [2, 4]}, parts: [1, 2, 2, 1]}"
    topo = load_config(write(tmp_path, lines)).model_topo
    assert (topo.stages, topo.replicas, topo.processes) == (4, 2, 8)


def test_parts_may_be_auto(tmp_path: Path) -> None:
    for words in ("", ", parts: auto"):
        config = load_config(write(tmp_path, f"model_topo: {{process_topology: {{dims: [2, 1]}}{words}}}"))
        assert config.parts_for(6) is None
        assert config.with_parts([4, 2]).parts_for(6) == [4, 2]


def test_parts_at_the_top_are_those_of_model_topo(tmp_path: Path) -> None:
    lines = "model_topo: {process_topology: {dims: [2, 1]}}"
    for config in (
        load_config(write(tmp_path, lines, "parts: [4, 2]")),
        load_config(write(tmp_path, "parts: [3, 3]", lines), ["parts=[4, 2]"]),
        load_config(write(tmp_path, "parts: [4, 2]"), ["model_topo.process_topology.dims=[2, 1]"]),
    ):
        assert config.model_topo.parts == [4, 2]


def test_parts_must_sum_to_the_layers_of_the_model() -> None:
    assert with_topology(2, [3, 2]).parts_for(5) == [3, 2]
    with pytest.raises(ConfigError, match=r"^model_topo\.parts: \[3, 2\] sums to 5, but the model has 6 layers \(4 bl"):
        with_topology(2, [3, 2]).parts_for(6)
    for parts in (None, [1, 1, 1, 1]):
        with pytest.raises(ConfigError, match=r"^model_topo\.process_topology\.dims: 4 stages for a model of 3 layers"):
            with_topology(4, parts).parts_for(3)


def test_a_saved_config_loads_as_the_same(tmp_path: Path) -> None:
    optimizer = "optimizer: {type: Lion, params: {lr: 1e-5, betas: [0.95, 0.98]}, no_wd_kws: [bias, norm]}"
    topology = "model_topo: {process_topology: {dims: [2, 2]}, parts: [3, 2]}"
    lines = ["n_epochs: 3", "scheduler: {params: {warmup_num_steps: 3}}", "fp16: {enabled: true, loss_scale: 8}"]
    config = load_config(
        write(tmp_path, *lines, optimizer, topology, "data_types: {grad_accum_dtype: fp32}", "prompt_format: plain")
    )
    saved = tmp_path / "config.yml"
    saved.write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
    assert load_config(saved) == config


@pytest.mark.parametrize(
    ("line", "params"),
    [
        ("scheduler: {}", WarmupCosineParams()),
        ("scheduler: {params: {warmup_num_steps: 3}}", WarmupCosineParams(warmup_num_steps=3)),
        ("scheduler: {type: linear}", LinearParams()),
        ("scheduler: {type: constant, params: {warmup_type: linear}}", ConstantParams(warmup_type="linear")),
        ("scheduler: {params: {decay_ratio: 0.2}, type: WSD}", WSDParams(decay_ratio=0.2)),
    ],
)
def test_params_of_each_schedule(line: str, params: WarmUp, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, line))
    assert config.scheduler is not None
    assert config.scheduler.params == params
    assert config.dump()["scheduler"]["params"] == params.model_dump()
    saved = tmp_path / "config.yml"
    saved.write_text(yaml.safe_dump(config.dump()), encoding="utf-8")
    assert load_config(saved) == config


@pytest.mark.parametrize("section", [{}, {"optimizer": {"type": "SGD"}}, {"optimizer": {"params": {"eps": 1e-6}}}])
def test_lr_is_required(section: dict[str, Any]) -> None:
    """torch's default of 1e-3 would spoil a trained model without a word."""
    config = TrainConfig.model_validate(REQUIRED | section)
    for in_stages in (True, False):
        with pytest.raises(ConfigError, match=r"^optimizer\.params\.lr: missing; expected a learning rate"):
            config.check_entry_point(in_stages=in_stages)


def test_a_pipeline_refuses_zero_stage_2() -> None:
    TrainConfig.model_validate(REQUIRED | LR | {"zero_optimization": {"stage": 1}}).check_entry_point(in_stages=True)
    config = TrainConfig.model_validate(REQUIRED | LR | {"zero_optimization": {"stage": 2}})
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.stage: 2 cannot be combined with a pipeline; expected 0"
    ):
        config.check_entry_point(in_stages=True)


def test_zero_has_no_sums_of_a_pipeline() -> None:
    zero = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "offload_gradients": True}
    with pytest.raises(ConfigError, match=r"^offload_gradients: a pipeline's"):
        TrainConfig.model_validate(REQUIRED | LR | zero).check_entry_point(in_stages=False)


@pytest.mark.parametrize("section", ["bf16", "fp16", "fp8", "tensorboard"])
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_stand_for_a_section(section: str, value: bool, tmp_path: Path) -> None:
    beside = "bf16: true" if section == "fp8" else ""
    for config in (
        load_config(write(tmp_path, f"{section}: {value}", beside)),
        load_config(write(tmp_path, beside), [f"{section}={value}"]),
        load_config(write(tmp_path, f"{section}: {not value}", beside), [f"{section}.enabled={value}"]),
    ):
        assert getattr(config, section).enabled is value
