"""Shows that a converted folder appears whole or not at all, also when its writer fails or is killed."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from models.checkpoint import publish
from models.checkpoint.publish import MARK, publish_folder
from tests.accidents import killed_at, limited
from tests.models.command_line import convert as run_command
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line, published

Convert = Callable[..., None]
COMMANDS = {"hg_to_pp": "huggingface", "pp_to_hg": "pipeline"}  # and the layout that each reads


def assert_leaves_nothing(work: Callable[[], object], folder: Path) -> str:
    """Check that refused work leaves a folder as it was, but for parents of its target; return the error."""
    before = set(folder.rglob("*"))
    line = error_line(work)
    after = set(folder.rglob("*"))
    assert before <= after <= before | {folder / "models"}
    return line


@pytest.fixture(params=[False, True], ids=["new", "overwrite"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder to write: one that does not exist, or one with something in it that may be replaced."""
    folder = tmp_path / "models" / "target"
    return published(folder, old="still good") if request.param else folder


# What is found before, while and after weights are written: headers are read first, a shard is opened when its first
# layer is read, and side files that the manifest lists are copied last.
DAMAGES = [
    ("pipeline", "layer_03-model_states.pt"),
    ("huggingface", "model-00005-of-00005.safetensors"),
    ("pipeline", "tokenizer.json"),
]


@pytest.mark.parametrize(("layout", "file"), DAMAGES)
def test_damage_leaves_nothing_whenever_it_is_found(
    both_layouts: dict[str, Path], layout: str, file: str, target: Path, tmp_path: Path
) -> None:
    source = copy_of(both_layouts[layout], tmp_path / "source")
    os.truncate(source / file, (source / file).stat().st_size - 1)
    if file == "tokenizer.json":
        (source / file).unlink()
    line = assert_leaves_nothing(lambda: CONVERTERS[layout](source, target, overwrite=True), tmp_path)
    assert str(source / file) in line
    assert (tmp_path / "models").exists() != (file.startswith("layer") and not target.exists())


@pytest.mark.parametrize("most", [0, 5_000, 100_000])
def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing(
    conversion: tuple[Convert, Path], most: int, target: Path, tmp_path: Path
) -> None:
    convert, folder = conversion
    with limited(resource.RLIMIT_FSIZE, most):  # the system refuses larger files, as a full disk does
        line = assert_leaves_nothing(lambda: convert(folder, target, overwrite=True), tmp_path)
    assert str(target) in line and "nothing was changed" in line


WRITE = "the converter's own way of writing"
FILES = "models.checkpoint.tensor_files"
WRITERS = {"hg_to_pp": f"{FILES}.torch.save", "pp_to_hg": f"{FILES}.os.pwrite"}
# What the conversion does when the process is killed, and for the how-manieth time.
MOMENTS = {
    "first-write": (WRITE, 1),
    "third-write": (WRITE, 3),
    "side-files": ("models.checkpoint.side_files.shutil.copyfile", 2),
    "reading-back": ("models.checkpoint.source.sync", 2),
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
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".target.partial-")
    assert run_command(*words) == (0, [])
    assert list(tmp_path.iterdir()) == [target]
    assert "config.json" in contents(target) and "old.txt" not in contents(target)


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
    assert contents(tmp_path) == before and list(tmp_path.iterdir()) == [target]


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


@pytest.mark.parametrize(("at", "times"), [("fcntl.flock", 1), ("json.dump", 1), ("os.rmdir", 2)])
def test_hidden_folder_whose_writer_was_killed_at_its_mark_is_empty_and_goes(
    at: str, times: int, tmp_path: Path
) -> None:
    def write() -> None:
        with publish_folder(tmp_path / "target") as folder:
            (folder / "file.txt").write_text("new")
            if at == "os.rmdir":  # of the new folder, then of the hidden one
                raise KeyError

    assert killed_at(at, times, write) == signal.SIGKILL
    (hidden,) = tmp_path.iterdir()
    assert {path.name: path.read_text() for path in hidden.iterdir()} in ({}, {MARK: ""})
    assert published(tmp_path / "target").exists()
    assert hidden.exists(), "its writer may live and be about to mark it"
    minutes_ago = time.time() - 120
    for path in (*hidden.iterdir(), hidden):
        os.utime(path, (minutes_ago, minutes_ago))
    with publish_folder(tmp_path / "target", overwrite=True) as folder:
        (folder / "file.txt").write_text("mine")
    assert not hidden.exists()


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
