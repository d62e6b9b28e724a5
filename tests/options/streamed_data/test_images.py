"""Records with images have to be known before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.errors import DataError
from options.streamed_data.stream import open_stream


def test_a_stream_takes_no_images(tmp_path: Path, shared: Path) -> None:
    folder = shared / "golden" / "vision" / "qwen2_5_vl-tiny"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    shutil.copytree(folder / "images", tmp_path / "images")
    record = json.loads((folder / "records.json").read_text(encoding="utf-8"))[0]
    (tmp_path / "records.json").write_text(json.dumps([record]), encoding="utf-8")

    stream = open_stream(
        str(tmp_path / "records.json"), folder, 512, "chat_template", gigabytes=0.1, folder=tmp_path / "stream"
    )
    with pytest.raises(DataError, match="record 1: stream_gb: not with images in the records; expected it absent"):
        stream.take(0, 1)
