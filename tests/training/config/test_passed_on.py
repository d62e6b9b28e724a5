"""Each key of a config acts, or is named as one without effect, or is refused; gdGPT's two files are taken."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tests.training.config.test_config import REQUIRED, refusal, write
from tests.training.config.test_leading_words import keys_of
from training.config.deepspeed_config import check_device, deepspeed_config
from training.config.keys import TrainConfig
from training.config.passed_on import BELOW_3, IDLE, NOT_PASSED_ON, ONLY_BELOW_3, unheeded
from training.config.sections import Zero
from training.config.yaml_file import load_config
from training.errors import ConfigError
from training.plan.memory import StateBytes

ROOT = Path(__file__).parents[3]
SOURCES = [path for wing in ("common", "data", "models", "training") for path in (ROOT / wing).rglob("*.py")]
DECLARED = {"keys.py", "sections.py", "model_topo.py", "changes.py", "foreign_names.py", "passed_on.py"}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16_MOMENTS = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}
# The keys of gdGPT's two files (github.com/CoinCheung/gdGPT), with a text for each of the paths.
OF_BOTH = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 128,
    "dataloader_drop_last": True,
    "steps_per_print": 20,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 4e-5, "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "warmup_min_ratio": 0.02, "cos_min_ratio": 0.2},
    },
    "bf16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
    "from_scratch": False,
    "model_path": "m",
    "save_path": "s",
    "data_path": "d",
    "n_epoches": 3,
    "max_seq_len": 1024,
    "use_grad_ckpt": False,
}
SCALING = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
PIPELINE: dict[str, Any] = OF_BOTH | {
    "fp16": SCALING | {"enabled": True, "auto_cast": False, "fused_optimizer": False},
    "aux_max_z_loss": {"weight": 2e-4},
    "model_topo": {"process_topology": {"axes": ["pipe", "data"], "dims": [8, 1]}, "parts": [1, 5, 5, 5, 5, 5, 5, 1]},
    "use_flash_attn": False,
}
ZERO: dict[str, Any] = OF_BOTH | {
    "fp16": SCALING | {"enabled": True, "auto_cast": False},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "memory_efficient_linear": False,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 10_000_000,
    },
}


def config_with(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(REQUIRED | sections)


@pytest.mark.parametrize(
    ("keys", "in_stages", "line"),
    [
        (PIPELINE, True, "no effect here: fp16.auto_cast, fp16.fused_optimizer"),
        (ZERO, False, "no effect here: fp16.auto_cast"),
    ],
    ids=["pipeline", "zero"],
)
def test_gdgpts_files_are_taken(keys: dict[str, Any], in_stages: bool, line: str, tmp_path: Path) -> None:
    (path := tmp_path / "gdgpt.yml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    config = load_config(path)
    config.check_entry_point(in_stages=in_stages)
    check_device(config)
    (named,) = unheeded(config, in_stages)
    assert sorted(re.findall(r"fp16\.\w+", named)) == re.findall(r"fp16\.\w+", line)
    assert named.startswith("no effect here: fp16.")
    assert deepspeed_config(config)["fp16"].keys() == SCALING.keys() | {"enabled"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_older_deepspeeds_offload_is_todays(stage: int) -> None:
    old = config_with(zero_optimization={"stage": stage, "cpu_offload": True})
    new = config_with(zero_optimization={"stage": stage} | OFFLOAD)
    assert old == new and StateBytes.of(old) == StateBytes.of(new) != StateBytes.of(config_with())
    assert (
        config_with(zero_optimization={"stage": stage, "cpu_offload": False}).dump()
        == config_with(zero_optimization={"stage": stage}).dump()
    )


def test_an_offload_that_stage_0_would_pass_over_is_refused(tmp_path: Path) -> None:
    line = refusal(write(tmp_path, "zero_optimization: {stage: 0, offload_optimizer: {device: cpu}}"))
    assert "zero_optimization.offload_optimizer: stage 0 keeps" in line and line.endswith("expected stage 1 or more")
    assert refusal(write(tmp_path, "zero_optimization: {stage: 0, cpu_offload: true}")) == line


def deepspeeds_keys() -> list[str]:
    return [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]


@pytest.mark.parametrize("stage", range(4))
def test_each_key_of_zero_acts_or_is_named_or_refused(stage: int) -> None:
    """What is taken without a word is what DeepSpeed's optimizers of that stage ask for by its name."""
    makers = {3: (DeepSpeedZeroOptimizer_Stage3, Init)}.get(stage, (DeepSpeedZeroOptimizer,) if stage else ())
    read = {name for maker in makers for name in inspect.signature(maker.__init__).parameters}
    read |= {f"stage3_{name}" for name in read} | {"allgather_bucket_size"}
    read |= {"offload_optimizer", "offload_param", "cpu_offload_param", "stage"} if stage else {"stage"}
    for key in deepspeeds_keys():
        if f"zero_optimization.{key}" in NOT_PASSED_ON or key in Zero.model_fields or key == "cpu_offload":
            continue
        config = config_with(zero_optimization={"stage": stage, key: 1})
        named = unheeded(config, in_stages=False) == [f"no effect here: zero_optimization.{key}"]
        if stage < 3:
            assert named or key in read, key
        elif named:
            assert key in IDLE | ONLY_BELOW_3, key


