"""Shows that the files of a checkpoint are whole on the disk, with the size and checksum that is noted of them."""

from __future__ import annotations

import errno
import resource
from operator import methodcaller
from pathlib import Path

import pytest
import torch

from tests.accidents import limited
from training.checkpoint import deepspeed_files
from training.checkpoint.deepspeed_files import CheckpointFiles, read_mapped
from training.checkpoint.folder import PIECE, file_record


@pytest.mark.parametrize("behind", [1, PIECE, 2**40])
def test_what_is_noted_while_writing_is_what_the_files_hold(
    behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_files, "BEHIND", behind)
    state = {"long": torch.randn(PIECE), "short": torch.arange(3), "empty": torch.ones(0), "number": 7}
    files = CheckpointFiles()
    files.save(state, str(tmp_path / "state.pt"))
    files.write(tmp_path / "config.json", methodcaller("write", b"{}"))
    files.write(tmp_path / "nothing", methodcaller("write", b""))
    assert files.written() == {path.name: file_record(path) for path in tmp_path.iterdir()}
    torch.testing.assert_close(read_mapped(tmp_path / "state.pt"), state, rtol=0, atol=0)


def test_a_full_disk_is_told_when_all_files_are_done(tmp_path: Path) -> None:
    files = CheckpointFiles()
    with limited(resource.RLIMIT_FSIZE, 1000):
        files.write(tmp_path / "small", methodcaller("write", b"1" * 100))
        files.save({"weight": torch.randn(PIECE)}, str(tmp_path / "large.pt"))
        files.write(tmp_path / "later", methodcaller("write", b"1"))
        with pytest.raises(OSError) as told:
            files.written()
    assert told.value.errno == errno.EFBIG
    assert not (tmp_path / "later").exists()
