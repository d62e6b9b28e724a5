"""Launched processes that many tests share, as a start costs more than most cases do.

The processes of `tests/workers/cases.py` start as those of a run do, with the first cases for N of them, and stay for
whatever comes next. A case that fails ends them; the next cases get new ones.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any

import yaml

from data.sample_set import Sample
from tests.launching import Launch, start_supervised

MOST_THREADS = 50  # of one of the processes; a new one has 18
LENGTHS = (5, 60, 17, 8, 41, 23, 55, 12)


def samples_of(lengths: Iterable[int]) -> list[Sample]:
    """Make samples of random tokens, the first third of each not trained."""
    generator, samples = random.Random(0), list[Sample]()
    for length in lengths:
        ids = [generator.randrange(3, 512) for _ in range(length)]
        samples.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return samples


def write_samples(folder: Path, count: int = len(LENGTHS)) -> list[Sample]:
    """Write samples.json for `loader_of`: samples of 5 to 60 tokens."""
    samples = samples_of(islice(cycle(LENGTHS), count))
    (folder / "samples.json").write_text(json.dumps(samples))
    return samples


def write_random_samples(folder: Path, count: int, longest: int) -> None:
    """Write samples.json for `loader_of`: samples of 5 to `longest` tokens, the first third of each not trained."""
    generator, samples = random.Random(0), []
    for _ in range(count):
        ids = [generator.randrange(3, 512) for _ in range(generator.randrange(5, longest + 1))]
        samples.append({"input_ids": ids, "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]})
    (folder / "samples.json").write_text(json.dumps(samples))


def job(folder: Path, name: str, kind: str = "pipeline", **keys: Any) -> dict[str, Any]:
    """Describe a whole job to tests/workers/jobs.py, small and of records.json, with other keys on top."""
    config: dict[str, Any] = {
        "data_path": str(folder / "records.json"),
        "save_path": str(folder / name),
        "cache_dir": str(folder / "cache"),
        "max_seq_len": 200,
        "keep_last": 9,
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
        "tensorboard": {"enabled": False},
    }
    return {"name": name, "kind": kind, "config": config | keys, "events": {}}


class Ranks:
    """`with Ranks(folder) as ranks:`

    Args:
        folder: for the notes to the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sets: dict[int, tuple[Launch, Path, int]] = {}  # by size: processes, their notes, how many of them

    def run(self, processes: int, worker: str, cases: list[dict[str, Any]], folder: Path) -> None:
        """Run `cases` by tests/workers/<worker>.py in N processes, which write their outcomes to `folder`.

        Raises:
            AssertionError: a case failed, with the end of what was printed.
        """
        path = folder / f"{worker}-{processes}.cases"
        path.write_text(json.dumps(cases))
        launch, notes, number = self._sets.pop(processes) if processes in self._sets else self._start(processes)
        (notes / "new").write_text(f"{worker}\n{path}")
        (notes / "new").rename(notes / str(number))
        try:
            launch.until((notes / f"{number}.done").exists)
        except BaseException:
            launch.kill()
            raise
        # Each job leaves a group of gloo's behind, whose threads wake up a hundred times a second.
        if max(each.num_threads() for each in launch.family()) > MOST_THREADS:
            _end(launch, notes)
        else:
            self._sets[processes] = launch, notes, number + 1

    def jobs(self, cases: list[dict[str, Any]], folder: Path, worker: str = "jobs") -> dict[str, dict[str, Any]]:
        """Run whole jobs in two processes each; return what they ended with, by name."""
        self.run(2, worker, cases, folder)
        return {case["name"]: json.loads((folder / f"{case['name']}.json").read_text()) for case in cases}

    def run_all(self, worker: str, cases: list[dict[str, Any]], folder: Path) -> None:
        """Run each of `cases` in as many processes as the topology of its config has."""
        by_size: dict[int, list[dict[str, Any]]] = {}
        for case in cases:
            dims = case["config"]["model_topo"]["process_topology"]["dims"]
            by_size.setdefault(math.prod(dims), []).append(case)
        for processes, chosen in sorted(by_size.items()):
            self.run(processes, worker, chosen, folder)

    def train(self, processes: int, config: Path, kind: str = "pipeline") -> dict[str, Any]:
        """Run the job of a config's file in N processes; return what tests/workers/jobs.py says of it."""
        keys = yaml.safe_load(config.read_text(encoding="utf-8"))
        self.run(processes, "jobs", [{"name": config.stem, "kind": kind, "config": keys, "events": {}}], config.parent)
        outcome: dict[str, Any] = json.loads(config.with_suffix(".json").read_text())
        return outcome

    def _start(self, processes: int) -> tuple[Launch, Path, int]:
        notes = Path(mkdtemp(dir=self._folder))
        return start_supervised(processes, "tests/workers/cases.py", notes, str(os.getpid())), notes, 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for launch, notes, _ in self._sets.values():
            _end(launch, notes)


def _end(launch: Launch, notes: Path) -> None:
    (notes / "end").touch()
    launch.end()
