"""A JSON file of DeepSpeed is read as keys of the config; what is off in it is passed over, and named once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from options import load_config
from tests.conftest import FAQ
from tests.launching import run, write_config
from tests.training.config.test_config import REQUIRED, refusal
from training.config.deepspeed_keys import describe_ignored_keys
from training.config.keys import TrainConfig
from training.errors import ConfigError

# As FlagAI's page has it, but for the batch.
FLAGAI: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 100,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "contiguous_gradients": False, "overlap_comm": True, "cpu_offload": True},
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 4e-4, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-6}},
    "activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": False},
    "wall_clock_breakdown": False,
}
OWN = REQUIRED | {"train_batch_size": 4}
OFF = "no effect here: activation_checkpointing, wall_clock_breakdown"
ADAM = "deepspeed_config: optimizer.type Adam is AdamW there (adam_w_mode)"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a config and the JSON file beside it, named as other paths are."""
    monkeypatch.chdir(tmp_path)

    def files(theirs: dict[str, Any] | str, **own: Any) -> Path:
        text = theirs if isinstance(theirs, str) else json.dumps(theirs)
        (tmp_path / "ds.json").write_text(text, encoding="utf-8")
        path = tmp_path / "run.yml"
        path.write_text(yaml.safe_dump({k: v for k, v in (OWN | own).items() if v is not None}), encoding="utf-8")
        return path

    return files


def with_file(theirs: dict[str, Any]) -> dict[str, Any]:
    return {"deepspeed_config": "ds.json", **dict.fromkeys(theirs)}


def test_a_whole_file_is_the_same_config_as_its_keys(write: Any) -> None:
    config = load_config(write(FLAGAI, **with_file(FLAGAI)))
    assert config.train_micro_batch_size_per_gpu == 2 and config.gradient_clipping == 0.5
    assert config.zero_optimization.offloads and config.fp16.enabled
    adamw = FLAGAI | {"optimizer": FLAGAI["optimizer"] | {"type": "AdamW"}}
    assert config.dump() == load_config(write({}, **adamw)).dump()
    lines = describe_ignored_keys(config, in_stages=False)
    assert lines[0] == ADAM and lines[1].startswith(OFF)


def test_what_a_run_writes_needs_no_other_file(write: Any, tmp_path: Path) -> None:
    config = load_config(write(FLAGAI, **with_file(FLAGAI)))
    (tmp_path / "ds.json").unlink()
    again = type(config).model_validate(config.dump())
    assert again.dump() == config.dump() and "deepspeed_config" not in config.dump()
    assert describe_ignored_keys(again, in_stages=False) == []


