"""ONNX of a model of images and text: its language model alone, which is said, and no checkpoint with a tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.checkpoint.source import HuggingFaceSource
from models.conversion.check import ALONE
from models.errors import CheckpointError
from options.exports.to_onnx import hg_to_onnx
from tests.models.images.conftest import golden_of
from tests.models.images.test_seeing import written

pytest.importorskip("onnxruntime")


@pytest.mark.slow
def test_what_is_left_out_is_said(shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    assert hg_to_onnx(golden.folder, tmp_path / "onnx").endswith(ALONE)
    written(HuggingFaceSource(golden.folder, golden.spec), tmp_path / "layers")
    with pytest.raises(CheckpointError, match="its tower of images; expected the HuggingFace folder that"):
        hg_to_onnx(tmp_path / "layers", tmp_path / "other")
