"""train_ds.py with a fault in one rank: started by the real launcher.

usage: FAULT=<kind>:<rank>:<step> faulty.py <arguments of train_ds.py>. At the beginning of the step that rank
- raises: an error of a program, - mistake: an error that a user can mend, - dies: by SIGKILL, - freezes: by SIGSTOP,
- hangs: waits in Python for what never comes, - fills: cannot write large files any more, as on a full disk,
- starves: asks in its forward pass for more memory than any machine has, - waits: until the file that WAITS_FOR names
is there. - dies_within: by SIGKILL, between two backward passes of the step.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable

import torch

import train_ds
from data.errors import DataError
from data.loader import GlobalBatch, Loader
from training.engine.pipeline import PipelineTrainer
from training.engine.stage_engine import StageEngine


def raises() -> None:
    raise ValueError("the third step breaks")


def mistake() -> None:
    raise DataError("data.json: record 7: gone")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freezes() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs() -> None:
    time.sleep(3600)


def fills() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def starves() -> None:
    forward = torch.nn.Linear.forward

    def asking(*_: torch.Tensor) -> torch.Tensor:
        torch.nn.Linear.forward = forward  # type: ignore[method-assign]  # the plan that is told runs blocks too
        return torch.empty(2**60)

    torch.nn.Linear.forward = asking  # type: ignore[method-assign, assignment]


def waits() -> None:
    while not os.path.exists(os.environ["WAITS_FOR"]):
        time.sleep(0.05)


def dies_within() -> None:
    backward, passes = StageEngine._exec_backward_pass, itertools.count(1)

    def mortal(engine: StageEngine, buffer_id: int) -> None:
        backward(engine, buffer_id)
        if next(passes) == 2:
            dies()

    StageEngine._exec_backward_pass = mortal  # type: ignore[method-assign, assignment]


KINDS = (raises, mistake, dies, freezes, hangs, fills, starves, waits, dies_within)
FAULTS: dict[str, Callable[[], None]] = {each.__name__: each for each in KINDS}


def main() -> None:
    kind, rank, step = os.environ["FAULT"].split(":")
    train_step = PipelineTrainer.train_step
    steps = 0

    def faulty_step(self: PipelineTrainer, loader: Loader, batch: GlobalBatch) -> float:
        nonlocal steps
        steps += 1
        if self.engine.global_rank == int(rank) and steps == int(step):
            FAULTS[kind]()
        return train_step(self, loader, batch)

    PipelineTrainer.train_step = faulty_step  # type: ignore[method-assign]
    train_ds.main()


if __name__ == "__main__":
    main()