def test_a_value_in_both_must_be_the_same_but_the_command_line_counts(write: Any) -> None:
    file = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    same = write(file, deepspeed_config="ds.json", gradient_clipping=0.5, fp16=True)
    assert load_config(same).zero_optimization.stage == 1
    overridden = load_config(same, ["gradient_clipping=2", "fp16=false"])
    assert overridden.gradient_clipping == 2 and not overridden.fp16.enabled
    other = write(file, deepspeed_config="ds.json", zero_optimization={"stage": 0})
    assert refusal(other).endswith(
        "run.yml with ds.json: zero_optimization.stage: 0, but ds.json (deepspeed_config) has 1; expected the same, or "
        "only one of them"
    )
    assert load_config(other, ["zero_optimization.stage=1"]).zero_optimization.stage == 1
    offload = write({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    words = ["deepspeed_config=ds.json", "zero_optimization.offload_optimizer=null"]
    assert load_config(offload, words[:1]).zero_optimization.offloads
    assert not load_config(offload, words).zero_optimization.offloads
    decay = write(
        FLAGAI | {"optimizer": {"type": "AdamW"}},
        **with_file(FLAGAI) | {"optimizer": {"params": {"weight_decay": 0.3, "lr": 1e-4}}},
    )
    assert load_config(decay).optimizer.params["weight_decay"] == 0.3
    assert load_config(write({"seed": 5}), ["deepspeed_config=ds.json"]).seed == 5


def test_what_hf_trainer_would_fill_in_is_named_at_once(write: Any) -> None:
    file = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    }
    path = write(file, deepspeed_config="ds.json")
    line = refusal(path)
    assert line.startswith(f"{path} with ds.json: deepspeed_config: ds.json: 'auto' is for HF Trainer to fill in; ")
    assert line.endswith(": gradient_clipping, optimizer.params.lr, zero_optimization.reduce_bucket_size")
    given = {"gradient_clipping": 1.0, "optimizer": {"params": {"lr": 1e-4}}}
    del file["zero_optimization"]
    assert load_config(write(file, deepspeed_config="ds.json", **given)).optimizer.params["lr"] == 1e-4


@pytest.mark.parametrize(
    ("optimizer", "kind", "decay"),
    [
        ({"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}, "AdamW", 0.0),
        ({"type": "adamw", "params": {"lr": 1e-4, "adam_w_mode": False}}, "AdamW", 0.0),
        ({"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "weight_decay": 0.1}}, "Adam", 0.1),
        ({"type": "Lion", "params": {"lr": 1e-4}}, "Lion", None),
    ],
)
def test_deepspeeds_adam_is_what_it_computes(
    optimizer: dict[str, Any], kind: str, decay: float | None, write: Any
) -> None:
    """`_configure_basic_optimizer` of its engine: Adam decouples its weight decay, unless `adam_w_mode` is false."""
    read = load_config(write({"optimizer": optimizer}, deepspeed_config="ds.json", optimizer=None)).optimizer
    assert read.type == kind
    assert read.params == {"lr": 1e-4} | ({} if decay is None else {"weight_decay": decay})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("wall_clock_breakdown", False),
        ("flops_profiler", {"enabled": False, "profile_step": 1}),
        ("activation_checkpointing", {"number_checkpoints": None, "profile": False}),
        ("amp", {"enabled": False}),
        ("sparse_gradients", None),
    ],
)
def test_what_is_off_is_passed_over_in_the_config_itself_too(key: str, value: Any) -> None:
    config = TrainConfig.model_validate(OWN | {key: value})
    assert describe_ignored_keys(config) == [f"no effect here: {key}"]
    assert config.model_copy(update={"seed": 7})._left_out == [key]
    assert key not in config.dump()


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ("[1]", "deepspeed_config: ds.json: expected DeepSpeed's keys and values, found list"),
        ('{"a": }', "deepspeed_config: ds.json: not JSON: Expecting value: line 1 column 7 (char 6); expected DeepSp"),
        ('{"seed": 1, "seed": 2}', "deepspeed_config: ds.json: not JSON: a key is repeated among seed; expected De"),
        ('{"sed": 1}', "unknown key sed; did you mean seed?"),
        ('{"fp16": {"enabled": true, "loss": 1}}', "unknown key fp16.loss"),
        ('{"wall_clock_breakdown": true}', "wall_clock_breakdown: DeepSpeed's, not tested here"),
        ('{"bf16": {"enabled": {"x": 1}}}', "bf16.enabled: "),
    ],
)
def test_a_bad_file_is_one_line(theirs: str, line: str, write: Any) -> None:
    path = write(theirs, deepspeed_config="ds.json")
    assert refusal(path).startswith(f"{path} with ds.json: {line}")


def test_a_missing_file_is_one_line(write: Any) -> None:
    path = write({}, deepspeed_config="none.json")
    assert refusal(path).endswith(
        "deepspeed_config: none.json: No such file or directory; expected DeepSpeed's JSON file"
    )
    with pytest.raises(ConfigError, match="deepspeed_config: expected text"):
        load_config(write({}, deepspeed_config=[1]))


@pytest.mark.launched
@pytest.mark.slow
def test_a_run_says_once_what_it_read(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """And its config.yml needs the file no more."""
    file = FLAGAI | {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}, "train_micro_batch_size_per_gpu": 4}
    (theirs := tmp_path / "ds.json").write_text(json.dumps(file), encoding="utf-8")
    path = write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(FAQ),
        optimizer=None,
        deepspeed_config=str(theirs),
        max_steps=1,
    )
    done = run(sys.executable, "train_ds.py", "--config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(ADAM) == 1 and done.stdout.count(OFF) == 1
    written = yaml.safe_load((tmp_path / "run" / "config.yml").read_text(encoding="utf-8"))
    assert written["optimizer"]["type"] == "AdamW" and written["gradient_clipping"] == 0.5
    assert not {"deepspeed_config", "wall_clock_breakdown", "activation_checkpointing"} & written.keys()


def test_the_keys_of_a_page_of_flagai(shared: Path) -> None:
    """Copied into the config one by one, as somebody did who was refused three times."""
    config = load_config(shared / "cases" / "seeds" / "flagai_deepspeed_keys.yml", ["gradient_accumulation_steps=2"])
    config.check_entry_point(in_stages=False)
    assert config.optimizer.type == "Adam" and describe_ignored_keys(config, in_stages=False)[0].startswith(OFF)
