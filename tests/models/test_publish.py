"""Shows that a converted folder appears whole or not at all, and that nothing is replaced without being asked."""

from __future__ import annotations

import itertools
import os
import pkgutil
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from models.checkpoint.export import pp_to_hg
from models.checkpoint.publish import publish_folder
from tests.models.command_line import convert as run_command
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line

Convert = Callable[..., None]
COMMANDS = {"hg_to_pp": "huggingface", "pp_to_hg": "pipeline"}  # and the layout that each reads


@pytest.fixture(params=CONVERTERS)
def conversion(request: pytest.FixtureRequest, both_layouts: dict[str, Path]) -> tuple[Convert, Path]:
    """A converter with a folder that it reads."""
    return CONVERTERS[request.param], both_layouts[request.param]


@contextmanager
def files_of_at_most(most: int) -> Iterator[None]:
    """Let the system refuse to write more than `most` bytes into any file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
    target = tmp_path / "target"
    target.mkdir()
    (target / "old.safetensors").write_text("stale")
    convert(folder, target, overwrite=True)
    assert contents(target) == contents(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "target"]


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
    if request.param:
        folder.mkdir(parents=True)
        (folder / "old.txt").write_text("still good")
    return folder


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
    "reading-back": ("models.checkpoint.verify.os.fsync", 2),
    "publishing": ("pathlib.Path.rename", 1),
    "between-old-and-new": ("pathlib.Path.rename", 2),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(
    both_layouts: dict[str, Path], command: str, moment: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if moment == "between-old-and-new":
        target.mkdir()
        (target / "old.txt").write_text("still good")
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


def test_folder_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    nobody = 2**22 + 1  # above the largest process number that Linux gives
    aside = tmp_path / f".target.partial-{socket.gethostname()}-{nobody}-old"
    aside.mkdir()
    (aside / "precious.txt").write_text("mine")
    with pytest.raises(KeyError), publish_folder(tmp_path / "target", overwrite=True):
        raise KeyError
    assert contents(tmp_path) == {"target/precious.txt": b"mine"}
