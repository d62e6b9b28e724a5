"""Shows that a converted folder appears whole or not at all, and that nothing is replaced without being asked."""

from __future__ import annotations

import os
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
from tests.models.helpers import CONVERTERS, contents, copy_of, error_line

Convert = Callable[..., None]


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_at_the_last_layer_leaves_nothing(
    both_layouts: dict[str, Path], overwrite: bool, tmp_path: Path
) -> None:
    layers = copy_of(both_layouts["pipeline"], tmp_path / "layers")
    last = layers / "layer_03-model_states.pt"
    state = torch.load(last, weights_only=True)
    torch.save(state | {"norm.weight": torch.ones(3)}, last)
    target = tmp_path / "models" / "target"
    if overwrite:
        target.mkdir(parents=True)
        (target / "old.txt").write_text("still good")
    before = contents(tmp_path)
    assert str(last) in error_line(lambda: pp_to_hg(layers, target, overwrite))
    assert contents(tmp_path) == before
    assert [path.name for path in (tmp_path / "models").iterdir()] == (["target"] if overwrite else [])


def test_full_disk_is_told_in_one_line_and_leaves_nothing(conversion: tuple[Convert, Path], tmp_path: Path) -> None:
    convert, folder = conversion
    with files_of_at_most(100_000):
        told = error_line(lambda: convert(folder, tmp_path / "target"))
    assert str(tmp_path / "target") in told
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_leaves_no_model_and_the_next_one_cleans_up(
    conversion: tuple[Convert, Path], tmp_path: Path
) -> None:
    convert, folder = conversion
    target = tmp_path / "target"
    child = os.fork()
    if child == 0:
        try:
            with publish_folder(target) as partial:
                (partial / "config.json").write_text("{}")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)  # the child must never become a second test run
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".")
    convert(folder, target)
    assert list(tmp_path.iterdir()) == [target]


def test_folder_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    nobody = 2**22 + 1  # above the largest process number that Linux gives
    aside = tmp_path / f".target.partial-{socket.gethostname()}-{nobody}-old"
    aside.mkdir()
    (aside / "precious.txt").write_text("mine")
    with pytest.raises(KeyError), publish_folder(tmp_path / "target", overwrite=True):
        raise KeyError
    assert contents(tmp_path) == {"target/precious.txt": b"mine"}
