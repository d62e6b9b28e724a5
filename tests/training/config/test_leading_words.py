"""Where the words of a refusal lead: to the right key, to what is expected, or nowhere, but never astray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from data.errors import DataError
from data.records.sources import Source, files_of
from models.checkpoint.layout import resolve
from models.errors import CheckpointError
from tests.training.config.test_config import refusal, write
from training.config.contradictions import PARAMETERS
from training.config.foreign_names import FOREIGN
from training.config.keys import TrainConfig
from training.config.sections import Optimizer, sections_in
from training.config.yaml_file import load_config


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")
    if section is Optimizer:
        yield from (f"{prefix}params.{name}" for name in PARAMETERS["AdamW"])


def test_every_foreign_name_leads_to_a_key_that_there_is() -> None:
    known = set(keys_of(TrainConfig))
    for name, (key, advice, _) in FOREIGN.items():
        assert key in known if key else advice, name
        assert name not in TrainConfig.model_fields, name
    assert len(FOREIGN) > 60


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_name_is_answered_with_ours(name: str, tmp_path: Path) -> None:
    key, advice, _ = FOREIGN[name]
    line = refusal(write(tmp_path, f"{name}: 1"))
    assert f": unknown key {name}; " in line
    assert (f"did you mean {key}?" if key else "no such thing here: ") in line and line.count(advice) >= 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # What looks a little like one of our keys, and is something else: no hint.
        ("xformers: true", "unknown key xformers"),
        ("eval_batch_size: 4", "unknown key eval_batch_size"),
        ("precision: 16", "unknown key precision"),
        ("run_name: a", "unknown key run_name"),
        ("plugins: []", "unknown key plugins"),
        ("1: 2", "unknown key 1"),
        # In a section with few keys: all of them.
        ("optimizer: {1: 2}", "unknown key optimizer.1; expected one of type, params, no_wd_kws"),
        ("bf16: {loss_scale: 8}", "unknown key bf16.loss_scale; expected one of enabled, immediate_grad_update, "),
        (
            "optimizer: {params: {momentum: 1}}",
            "optimizer.params.momentum: AdamW does not take it; expected one of lr,",
        ),
        ("aux_max_z_loss: {x: 1}", "unknown key aux_max_z_loss.x; expected one of weight"),
        # The right one, wherever it was looked for.
        ("Learning-Rate: 1", "unknown key Learning-Rate; did you mean optimizer.params.lr?"),
        ("optimizer: {lr: 1}", "unknown key optimizer.lr; did you mean optimizer.params.lr?"),
        (
            "optimizer: {weight_decay: 1}",
            "unknown key optimizer.weight_decay; did you mean optimizer.params.weight_dec",
        ),
        ("optimizer: {params: {learning_rate: 1}}", "optimizer.params.learning_rate: AdamW does not take it; did you "),
        ("scheduler: {warmup_steps: 3}", "unknown key scheduler.warmup_steps; did you mean scheduler.params.warmup_nu"),
        ("model_topo: {dims: [2, 1]}", "unknown key model_topo.dims; expected one of process_topology, sequence, "),
        (
            "model_topo: {num_gpus: 2}",
            "unknown key model_topo.num_gpus; did you mean model_topo.process_topology.dims?",
        ),
        ("parts: [3, 3]", "unknown key parts; did you mean model_topo.parts?"),
        ("warmup_ratio: 0.1", "unknown key warmup_ratio; did you mean scheduler.params.warmup_num_steps? (a number of"),
        # Types, in plain words and once.
        ("bf16: auto", "bf16: expected true, false or {enabled: true}, found 'auto', which HF Trainer would fill in"),
        ("fp16: 1", "fp16: expected true, false or {enabled: true}, found 1"),
        ("wandb: my-project", "wandb: expected true, false or {enabled: true}, found 'my-project'"),
        (
            "train_micro_batch_size_per_gpu: auto",
            "train_micro_batch_size_per_gpu: expected an integer, found 'auto', wh",
        ),
        ("train_micro_batch_size_per_gpu: 1.5", "train_micro_batch_size_per_gpu: expected an integer, found 1.5"),
        (
            "gradient_clipping: auto",
            "gradient_clipping: expected a number, found 'auto', which HF Trainer would fill in",
        ),
        ("zero_optimization: {reduce_bucket_size: auto}", "zero_optimization.reduce_bucket_size: expected a value, f"),
        ("optimizer: adamw_torch", "optimizer: expected keys and values, found 'adamw_torch'"),
        ("scheduler: cosine", "scheduler: expected keys and values, found 'cosine'"),
        ("export_hf: maybe", "export_hf: expected true or false, found 'maybe'"),
        ("save_path: ''", "save_path: expected at least 1 character, found ''"),
        ("data_path: []", "data_path: expected at least 1 item, found []"),
        ("use_grad_ckpt: maybe", "use_grad_ckpt: expected true, false, auto or {every: n}, found 'maybe'"),
        ("profile_steps: [4, 3]", "profile_steps: expected [first, last], two steps from 1, found [4, 3]"),
    ],
)
def test_the_words_of_a_refusal(line: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, line, leave_out=line.partition(":")[0])
    found = refusal(path).removeprefix(f"{path}: ")
    assert found.startswith(words)
    assert ("did you" in words) == ("did you" in found)
    assert " a integer" not in found and "Input should" not in found and "unable to" not in found


@pytest.mark.parametrize("section", ["bf16", "fp16", "fp8", "tensorboard", "wandb"])
@pytest.mark.parametrize("value", [True, False])
def test_a_switch_may_stand_for_its_section(section: str, value: bool, tmp_path: Path) -> None:
    beside = "bf16: true" if section == "fp8" else ""
    written = f"{section}: {str(value).lower()}"
    for config in (
        load_config(write(tmp_path, written, beside)),
        load_config(write(tmp_path, beside), [written.replace(": ", "=")]),
        load_config(write(tmp_path, f"{section}: {str(not value).lower()}", beside), [f"{section}.enabled={value}"]),
    ):
        assert getattr(config, section).enabled is value


@pytest.mark.parametrize(
    ("name", "is_hub"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("tatsu-lab/alpaca", True),
        ("../Qwen3", False),
        ("./Qwen3", False),
        ("/models/Qwen3", False),
        ("Qwen3", False),
        ("a/b/c", False),
        ("here/Qwen3", False),
    ],
)
def test_a_name_of_the_hub_leads_to_the_command_that_fetches_it(
    name: str, is_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match="not found; expected a model folder") as caught:
        resolve(name)
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
        (
            ["--plan", "--devices", "8xA100-40G"],
            "Qwen/Qwen3-0.6B: not found; expected a model folder, or first: python",
        ),
        (["--inspect", "3"], "Qwen/Qwen3-0.6B: not found; expected a model folder"),
        ([], "Qwen/Qwen3-0.6B: not found; expected a model folder"),
    ],
)
def test_devices_and_folders_are_looked_at_before_what_takes_seconds(
    words: list[str], line: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "model_path: Qwen/Qwen3-0.6B", "optimizer: {params: {lr: 1e-5}}", leave_out="model_path")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--config", str(path), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "light\n"), result.stderr
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1