def test_what_is_below_stage_3_alone_is_not_asked_for_by_stage_3() -> None:
    below, above = (
        inspect.signature(each.__init__).parameters for each in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    )
    assert below.keys() >= BELOW_3
    assert above.keys().isdisjoint(ONLY_BELOW_3)


@pytest.mark.parametrize(
    ("sections", "named", "unplanned"),
    [
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm", ""),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 1e6}},
            "zero_optimization.stage3_prefetch_bucket_size",
            "",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param", ""),
        ({"zero_optimization": {"zero_quantized_weights": False}}, "zero_optimization.zero_quantized_weights", ""),
        ({"zero_optimization": {"stage": 0, "reduce_bucket_size": 5}}, "zero_optimization.reduce_bucket_size", ""),
        ({"zero_optimization": {"reduce_bucket_size": 5}}, "", ""),
        ({"zero_optimization": {"contiguous_gradients": False}}, "", "zero_optimization.contiguous_gradients"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4}}},
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.pin_memory",
        ),
        ({"bf16": {"enabled": True, "immediate_grad_update": False}}, "bf16.immediate_grad_update", ""),
        ({"bf16": BF16_STATES}, "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states", ""),
        (
            {"bf16": BF16_STATES, "zero_optimization": OFFLOAD, "optimizer": BF16_MOMENTS},
            "",
            "bf16.bf16_optimizer_states",
        ),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast", ""),
        ({"fp16": {"enabled": True, "hysteresis": 4}}, "", ""),
        ({}, "", ""),
    ],
)
def test_what_nothing_reads_is_named_and_so_is_what_a_plan_leaves_out(
    sections: dict[str, Any], named: str, unplanned: str
) -> None:
    lines = unheeded(config_with(**sections), plan=True)
    assert [line.partition(": ")[0] for line in lines] == ["no effect here"] * bool(named) + ["not in the plan"] * bool(
        unplanned
    )
    assert named in "".join(lines) and unplanned in "".join(lines)


