"""Shows where a converted folder may appear, and that nothing is replaced without being asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.checkpoint.publish import MARK, publish_folder
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line, published

Convert = Callable[..., None]


def test_existing_folder_is_refused_and_left_alone(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, folder = conversion
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    told = error_line(lambda: convert(folder, target))
    assert str(target) in told
    assert "--overwrite" in told
    assert contents(tmp_path) == {"target/precious.txt": b"mine"}


def test_overwrite_replaces_the_whole_folder(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, folder = conversion
    convert(folder, tmp_path / "fresh")
    target = published(tmp_path / "target", stale="old")
    convert(folder, target, overwrite=True)
    assert contents(target) == contents(tmp_path / "fresh")
    convert(folder, target, overwrite=True)
    assert contents(target) == contents(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "target"]


def no_mark(target: Path) -> None:
    (target / MARK).unlink()


def mark_of_nonsense(target: Path) -> None:
    (target / MARK).write_text("[]")


def file_added(target: Path) -> None:
    (target / "mine.txt").write_text("mine")


def hidden_file_added(target: Path) -> None:
    (target / ".mine").write_text("mine")


def folder_added(target: Path) -> None:
    (target / "mine").mkdir()


def link_added(target: Path) -> None:
    (target / "mine").symlink_to(target.parent)


def file_edited(target: Path) -> None:
    (target / "stale.txt").write_text("new")


def file_replaced_by_a_link(target: Path) -> None:
    (target / "stale.txt").rename(target.parent / "mine.txt")
    (target / "stale.txt").symlink_to(target.parent / "mine.txt")


USERS = (
    no_mark,
    mark_of_nonsense,
    file_added,
    hidden_file_added,
    folder_added,
    link_added,
    file_edited,
    file_replaced_by_a_link,
)


@pytest.mark.parametrize("made", USERS)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_a_user_has_in_a_folder_is_never_removed(made: Callable[[Path], None], when: str, tmp_path: Path) -> None:
    target = published(tmp_path / "target", stale="old")
    if when == "before":
        made(target)
        before = contents(tmp_path)
        told = error_line(lambda: publish_folder(target, overwrite=True).__enter__())
    else:

        def publish() -> None:
            with publish_folder(target, overwrite=True) as folder:
                (folder / "fresh.txt").write_text("new")
                made(target)
                before.update(contents(target))

        before = {}
        told = error_line(publish)
        before = {f"target/{name}": content for name, content in before.items()}
        before |= {name: content for name, content in contents(tmp_path).items() if "/" not in name}
    assert str(target) in told
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("overwrite", [False, True])
def test_target_that_somebody_makes_while_it_is_written_stays(overwrite: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"

    def publish() -> None:
        with publish_folder(target, overwrite=overwrite) as folder:
            (folder / "fresh.txt").write_text("new")
            target.mkdir()
            (target / "mine.txt").write_text("mine")

    assert str(target) in error_line(publish)
    assert contents(tmp_path) == {"target/mine.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [target]


def test_target_filled_in_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last look, when only the rename itself can tell."""
    target = tmp_path / "target"
    rename = Path.rename

    def rename_late(path: Path, place: Path) -> Path:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        return rename(path, place)

    def publish() -> None:
        with publish_folder(target) as folder:
            (folder / "fresh.txt").write_text("new")
            monkeypatch.setattr(Path, "rename", rename_late)

    assert str(target) in error_line(publish)
    assert contents(tmp_path) == {"target/mine.txt": b"mine"}


@pytest.mark.parametrize("layout", CONVERTERS)
@pytest.mark.parametrize("target", [".", "..", "below", "around/link", "link/below"])
def test_input_is_not_replaced_and_nothing_in_it_or_around_it(
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


def test_folder_that_the_input_is_linked_to_is_not_replaced(both_layouts: dict[str, Path], tmp_path: Path) -> None:
    with publish_folder(tmp_path / "weights") as folder:
        for path in both_layouts["huggingface"].glob("*.safetensors"):
            shutil.copy(path, folder)
    source = copy_of(both_layouts["huggingface"], tmp_path / "source")
    for path in source.glob("*.safetensors"):
        path.unlink()
        path.symlink_to(tmp_path / "weights" / path.name)
    before = contents(tmp_path)
    told = error_line(lambda: CONVERTERS["huggingface"](source, tmp_path / "weights", overwrite=True))
    assert "is not replaced" in told
    assert contents(tmp_path) == before


@pytest.mark.parametrize("pointing_to", ["empty", "missing", "published"])
def test_link_as_a_target_stays_a_link(conversion: tuple[Convert, Path], pointing_to: str, tmp_path: Path) -> None:
    convert, folder = conversion
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    if pointing_to == "empty":
        real.mkdir()
    if pointing_to == "published":
        published(real, stale="old")
    convert(folder, link, overwrite=pointing_to == "published")
    assert link.is_symlink()
    assert "config.json" in contents(real)
    assert "stale.txt" not in contents(real)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent != real) == ["disk", "link", "real"]


@pytest.mark.parametrize("what", ["tmpfs", "bind"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_mount_point_is_refused_before_any_work(what: str, overwrite: bool, tmp_path: Path) -> None:
    target, other = tmp_path / "a target", tmp_path / "other"
    target.mkdir()
    other.mkdir()
    words = ["-t", "tmpfs", "none"] if what == "tmpfs" else ["--bind", str(other)]
    if subprocess.run(["mount", *words, str(target)], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount here")
    try:
        told = error_line(lambda: publish_folder(target, overwrite).__enter__())
        with publish_folder(target / "below") as folder:
            (folder / "file.txt").write_text("new")
        assert contents(target) == {"below/file.txt": b"new"}
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert "mount point" in told


def test_empty_folder_is_filled_and_parents_are_made(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, folder = conversion
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    convert(folder, tmp_path / "a" / "b" / "c")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b" / "c")


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_in_the_place_of_the_target_is_refused_and_kept(
    conversion: tuple[Convert, Path], overwrite: bool, tmp_path: Path
) -> None:
    convert, folder = conversion
    target = tmp_path / "target"
    target.write_text("mine")
    told = error_line(lambda: convert(folder, target, overwrite=overwrite))
    assert str(target) in told
    assert contents(tmp_path) == {"target": b"mine"}


def test_target_below_a_file_is_refused(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, folder = conversion
    (tmp_path / "file").write_text("mine")
    told = error_line(lambda: convert(folder, tmp_path / "file" / "target"))
    assert str(tmp_path / "file" / "target") in told
    assert contents(tmp_path) == {"file": b"mine"}
