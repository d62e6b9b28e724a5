"""Each key acts, is reported as one without effect, or is refused by name; gdGPT's two files load."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from options import load_config
from tests.conftest import ROOT
from tests.launching import run, topology
from tests.training.config.test_config import REQUIRED
from tests.training.config.test_mistakes import keys_of
from training.config.deepspeed_config import check_device, deepspeed_config
from training.config.deepspeed_keys import BELOW_3, IDLE, ONLY_BELOW_3, REFUSED, describe_ignored_keys
from training.config.keys import TrainConfig
from training.config.optimization import Zero
from training.errors import ConfigError
from training.launch.agent import free_port

PACKAGES = "common", "data", "models", "options", "training"
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
DECLARED = {"keys.py", "sections.py", "model_topo.py", "changes.py", "foreign_names.py", "deepspeed_keys.py"}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
BF16_STATES = BF16_MASTERS | {"bf16_optimizer_states": True}
BF16_MOMENTS = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}
# The keys of gdGPT's two files (github.com/CoinCheung/gdGPT), with a text for each of the paths.
OF_BOTH: dict[str, Any] = {
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
    "optimizer": OF_BOTH["optimizer"] | {"no_wd_kws": ["bias", "[a-zA-Z]*norm"]},
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
def test_gdgpts_files_load(keys: dict[str, Any], in_stages: bool, line: str, tmp_path: Path) -> None:
    (path := tmp_path / "gdgpt.yml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    config = load_config(path)
    config.check_entry_point(in_stages=in_stages)
    check_device(config)
    (named,) = describe_ignored_keys(config, in_stages)
    assert sorted(re.findall(r"fp16\.\w+", named)) == re.findall(r"fp16\.\w+", line)
    assert named.startswith("no effect here: fp16.")
    assert deepspeed_config(config)["fp16"].keys() == SCALING.keys() | {"enabled"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_offload_is_offload_optimizer(stage: int) -> None:
    old = config_with(zero_optimization={"stage": stage, "cpu_offload": True})
    new = config_with(zero_optimization={"stage": stage} | OFFLOAD)
    assert old == new != config_with()
    assert (
        config_with(zero_optimization={"stage": stage, "cpu_offload": False}).dump()
        == config_with(zero_optimization={"stage": stage}).dump()
    )


def deepspeeds_keys() -> list[str]:
    return [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]


@pytest.mark.parametrize("stage", range(4))
def test_each_key_of_zero_acts_or_is_reported(stage: int) -> None:
    """What is taken without a word is what DeepSpeed's optimizers of that stage ask for by its name."""
    makers = {3: (DeepSpeedZeroOptimizer_Stage3, Init)}.get(stage, (DeepSpeedZeroOptimizer,) if stage else ())
    read = {name for maker in makers for name in inspect.signature(maker.__init__).parameters}
    read |= {f"stage3_{name}" for name in read} | {"allgather_bucket_size"}
    read |= {"offload_optimizer", "offload_param", "cpu_offload_param", "stage"} if stage else {"stage"}
    for key in deepspeeds_keys():
        if f"zero_optimization.{key}" in REFUSED or key in Zero.model_fields or key == "cpu_offload":
            continue
        config = config_with(zero_optimization={"stage": stage, key: 1})
        named = describe_ignored_keys(config, in_stages=False) == [f"no effect here: zero_optimization.{key}"]
        if stage < 3:
            assert named or key in read, key
        elif named:
            assert key in IDLE | ONLY_BELOW_3, key


def test_keys_below_stage_3_are_not_read_by_stage_3() -> None:
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
            "",
        ),
        ({"bf16": BF16_STATES, "zero_optimization": {"stage": 2}}, "", "bf16.bf16_optimizer_states"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": False}}}, "", ""),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast", ""),
        ({"fp16": {"enabled": True, "hysteresis": 4}}, "", ""),
        ({}, "", ""),
    ],
)
def test_keys_without_effect_and_unplanned_keys_are_reported(
    sections: dict[str, Any], named: str, unplanned: str
) -> None:
    lines = describe_ignored_keys(config_with(**sections), plan=True)
    assert [line.partition(": ")[0] for line in lines] == ["no effect here"] * bool(named) + ["not in the plan"] * bool(
        unplanned
    )
    assert named in "".join(lines) and unplanned in "".join(lines)


