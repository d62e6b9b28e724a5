"""Launched processes that many tests share, as a start costs more than most cases do.

The processes of `tests/workers/cases.py` start as those of a run do, with the first cases for N of them, and stay for
whatever comes next. A case that fails ends them; the next cases get new ones.
"""

from __future__ import annotations

import json
import os
import random
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


def write_samples(folder: Path, count: int = len(LENGTHS)) -> list[Sample]:
    """Write samples.json for `loader_of`: samples of 5 to 60 tokens, the first third of each not trained."""
    generator, samples = random.Random(0), list[Sample]()
    for length in islice(cycle(LENGTHS), count):
        ids = [generator.randrange(3, 512) for _ in range(length)]
        samples.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    (folder / "samples.json").write_text(json.dumps(samples))
    return samples


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
