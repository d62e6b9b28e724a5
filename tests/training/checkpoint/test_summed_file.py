"""Shows that what is summed up while it is written is what lies on the disk afterwards."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch

from tests.models.test_publish import files_of_at_most
from training.checkpoint import summed_file
from training.checkpoint.deepspeed_files import CheckpointFiles
from training.checkpoint.folder import file_record
from training.checkpoint.summed_file import SummedFile

STATE: dict[str, Any] = {
    "large": torch.arange(100_000),
    "step": 7,
    "nested": [{"small": torch.ones(3)}, torch.empty(0)],
}


@pytest.mark.parametrize("piece", [1000, 4096, 2**30])
def test_size_and_checksum_are_the_files(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_file, "PIECE", piece)
    path = tmp_path / "state.pt"
    with SummedFile(path) as file:
        torch.save(STATE, cast(IO[bytes], file))
    found = file_record(path)
    assert (found.size, found.crc32) == (file.size, file.checksum)
    assert zipfile.ZipFile(path).testzip() is None
    assert torch.equal(torch.load(path, weights_only=True)["large"], STATE["large"])


@pytest.mark.parametrize("most", [0, 5_000, 100_000])
def test_full_disk_is_kept_until_all_ranks_can_hear_of_it(most: int, tmp_path: Path) -> None:
    files = CheckpointFiles()
    with files_of_at_most(most):
        files.save(STATE, str(tmp_path / "state.pt"))
        assert isinstance(files.error, OSError)
        assert "too large" in str(files.error)
        files.save(STATE, str(tmp_path / "more.pt"))
    assert files.written == {}
    assert not (tmp_path / "more.pt").exists()
