"""Other samples than a checkpoint's: the setting that changed is named with both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resume import check_resumable
from training.config.changes import settings_of
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.topology import Topology

FOLDER = Path("step-000004")


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(**{"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 2} | keys)


def order(fingerprint: str, samples: int = 3) -> DataOrder:
    return DataOrder(samples=samples, fingerprint=fingerprint, seed=1, train_batch_size=2, dataloader_drop_last=False)


def refusal(settings: dict[str, Any], now: TrainConfig) -> str:
    topology = Topology(stages=1, replicas=1, zero_stage=0, parts=[3])
    record = CheckpointRecord.model_construct(step=4, topology=topology, data=order("a"), settings=settings)
    with pytest.raises(ConfigError) as refused:
        check_resumable(FOLDER, record, order("b", samples=2), now)
    return str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [{"mask": "all"}, {"truncate": "refuse"}, {"max_seq_len": 77}, {"eval_share": 0.5}, {"on_bad_record": "skip"}],
    ids=lambda keys: next(iter(keys)),
)
def test_the_changed_key_is_named(keys: dict[str, Any]) -> None:
    (key, value), before = next(iter(keys.items())), config()
    told = refusal(settings_of(before), config(**keys))
    assert told.startswith(f"{key}: {value}, but {FOLDER} was trained with ")


def test_other_records_and_an_older_checkpoint_keep_the_general_line() -> None:
    told = refusal(settings_of(config()), config(data_path="moved"))
    assert told.startswith("data_path: not the samples") and "(3 then, 2 now)" in told
    older = {key: value for key, value in settings_of(config()).items() if key in ("seed", "optimizer.type")}
    assert refusal(older, config(mask="all")).startswith("data_path: not the samples")
