"""Shows that a weight file's pickle never runs code, and that damage anywhere in it is told in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models import load_model
from tests.models.helpers import CONVERTERS, copy_of, error_line, joined, read_weights, write_weights


class RunsCode:
    """A pickle of it makes the reader call os.mkdir, as an attacker would call something worse."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("hidden_in", ["pytorch_model.bin", "layer_01-model_states.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_that_would_run_code_is_refused(
    both_layouts: dict[str, Path], hidden_in: str, zipped: bool, tmp_path: Path
) -> None:
    layout = "pipeline" if hidden_in.startswith("layer") else "huggingface"
    folder = copy_of(both_layouts[layout], tmp_path / "bad")
    if layout == "huggingface":
        write_weights(folder, {})
    marker = tmp_path / "marker"
    trap = {"weight": torch.ones(1), "trap": RunsCode(marker)}
    torch.save(trap, folder / hidden_in, _use_new_zipfile_serialization=zipped)

    for use in (lambda: load_model(folder), lambda: CONVERTERS[layout](folder, tmp_path / "out")):
        told = error_line(use)
        assert hidden_in in told
        assert "refused" in told
        assert not marker.exists()
    run, arguments = RunsCode(marker).__reduce__()
    run(*arguments)
    assert marker.exists(), "the trap is not armed, so the test shows nothing"


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_cut_anywhere_is_told_in_one_line(both_layouts: dict[str, Path], zipped: bool, tmp_path: Path) -> None:
    folder = copy_of(both_layouts["huggingface"], tmp_path / "bad")
    tensors = joined(read_weights(folder))
    write_weights(folder, {})
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for length in [*range(0, 400, 7), len(whole) // 2, len(whole) - 100, len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert str(path) in error_line(lambda: load_model(folder))
