"""Bad images and records are one line each, or counted; the good ones around them are all there."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import PIL.Image
import pytest

from data.errors import DataError
from tests.data.images.conftest import LoadSeen
from tests.data.images.dialogues import TEXT, A, talk

BOMB = 1 << 16  # pixels at each side that a few bytes promise


def bomb() -> bytes:
    """A PNG that says it is huge."""
    header = b"IHDR" + pack(">IIBBBBB", BOMB, BOMB, 8, 2, 0, 0, 0)
    parts = (header, b"IDAT" + zlib.compress(b"\0"), b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        pack(">I", len(each) - 4) + each + pack(">I", zlib.crc32(each)) for each in parts
    )


def one(image: Any) -> dict[str, Any]:
    return talk(("<image>What?", "This."), images=[image])


def bad_files(folder: Path) -> list[str]:
    """Ten files that are no usable images, as records name them."""
    good = (folder / A).read_bytes()
    picture = PIL.Image.new("RGB", (64, 64), "red")
    picture.save(folder / "whole.jpg")
    contents = {
        "cut.png": good[: len(good) // 2],
        "cut.jpg": (folder / "whole.jpg").read_bytes()[:400],
        "flipped.png": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "text.png": b"not an image",
        "empty.png": b"",
        "bomb.png": bomb(),
        "page.png": b"<html><body>404</body></html>",
        "zeros.png": bytes(300),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.png").mkdir()
    return [*contents, "folder.png", "missing.png"]


def test_forty_bad_images_and_records_are_a_line_each_and_nothing_else_is_lost(
    tmp_path: Path, vision: Path, load_seen: LoadSeen
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(vision / "qwen2_5_vl-tiny" / "images", folder / "images")
    bad = [one(name) for name in bad_files(folder)]
    bad += [one(f"http://x/{number}.png") for number in range(5)]
    bad += [one({"bytes": None, "path": None}), one(""), one({"a": 1}), one(7), one("data:image/png;base64,AA==")]
    bad += [talk(("<image>" * number, "This."), images=[A]) for number in (0, 2, 3, 4, 5)]
    bad += [talk(("<image>", "This."), images=[A] * number) for number in (2, 3, 4, 5, 6)]
    bad += [talk((f"What <|image_pad|>{number}?", "This.")) for number in range(5)]
    bad += [talk(("<image>", "This."), images=[A], videos=["v.mp4"]) for _ in range(5)]
    assert len(bad) == 40

    good = [TEXT, one(A)]
    mixed = []
    for record in bad:
        mixed += [*good, record]
    dataset = load_seen(mixed, on_bad_record="skip")
    assert dataset.n_bad == 40
    assert len(dataset) == 80 and (dataset.image_tokens > 0).tolist() == [False, True] * 40
    assert dataset.skipped[-1] == "40 bad records skipped, 20 of them not shown"

    for begin in (0, 20):
        with pytest.raises(DataError) as caught:
            load_seen(bad[begin : begin + 20], name=f"bad-{begin}.json")
        lines = str(caught.value).split("\n")
        told = {number for line in lines for number in numbers_of(line)}
        assert told == set(range(1, 21))
        assert all(len(line) < 400 for line in lines)


def numbers_of(line: str) -> list[int]:
    """The numbers of the records that a line names."""
    _, _, rest = line.partition(": record")
    words = rest.removeprefix("s").partition(":")[0].replace(",", " ").split()
    if "to" in words:
        return list(range(int(words[0]), int(words[2]) + 1))
    return [int(word) for word in words]


def damaged(name: str, content: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)

    return change


def without_token(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))


def without_processor(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize("on_bad_record", ["stop", "skip"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_token, "config.json: image_token_id or image_token_index: missing; expected a model that sees"),
        (without_processor, "no processor of images"),
        (damaged("preprocessor_config.json", "{"), "preprocessor_config.json"),
    ],
)
def test_a_model_that_sees_no_images_is_one_line_however_many_records_have_some(
    change: Callable[[Path], None], line: str, on_bad_record: str, tmp_path: Path, vision: Path, load_seen: LoadSeen
) -> None:
    model = shutil.copytree(vision / "qwen2_5_vl-tiny", tmp_path / "model", copy_function=shutil.copyfile)
    model.chmod(0o755)
    change(model)
    assert len(load_seen([TEXT], tokenizer=model, on_bad_record=on_bad_record)) == 1
    with pytest.raises(DataError) as caught:
        load_seen([TEXT, one(A), one(A)], tokenizer=model, on_bad_record=on_bad_record)
    assert line in str(caught.value) and "records.json: record 2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_from_another_folder_is_told_from_where_paths_begin(load_seen: LoadSeen) -> None:
    with pytest.raises(DataError, match=r"record 1: image 1: /.*/else/a.png: no such file; expected a path from the f"):
        load_seen([one("else/a.png")])
