"""Shows that a converted folder appears whole or not at all, and that nothing is replaced without being asked."""

from __future__ import annotations

import itertools
import os
import pkgutil
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from models.checkpoint import publish
from models.checkpoint.export import pp_to_hg
from models.checkpoint.publish import MARK, publish_folder
from tests.models.command_line import convert as run_command
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line, published

Convert = Callable[..., None]
COMMANDS = {"hg_to_pp": "huggingface", "pp_to_hg": "pipeline"}  # and the layout that each reads


@pytest.fixture(params=CONVERTERS)
def conversion(request: pytest.FixtureRequest, both_layouts: dict[str, Path]) -> tuple[Convert, Path]:
    """A converter with a folder that it reads."""
    return CONVERTERS[request.param], both_layouts[request.param]


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Let the system give this process at most so much of something (`resource.RLIMIT_*`)."""
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, limits)


def files_of_at_most(most: int) -> AbstractContextManager[None]:
    """Let the system refuse to write more than `most` bytes into any file, as a full disk does."""
    return limited(resource.RLIMIT_FSIZE, most)


def everything(folder: Path) -> set[Path]:
    """All paths below a folder, hidden ones too."""
    return set(folder.rglob("*"))


def killed_at(call: str, number: int, work: Callable[[], object]) -> int:
    """Do some work in a child that is killed when it calls something for the `number`th time; gives the signal."""
    child = os.fork()
    if child == 0:
        try:
            owner, _, name = call.rpartition(".")
            original, calls = pkgutil.resolve_name(call), itertools.count(1)

            def counted(*arguments: object, **options: object) -> object:
                if next(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            setattr(pkgutil.resolve_name(owner), name, counted)
            work()
        finally:
            os._exit(1)  # the child must never become a second test run
    return os.WTERMSIG(os.waitpid(child, 0)[1])


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


@pytest.fixture(params=[False, True], ids=["new", "overwrite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder to write: one that does not exist, or one with something in it that may be replaced."""
    folder = tmp_path / "models" / "target"
    return published(folder, old="still good") if request.param else folder


