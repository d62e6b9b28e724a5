"""Shows where a converted folder may appear, and that nothing of a user's is replaced or removed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.checkpoint.publish import MARK, publish_folder
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line, published


def publish(target: Path, overwrite: bool = False, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Write a folder with one file; something may happen before it appears."""
    with publish_folder(target, overwrite) as folder:
        (folder / "fresh.txt").write_text("new")
        meanwhile()


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["folder", "file", "file/below", "made meanwhile"])
def test_what_is_in_the_place_of_a_target_is_refused_and_kept(place: str, overwrite: bool, tmp_path: Path) -> None:
    target, mine = tmp_path / place, tmp_path / "folder" / "mine.txt"
    mine.parent.mkdir()
    for path in (mine, tmp_path / "file"):
        path.write_text("mine")
    before = names_below(tmp_path)
    if place == "made meanwhile":
        line = error_line(lambda: publish(target, overwrite, lambda: copy_of(mine.parent, target)))
        assert contents(target) == {"mine.txt": b"mine"}
        shutil.rmtree(target)
    else:
        line = error_line(lambda: publish(target, overwrite))
    assert str(target) in line
    assert ("file" not in place and not overwrite) == ("--overwrite" in line)
    assert names_below(tmp_path) == before and set(contents(tmp_path).values()) == {b"mine"}


def test_a_target_filled_in_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last look, when only the rename itself can tell."""
    target, rename = tmp_path / "target", Path.rename

    def rename_late(path: Path, place: Path) -> Path:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        return rename(path, place)

    late = monkeypatch.setattr
    assert str(target) in error_line(lambda: publish(target, meanwhile=lambda: late(Path, "rename", rename_late)))
    assert contents(tmp_path) == {"target/mine.txt": b"mine"}


def replace_by_a_link(target: Path) -> None:
    (target / "stale.txt").rename(target.parent / "mine.txt")
    (target / "stale.txt").symlink_to(target.parent / "mine.txt")


USERS: dict[str, Callable[[Path], object]] = {
    "no mark": lambda target: (target / MARK).unlink(),
    "a mark of nonsense": lambda target: (target / MARK).write_text("[]"),
    "a file": lambda target: (target / "mine.txt").write_text("mine"),
    "a hidden file": lambda target: (target / ".mine").write_text("mine"),
    "a folder": lambda target: (target / "mine").mkdir(),
    "a link": lambda target: (target / "mine").symlink_to(target.parent),
    "a file edited": lambda target: (target / "stale.txt").write_text("new"),
    "a file replaced by a link": replace_by_a_link,
}


@pytest.mark.parametrize("what", USERS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_a_user_has_in_a_folder_is_never_removed(what: str, when: str, tmp_path: Path) -> None:
    target, twin = (published(tmp_path / name / "target", stale="old") for name in ("one", "twin"))
    USERS[what](twin)
    if when == "before":
        USERS[what](target)
        line = error_line(lambda: publish(target, overwrite=True))
    else:
        line = error_line(lambda: publish(target, True, lambda: USERS[what](target)))
    assert str(target) in line
    assert names_below(target.parent) == names_below(twin.parent)
    assert contents(target.parent) == contents(twin.parent)


@pytest.mark.parametrize("layout", CONVERTERS)
@pytest.mark.parametrize("target", [".", "..", "below", "around/link", "link/below"])
def test_the_input_is_not_replaced_nor_anything_in_it_or_around_it(
    layout: str, target: str, both_layouts: dict[str, Path], tmp_path: Path
) -> None:
    """All of it made to look as Pipetune's own, which such folders often are."""
    outer = tmp_path / "outer"
    with publish_folder(outer) as folder:
        copy_of(both_layouts[layout], folder / "source")
        shutil.rmtree(folder / "source" / "below", ignore_errors=True)
        published(folder / "source" / "below", stale="old")
    source = outer / "source"
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "link").symlink_to(outer)
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path)
    place = tmp_path / target if "link" in target else source / target
    assert "is not replaced" in error_line(lambda: CONVERTERS[layout](source, place, overwrite=True))
    assert contents(tmp_path) == before


def test_a_folder_that_the_input_is_linked_to_is_not_replaced(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    source = copy_of(both_layouts["huggingface"], tmp_path / "source")
    with publish_folder(tmp_path / "weights") as folder:
        for path in source.glob("*.safetensors"):
            path.rename(folder / path.name)
            path.symlink_to(tmp_path / "weights" / path.name)
    before = contents(tmp_path)
    line = error_line(lambda: CONVERTERS["huggingface"](source, tmp_path / "weights", overwrite=True))
    assert "is not replaced" in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("pointing_to", ["empty", "missing", "published"])
def test_a_link_as_a_target_stays_a_link(pointing_to: str, tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    if pointing_to == "empty":
        real.mkdir()
    if pointing_to == "published":
        published(real, stale="old")
    publish(link, overwrite=pointing_to == "published")
    assert link.is_symlink()
    assert contents(real) == {"fresh.txt": b"new"}
    assert [name for name in names_below(tmp_path) if "real/" not in name] == ["disk", "disk/real", "link"]


@pytest.mark.parametrize("what", ["tmpfs", "bind"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mount_point_is_refused_before_any_work(what: str, overwrite: bool, tmp_path: Path) -> None:
    target, other = tmp_path / "a target", tmp_path / "other"
    target.mkdir()
    other.mkdir()
    words = ["-t", "tmpfs", "none"] if what == "tmpfs" else ["--bind", str(other)]
    if subprocess.run(["mount", *words, str(target)], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount here")
    try:
        line = error_line(lambda: publish_folder(target, overwrite).__enter__())
        publish(target / "below")
        assert contents(target) == {"below/fresh.txt": b"new"}
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert "mount point" in line


def test_empty_and_written_folders_are_replaced_whole_and_parents_are_made(
    conversion: tuple[Callable[..., None], Path], tmp_path: Path
) -> None:
    convert, folder = conversion
    (tmp_path / "empty").mkdir()
    published(tmp_path / "old", stale="old")
    convert(folder, tmp_path / "empty")
    expected = contents(tmp_path / "empty")
    convert(folder, tmp_path / "a" / "b")
    for _ in range(2):
        convert(folder, tmp_path / "old", overwrite=True)
        assert contents(tmp_path / "old") == contents(tmp_path / "a" / "b") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "old"]
