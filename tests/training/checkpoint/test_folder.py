"""Which checkpoint folders count as whole, and which are removed."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint.publish import sweep
from models.errors import CheckpointError
from tests.accidents import killed_at, limited
from tests.models.helpers import contents
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

EARLIER = (  # of version 0.1.0, with fewer keys
    '{"step": 4, "topology": {"stages": 2, "replicas": 1, "zero_stage": 1, "parts": [3, 2]}, "data": {"samples": 30, '
    '"fingerprint": "ab12", "seed": 42, "train_batch_size": 8, "dataloader_drop_last": false, "packed_epoch": 0, '
    '"stream_gb": 0.00001, "windows": []}, "settings": {"optimizer.type": "AdamW", "bf16.enabled": false, '
    '"fp16.enabled": false}, "files": {"config.json": {"size": 10, "crc32": 5}}, "crc32": 1168400093}'
)
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
    "truncated": (truncate, r"is shorter than recorded: \d+ bytes instead of \d+"),
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


def no_descriptors_left() -> AbstractContextManager[None]:
    """Let this process open no more files, as one with too many open ones."""
    return limited(resource.RLIMIT_NOFILE, 0)


@contextmanager
def errors_of_the_disk(number: int) -> Iterator[None]:
    """Fail for every file and folder, as a failing disk or a lost server does."""

    def refuse(path: object, *_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open")):
            patched.setattr(owner, name, refuse)
        yield


READERS: dict[str, Callable[[Path], object]] = {
    "fault": fault,
    "record": CheckpointRecord.read,
    "best": lambda folder: Best.read(folder.parent, 10, ""),
    "folders": lambda folder: step_folders(folder.parent),
}
UNREADABLE: dict[str, tuple[Callable[[], AbstractContextManager[None]], int]] = {
    "descriptors": (no_descriptors_left, errno.EMFILE),
    **{
        errno.errorcode[number]: (partial(errors_of_the_disk, number), number)
        for number in (errno.EACCES, errno.EIO, errno.ESTALE)
    },
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reason", UNREADABLE)
def test_a_file_that_cannot_be_read_is_an_error_and_not_damaged(reader: str, reason: str, tmp_path: Path) -> None:
    folder = whole(tmp_path, 5)
    Best(checkpoint=folder.name, step=5, measure="eval_loss", value=1.5).write(tmp_path)
    trouble, number = UNREADABLE[reason]
    with pytest.raises(CheckpointError) as error, trouble():
        READERS[reader](folder)
    assert str(error.value).startswith(str(tmp_path))
    assert f"cannot be read: {os.strerror(number)}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_unfinished_folder_and_a_damaged_record_have_different_reasons(tmp_path: Path) -> None:
    folder = whole(tmp_path, 5)
    for damaged in ("{", (folder / RECORD).read_text().replace('"step": 5', '"step": 4')):
        (folder / RECORD).write_text(damaged)
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
    prune(tmp_path, keep_last=2, keep={"step-000005"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000015", "step-000020"]


def note(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def link(folder: Path) -> None:
    """The checkpoint was moved to another disk."""
    folder.rename(folder.parent / "moved")
    folder.symlink_to(folder.parent / "moved")


def not_a_checkpoint(folder: Path) -> None:
    (folder / RECORD).unlink()


def damage_record(folder: Path) -> None:
    (folder / RECORD).write_text("{}")


@pytest.mark.parametrize("made", [note, link, not_a_checkpoint, damage_record])
def test_pruning_leaves_what_a_user_made_of_a_folder(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(whole(tmp_path, 5))
    before = contents(tmp_path)
    for step in (10, 15, 20):
        whole(tmp_path, step)
    prune(tmp_path, keep_last=1, keep=set())
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert {path.name for path in step_folders(tmp_path)} == {"step-000005", "step-000020"}


def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    whole(tmp_path, 5)
    whole(tmp_path, 10)
    assert killed_at("shutil.rmtree", 1, lambda: prune(tmp_path, 1, set())) == signal.SIGKILL
    assert [path.name for path in step_folders(tmp_path)] == ["step-000010"]
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path.glob(".step-*.partial-*"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_damaged_folders_set_aside_keep_their_files(tmp_path: Path) -> None:
    asides = ("step-000005.damaged", "step-000005.damaged-2", "step-000005.damaged-3")
    for number, _ in enumerate(asides):
        folder = whole(tmp_path, 5)
        (folder / NAMES[0]).write_text(str(number))
        set_aside(folder)
        assert not step_folders(tmp_path)
    assert [(tmp_path / name / NAMES[0]).read_text() for name in asides] == ["0", "1", "2"]
    assert {path.name for path in (tmp_path / asides[0]).iterdir()} == {*NAMES, RECORD}


def test_best_counts_only_up_to_the_resumed_step_and_while_it_is_there(tmp_path: Path) -> None:
    assert Best.read(tmp_path, 10, "") is None
    folder = whole(tmp_path, 10)
    best = Best(checkpoint=folder.name, step=10, measure="eval_loss", value=1.5)
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
    Best(checkpoint=folder.name, step=10, measure="eval_loss", value=float("nan")).write(tmp_path)
    assert Best.read(tmp_path, 10, "") is None


def test_the_record_of_an_earlier_version_is_whole(tmp_path: Path) -> None:
    """It has fewer keys, in another order."""
    (tmp_path / RECORD).write_text(EARLIER)
    record = CheckpointRecord.read(tmp_path)
    assert record is not None
    assert (record.step, record.data.seed, record.settings["optimizer.type"]) == (4, 42, "AdamW")
    (tmp_path / RECORD).write_text(EARLIER.replace('"samples": 30', '"samples": 31'))
    assert CheckpointRecord.read(tmp_path) is None


def test_a_damaged_best_json_is_an_error_as_the_best_would_be_removed(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json: damaged"):
        Best.read(tmp_path, 10, "")
