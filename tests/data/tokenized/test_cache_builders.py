"""Who builds a cache: one of all that want it, by workers; the others wait, and nobody waits for somebody killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from common.lease import Lease
from data.tokenized import store
from data.tokenized.dataset import Dataset
from data.tokenized.sample_file import SAMPLES
from tests.conftest import ROOT
from tests.data.caches import LIMIT, Load, caches, left_over, plain_recipe, records, write
from tests.launching import IDLE, Launch, eventually

WORKER = ROOT / "tests" / "workers" / "caching.py"


def printed(launch: Launch, text: str) -> bool:
    return launch.stdout == text


def start(folder: Path, tokenizer: Path, data: Path, count: int) -> list[Launch]:
    """Processes that want the same samples at the same moment."""
    job = {
        "data": str(data),
        "tokenizer": str(tokenizer),
        "limit": LIMIT,
        "cache": str(folder / "cache"),
        "go": str(folder / "go"),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    launches = [Launch(sys.executable, WORKER, folder / "job.json") for _ in range(count)]
    for launch in launches:
        launch.until(partial(printed, launch, "ready\n"))
    (folder / "go").touch()
    return launches


def outcome(launch: Launch) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(launch.end().stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_processes_that_start_cold_at_once_make_one_build(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = write(tmp_path / "a.jsonl", records(3000))
    results = [outcome(process) for process in start(tmp_path, tokenizer_folder, data, count=3)]
    assert sum(result["built"] for result in results) == 1
    assert len({result["fingerprint"] for result in results}) == 1
    assert len(caches(tmp_path)) == 1
    assert not left_over(tmp_path)
    waited = [result["told"] for result in results if not result["built"]]
    assert all("waiting for it" in told and "data: process" in told for told in waited)


@pytest.mark.slow
def test_those_who_waited_fail_with_the_builders_words(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = write(tmp_path / "a.jsonl", [*records(3000), {"type": "instruct", "instruct": 7, "output": ""}])
    results = [outcome(process) for process in start(tmp_path, tokenizer_folder, data, count=3)]
    assert sum(result["built"] for result in results) == 1
    texts = {result["error"] for result in results}
    assert len(texts) == 1
    assert f"{data}: record 3001: " in texts.pop()
    assert not caches(tmp_path)


def wait_for_build(folder: Path, launch: Launch) -> Path:
    """The samples' file of a build that is under way."""
    builds = folder / "cache" / "builds"
    launch.until(lambda: list(builds.glob(f"*/{SAMPLES}")))
    (found,) = builds.glob(f"*/{SAMPLES}")
    return found


@pytest.mark.parametrize("content", ["", json.dumps(["node9", 17, "2020-01-01", "another kernel", "token"])])
def test_a_lease_of_somebody_silent_is_taken_over(
    content: str, tmp_path: Path, load: Load, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was killed before it could say in the file who it is, or a machine is gone."""
    monkeypatch.setattr(store, "Lease", partial(Lease, interval=0.05))
    data = write(tmp_path / "a.jsonl", records(50))
    built = load(data).folder
    shutil.rmtree(built)
    left = tmp_path / "cache" / "builds" / f"{plain_recipe(data, tokenizer_folder).identity()}.lease-000007"
    left.write_text(content)
    again = Thread(target=load, args=[data], daemon=True)
    again.start()
    again.join(IDLE)
    assert not again.is_alive(), "it waits for nobody"
    assert caches(tmp_path) == [built]
    assert not left.exists()


@pytest.mark.slow
def test_a_killed_builder_is_one_line_and_its_workers_leave(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = write(tmp_path / "a.jsonl", records(20_000))
    (waiting,) = start(tmp_path, tokenizer_folder, data, count=1)
    wait_for_build(tmp_path, waiting)
    builder, *_ = children(waiting.pid)
    waiting.until(lambda: children(builder))
    workers = children(builder)
    os.kill(builder, signal.SIGKILL)
    assert "ended by SIGKILL" in outcome(waiting)["error"]
    assert not left_over(tmp_path)
    eventually(lambda: not any(alive(worker) for worker in workers))


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_build_by_workers_equals_one_without(
    tmp_path: Path, load: Load, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        *records(1500),
        {"type": "pretrain", "text": "All of it. " * 100},
        *records(700, answer="Two."),
    ]
    data = write(tmp_path / "a.jsonl", entries)
    alone = load(data)
    shutil.rmtree(alone.folder.parent)
    monkeypatch.setattr(store, "SMALL", 0)
    together = load(data)
    assert len(builds) == 2
    assert together.fingerprint() == Dataset(together.folder, [str(data)]).fingerprint()
    pieces = together.total.samples - 2200
    assert pieces > 2
    origins = [together.origin(number) for number in range(len(together))]
    numbers = [*range(1, 1501), *[1501] * pieces, *range(1502, 2202)]
    assert origins == [f"{data}: record {number}" for number in numbers]
    assert together.total.records == 2201
