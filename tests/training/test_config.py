"""The YAML file of a run: defaults, overrides, DeepSpeed's keys, and one line that names file and key for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from training.config import ModelTopo, ProcessTopology, TrainConfig, load_config
from training.engine import deepspeed_config
from training.errors import ConfigError

REQUIRED = {"model_path": "model", "data_path": "records.json", "save_path": "run", "train_batch_size": "8"}


def write(tmp_path: Path, *lines: str, leave_out: str = "") -> Path:
    """A config file: the required keys, but those that `lines` give themselves, then `lines`."""
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


def test_four_keys_make_a_run_with_sensible_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.model_path, config.data_paths, config.save_path) == ("model", ["records.json"], "run")
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.n_epoches) == (8, 1, 1)
    assert (config.gradient_clipping, config.zero_optimization.stage, config.seed) == (1.0, 1, 42)
    assert (config.optimizer.type, config.scheduler, config.prompt_format) == ("AdamW", None, None)
    assert (config.model_topo.stages, config.model_topo.replicas, config.model_topo.processes) == (1, 1, 1)
    flags = (config.from_scratch, config.use_grad_ckpt, config.use_flash_attn, config.dataloader_drop_last)
    assert flags == (False, False, False, False)


@pytest.mark.parametrize("name", ["n_epoches", "n_epochs"])
def test_both_spellings_of_the_number_of_epochs_are_read(name: str, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"{name}: 3")).n_epoches == 3
    assert load_config(write(tmp_path), [f"{name}=4"]).n_epoches == 4


@pytest.mark.parametrize(("in_file", "override"), [("n_epoches", "n_epochs"), ("n_epochs", "n_epoches")])
def test_two_spellings_of_one_key_never_hide_each_other(in_file: str, override: str, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"{in_file}: 6"), [f"{override}=2"]).n_epoches == 2


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("+2E3", 2000.0), (".5e1", 5.0), ("0.1", 0.1)]
)
def test_numbers_with_an_exponent_are_numbers(text: str, value: float, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, f"optimizer: {{params: {{lr: {text}}}}}")).optimizer.params["lr"] == value
    assert load_config(write(tmp_path), [f"optimizer.params.lr={text}"]).optimizer.params["lr"] == value


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "save_path: run-1e-5", leave_out="save_path")).save_path == "run-1e-5"


def test_words_of_the_command_line_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "optimizer:", "  params: {lr: 0.1, betas: [0.9, 0.99]}", "seed: 1")
    words = ["seed=7", "optimizer.params.betas=[0.8, 0.9]", "scheduler.params.warmup_num_steps=5", "bf16.enabled=true"]
    config = load_config(path, [*words, "seed=8", "data_path=[a.json, b.json]"])
    assert config.seed == 8
    assert config.optimizer.params == {"lr": 0.1, "betas": [0.8, 0.9]}
    assert config.scheduler is not None
    assert config.scheduler.params.warmup_num_steps == 5
    assert config.bf16.enabled
    assert config.data_paths == ["a.json", "b.json"]


def test_yaml_anchors_and_merge_keys_are_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "bf16: &half {enabled: false}", "fp16: {<<: *half, loss_scale: 8}"))
    assert (config.fp16.enabled, config.fp16.model_extra) == (False, {"loss_scale": 8})


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("seed", "command line: 'seed': expected key.sub=value"),
        ("=3", "command line: '=3': expected key.sub=value"),
        ("seed=[1", "command line: seed: '[1' is not a YAML value"),
        ("model_path.sub=3", "command line: model_path.sub: model_path is a value, not a section"),
        ("optimizer.params=[1]", "{file}: optimizer.params: expected a dictionary, found [1]"),
        ("optimizr.type=SGD", "{file}: unknown key optimizr; did you mean optimizer?"),
    ],
)
def test_bad_words_of_the_command_line_are_refused(word: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert refusal(path, word) == reason.format(file=path)


def test_deepspeeds_own_keys_pass_through(tmp_path: Path) -> None:
    lines = ["wall_clock_breakdown: true", "flops_profiler: {enabled: true, profile_step: 3}", "bf16: {enabled: true}"]
    zero = "zero_optimization: {stage: 1, offload_optimizer: {device: cpu, pin_memory: true}, reduce_bucket_size: 1e6}"
    resolved = deepspeed_config(load_config(write(tmp_path, *lines, zero, "zero_force_ds_cpu_optimizer: false")))
    assert resolved["wall_clock_breakdown"] is True
    assert resolved["flops_profiler"] == {"enabled": True, "profile_step": 3}
    assert resolved["bf16"]["enabled"] is True
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 1e6
    assert resolved["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert (resolved["train_batch_size"], resolved["gradient_clipping"]) == (8, 1.0)
    assert resolved.keys().isdisjoint(TrainConfig.model_fields.keys() - deepspeeds_share())


def deepspeeds_share() -> set[str]:
    """The keys of Pipetune that DeepSpeed knows by the same name."""
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "steps_per_print"}
    return sizes | {"bf16", "fp16", "zero_optimization", "zero_allow_untested_optimizer"}


def test_axes_may_stand_in_either_order(tmp_path: Path) -> None:
    lines = "model_topo: {process_topology: {axes: [data, pipe], dims: [2, 4]}, parts: [1, 2, 2, 1]}"
    topo = load_config(write(tmp_path, lines)).model_topo
    assert (topo.stages, topo.replicas, topo.processes) == (4, 2, 8)


def with_topology(stages: int, parts: list[int] | None) -> TrainConfig:
    topo = ModelTopo(process_topology=ProcessTopology(dims=[stages, 1]), parts=parts)
    return TrainConfig(model_path="m", data_path="d", save_path="s", train_batch_size=1, model_topo=topo)


@given(stages=st.integers(1, 40), extra=st.integers(0, 100))
def test_layers_are_split_evenly_where_parts_is_absent(stages: int, extra: int) -> None:
    parts = with_topology(stages, None).parts_for(stages + extra)
    assert (len(parts), sum(parts)) == (stages, stages + extra)
    assert max(parts) - min(parts) <= 1


def test_parts_must_sum_to_the_models_layers() -> None:
    assert with_topology(2, [3, 2]).parts_for(5) == [3, 2]
    with pytest.raises(ConfigError, match=r"^model_topo\.parts: \[3, 2\] sums to 5, but the model has 6 layers \(4 bl"):
        with_topology(2, [3, 2]).parts_for(6)


@pytest.mark.parametrize("parts", [None, [1, 1, 1, 1]])
def test_more_stages_than_layers_are_refused(parts: list[int] | None) -> None:
    with pytest.raises(ConfigError, match=r"^model_topo\.process_topology\.dims: 4 stages for a model of 3 layers$"):
        with_topology(4, parts).parts_for(3)


def test_the_saved_config_is_read_back_as_the_same(tmp_path: Path) -> None:
    lines = ["n_epochs: 3", "optimizer: {type: Lion, params: {lr: 1e-5, betas: [0.95, 0.98]}, no_wd_kws: [bias, norm]}"]
    lines += [
        "scheduler: {params: {warmup_num_steps: 3}}",
        "model_topo: {process_topology: {dims: [2, 2]}, parts: [3, 2]}",
    ]
    lines += ["fp16: {enabled: true, initial_scale_power: 8}", "wall_clock_breakdown: true", "prompt_format: plain"]
    config = load_config(write(tmp_path, *lines))
    saved = tmp_path / "config.yml"
    saved.write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
    assert load_config(saved) == config
    assert load_config(saved).dump() == config.dump()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("optimiser: {}", "unknown key optimiser; did you mean optimizer?"),
        (
            "train_micro_batch_size: 1",
            "unknown key train_micro_batch_size; did you mean train_micro_batch_size_per_gpu?",
        ),
        ("wall_clock_break: true", "unknown key wall_clock_break; did you mean wall_clock_breakdown?"),
        ("optimizer: {parms: {}}", "unknown key optimizer.parms; did you mean optimizer.params?"),
        (
            "model_topo: {process_topology: {dim: [1]}}",
            "unknown key model_topo.process_topology.dim; did you mean model",
        ),
        (
            "scheduler: {params: {warmup_steps: 3}}",
            "unknown key scheduler.params.warmup_steps; did you mean scheduler.",
        ),
        ("seed: 1\nseed: 2", "line 6, column 1: key 'seed' stands twice"),
        ("optimizer: {type: SGD, type: Lion}", "line 5, column 24: key 'type' stands twice"),
        ("seed: [1", "line 6, column 1: "),
        ("\tseed: 1", "line 5, column 1: "),
        ("seed: *nowhere", "line 5, column 7: found undefined alias"),
        ("seed: !!python/object:os.system 1", "line 5, column 7: "),
        ("? [seed]\n: 1", ""),
        ("save_path: run\a", ""),
        ("start: 2024-13-45", ""),
        ("max_seq_len: long", "max_seq_len: expected a"),
        ("max_seq_len: 1", "max_seq_len: expected greater than or equal to 2, found 1"),
        ("seed: 1.5", "seed: expected a"),
        ("use_grad_ckpt: maybe", "use_grad_ckpt: expected a boolean"),
        ("data_path: 3", "data_path: expected a string, found 3"),
        ("optimizer: AdamW", "optimizer: expected a dictionary"),
        ("optimizer: {type: Adagrad}", "optimizer.type: expected 'AdamW', 'Adam', 'Lion' or 'SGD', found 'Adagrad'"),
        ("optimizer: {params: {lr: fast}}", "optimizer.params.lr: expected a number of at least 0, found 'fast'"),
        ("optimizer: {params: {weight_decay: -1}}", "optimizer.params.weight_decay: expected a number of at least 0"),
        ("optimizer: {no_wd_kws: ['(']}", "optimizer.no_wd_kws: '(' is not a regular expression"),
        ("scheduler: {params: {cos_min_ratio: 2}}", "scheduler.params.cos_min_ratio: expected less than or equal to 1"),
        ("prompt_format: alpaca", "prompt_format: expected 'chat_template' or 'plain', found 'alpaca'"),
        ("bf16: {enabled: true}\nfp16: {enabled: true}", "bf16.enabled: expected at most one of bf16 and fp16"),
        (
            "zero_optimization: {stage: 2}",
            "zero_optimization.stage: 2 cannot be combined with a pipeline; expected 0 or 1",
        ),
        ("train_micro_batch_size_per_gpu: 3", "train_batch_size: 8 is not a multiple of 3 "),
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 4 contradicts train_batch_size 8; expected 8"),
        ("model_topo: {process_topology: {dims: [1, 3]}}", "train_batch_size: 8 is not a multiple of 3 "),
        ("model_topo: {process_topology: {dims: [2]}}", "model_topo.process_topology.dims: expected 2 numbers of at"),
        (
            "model_topo: {process_topology: {dims: [0, 1]}}",
            "model_topo.process_topology.dims: expected 2 numbers of at",
        ),
        ("model_topo: {process_topology: {axes: [pipe, pipe]}}", "model_topo.process_topology.axes: expected pipe and"),
        (
            "model_topo: {process_topology: {axes: [pipe, tensor]}}",
            "model_topo.process_topology.axes.1: expected 'pipe'",
        ),
        ("model_topo: {parts: [1, 2]}", "model_topo.parts: expected one entry for each of 1 stages, found [1, 2]"),
        ("model_topo: {parts: [0]}", "model_topo.parts: expected at least one layer a stage, found [0]"),
    ],
)
def test_a_mistake_is_refused_with_its_file_and_key(line: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, line, leave_out=line.partition(":")[0])
    assert refusal(path).startswith(f"{path}: {reason}")


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    path = write(tmp_path, leave_out=key)
    assert refusal(path) == f"{path}: {key}: missing"


@pytest.mark.parametrize("content", [b"", b"a word", b"- a list", b"\xff\xfe"])
def test_a_file_without_keys_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: ")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yml") == f"{tmp_path / 'none.yml'}: not found; expected a YAML file"
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot be read")
