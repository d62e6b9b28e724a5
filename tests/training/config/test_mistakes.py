"""A mistake in a config is refused in one line: the key, what is wrong, and the key that was meant."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from data.errors import DataError
from data.records.sources import files_of
from data.settings import Source
from models.checkpoint.layout import resolve
from models.errors import CheckpointError
from options import load_config
from tests.training.config.test_config import REQUIRED, refusal, write
from training.config.contradictions import PARAMETERS
from training.config.optimization import Optimizer
from training.config.section import sections_in
from training.errors import ConfigError

NINE = [f"[{', '.join([f'*a{level}'] * 9)}]" for level in range(9)]
BOMB = ["a0: &a0 [x]", *(f"a{level + 1}: &a{level + 1} {NINE[level]}" for level in range(9))]
MERGE_BOMB = ["a0: &a0 {x: 1}", *(f"a{level + 1}: &a{level + 1} {{<<: {NINE[level]}}}" for level in range(9))]
ADAFACTOR = "optimizer: {type: Adafactor}\nzero_optimization: {stage: 0}\n"
FP8 = "fp8: true\nbf16: true\n"

# A line of the file, and how the refusal begins behind the file's name.
MISTAKES = [
    # Unknown keys: the nearest one, that of another tool, all of a small section, or no hint at all.
    ("optimiser: {}", "unknown key optimiser; did you mean optimizer?"),
    ("bf16: {enable: true}", "unknown key bf16.enable; did you mean bf16.enabled?"),
    ("bf16: {loss_scale: 8}", "unknown key bf16.loss_scale; expected one of enabled, "),
    ("model_topo: {process_topology: {dim: [1]}}", "unknown key model_topo.process_topology.dim; did you mean "),
    ("model_topo: {dims: [2, 1]}", "unknown key model_topo.dims; expected one of process_topology, sequence, "),
    ("model_topo: {num_gpus: 2}", "unknown key model_topo.num_gpus; did you mean model_topo.process_topology.dims?"),
    ("eval_data_path: [a, {pth: p}]", "unknown key eval_data_path.1.pth; did you mean eval_data_path.1.path?"),
    ("optimizer: {1: 2}", "unknown key optimizer.1; expected one of type, params, no_wd_kws"),
    ("optimizer: {lr: 1}", "unknown key optimizer.lr; did you mean optimizer.params.lr?"),
    ("Learning-Rate: 1", "unknown key Learning-Rate; did you mean optimizer.params.lr?"),
    ("optimizer: {params: {betaz: 3}}", "optimizer.params.betaz: AdamW does not take it; did you mean optimizer.param"),
    ("optimizer: {params: {learning_rate: 3}}", "optimizer.params.learning_rate: AdamW does not take it; did you "),
    ("optimizer: {params: {momentum: 1}}", "optimizer.params.momentum: AdamW does not take it; expected one of lr,"),
    ("scheduler: {params: {warmup_steps: 3}}", "scheduler.params.warmup_steps: WarmupCosineLR does not have it; did y"),
    ("scheduler: {type: WSD, params: {cos_min_ratio: 0.1}}", "scheduler.params.cos_min_ratio: WSD does not have it; "),
    ("scheduler: {type: linear, params: {1: 2}}", "scheduler.params.1: linear does not have it; expected one of "),
    ("xformers: true", "unknown key xformers"),
    ("precision: 16", "unknown key precision"),
    ("1: 2", "unknown key 1"),
    # Types and ranges, by pydantic.
    ("max_seq_len: long", "max_seq_len: expected a whole number, found 'long'"),
    ("max_seq_len: 1", "max_seq_len: expected at least 2, found 1"),
    ("max_seq_len: 1000000000", "max_seq_len: expected at most 16777216, found 1000000000"),
    ("max_steps: 1000000000001", "max_steps: expected at most 1,000,000,000,000, found 1000000000001"),
    ("timeout_minutes: .inf", "timeout_minutes: expected a finite number, found inf"),
    ("save_interval: yes", "save_interval: expected a number, found True"),
    ("scheduler: {params: {warmup_num_steps: true}}", "scheduler.params.warmup_num_steps: expected a number"),
    ("scheduler: {type: linear, params: {min_ratio: 2}}", "scheduler.params.min_ratio: expected at most 1, found 2"),
    (
        "scheduler: {type: [WSD]}",
        "scheduler.type: expected 'WarmupCosineLR', 'linear', 'constant' or 'WSD', fou",
    ),
    ("optimizer: {params: {lr: fast}}", "optimizer.params.lr: expected a number, found 'fast'"),
    ("optimizer: {params: {lr: .nan}}", "optimizer.params.lr: expected a finite number, found nan"),
    ("max_steps: 0.1", "max_steps: expected a whole number, found 0.1"),
    ("seed:", "seed: expected a whole number, found nothing"),
    ("lora: 8", "lora: expected a section of keys, found 8"),
    ("lora: false", "lora: expected keys, or the section left out, found False"),
    # Values of other tools.
    ("optimizer: {type: adamw_torch}", "optimizer.type: expected 'AdamW', 'Adam', 'Lion', 'Adafactor' or 'SGD', found"),
    ("scheduler: {type: cosine}", "scheduler.type: expected 'WarmupCosineLR', 'linear', 'constant' or 'WSD', found "),
    ("preference: {loss: sigmoid}", "preference.loss: expected 'dpo', 'cdpo', "),
    ("packing: true", "packing: expected 'batch', 'dataset' or False, found True; did you mean batch?"),
    ("optimizer: {params: {eps: a}}", "optimizer.params.eps: expected a number of at least 0, or two for Adafactor, f"),
    ("optimizer: {params: {betas: [0.9]}}", "optimizer.params.betas: expected at least 2 items"),
    ("optimizer: {params: {betas: [0.9, 1]}}", "optimizer.params.betas.1: expected less than 1, found 1"),
    ("optimizer: {params: {amsgrad: 'false'}}", "optimizer.params.amsgrad: expected true or false"),
    ("optimizer: {type: SGD, params: {nesterov: 'no'}}", "optimizer.params.nesterov: expected true or false"),
    ("n_epochs: 3\nn_epoches: 4", "n_epochs and n_epoches are one key; expected only one of them"),
    ("parts: [3, 2]\nmodel_topo: {parts: [3, 2]}", "parts and model_topo.parts are one key; expected only one of them"),
    ("parts: [3, 2]\nmodel_topo: 2", "model_topo.parts: model_topo is a value, not a section"),
    ("parts: even", "model_topo.parts: expected auto or a list of layers per stage, found 'even'"),
    ("optimizer: {no_wd_kws: ['(']}", "optimizer.no_wd_kws.0: expected a valid regular expression, found '('"),
    ("data_path: 3", "data_path.0: expected text, found 3"),
    ("data_path: []", "data_path: expected at least 1 item"),
    ("save_path: ''", "save_path: expected at least 1 character, found ''"),
    ("bf16: auto", "bf16: expected true, false or {enabled: true}, found 'auto', which HF Trainer would fill in"),
    ("zero_optimization: {reduce_bucket_size: auto}", "zero_optimization.reduce_bucket_size: expected a value, found"),
    (
        "zero_optimization: {offload_optimizer: {device: nvme}}",
        "zero_optimization.offload_optimizer.device: expected 'none' or 'c",
    ),
    ("use_grad_ckpt: maybe", "use_grad_ckpt: expected true, false, auto or {every: n}, found 'maybe'"),
    ("use_grad_ckpt: {every: 0}", "use_grad_ckpt: expected true, false, auto or {every: n}, found {'every': 0}"),
    ("use_grad_ckpt: {}", "use_grad_ckpt: expected true, false, auto or {every: n}, found {}"),
    ("compile: {deepcompile: true}", "compile: expected true, false or auto"),
    ("model_topo: {parts: even}", "model_topo.parts: expected auto or a list of layers per stage, found 'even'"),
    (
        "prompt_format: alpaca",
        "prompt_format: expected 'chat_template', 'plain', 'gdgpt', or the path of a Jinja file, found",
    ),
    ("template_args: {tools: []}", "template_args: expected others than tools, which Pipetune gives"),
    (
        "prompt_format: gdgpt\ntemplate_fallback: rewrite",
        "template_fallback: without effect, as prompt_format: gdgpt has no template; expected it left out",
    ),
    (
        "prompt_format: plain\ntemplate_args: {a: 1}",
        "template_args: without effect, as prompt_format: plain has no template; expected it left out",
    ),
    # YAML.
    ("seed: 1\nseed: 2", "line 6, column 1: key 'seed' is repeated"),
    ("seed: [1", "line 6, column 1: "),
    ("\tseed: 1", "line 5, column 1: "),
    ("seed: !!python/object:os.system 1", "line 5, column 7: "),
    ("? [seed]\n: 1", "line 5, column 3: found unhashable key"),
    ("seed: 1\a", ""),
    ("seed: 2024-13-45", ""),
    ('"a\\x1b[2J\\nerror: forged": 1', "line 5, column 1: a control character; expected printable text"),
    ("optimizer: &a {params: *a}", "line 1, column 1: more than 100,000 values"),
    ("\n".join(BOMB), "line 1, column 1: more than 100,000 values, with aliases and merge keys expanded"),
    ("\n".join(MERGE_BOMB), "line 1, column 1: more than 100,000 values, with aliases and merge keys expanded"),
    ("cache_dir: " + "[" * 50_000, "nested too deeply; expected fewer levels"),
    ("#" * 2**20, "cannot be read: larger than 1 MB"),
    # Keys that contradict each other.
    ("ports: {meeting: 29500, failure_detector: 29500}", "ports.failure_detector: 29500 is that of meeting; expect"),
    (
        "zero_optimization: {offload_optimizer: {device: cpu, super_offload: true}}",
        "zero_optimization.offload_optimizer.super_offload: DeepSpeed's, not tested here and not passed on; leave it o",
    ),
    (
        "zero_optimization: {stage: 2, zenflow: {topk_ratio: 0.1}}",
        "zero_optimization.zenflow: DeepSpeed's, not tested here and not passed on; leave it out",
    ),
    ("compile: true\nzero_optimization: {stage: 3}", "compile: ZeRO stage 3 gathers weights"),
    (
        "zero_optimization: {stage: 0, cpu_offload: true}",
        "zero_optimization.offload_optimizer: stage 0 keeps the optim",
    ),
    ("offload_gradients: true", "offload_gradients: an optimizer on the GPU needs them there; expected false, or zero"),
    ("bf16: true\nfp16: true", "bf16.enabled: expected at most one of bf16 and fp16"),
    ("tf32: true\nbf16: true", "tf32: 16-bit products do not use it; expected false"),
    (
        "optimizer: {type: Adafactor}",
        "zero_optimization.stage: 1 joins the weights, which Adafactor needs apart; expec",
    ),
    (f"{ADAFACTOR}bf16: true", "bf16.enabled: true joins the weights, which Adafactor needs apart; expected stage 0"),
    (
        ADAFACTOR + "model_topo: {process_topology: {axes: [pipe, data, model], dims: [1, 1, 2]}}",
        "model_topo: a model axis cuts the weights, which Adafactor needs whole; expected none",
    ),
    (
        "optimizer: {type: SGD}\nzero_optimization: {offload_optimizer: {device: cpu}}",
        "optimizer.type: SGD cannot be offloaded; expected one of AdamW, Adam, Lion, or zero_force_ds_cpu",
    ),
    (
        "optimizer: {params: {fused: true}}\nzero_optimization: {offload_optimizer: {device: cpu}}",
        "optimizer.params.fused: AdamW does not take it; expected one of lr, bias_correction, ",
    ),
    ("fp8: true\nfp16: true", "fp8.enabled: it rounds bf16 numbers; expected bf16.enabled"),
    (
        f"{FP8}schedule: dualpipev\nmodel_topo: {{process_topology: {{dims: [2, 1]}}}}",
        "fp8.enabled: dualpipev computes",
    ),
    (f"{FP8}zero_optimization: {{stage: 3}}", "fp8.enabled: ZeRO stage 3 gathers weights inside of the blocks; expect"),
    (f"{FP8}model_topo: {{process_topology: {{axes: [pipe, data, model], dims: [1, 1, 2]}}}}", "fp8.enabled: linear "),
    ("train_micro_batch_size_per_gpu: 3", "train_batch_size: 8 is not a multiple of 3 "),
    ("model_topo: {process_topology: {dims: [1, 3]}}", "train_batch_size: 8 is not a multiple of 3 "),
    ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 4 contradicts train_batch_size 8; expected 8"),
    ("eval_interval: 5", "eval_data_path: expected records to evaluate on, or neither eval_interval nor"),
    ("eval_at_start: true", "eval_data_path: expected records to evaluate on, or neither eval_interval nor"),
    ("eval_share: 0.1\neval_data_path: [e.json]", "eval_share: eval_data_path has the records to evaluate on; "),
    ("model_topo: {process_topology: {dims: [2]}}", "model_topo.process_topology.dims: expected one number for each "),
    ("model_topo: {process_topology: {axes: [pipe, pipe]}}", "model_topo.process_topology.axes: expected pipe and"),
    ("model_topo: {parts: [1, 2]}", "model_topo.parts: expected one entry for each of 1 stages, found [1, 2]"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_a_mistake_is_refused_in_one_line_with_its_key(line: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, line, leave_out=line.partition(":")[0])
    found = refusal(path)
    assert found.startswith(f"{path}: {words}")
    assert ("did you" in words) <= ("did you" in found)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("optimizer: {type: adamw_torch}", "AdamW"),
        ("optimizer: {type: paged_adamw_8bit}", "AdamW"),
        ("scheduler: {type: cosine}", "WarmupCosineLR"),
        ("scheduler: {type: constant_with_warmup}", "constant"),
        ("preference: {loss: sigmoid}", "dpo"),
        ("mask: last_round", "last_turn"),
    ],
)
def test_a_value_of_another_tool_is_answered_with_ours(line: str, meant: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, line)).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("trackers: wandb", "trackers", ["wandb"]),
        ("trackers: none", "trackers", []),
        ("resume: true", "resume", "auto"),
        ("resume: false", "resume", "none"),
    ],
)
def test_a_bare_value_is_taken_for_what_it_says(line: str, key: str, value: object, tmp_path: Path) -> None:
    assert getattr(load_config(write(tmp_path, line)), key) == value


def test_a_word_may_stand_for_a_section(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "preference: simpo", "lora: true"))
    assert config.preference and config.preference.loss == "simpo"
    assert config.lora and config.lora.targets == "all-linear"
    assert load_config(write(tmp_path, "lora: {targets: all}")).lora == config.lora


def test_all_unknown_keys_are_said_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "stage: sft", "learning_rate: 1e-4", "cutoff_len: 9", "lora: {rank: 8}", "bogus_words: 1")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    first, *listed, last = str(caught.value).splitlines()
    assert first == f"{path}: 5 unknown keys"
    assert sorted(line.strip().partition(";")[0] for line in listed) == [
        "bogus_words",
        "cutoff_len",
        "learning_rate",
        "lora.rank",
        "stage",
    ]
    assert {"  learning_rate; did you mean optimizer.params.lr?", "  lora.rank; did you mean lora.r?"} <= set(listed)
    assert last == "  pipetune init --from FILE translates a whole file of another tool"


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
def test_a_bad_override_is_refused(word: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert refusal(path, word) == reason.format(file=path)


def test_a_missing_key_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    for key in REQUIRED:
        path = write(tmp_path, leave_out=key)
        assert refusal(path) == f"{path}: {key}: missing"
    for content in (b"", b"a word", b"- a list", b"\xff\xfe"):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: ")
    assert refusal(tmp_path / "none.yml") == f"{tmp_path / 'none.yml'}: not found; expected a YAML file"
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path, tmp_path / "pipe"):
        assert refusal(special) == f"{special}: cannot be read: expected a regular file"


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")
    if section is Optimizer:
        yield from (f"{prefix}params.{name}" for name in PARAMETERS["AdamW"])


def test_the_keys_of_flagai_and_libai_have_answers(tmp_path: Path) -> None:
    """Those that the pages of the two name, and that got none, or a wrong one."""
    expected = {
        "log_interval": "steps_per_print",
        "batch_size": "train_micro_batch_size_per_gpu",
        "save_dir": "save_path",
        "load_dir": "resume",
        "num_checkpoints": "keep_last",
        "clip_grad_norm": "gradient_clipping",
        "pipeline_parallel_size": "model_topo.process_topology.dims",
        "data_parallel_size": "model_topo.process_topology.dims",
        "model_parallel_size": "model_topo.process_topology.dims",
        "custom_pipeline_stage_id": "model_topo.parts",
        "checkpoint_activations": "use_grad_ckpt",
        "amp": "fp16",
        "master_port": "ports.meeting",
        "experiment_name": "wandb.name",
        "auto_parallel": "--auto chooses a config",
        "num_nodes": "--hostfile FILE",
        "hostfile": "--hostfile FILE",
    }
    for name, answer in expected.items():
        assert answer in refusal(write(tmp_path, f"{name}: 1")).partition(";")[2], name


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "../Qwen3", "/models/Qwen3", "Qwen3", "a/b/c", "here/Qwen3"])
def test_a_name_of_the_hub_is_answered_with_the_command_that_downloads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match="not found; expected a model folder") as caught:
        resolve(name)
    is_hub = name == "Qwen/Qwen3-0.6B"
    assert (f"python convert_model.py download --model-name {name} --save-path DIR" in str(caught.value)) == is_hub
    if is_hub:
        with pytest.raises(DataError, match=f"hf download --repo-type dataset {name}"):
            files_of(Source(path=name))


WITHOUT_TORCH = """
import sys, train_ds
try:
    train_ds.main()
finally:
    print("heavy" if {"torch", "transformers", "deepspeed"} & sys.modules.keys() else "light")
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--plan", "--devices", "8xA100"], "--devices: '8xA100': expected a number and one of A100-40G, A100-80G"),
        (["--inspect", "3"], "Qwen/Qwen3-0.6B: not found; expected a model folder, or first: python"),
        ([], "Qwen/Qwen3-0.6B: not found; expected a model folder"),
    ],
)
def test_devices_and_folders_are_checked_before_slow_imports(words: list[str], line: str, tmp_path: Path) -> None:
    path = write(tmp_path, "model_path: Qwen/Qwen3-0.6B", "optimizer: {params: {lr: 1e-5}}", leave_out="model_path")
    command = [sys.executable, "-c", WITHOUT_TORCH, "--config", str(path), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "light\n"), result.stderr
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1