@pytest.mark.parametrize(
    ("zero", "line"),
    [
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "zero_optimization: Assertion failed, Partial offloading only supported for ZeRO Stage 3",
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 3},
            "zero_optimization.zero_hpz_partition_size: expected a divisor of",
        ),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}},
            "zero_optimization.offload_param.device: expected cpu or none, found 'nvme'",
        ),
    ],
)
def test_zero_keys_that_do_not_fit_are_named(zero: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        check_device(config_with(zero_optimization=zero, model_topo=topology((1, 4))))


# What DeepSpeed asserts when an engine is made: the keys, and a part of its text.
ASSERTED: list[tuple[dict[str, Any], str]] = [
    ({"bf16": BF16_MASTERS, "zero_optimization": {"stage": 2}}, "Master weights feature requires ZeRO-2 Offload"),
    ({"bf16": BF16_MASTERS, "zero_optimization": {"stage": 0}}, "only supported with ZeRO Stage 1, 2, or 3"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "requires bf16_master_weights_and_grads"),
    (
        {"zero_allow_untested_optimizer": False, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
        'Please add <"zero_allow_untested_optimizer": true>',
    ),
    (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}},
        "unsupported mix of model_dtype=torch.bfloat16 and grad_accum_dtype=torch.float32",
    ),
    ({"zero_optimization": {"allgather_bucket_size": 3}}, "allgather_bucket_size must be a multiple of"),
    ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "on CPU backend"),
]
WRAP = """
import json, sys
from torch import nn
from training.config.keys import TrainConfig
from training.distributed.joining import join
from training.distributed.processes import ProcessInfo
from training.engine.building import wrap_in_engine
from training.errors import ConfigError
from datetime import timedelta

join(ProcessInfo(0, 1, 0, 1), timedelta(minutes=30))
for keys in json.loads(sys.argv[1]):
    try:
        wrap_in_engine(nn.Linear(64, 64), TrainConfig.model_validate(keys))
        print("refused: nothing")
    except ConfigError as error:
        print(f"refused: {error}")
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="some keys are refused without a GPU only")
def test_what_deepspeed_asserts_is_one_line() -> None:
    base = REQUIRED | {"optimizer": {"params": {"lr": 1e-3}}}
    done = wrapped([base | keys for keys, _ in ASSERTED])
    lines = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(lines) == len(ASSERTED), done.stderr
    for line, (_, part) in zip(lines, ASSERTED, strict=True):
        assert line.startswith("refused: DeepSpeed refuses its keys: ") and part in line


@pytest.mark.slow
def test_deepspeed_does_not_warn_of_an_optimizer_that_has_consent() -> None:
    lion = REQUIRED | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    done = wrapped([lion])
    assert "refused: nothing" in done.stdout
    assert "caution" not in done.stdout + done.stderr


def wrapped(configs: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    meeting |= {"MASTER_PORT": str(free_port())}
    return run(sys.executable, "-c", WRAP, json.dumps(configs), **meeting)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the kernels")
@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantized_communication_without_cuda_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^zero_optimization\.{key}: its kernels need CUDA"):
        check_device(config_with(zero_optimization={"stage": 3, key: True}))


def test_each_key_is_read_somewhere() -> None:
    """As an attribute or by its name; where keys are declared or listed does not count."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name not in DECLARED)
    deepspeeds = ("bf16.", "fp16.", "data_types.", "optimizer.params.", "scheduler.params.", "zero_optimization.")
    passed = {"communication_data_type", "zero_allow_untested_optimizer", "gradient_accumulation_steps"}
    for key in keys_of(TrainConfig):
        name = key.rpartition(".")[2]
        read = re.search(rf'\.{name}\b|"{name}"', source)
        assert read or key in passed or key.startswith(deepspeeds), key
