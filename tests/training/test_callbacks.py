"""What callbacks choose before the first step takes effect in the job, one choice after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from training.callbacks import Callback, Choice, JobView
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.job import Job
from training.topology import Division

ROWS = "train_micro_batch_size_per_gpu"
KEYS: dict[str, Any] = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}


class Chooses(Callback):
    """Sees in the job what it has chosen before."""

    def on_divide(self, job: JobView) -> Iterator[Choice]:
        yield Choice({ROWS: 4}, report=["rows: 4"])
        yield Choice(division=Division(job.config.topology([job.config.micro_batch_size, 1])))


class Looks(Callback):
    """A user's callback, which returns nothing."""

    def on_divide(self, job: JobView) -> None:
        self.seen = job.config.micro_batch_size, job.division.topology.parts


@dataclass
class Known:
    config: TrainConfig


def test_choices_take_effect_one_after_the_other() -> None:
    config, looks = TrainConfig.model_validate(KEYS), Looks()
    made: list[TrainConfig] = []
    task: Any = SimpleNamespace(divide=lambda config: Division(config.topology([5])), make_batches=made.append)
    monitor: Any = SimpleNamespace(mark=print)
    job = Job(task, config, ProcessInfo(0, 1, 0, 1), monitor, [looks, Chooses(), looks])
    progress: Any = Known(config)
    job.progress = progress

    job.divide()
    assert looks.seen == (4, [4, 1]) and job.division.topology.parts == [4, 1]
    assert [each.micro_batch_size for each in made] == [4], "batches are made anew, once"
    assert job.progress.config.micro_batch_size == 4, "a checkpoint says how many"
    assert job.report == ["rows: 4"] and config.micro_batch_size == 1
