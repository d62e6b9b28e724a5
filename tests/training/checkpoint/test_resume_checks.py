"""What a start does with a checkpoint of another device, another order of ranks, or other samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.checkpoint.resume import check_resumable, restore_random_states, same_positions
from training.config.changes import rule_of, settings_of
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.topology import Topology

SEED = 7
FOLDER = Path("step-000004")


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(**{"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 2} | keys)


def order(fingerprint: str, samples: int = 3) -> DataOrder:
    return DataOrder(samples=samples, fingerprint=fingerprint, seed=1, train_batch_size=2, dataloader_drop_last=False)


def test_random_numbers_go_on_or_begin_by_the_seed_on_a_device_of_another_kind() -> None:
    states = {"cpu": torch.get_rng_state(), "device": torch.get_rng_state()}
    expected = torch.rand(3)
    torch.rand(5)
    assert restore_random_states(states, SEED)
    assert torch.equal(torch.rand(3), expected)
    assert not restore_random_states(states | {"device": torch.zeros(16, dtype=torch.uint8)}, SEED)  # as CUDA's are
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(SEED)))


def test_ranks_in_another_order_do_not_continue_each_others_random_numbers() -> None:
    """Else ranks that share layers would draw different numbers, and replicas the same ones."""
    then, other = (
        config(model_topo={"process_topology": {"axes": axes, "dims": dims}})
        for axes, dims in ((["pipe", "data", "model"], [1, 2, 2]), (["model", "data", "pipe"], [2, 2, 1]))
    )
    topology = Topology(stages=1, replicas=2, zero_stage=1, parts=[5])
    record = CheckpointRecord(step=4, topology=topology, data=order("a"), settings=settings_of(then))
    assert same_positions(record, topology, then) and not same_positions(record, topology, other)
    assert not same_positions(record, topology.model_copy(update={"replicas": 4}), then)
    assert same_positions(record.model_copy(update={"settings": {}}), topology, other), "an earlier version noted none"


@pytest.mark.parametrize(
    ("settings", "keys", "message"),
    [
        (None, {"mask": "all"}, f"mask: all, but {FOLDER} was trained with "),
        (None, {"truncate": "refuse"}, f"truncate: refuse, but {FOLDER} was trained with "),
        (None, {"max_seq_len": 77}, f"max_seq_len: 77, but {FOLDER} was trained with "),
        (None, {"eval_share": 0.5}, f"eval_share: 0.5, but {FOLDER} was trained with "),
        (None, {"on_bad_record": "skip"}, f"on_bad_record: skip, but {FOLDER} was trained with "),
        (None, {"data_path": "moved"}, f"data_path: not the samples that {FOLDER} was trained on (3 then, 2 now); "),
        # Of an earlier version, which recorded fewer settings.
        (
            {key: value for key, value in settings_of(config()).items() if rule_of(key).counts and key != "freeze"},
            {"mask": "all"},
            "data_path: not the samples",
        ),
    ],
)
def test_the_key_that_changed_the_samples_is_named(
    settings: dict[str, Any] | None, keys: dict[str, Any], message: str
) -> None:
    topology = Topology(stages=1, replicas=1, zero_stage=0, parts=[3])
    settings = settings or settings_of(config())
    record = CheckpointRecord.model_construct(step=4, topology=topology, data=order("a"), settings=settings)
    with pytest.raises(ConfigError) as refused:
        check_resumable(FOLDER, record, order("b", samples=2), config(**keys))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/a.jinja"])
def test_a_file_that_changed_the_samples_is_named(name: str, tmp_path: Path) -> None:
    model, checkpoint = tmp_path / "model", tmp_path / "step-000004"
    for folder, path, content in ((model, name, "now"), (checkpoint, name.replace("/", "."), "then")):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(content)
        (folder / "tokenizer.json").write_text("{}")
    kept = config(model_path=str(model))
    topology = Topology(stages=1, replicas=1, zero_stage=0, parts=[3])
    record = CheckpointRecord(step=4, topology=topology, data=order("a"), settings=settings_of(kept))
    assert check_resumable(checkpoint, record, order("a"), kept) == [], "the same samples"
    with pytest.raises(ConfigError, match=f"^model_path: {name}: not the file that {checkpoint} was trained with; "):
        check_resumable(checkpoint, record, order("b"), kept)
