"""Shows which checkpoint folders count as whole, and which are removed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from training.checkpoint.folder import (
    RECORD,
    Best,
    CheckpointRecord,
    DataOrder,
    fault,
    file_record,
    prune,
    set_aside,
    step_folder,
    step_folders,
)
from training.topology import Topology

EARLIER = """\
{
 "step": 4,
 "topology": {
  "stages": 2,
  "replicas": 1,
  "zero_stage": 1,
  "parts": [
   3,
   2
  ]
 },
 "data": {
  "samples": 30,
  "fingerprint": "ab12",
  "seed": 42,
  "train_batch_size": 8,
  "dataloader_drop_last": false,
  "packed_epoch": 0,
  "stream_gb": 0.00001,
  "windows": []
 },
 "settings": {
  "optimizer.type": "AdamW",
  "bf16.enabled": false,
  "fp16.enabled": false
 },
 "files": {
  "config.json": {
   "size": 10,
   "crc32": 5
  }
 },
 "crc32": 1168400093
}
"""
DATA = DataOrder(samples=3, fingerprint="f", seed=1, train_batch_size=2, dataloader_drop_last=False)
TOPOLOGY = Topology(stages=2, replicas=1, zero_stage=1, parts=[3, 2])
NAMES = ("layer_00-model_states.pt", "mp_rank_00_model_states.pt", "config.json")


def whole(save_path: Path, step: int) -> Path:
    folder = step_folder(save_path, step)
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_bytes(name.encode() * 1000)
    files = {name: file_record(folder / name) for name in NAMES}
    CheckpointRecord(step=step, topology=TOPOLOGY, data=DATA, files=files).write(folder)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, r"has \d+ bytes instead of \d+"),
    "flipped": (flip, "is damaged: its checksum differs"),
    "deleted": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_file_is_found_and_named(damage: str, name: str, tmp_path: Path) -> None:
    folder = whole(tmp_path, 5)
    assert fault(folder) is None
    harm, reason = DAMAGES[damage]
    harm(folder / name)
    assert re.fullmatch(f"{name} {reason}", fault(folder) or "")
    assert [fault(folder, share, 3) is None for share in range(3)].count(False) == 1  # one rank's share holds it


def test_a_changed_number_in_the_record_is_damage(tmp_path: Path) -> None:
    folder = whole(tmp_path, 5)
    path = folder / RECORD
    path.write_text(path.read_text().replace('"step": 5', '"step": 4'))
    assert fault(folder) == f"{RECORD} is damaged"


def test_unfinished_folder_and_broken_record_are_told_apart(tmp_path: Path) -> None:
    folder = whole(tmp_path, 5)
    (folder / RECORD).write_text("{")
    assert fault(folder) == f"{RECORD} is damaged"
    (folder / RECORD).unlink()
    assert fault(folder) == f"no {RECORD}: it was never finished"


def test_steps_are_ordered_by_number_and_other_folders_do_not_count(tmp_path: Path) -> None:
    for step in (5, 1000000, 20):
        whole(tmp_path, step)
    for name in ("step-abc", "step-000030.damaged", "steps", "step-7x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000040").write_text("a file")
    assert [path.name for path in step_folders(tmp_path)] == ["step-1000000", "step-000020", "step-000005"]


def test_pruning_keeps_the_newest_whole_ones_and_the_best(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        whole(tmp_path, step)
    (step_folder(tmp_path, 18) / "part").mkdir(parents=True)  # never finished
    prune(tmp_path, keep_last=2, keep={"step-000005"})
    assert [path.name for path in step_folders(tmp_path)] == ["step-000020", "step-000015", "step-000005"]


def test_damaged_folder_set_aside_keeps_its_files(tmp_path: Path) -> None:
    for _ in range(2):
        folder = whole(tmp_path, 5)
        flip(folder / NAMES[0])
        set_aside(folder)
        assert not step_folders(tmp_path)
    assert {path.name for path in (tmp_path / "step-000005.damaged").iterdir()} == {*NAMES, RECORD}


def test_best_counts_only_up_to_the_resumed_step_and_while_it_is_there(tmp_path: Path) -> None:
    assert Best.read(tmp_path, 10, "") is None
    folder = whole(tmp_path, 10)
    best = Best(checkpoint=folder.name, step=10, eval_loss=1.5)
    best.write(tmp_path)
    assert Best.read(tmp_path, 10, "these records") == best
    assert Best.read(tmp_path, 9, "these records") is None
    measured = best.model_copy(update={"records": "these records"})
    measured.write(tmp_path)
    assert Best.read(tmp_path, 10, "these records") == Best.read(tmp_path, 10, "") == measured
    assert Best.read(tmp_path, 10, "other records") is None
    (folder / RECORD).unlink()
    assert Best.read(tmp_path, 10, "these records") is None


def test_a_best_loss_that_is_no_number_does_not_count(tmp_path: Path) -> None:
    """As an earlier version wrote it."""
    folder = whole(tmp_path, 10)
    Best(checkpoint=folder.name, step=10, eval_loss=float("nan")).write(tmp_path)
    assert Best.read(tmp_path, 10, "") is None


def test_the_record_of_an_earlier_version_is_whole(tmp_path: Path) -> None:
    """It knew neither all keys nor their order of today."""
    (tmp_path / RECORD).write_text(EARLIER)
    record = CheckpointRecord.read(tmp_path)
    assert record is not None
    assert (record.step, record.data.seed, record.settings["optimizer.type"]) == (4, 42, "AdamW")
    (tmp_path / RECORD).write_text(EARLIER.replace('"samples": 30', '"samples": 31'))
    assert CheckpointRecord.read(tmp_path) is None