def test_damage_in_the_last_layer_is_found_before_anything_is_made(
    both_layouts: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    layers = copy_of(both_layouts["pipeline"], tmp_path / "layers")
    last = layers / "layer_03-model_states.pt"
    state = torch.load(last, weights_only=True)
    torch.save(state | {"norm.weight": torch.ones(3)}, last)
    before = everything(tmp_path)
    assert str(last) in error_line(lambda: pp_to_hg(layers, target, overwrite=True))
    assert everything(tmp_path) == before


def shorten_last_shard(folder: Path) -> Path:
    path = folder / "model-00005-of-00005.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return path


def remove_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.unlink()
    return path


MIDWAY: list[tuple[str, Callable[[Path], Path]]] = [
    ("huggingface", shorten_last_shard),  # a shard is opened when its first layer is read
    ("pipeline", remove_tokenizer),  # what the manifest lists is copied after the weights
]


@pytest.mark.parametrize(("layout", "damage"), MIDWAY, ids=["huggingface", "pipeline"])
def test_failure_in_the_middle_of_writing_leaves_nothing(
    both_layouts: dict[str, Path], layout: str, damage: Callable[[Path], Path], target: Path, tmp_path: Path
) -> None:
    source = copy_of(both_layouts[layout], tmp_path / "source")
    damaged = damage(source)
    before = everything(tmp_path)
    assert str(damaged) in error_line(lambda: CONVERTERS[layout](source, target, overwrite=True))
    assert everything(tmp_path) - before <= {tmp_path / "models"}
    assert everything(tmp_path) >= before


@pytest.mark.parametrize("most", [0, 5_000, 100_000])
def test_full_disk_is_told_in_one_line_and_leaves_nothing(
    conversion: tuple[Convert, Path], most: int, target: Path, tmp_path: Path
) -> None:
    convert, folder = conversion
    before = everything(tmp_path)
    with files_of_at_most(most):
        told = error_line(lambda: convert(folder, target, overwrite=True))
    assert str(target) in told
    assert "nothing was changed" in told
    assert everything(tmp_path) - before <= {tmp_path / "models"}
    assert everything(tmp_path) >= before


WRITE = "the converter's own way of writing"
WRITERS = {"hg_to_pp": "models.checkpoint.layer_files.torch.save", "pp_to_hg": "models.checkpoint.parallel.os.pwrite"}
# What the conversion does when the process is killed, and for the how-manieth time.
MOMENTS = {
    "first-write": (WRITE, 1),
    "third-write": (WRITE, 3),
    "side-files": ("models.checkpoint.convert.shutil.copyfile", 2),
    "reading-back": ("models.checkpoint.verify.sync", 2),
    "publishing": ("pathlib.Path.rename", 1),
    "between-old-and-new": ("pathlib.Path.rename", 4),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(
    both_layouts: dict[str, Path], command: str, moment: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if moment == "between-old-and-new":
        published(target, old="still good")
    words = (command, both_layouts[COMMANDS[command]], target, "--overwrite", "--verify")
    place, time = MOMENTS[moment]
    assert killed_at(WRITERS[command] if place == WRITE else place, time, lambda: run_command(*words)) == signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert left
    assert all(path.name.startswith(".target.partial-") for path in left)
    assert run_command(*words) == (0, [])
    assert list(tmp_path.iterdir()) == [target]
    assert "config.json" in contents(target)
    assert "old.txt" not in contents(target)


@pytest.mark.parametrize("rename", [2, 4], ids=["trying", "replacing"])
def test_folder_moved_aside_by_a_killed_process_comes_back(rename: int, tmp_path: Path) -> None:
    target = published(tmp_path / "target", precious="mine")
    before = contents(tmp_path)

    def publish() -> None:
        with publish_folder(target, overwrite=True) as folder:
            (folder / "fresh.txt").write_text("new")

    assert killed_at("pathlib.Path.rename", rename, publish) == signal.SIGKILL
    assert not target.exists()
    with pytest.raises(KeyError), publish_folder(target, overwrite=True):
        raise KeyError
    assert contents(tmp_path) == before
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kernel", ["this", "another"])
def test_what_another_process_is_writing_stays(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number and its host are called: a writer that lives has a lock, one elsewhere was here today."""
    left = []
    child_is_there, child_may_end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if kernel == "another":
                monkeypatch.setattr(publish, "kernel_name", lambda: "another")
            with publish_folder(tmp_path / "target") as folder:
                (folder / "file.txt").write_text("theirs")
                os.write(child_is_there[1], b"x")
                os.read(child_may_end[0], 1)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.read(child_is_there[0], 1)
    if kernel == "another":  # its lock is not seen here
        os.write(child_may_end[1], b"x")
        os.waitpid(child, 0)
    with pytest.raises(KeyError), publish_folder(tmp_path / "target"):
        left = list(tmp_path.iterdir())
        raise KeyError
    assert len(left) == 2
    assert list(contents(tmp_path).values()) == [b"theirs"]
    if kernel == "another":
        days_ago = time.time() - 2 * 24 * 3600
        for path in (*tmp_path.rglob("*"), *tmp_path.iterdir()):
            os.utime(path, (days_ago, days_ago))
    else:
        os.write(child_may_end[1], b"x")
        os.waitpid(child, 0)
    with publish_folder(tmp_path / "target") as folder:
        (folder / "file.txt").write_text("mine")
    assert contents(tmp_path) == {"target/file.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [tmp_path / "target"]


@pytest.mark.parametrize("at", ["os.rename", "os.rmdir"], ids=["beginning", "removing"])
def test_hidden_folder_whose_writer_was_killed_at_its_mark_is_empty_and_goes(at: str, tmp_path: Path) -> None:
    def write() -> None:
        with publish_folder(tmp_path / "target") as folder:
            (folder / "file.txt").write_text("new")
            if at == "os.rmdir":
                raise KeyError

    times = 1 if at == "os.rename" else 2  # of the new folder, then of the hidden one
    assert killed_at(at, times, write) == signal.SIGKILL
    (hidden,) = tmp_path.iterdir()
    assert contents(hidden).keys() <= {publish.UNLOCKED}
    assert published(tmp_path / "target").exists()
    assert hidden.exists(), "its writer may live and be about to mark it"
    minutes_ago = time.time() - 120
    os.utime(hidden, (minutes_ago, minutes_ago))
    with publish_folder(tmp_path / "target", overwrite=True) as folder:
        (folder / "file.txt").write_text("mine")
    assert list(tmp_path.iterdir()) == [tmp_path / "target"]


def test_hidden_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    hidden = tmp_path / ".target.partial-host-1"
    hidden.mkdir()
    (hidden / "mine.txt").write_text("mine")
    days_ago = time.time() - 2 * 24 * 3600
    os.utime(hidden, (days_ago, days_ago))
    published(tmp_path / "target")
    assert contents(hidden) == {"mine.txt": b"mine"}


def test_everything_is_on_the_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders and the mark before the rename, and the parent's list of names after it."""
    synced: list[tuple[str, bool]] = []
    fsync, target = os.fsync, tmp_path / "target"

    def watched(descriptor: int) -> None:
        place = os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)
        synced.append((re.sub(r"^\.target\.partial-\w+/", "", place), target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with publish_folder(target) as folder:
        (folder / "below").mkdir()
        for name in ("one.txt", "below/two.txt"):
            (folder / name).write_text(name)
    before = {"new/one.txt", "new/below/two.txt", "new/below", f"new/{MARK}", "new"}
    assert {place for place, published in synced if not published} >= before
    assert synced[-1] == (".", True)
