"""Kept arrays: found again whole and by the same maker, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from common.kept_arrays import BLOCK, KeptArray

VALUES = numpy.arange(12, dtype=numpy.float32).reshape(6, 2)
MAKER = ["pairs", {"weights": "7f", "dtype": "bf16"}]


def place(folder: Path, made_of: object = MAKER, dtype: str = "float32", shape: tuple[int, ...] = (6, 2)) -> KeptArray:
    return KeptArray(folder / "sums.bin", made_of, dtype, shape)


def changed(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)

    return apply


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def linked_to(target: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return apply


def swap_rows(content: bytearray) -> None:
    content[:8], content[8:16] = content[8:16], content[:8]


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the first number": changed(lambda content: content.__setitem__(0, content[0] ^ 1)),
    "a bit of the last number": changed(lambda content: content.__setitem__(47, content[47] ^ 128)),
    "a bit of the sum": changed(lambda content: content.__setitem__(-1, content[-1] ^ 4)),
    "a bit of the maker": changed(lambda content: content.__setitem__(50, content[50] ^ 1)),
    "rows in another order": changed(swap_rows),
    "zeros": changed(lambda content: content.__setitem__(slice(0, 48), bytes(48))),
    "cut": changed(lambda content: content.__delitem__(slice(30, None))),
    "emptied": changed(lambda content: content.clear()),
    "longer": changed(lambda content: content.extend(b"0")),
    "fifo": fifo,
    "device": linked_to("/dev/zero"),
    "folder": to_folder,
}


@pytest.mark.parametrize("shape", [(6, 2), (3, 2, 2), (0, 2)])
def test_an_array_is_found_as_it_was_written(shape: tuple[int, ...], tmp_path: Path) -> None:
    kept = place(tmp_path, shape=shape)
    assert kept.find() is None
    values = VALUES.reshape(-1)[: numpy.prod(shape)].reshape(shape)
    kept.write(values)
    found = kept.find()
    assert found is not None and found.dtype == numpy.float32
    numpy.testing.assert_array_equal(found, values)
    assert [path.name for path in tmp_path.iterdir()] == ["sums.bin"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_told_and_not_taken(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = place(tmp_path)
    kept.write(VALUES)
    DAMAGES[damage](kept.path)
    assert kept.find() is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"warning: {kept.path}: ignored: ")


@pytest.mark.parametrize(
    "other",
    [
        {"made_of": ["pairs", {"weights": "7e", "dtype": "bf16"}]},
        {"made_of": ["pairs"]},
        {"dtype": "int32"},
        {"shape": (3, 4)},
        {"shape": (5, 2)},
    ],
)
def test_one_of_another_maker_is_not_taken(other: dict[str, object], tmp_path: Path) -> None:
    place(tmp_path).write(VALUES)
    assert place(tmp_path, **other).find() is None  # type: ignore[arg-type]
    assert place(tmp_path).find() is not None


def test_pieces_are_written_in_any_order(tmp_path: Path) -> None:
    rows = BLOCK // 4 + 3
    kept, values = place(tmp_path, shape=(rows, 2)), numpy.random.default_rng(0).random((rows, 2), numpy.float32)
    with kept.writing() as file:
        for first in (rows // 2, 0):
            file.seek(8 * first)
            file.write(values[first : first + rows // 2 + 2].tobytes())
    numpy.testing.assert_array_equal(kept.find(), values)


def test_two_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    one, other = place(tmp_path), place(tmp_path)
    with one.writing() as first:
        first.write(VALUES[:3].tobytes())
        with other.writing() as second:
            second.write(VALUES.tobytes())
        first.write(VALUES[3:].tobytes())
    numpy.testing.assert_array_equal(one.find(), VALUES)


def test_a_failed_or_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    kept = place(tmp_path)
    with pytest.raises(OSError, match="No space"), kept.writing() as file:
        file.write(b"1")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
    (tmp_path / ".sums.bin.partial-0123abcd").write_bytes(b"1")
    (other := tmp_path / ".other.bin.partial-0123abcd").write_bytes(b"1")
    kept.sweep()
    assert list(tmp_path.iterdir()) == [other]
