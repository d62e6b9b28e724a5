"""The YAML file of a run: defaults, overrides, DeepSpeed's keys, and one line with file and key for each mistake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from pydantic import BaseModel

from training.config.deepspeed_config import check_device, deepspeed_config
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo, ProcessTopology
from training.config.passed_on import LEFT_OUT, NOT_PASSED_ON
from training.config.sections import (
    BF16,
    FP16,
    ConstantParams,
    LinearParams,
    Section,
    WarmUp,
    WarmupCosineParams,
    WSDParams,
)
from training.config.yaml_file import load_config
from training.errors import ConfigError

REQUIRED = {"model_path": "model", "data_path": "records.json", "save_path": "run", "train_batch_size": "8"}
LR = {"optimizer": {"params": {"lr": 1e-5}}}


NINE = [f"[{', '.join([f'*a{level}'] * 9)}]" for level in range(9)]
BOMB = ["a0: &a0 [x]", *(f"a{level + 1}: &a{level + 1} {NINE[level]}" for level in range(9))]
MERGE_BOMB = ["a0: &a0 {x: 1}", *(f"a{level + 1}: &a{level + 1} {{<<: {NINE[level]}}}" for level in range(9))]


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


def test_four_keys_make_a_run_with_sensible_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.model_path, config.data_path, config.save_path) == ("model", ["records.json"], "run")
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.n_epoches) == (8, 1, 1)
    assert (config.gradient_clipping, config.zero_optimization.stage, config.optimizer.type) == (1.0, 1, "AdamW")
    assert (config.model_topo.stages, config.model_topo.replicas, config.scheduler) == (1, 1, None)
    assert not (config.from_scratch or config.use_grad_ckpt or config.dataloader_drop_last)
    assert config.use_flash_attn == config.compile == "auto"


@pytest.mark.parametrize(("name", "other"), [("n_epoches", "n_epochs"), ("n_epochs", "n_epoches")])
def test_both_spellings_of_the_number_of_epochs_are_one_key(name: str, other: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{name}: 3")
    assert load_config(path).n_epoches == 3
    assert load_config(path, [f"{name}=4"]).n_epoches == 4
    assert load_config(path, [f"{other}=5"]).n_epoches == 5


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("+2E3", 2e3), (".5e1", 5.0)])
def test_numbers_with_an_exponent_are_numbers(text: str, value: float, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"optimizer: {{params: {{lr: {text}}}}}")).optimizer.params["lr"] == value
    config = load_config(write(tmp_path), [f"optimizer.params.lr={text}", f"save_path=run{text}"])
    assert (config.optimizer.params["lr"], config.save_path) == (value, f"run{text}")


def test_words_of_the_command_line_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer: {params: {lr: 0.1, betas: [0.9, 0.99]}}", "seed: 1")
    words = ["seed=7", "optimizer.params.betas=[0.8, 0.9]", "scheduler.params.warmup_num_steps=5", "seed=8"]
    config = load_config(path, [*words, "data_path=[a.json, b.json]"])
    assert config.seed == 8
    assert config.optimizer.params == {"lr": 0.1, "betas": [0.8, 0.9]}
    assert config.scheduler is not None
    assert config.scheduler.params.warmup_num_steps == 5
    assert config.data_path == ["a.json", "b.json"]


def test_a_word_changes_the_one_section_that_it_names(tmp_path: Path) -> None:
    path = write(tmp_path, "bf16: &on {enabled: true}", "tensorboard: *on")
    config = load_config(path, ["tensorboard.enabled=false"])
    assert (config.bf16.enabled, config.tensorboard.enabled) == (True, False)
    config = load_config(write(tmp_path, "scheduler:"), ["scheduler.type=linear"])
    assert config.scheduler is not None and config.scheduler.type == "linear"


def test_a_home_folder_is_meant_by_its_short_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(write(tmp_path), ["model_path=~/m", "save_path=~/run", "resume=~/run/step-000002"])
    found = (config.model_path, config.save_path, config.resume)
    assert found == (f"{tmp_path}/m", f"{tmp_path}/run", f"{tmp_path}/run/step-000002")


def test_yaml_anchors_and_merge_keys_are_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "bf16: &half {enabled: false}", "fp16: {<<: *half, loss_scale: 8}"))
    assert (config.fp16.enabled, config.fp16.loss_scale) == (False, 8)


def test_deepspeeds_own_keys_pass_through_and_pipetunes_do_not(tmp_path: Path) -> None:
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
def test_what_a_precision_takes_is_what_deepspeed_takes(section: type[Section], known: type[BaseModel]) -> None:
    assert section.model_fields.keys() - {"fused_optimizer"} == known.model_fields.keys()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (
            {"reduce_bucket_siz": 5},
            "reduce_bucket_siz: DeepSpeed does not have it; did you mean zero_optimization.reduce_buc",
        ),
        ({"reduce_bucket_size": "x"}, "reduce_bucket_size: expected an integer, found 'x'"),
        ({"offload_param": {"device": "tape"}}, "offload_param.device: expected 'none', "),
    ],
)
def test_what_deepspeed_refuses_of_zero_is_told_before_a_model_is_built(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_device(TrainConfig.model_validate(REQUIRED | {"zero_optimization": section}))
    assert str(caught.value).startswith(f"zero_optimization.{reason}")


def test_states_on_a_disk_which_a_resume_could_not_take_up_are_refused(tmp_path: Path) -> None:
    line = refusal(write(tmp_path, "zero_optimization: {offload_optimizer: {device: nvme, nvme_path: /tmp}}"))
    assert "zero_optimization.offload_optimizer.device" in line and "'none' or 'cpu'" in line


def test_every_key_that_is_not_passed_on_is_refused(tmp_path: Path) -> None:
    assert not NOT_PASSED_ON & TrainConfig.model_fields.keys()
    for key in NOT_PASSED_ON:
        for value in ("{enabled: true}", "1", "false"):
            assert refusal(write(tmp_path), f"{key}={value}").endswith(f": {key}: {LEFT_OUT}")


def test_axes_may_stand_in_either_order(tmp_path: Path) -> None:
    lines = "model_topo: {process_topology: {axes: [data, pipe], dims: [2, 4]}, parts: [1, 2, 2, 1]}"
    topo = load_config(write(tmp_path, lines)).model_topo
    assert (topo.stages, topo.replicas, topo.processes) == (4, 2, 8)


def test_parts_are_chosen_later_where_absent_or_auto(tmp_path: Path) -> None:
    for words in ("", ", parts: auto"):
        config = load_config(write(tmp_path, f"model_topo: {{process_topology: {{dims: [2, 1]}}{words}}}"))
        assert config.parts_for(6) is None
        assert config.with_parts([4, 2]).parts_for(6) == [4, 2]


def test_parts_that_do_not_fit_the_model_are_refused() -> None:
    assert with_topology(2, [3, 2]).parts_for(5) == [3, 2]
    with pytest.raises(ConfigError, match=r"^model_topo\.parts: \[3, 2\] sums to 5, but the model has 6 layers \(4 bl"):
        with_topology(2, [3, 2]).parts_for(6)
    for parts in (None, [1, 1, 1, 1]):
        with pytest.raises(ConfigError, match=r"^model_topo\.process_topology\.dims: 4 stages for a model of 3 layers"):
            with_topology(4, parts).parts_for(3)


def test_the_saved_config_is_read_back_as_the_same(tmp_path: Path) -> None:
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
def test_the_type_of_a_schedule_says_which_params_there_are(line: str, params: WarmUp, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, line))
    assert config.scheduler is not None
    assert config.scheduler.params == params
    assert config.dump()["scheduler"]["params"] == params.model_dump()
    saved = tmp_path / "config.yml"
    saved.write_text(yaml.safe_dump(config.dump()), encoding="utf-8")
    assert load_config(saved) == config


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("optimiser: {}", "unknown key optimiser; did you mean optimizer?"),
        ("communication_data_typ: fp32", "unknown key communication_data_typ; did you mean communication_data_type?"),
        ("bf16: {enable: true}", "unknown key bf16.enable; did you mean bf16.enabled?"),
        ("bf16: {loss_scale: 8}", "unknown key bf16.loss_scale; expected one of enabled, "),
        ("fp16: {los_scale: 8}", "unknown key fp16.los_scale; did you mean fp16.loss_scale?"),
        ("model_pth: m", "unknown key model_pth; did you mean model_path?"),
        ("data_path: {path: p, repeet: 2}", "unknown key data_path.0.repeet; did you mean data_path.0.repeat?"),
        ("eval_data_path: [a, {pth: p}]", "unknown key eval_data_path.1.pth; did you mean eval_data_path.1.path?"),
        ("lr: 3", "unknown key lr; did you mean optimizer.params.lr?"),
        ("optimizer: {learning_rate: 3}", "unknown key optimizer.learning_rate; did you mean optimizer.params.lr?"),
        (
            "optimizer: {params: {betaz: 3}}",
            "optimizer.params.betaz: AdamW does not take it; did you mean optimizer.params.bet",
        ),
        ("optimizer: {params: {learning_rate: 3}}", "optimizer.params.learning_rate: AdamW does not take it; did you "),
        (
            "optimizer: {params: {fused: true}}\nzero_optimization: {offload_optimizer: {device: cpu}}",
            "optimizer.params.fused: AdamW does not take it; expected one of lr, bias_correction, ",
        ),
        ("optimizer: {1: 2}", "unknown key optimizer.1; expected one of type, "),
        ("seed: 1e40", "seed: "),
        (f"seed: {10**40}", "seed: expected at most 1,000,000,000,000, found 1000"),
        ("max_steps: 1000000000001", "max_steps: expected at most 1,000,000,000,000, found 1000000000001"),
        ("max_seq_len: 1000000000", "max_seq_len: expected less than or equal to 16777216, found 1000000000"),
        ("timeout_minutes: .inf", "timeout_minutes: expected a finite number, found inf"),
        ("timeout_minutes: 1e9", "timeout_minutes: expected less than or equal to "),
        ("preemption_signals: [SIGKILL]", "preemption_signals.0: expected 'SIGUSR1', 'SIGUSR2', "),
        ("preemption_signals: SIGUSR1", "preemption_signals: expected a list, found "),
        ("ports: {meeting: 70000}", "ports.meeting: expected less than or equal to 65535, found 70000"),
        (
            "ports: {meeting: 29500, failure_detector: 29500}",
            "ports.failure_detector: 29500 is that of meeting; expect",
        ),
        ("save_minutes: .inf", "save_minutes: expected a finite number, found inf"),
        ("aux_max_z_loss: {weight: .nan}", "aux_max_z_loss.weight: expected a finite number, found nan"),
        ("optimizer: {params: {lr: .nan}}", "optimizer.params.lr: expected a number of at least 0, found nan"),
        ("optimizer: {params: {lr: .inf}}", "optimizer.params.lr: expected a number of at least 0, found inf"),
        ('cache_dir: "a\\0b"', "line 5, column 12: a control character; expected printable text"),
        ('"a\\x1b[2J\\nerror: forged": 1', "line 5, column 1: a control character; expected printable text"),
        ('cache_dir: "\\u202e"', "line 5, column 12: a control character; expected printable text"),
        ("optimizer: &a {params: *a}", "line 1, column 1: more than 100,000 values"),
        ("\n".join(BOMB), "line 1, column 1: more than 100,000 values, aliases and merge keys followed"),
        ("\n".join(MERGE_BOMB), "line 1, column 1: more than 100,000 values, aliases and merge keys followed"),
        ("cache_dir: " + "[" * 50_000, "nested too deeply; expected fewer levels"),
        ("#" * 2**20, "cannot be read: larger than 1 MiB"),
        ("optimizer: {parms: {}}", "unknown key optimizer.parms; did you mean optimizer.params?"),
        ("model_topo: {process_topology: {dim: [1]}}", "unknown key model_topo.process_topology.dim; did you mean "),
        ("scheduler: {parms: {}}", "unknown key scheduler.parms; did you mean scheduler.params?"),
        (
            "scheduler: {params: {warmup_steps: 3}}",
            "scheduler.params.warmup_steps: WarmupCosineLR does not have it; did you mean scheduler.params.warmup_n",
        ),
        (
            "scheduler: {params: {cos_min_ratio: 0.1}, type: WSD}",
            "scheduler.params.cos_min_ratio: WSD does not have it; did you mean scheduler.params.min_ratio?",
        ),
        ("scheduler: {type: linear, params: {1: 2}}", "scheduler.params.1: linear does not have it; expected one of "),
        ("scheduler: {type: linear, params: {min_ratio: 2}}", "scheduler.params.min_ratio: expected less than or "),
        ("scheduler: {type: constant, params: 3}", "scheduler.params: expected keys and values"),
        (
            "scheduler: {type: cosine, params: {min_ratio: 0.1}}",
            "scheduler.type: expected 'WarmupCosineLR', 'linear', 'constant' or 'WSD', found 'cosine'",
        ),
        ("scheduler: {type: [WSD]}", "scheduler.type: expected 'WarmupCosineLR', 'linear', 'constant' or 'WSD', found"),
        ("seed: 1\nseed: 2", "line 6, column 1: key 'seed' stands twice"),
        ("optimizer: {type: SGD, type: Lion}", "line 5, column 24: key 'type' stands twice"),
        ("seed: [1", "line 6, column 1: "),
        ("\tseed: 1", "line 5, column 1: "),
        ("seed: !!python/object:os.system 1", "line 5, column 7: "),
        ("? [seed]\n: 1", "line 5, column 3: "),
        ("seed: 1\a", ""),
        ("seed: 2024-13-45", ""),
        ("max_seq_len: long", "max_seq_len: expected a"),
        ("max_seq_len: 1", "max_seq_len: expected greater than or equal to 2, found 1"),
        ("use_grad_ckpt: maybe", "use_grad_ckpt: expected true, false, auto or {every: n}, found 'maybe'"),
        ("use_grad_ckpt: {every: 0}", "use_grad_ckpt: expected true, false, auto or {every: n}, found {'every': 0}"),
        ("use_grad_ckpt: {}", "use_grad_ckpt: expected true, false, auto or {every: n}, found {}"),
        ("use_grad_ckpt: {each: 2}", "use_grad_ckpt: expected true, false, auto or {every: n}, found {'each': 2}"),
        ("compile: {deepcompile: true}", "compile: expected true, false or auto"),
        ("compile: true\nzero_optimization: {stage: 3}", "compile: ZeRO stage 3 gathers weights"),
        ("data_path: 3", "data_path.0: expected a string, found 3"),
        ("optimizer: AdamW", "optimizer: expected keys and values"),
        ("optimizer: {type: Adagrad}", "optimizer.type: expected 'AdamW', 'Adam', 'Lion', 'Adafactor' or 'SGD'"),
        ("optimizer: {params: {lr: fast}}", "optimizer.params.lr: expected a number of at least 0, found 'fast'"),
        ("optimizer: {params: {eps: [1, 2]}}", "optimizer.params.eps: expected a number of at least 0, found [1, 2]"),
        ("optimizer: {no_wd_kws: ['(']}", "optimizer.no_wd_kws.0: expected a regular expression, found '('"),
        (
            "prompt_format: alpaca",
            "prompt_format: expected 'chat_template' or 'plain', or the path of a Jinja file, found 'alpaca'",
        ),
        ("template_args: {tools: []}", "template_args: expected others than tools, which Pipetune gives"),
        ("template_fallback: drop", "template_fallback: expected 'rewrite' or 'refuse', found 'drop'"),
        ("mask: user", "mask: expected 'assistant', 'last_turn' or 'all', found 'user'"),
        ("truncate: newest", "truncate: expected 'turns', 'oldest' or 'refuse', found 'newest'"),
        ("bf16: {enabled: true}\nfp16: {enabled: true}", "bf16.enabled: expected at most one of bf16 and fp16"),
        *(
            (
                f"optimizer: {{type: Adafactor}}\n{keys}",
                f"{reason} joins the weights, which Adafactor needs apart; expec",
            )
            for keys, reason in (
                ("", "zero_optimization.stage: 1"),
                ("zero_optimization: {offload_optimizer: {device: cpu}}", "zero_optimization.stage: 1"),
                ("zero_optimization: {stage: 0}\nbf16: {enabled: true}", "bf16.enabled: true"),
                ("zero_optimization: {stage: 0}\nfp16: {enabled: true}", "fp16.enabled: true"),
            )
        ),
        (
            "optimizer: {type: Adafactor}\nzero_optimization: {stage: 0}\n"
            "model_topo: {process_topology: {axes: [pipe, data, model], dims: [1, 1, 2]}}",
            "model_topo: a model axis cuts the weights, which Adafactor needs whole; expected none",
        ),
        (
            "optimizer: {type: SGD}\nzero_optimization: {offload_optimizer: {device: cpu}}",
            "optimizer.type: SGD cannot be offloaded; expected one of AdamW, Lion, or zero_force_ds_cpu",
        ),
        ("fp8: {enabled: true}", "fp8.enabled: it rounds bf16 numbers; expected bf16.enabled: true"),
        ("fp8: {enabled: true}\nfp16: {enabled: true}", "fp8.enabled: it rounds bf16 numbers; expected bf16.enabled"),
        (
            "fp8: {enabled: true}\nbf16: {enabled: true}\nschedule: dualpipev\n"
            "model_topo: {process_topology: {dims: [2, 1]}}",
            "fp8.enabled: dualpipev computes gradients of weights later, and in bf16; expected false or schedule: 1f1b",
        ),
        (
            "fp8: {enabled: true}\nbf16: {enabled: true}\nzero_optimization: {stage: 3}",
            "fp8.enabled: ZeRO stage 3 gathers weights inside of the blocks; expected false or stage <= 2",
        ),
        ("train_micro_batch_size_per_gpu: 3", "train_batch_size: 8 is not a multiple of 3 "),
        ("eval_interval: 5", "eval_data_path: expected records to evaluate on, or neither eval_interval nor"),
        ("eval_at_start: true", "eval_data_path: expected records to evaluate on, or neither eval_interval nor"),
        ("eval_share: 1", "eval_share: expected less than 1, found 1"),
        ("eval_share: 0.1\neval_data_path: [e.json]", "eval_share: eval_data_path has the records to evaluate on; "),
        ("eval_share: 0.1\nstream_gb: 1\nmax_steps: 5", "eval_share: nobody knows all samples of a stream; expected "),
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 4 contradicts train_batch_size 8; expected 8"),
        ("model_topo: {process_topology: {dims: [1, 3]}}", "train_batch_size: 8 is not a multiple of 3 "),
        (
            "model_topo: {process_topology: {dims: [2]}}",
            "model_topo.process_topology.dims: expected one number for each of the axes ['pipe', 'data'], found [2]",
        ),
        ("model_topo: {process_topology: {axes: [pipe, pipe]}}", "model_topo.process_topology.axes: expected pipe and"),
        ("model_topo: {parts: [1, 2]}", "model_topo.parts: expected one entry for each of 1 stages, found [1, 2]"),
        ("profile_steps: 3", "profile_steps: expected [first, last], two steps from 1, found 3"),
        ("profile_steps: [0, 3]", "profile_steps: expected [first, last], two steps from 1, found [0, 3]"),
        ("profile_steps: [4, 3]", "profile_steps: expected [first, last], two steps from 1, found [4, 3]"),
        ("profile_steps: [1, 2.5]", "profile_steps: expected [first, last], two steps from 1, found [1, 2.5]"),
        ("model_topo: {parts: even}", "model_topo.parts: expected auto or a list of layers per stage, found 'even'"),
        ("save_path: ''", "save_path: expected at least 1 character, found"),
        ("save_interval: yes", "save_interval: expected a number, found True"),
        ("timeout_minutes: true", "timeout_minutes: expected a number, found True"),
        ("max_steps: on", "max_steps: expected a number, found True"),
        ("scheduler: {params: {warmup_num_steps: true}}", "scheduler.params.warmup_num_steps: expected a number"),
        ("data_types: {grad_accum_dtyp: fp32}", "unknown key data_types.grad_accum_dtyp; did you mean data_types.grad"),
        ("data_types: {grad_accum_dtype: fp33}", "data_types.grad_accum_dtype: expected 'fp32', 'bf16' or 'fp16', fou"),
        ("communication_data_type: int3", "communication_data_type: expected 'fp32', 'bf16' or 'fp16', found 'int3'"),
        *(
            (f"optimizer: {{params: {{betas: {betas}}}}}", "optimizer.params.betas: expected two numbers of at l")
            for betas in ("[0.9]", "[a, b]", "[0.9, 1]", "[0.9, 0.9, 0.9]", "0.9")
        ),
        ("optimizer: {params: {amsgrad: 'false'}}", "optimizer.params.amsgrad: expected true or false, found 'false'"),
        ("optimizer: {type: SGD, params: {nesterov: 'no'}}", "optimizer.params.nesterov: expected true or false, fou"),
        ("model_topo: {parts: [0]}", "model_topo.parts: expected auto or a list of layers per stage, found [0]"),
    ],
)
def test_a_mistake_is_refused_with_its_file_and_key(line: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, line, leave_out=line.partition(":")[0])
    assert refusal(path).startswith(f"{path}: {reason}")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("seed", "command line: 'seed': expected key.sub=value"),
        ("=3", "command line: '=3': expected key.sub=value"),
        ("seed=[1", "command line: seed: '[1' is not a YAML value"),
        ("model_path.sub=3", "command line: model_path.sub: model_path is a value, not a section"),
        ("optimizr.type=SGD", "{file}: unknown key optimizr; did you mean optimizer?"),
    ],
)
def test_a_bad_word_of_the_command_line_is_refused(word: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert refusal(path, word) == reason.format(file=path)


def test_a_missing_key_is_named_and_so_is_a_file_without_keys(tmp_path: Path) -> None:
    for key in REQUIRED:
        path = write(tmp_path, leave_out=key)
        assert refusal(path) == f"{path}: {key}: missing"
    for content in (b"", b"a word", b"- a list", b"\xff\xfe"):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: ")
    assert refusal(tmp_path / "none.yml") == f"{tmp_path / 'none.yml'}: not found; expected a YAML file"
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        assert refusal(special) == f"{special}: cannot be read: expected a regular file"


@pytest.mark.parametrize("section", [{}, {"optimizer": {"type": "SGD"}}, {"optimizer": {"params": {"eps": 1e-6}}}])
def test_a_run_has_a_learning_rate_of_its_own(section: dict[str, Any]) -> None:
    """torch's default of 1e-3 would spoil a trained model without a word."""
    config = TrainConfig.model_validate(REQUIRED | section)
    for in_stages in (True, False):
        with pytest.raises(ConfigError, match=r"^optimizer\.params\.lr: missing; expected a learning rate"):
            config.check_entry_point(in_stages=in_stages)


def test_sharding_what_a_pipeline_needs_whole_is_refused() -> None:
    TrainConfig.model_validate(REQUIRED | LR | {"zero_optimization": {"stage": 1}}).check_entry_point(in_stages=True)
    config = TrainConfig.model_validate(REQUIRED | LR | {"zero_optimization": {"stage": 2}})
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.stage: 2 cannot be combined with a pipeline; expected 0"
    ):
        config.check_entry_point(in_stages=True)
