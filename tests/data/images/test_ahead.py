"""Images decoded by other processes: the same bits, errors as lines, and nothing that hangs or stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from data.errors import DataError
from data.images import ahead
from data.images.ahead import Decoders, PictureSettings
from tests import golden_vision as golden
from tests.conftest import ROOT
from tests.golden_vision import needs_golden

INPUTS = {"qwen2_5_vl": ("pixel_values", "image_grid_thw"), "mistral3": ("pixel_values", "image_sizes")}
LISTS = [["images/a.png"], ["images/b.png", "images/c.png"], ["images/c.png"]]

pytestmark = needs_golden


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders]:
    monkeypatch.setattr(ahead, "MOST", 1)
    yield Decoders(PictureSettings(golden.folder("qwen2_5_vl")), INPUTS["qwen2_5_vl"])


def process_of(decoders: Decoders) -> psutil.Process:
    (worker,) = decoders._workers
    return psutil.Process(worker._process.pid)


@pytest.mark.parametrize("cores", [1, 16])
@pytest.mark.parametrize("name", INPUTS)
def test_they_give_the_same_bits_in_any_order(name: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    decoders = Decoders(PictureSettings(golden.folder(name)), INPUTS[name])
    assert len(decoders._workers) == max(cores // 8, 1)
    lists = [golden.looked_at(name, paths) for paths in LISTS]
    tickets = decoders.ask(lists) + decoders.ask(lists)
    unwanted, later = tickets[0], tickets[4]
    decoders.drop([unwanted, later])
    for ticket in [tickets[2], tickets[1], tickets[5], tickets[3]]:
        made = decoders.take(ticket)
        expected = golden.pictures(name).tensors(lists[ticket % 3])
        assert tuple(made) == INPUTS[name]
        for key, tensor in made.items():
            assert tensor.dtype == expected[key].dtype
            assert torch.equal(tensor, expected[key])
        made["pixel_values"].add_(1)  # it is the receiver's own
    assert not decoders._answers
    assert decoders._unwanted <= {unwanted, later}


def test_limits_are_kept() -> None:
    settings = PictureSettings(golden.folder("qwen2_5_vl"), None, 800)
    decoders = Decoders(settings, INPUTS["qwen2_5_vl"])
    (ticket,) = decoders.ask([golden.looked_at("qwen2_5_vl", LISTS[1])])
    assert int(decoders.take(ticket)["image_grid_thw"].prod(dim=1).max()) * 49 <= 800


def test_an_image_that_cannot_be_read_is_an_error_of_its_own_list(decoders: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    shutil.copy(golden.folder("qwen2_5_vl") / "images/a.png", path)
    image = golden.pictures("qwen2_5_vl").look(path, tmp_path)
    path.write_bytes(b"now it is text")
    good = golden.looked_at("qwen2_5_vl", LISTS[1])
    first, bad, last = decoders.ask([good, [image], good])
    with pytest.raises(DataError) as error:
        decoders.take(bad)
    assert str(error.value) == f"{path}: this image was changed since the records were read; expected the same file"
    assert torch.equal(decoders.take(first)["pixel_values"], decoders.take(last)["pixel_values"])


def test_a_folder_that_cannot_be_used_is_an_error_and_no_hang(tmp_path: Path) -> None:
    decoders = Decoders(PictureSettings(tmp_path), ("pixel_values",))
    (ticket,) = decoders.ask([golden.looked_at("llava", LISTS[0])])
    with pytest.raises(DataError, match="no processor of images"):
        decoders.take(ticket)


@pytest.mark.parametrize("when", ["before it is asked", "after it was asked"])
def test_one_that_was_killed_is_an_error_and_no_hang(decoders: Decoders, when: str) -> None:
    lists = [golden.looked_at("qwen2_5_vl", paths) for paths in LISTS]
    if when == "after it was asked":
        decoders.take(decoders.ask(lists)[0])
    worker = process_of(decoders)
    worker.send_signal(signal.SIGSTOP)  # so that it has not answered yet
    tickets = decoders.ask(lists) if when == "after it was asked" else []
    worker.kill()
    tickets = tickets or decoders.ask(lists)
    for ticket in tickets:
        with pytest.raises(DataError) as error:
            decoders.take(ticket)
        line = "the process that decodes the images was ended by SIGKILL; is there enough memory?"
        assert str(error.value) == line


def test_signals_for_the_run_do_not_end_it(decoders: Decoders) -> None:
    """Ctrl-C and a scheduler's signals go to whole groups, and the run finishes its step."""
    worker = process_of(decoders)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        worker.send_signal(number)
    lists = [golden.looked_at("qwen2_5_vl", paths) for paths in LISTS]
    tickets = decoders.ask(lists)
    worker.send_signal(signal.SIGINT)
    assert all(len(decoders.take(ticket)) == 2 for ticket in tickets)


def test_they_end_with_what_asks_them(decoders: Decoders) -> None:
    other = Decoders(PictureSettings(golden.folder("llava")), ("pixel_values",))
    gone, worker = process_of(other), process_of(decoders)
    del other
    assert not gone.is_running()
    assert worker.is_running()


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit()", "raise KeyboardInterrupt"])
def test_they_end_with_the_process_however_it_ends(end: str) -> None:
    code = (
        "import os, sys, psutil; from pathlib import Path\n"
        "from data.images.ahead import Decoders, PictureSettings\n"
        "decoders = Decoders(PictureSettings(Path(sys.argv[1])), ('pixel_values',))\n"
        "print(*(each.pid for each in psutil.Process().children()), flush=True)\n"
        f"{end}\n"
    )
    words = [sys.executable, "-c", code, str(golden.folder("llava"))]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    (pid,) = map(int, ended.stdout.split())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_more_answers_than_a_socket_holds_do_not_block(decoders: Decoders) -> None:
    lists = [golden.looked_at("qwen2_5_vl", LISTS[0])] * 600
    tickets = decoders.ask(lists)
    time.sleep(1)
    following = decoders.ask(lists)  # while nobody has taken any
    expected = golden.pictures("qwen2_5_vl").tensors(lists[0])["pixel_values"]
    for ticket in tickets + following:
        assert torch.equal(decoders.take(ticket)["pixel_values"], expected)
    assert len(os.listdir("/proc/self/fd")) < 200
