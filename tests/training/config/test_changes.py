"""What may differ between two starts: every key has a rule, the docs show it, and the checks follow it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from options import RunConfig
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resume import check_resumable
from training.config.changes import compare, rule_of, settings_of
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.topology import Topology

CHECKPOINT = Path("runs/tiny/step-000004")
TOPOLOGY = Topology(stages=1, replicas=1, zero_stage=1, parts=[5])
ORDER = DataOrder(samples=30, fingerprint="f", seed=42, train_batch_size=8, dataloader_drop_last=False)
MINIMUM: dict[str, Any] = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}
PARAMS = {"lr": 1.0e-3, "weight_decay": 0.1}

RULES = RunConfig.rules


def config(**keys: Any) -> TrainConfig:
    return RunConfig.model_validate(MINIMUM | {"optimizer": {"params": PARAMS}} | keys)


def own_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a section and of those in it."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from own_keys(kind, f"{prefix}{name}.")


def test_every_key_has_a_rule() -> None:
    sections = {key.rpartition(".")[0] for key in own_keys(RunConfig)}
    for key in own_keys(RunConfig):
        ruled = key in RULES or any(key.startswith(f"{each}.") for each in RULES)
        below = key in sections and all(each in RULES for each in own_keys(RunConfig) if each.startswith(f"{key}."))
        assert ruled or below, f"{key}: training.config.changes does not say whether two starts must agree on it"


def test_no_rule_is_left_of_a_key_that_is_gone() -> None:
    known = set(own_keys(RunConfig))
    for key, rule in RULES.items():
        assert key in known or rule_of(key.rpartition(".")[0], RULES) is not rule, f"{key} is no key"
        assert key in known or key.startswith("optimizer.params.")


def different(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"other than {value}"


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if not rule.free and rule.counts])
def test_what_must_agree_is_refused_with_both_values(key: str) -> None:
    then = settings_of(config())
    now = then | {key: different(then.get(key, 0))}
    message = re.escape(f"{key}: {now[key]}, but {CHECKPOINT} was trained with {then.get(key, 'none')}; expected ")
    with pytest.raises(ConfigError, match=f"^{message}.*, or another save_path$"):
        compare(then, now, CHECKPOINT, RULES)


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if rule.free and rule.counts])
def test_what_is_free_and_changes_something_is_said(key: str) -> None:
    then = settings_of(config())
    now = then | {key: different(then.get(key, 0))}
    (line,) = compare(then, now, CHECKPOINT, RULES)
    assert line == f"changed since the checkpoint: {key} {then.get(key, 'none')} -> {now[key]}: {RULES[key].effect}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"type": "Lion", "params": PARAMS}}, "optimizer.type: Lion, .* with AdamW; expected AdamW"),
        ({"optimizer": {"params": PARAMS | {"amsgrad": True}}}, "optimizer.params.amsgrad: True, .* with none"),
        ({"optimizer": {"params": PARAMS, "no_wd_kws": ["norm"]}}, r"optimizer.no_wd_kws: \['norm'\], .* with \[\]"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: True, .* with False"),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale: 8.0, .* with none"),
        ({"seed": 1}, "seed: 1, .* with 42"),
        ({"train_batch_size": 16}, "train_batch_size: 16, .* with 8"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types: {'grad_accum_dtype': 'bf16'}, .* with none"),
    ],
)
def test_changes_of_a_config_that_are_refused(change: dict[str, Any], message: str) -> None:
    record = CheckpointRecord(step=4, topology=TOPOLOGY, data=ORDER, settings=settings_of(config()))
    assert check_resumable(CHECKPOINT, record, ORDER, config()) == []
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_resumable(CHECKPOINT, record, ORDER, config(**change))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"lora": {"r": 4}}, r"lora: {.*'r': 4.*}, but .* with none; expected none"),
        ({"lora": {"r": 4}}, {}, r"lora: none, but .* with {.*'r': 4.*}; expected {"),
        ({"lora": {"r": 4}}, {"lora": {"r": 4, "rslora": True}}, r"lora.rslora: True, but .* with False"),
        ({}, {"freeze": ["embed"]}, r"freeze: \['embed'\], but .* with \[\]"),
        ({}, {"optimizer": {"type": "Lion"}}, "optimizer.type: Lion, but .* with AdamW"),
    ],
)
def test_the_key_that_was_changed_is_named_before_what_comes_of_it(
    then: dict[str, Any], now: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_refused(then, now, message, tmp_path)


def assert_refused(then: dict[str, Any], now: dict[str, Any], message: str, folder: Path) -> None:
    """And not by what comes of it: other samples, or a checkpoint's config.json that is that of another model."""
    record = CheckpointRecord(step=4, topology=TOPOLOGY, data=ORDER, settings=settings_of(config(**then)))
    record.write(folder)  # the order of keys is that of the file
    read = CheckpointRecord.read(folder)
    assert read is not None

    def check(folder: Path) -> None:
        raise AssertionError("the model was compared first")

    with pytest.raises(ConfigError, match=f"^{message}"):
        check_resumable(CHECKPOINT, read, ORDER.model_copy(update={"fingerprint": "g"}), config(**now), check)