FP16_MASTERS = {"enabled": True, "fp16_master_weights_and_grads": True}
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
LION, SGD = {"type": "Lion"}, {"type": "SGD"}
# What DeepSpeed would assert at the start of a run: the keys, what is said, and keys with which it is fine.
ASSERTED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "fp16 weights": ({"fp16": FP16_MASTERS}, "fp16.fp16_master_weights_and_grads: ", {"zero_optimization": OFFLOAD}),
    "fp16 weights, Lion": (
        {"fp16": FP16_MASTERS, "zero_optimization": OFFLOAD, "optimizer": LION},
        "fp16.fp16_master_weights_and_grads: ",
        {"optimizer": {"type": "AdamW"}},
    ),
    "fp16 weights, torch's AdamW": (
        {"fp16": FP16_MASTERS, "zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False},
        "fp16.fp16_master_weights_and_grads: ",
        {"zero_force_ds_cpu_optimizer": True},
    ),
    "bf16 weights": (
        {"bf16": BF16_MASTERS, "zero_optimization": {"stage": 2}},
        "bf16.bf16_master_weights_and_grads: needs",
        {"zero_optimization": {"stage": 1}},
    ),
    "bf16 weights, stage 0": (
        {"bf16": BF16_MASTERS, "zero_optimization": {"stage": 0}},
        "bf16.bf16_master_weights_and_grads: needs",
        {"zero_optimization": {"stage": 1}},
    ),
    "bf16 states": (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states: expected bf16_master_weights_and_grads: true",
        {"bf16": BF16_STATES},
    ),
    "bf16 states, fp32 moments": (
        {"bf16": BF16_STATES, "zero_optimization": OFFLOAD},
        "bf16_master_weights_and_grads: true and optimizer.params.fp32_optimizer_states: false beside it",
        {"optimizer": BF16_MOMENTS},
    ),
    "a part of Lion": (
        {"zero_optimization": {"stage": 3} | HALF, "optimizer": LION},
        "zero_optimization.offload_optimizer.ratio: ",
        {"optimizer": {"type": "AdamW"}},
    ),
    "untested": (
        {"zero_allow_untested_optimizer": False, "optimizer": LION},
        "zero_allow_untested_optimizer: DeepSpeed has not tested Lion",
        {"zero_optimization": OFFLOAD},
    ),
    "untested, offloaded": (
        {
            "zero_allow_untested_optimizer": False,
            "optimizer": SGD,
            "zero_optimization": OFFLOAD,
            "zero_force_ds_cpu_optimizer": False,
        },
        "zero_allow_untested_optimizer: DeepSpeed has not tested SGD",
        {"zero_allow_untested_optimizer": True},
    ),
    "sums": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype: ",
        {"zero_optimization": {"stage": 1}},
    ),
    "a scale below 0": ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale", {"fp16": {"enabled": True}}),
    "no window": ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window", {"fp16": {}}),
    "no least scale": ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale", {"fp16": {}}),
    "a part below stage 3": (
        {"zero_optimization": HALF},
        "zero_optimization: Assertion failed, Partial offloading only supported for ZeRO Stage 3",
        {"zero_optimization": {"stage": 3} | HALF},
    ),
    "an odd bucket": (
        {"zero_optimization": {"allgather_bucket_size": 3}},
        "zero_optimization.allgather_bucket_size: expected an even number, found 3",
        {"zero_optimization": {"stage": 3}},
    ),
    "groups that do not divide": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
        "zero_optimization.zero_hpz_partition_size: expected a divisor of ",
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    ),
    "weights on a disk": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device: expected cpu or none, found 'nvme'",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
}


@pytest.mark.parametrize("name", ASSERTED)
def test_what_deepspeed_would_assert_is_told_by_its_key(name: str, tmp_path: Path) -> None:
    keys, told, mended = ASSERTED[name]
    with pytest.raises(ConfigError) as refused:
        check_device(loaded(tmp_path, keys))
    assert told in str(refused.value) and "\n" not in str(refused.value)
    config = loaded(tmp_path, keys | mended)
    check_device(config)
    DeepSpeedConfig(deepspeed_config(config) | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8})


def loaded(folder: Path, keys: dict[str, Any]) -> TrainConfig:
    topology = {"process_topology": {"axes": ["pipe", "data"], "dims": [1, 4]}}
    (path := folder / "run.yml").write_text(yaml.safe_dump(REQUIRED | {"model_topo": topology} | keys))
    return load_config(path)


def test_each_key_of_ours_is_read_somewhere() -> None:
    """By the wings, as an attribute or by its name; where keys are declared and listed does not count."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name not in DECLARED)
    deepspeeds = ("bf16.", "fp16.", "data_types.", "optimizer.params.", "scheduler.params.", "zero_optimization.")
    passed = {"communication_data_type", "zero_allow_untested_optimizer", "gradient_accumulation_steps"}
    for key in keys_of(TrainConfig):
        name = key.rpartition(".")[2]
        read = re.search(rf'\.{name}\b|"{name}"', source)
        assert read or key in passed or key.startswith(deepspeeds), key
