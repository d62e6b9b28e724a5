"""The files of a checkpoint are on the disk with the recorded size and checksum."""

from __future__ import annotations

import errno
import resource
import time
from collections import OrderedDict
from operator import methodcaller
from pathlib import Path
from typing import BinaryIO

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
    assert files.wait() == {path.name: file_record(path) for path in tmp_path.iterdir()}
    torch.testing.assert_close(read_mapped(tmp_path / "state.pt"), state, rtol=0, atol=0)


@pytest.mark.parametrize("background", [False, True])
def test_the_error_of_a_full_disk_is_raised_when_all_files_are_done(background: bool, tmp_path: Path) -> None:
    files = CheckpointFiles(background)
    with limited(resource.RLIMIT_FSIZE, 1000):
        files.write(tmp_path / "small", methodcaller("write", b"1" * 100))
        files.save({"weight": torch.randn(PIECE)}, str(tmp_path / "large.pt"))
        files.write(tmp_path / "later", methodcaller("write", b"1"))
        files.close()
        with pytest.raises(OSError) as caught:
            files.wait()
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "later").exists()


def slowly(file: BinaryIO) -> None:
    time.sleep(0.2)
    file.write(b"1")


def test_a_thread_writes_the_same_files_of_what_was_there_when_they_were_given(tmp_path: Path) -> None:
    """Views of one memory, parameters and nested containers, which training changes before the thread writes them."""
    whole = torch.randn(3, PIECE)
    state = {
        "module": OrderedDict(weight=whole[0], again=whole[0], turned=whole.T, halves=[whole[1:], whole[:, ::2]]),
        "optimizer_state_dict": {
            "step": torch.tensor(3.0),
            "groups": ({"lr": 0.1, "weights": whole[1]},),
            "none": None,
        },
        "trained": torch.nn.Parameter(torch.ones(2)).detach().requires_grad_(),
    }
    for name, background in (("plain", False), ("background", True)):
        (tmp_path / name).mkdir()
        files = CheckpointFiles(background)
        files.write(tmp_path / name / "first", slowly)
        files.save(state, str(tmp_path / name / "state.pt"))
        files.close()
        assert files.done is not background
        whole += background
        assert files.wait() == {path.name: file_record(path) for path in (tmp_path / name).iterdir()}
        assert files.done
    plain, background_ = ((tmp_path / name / "state.pt").read_bytes() for name in ("plain", "background"))
    assert plain == background_