def test_changes_of_a_config_that_are_said() -> None:
    record = CheckpointRecord(step=4, topology=TOPOLOGY, data=ORDER, settings=settings_of(config()))
    changed = config(
        n_epoches=3,
        scheduler={"type": "linear"},
        save_interval=5,
        packing=False,
        model_topo={"process_topology": {"dims": [2, 1]}},
        optimizer={"params": {"lr": 5.0e-4, "weight_decay": 0.1}},
    )
    lines = check_resumable(CHECKPOINT, record, ORDER, changed)
    for part in (
        "model_topo.process_topology.dims [1, 1] -> [2, 1]: sums are rounded in another order",
        "n_epoches 1 -> 3, scheduler.params.min_ratio none -> 0.0001, ",
        "scheduler.type none -> linear: the learning rate",
        "optimizer.params.lr 0.001 -> 0.0005: counts from the next step on",
        "packing batch -> False: sums are rounded in another order; a router loss is that of other micro-batches",
    ):
        assert sum(part in line for line in lines) == 1, lines
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("then", "now", "keys", "message"),
    [
        (256, 384, {"packing": "dataset"}, "pack_len: 384, but .* with 256; expected 256, or another save_path"),
        (256, 0, {"packing": False}, "packing: False, but .* with dataset; expected dataset"),
        (0, 256, {"packing": "dataset"}, "packing: dataset, but .* with batch or false"),
    ],
)
def test_the_rows_of_packed_epochs_must_agree(then: int, now: int, keys: dict[str, Any], message: str) -> None:
    before, after = (ORDER.model_copy(update={"packed_epoch": rows}) for rows in (then, now))
    record = CheckpointRecord(step=4, topology=TOPOLOGY, data=before, settings=settings_of(config()))
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_resumable(CHECKPOINT, record, after, config(**keys))


@pytest.mark.parametrize("settings", [{}, {"optimizer.type": "AdamW", "bf16.enabled": False, "fp16.enabled": False}])
def test_a_checkpoint_of_an_earlier_version_says_what_it_knows(settings: dict[str, Any]) -> None:
    record = CheckpointRecord(step=4, topology=TOPOLOGY, data=ORDER, settings=settings)
    message = check_resumable(CHECKPOINT, record, ORDER, config())
    assert message == [
        "step-000004: an earlier version saved it and noted only seed, train_batch_size, dataloader_drop_last, "
        f"{', '.join(['stream_gb', *settings])}; nothing else was compared"
    ]
    with pytest.raises(ConfigError, match=r"seed: 7, but .* with 42"):
        check_resumable(CHECKPOINT, record, ORDER, config(seed=7))
    if settings:
        with pytest.raises(ConfigError, match=r"optimizer\.type: Lion"):
            check_resumable(CHECKPOINT, record, ORDER, config(optimizer={"type": "Lion"}))


def test_a_record_keeps_what_a_later_start_is_compared_with(tmp_path: Path) -> None:
    """Through the file: what JSON makes of the values is not taken for a change."""
    keys: dict[str, Any] = {
        "data_path": [{"path": "d", "repeat": 2.0}],
        "eval_data_path": ["e"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-5, "betas": (0.9, 0.95)}, "no_wd_kws": ["norm", "bias"]},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
        "communication_data_type": "fp32",
    }
    CheckpointRecord(step=4, topology=TOPOLOGY, data=ORDER, settings=settings_of(config(**keys))).write(tmp_path)
    record = CheckpointRecord.read(tmp_path)
    assert record is not None
    assert check_resumable(CHECKPOINT, record, ORDER, config(**keys)) == []
