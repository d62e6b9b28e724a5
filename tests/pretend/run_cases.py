"""What a worker runs, case by case, each divided into phases that are counted apart.

A case is {"name", "work", "config", "kernel", "planted"}; <folder of the file>/<name>.<rank>.json gets for each phase
the lists [kind, what, where, line, count] of what it made the device refuse or the host wait for. The work:

    pipeline, zero   "warm-up": building, a first step and a first evaluation; "step" and "evaluation": a second one of
                     each; besides "micro_batches" of the step, "events" that it left behind, and "losses"
    generation       "warm-up", and "tokens": TOKENS of them, greedy and sampled
    hang             one process whose GPU does not come to the end of the instruction that `hang` names; "place": what
                     the rank's monitor says meanwhile of where it is
    job              a run of STEPS steps by `training.job`; "warm-up" ends with the report of step 2, "step" with that
                     of step 3, so it holds all that the loop does for one; "rest" has the checkpoint and the evaluation

With a topology of several ranks, `hang` of a job names an instruction for each, and the monitor ends the run.
`kernel` names an attention, or is null for the usual one; `planted` a bug of `tests.pretend.planted`, or is null.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils import groups

import models.offload
from models import load_model
from models.api import read_spec
from options import RunConfig
from options.demo.generation import Sampling, generate
from options.planner.feedback import StageClock
from options.planner.planning import divide
from options.planner.row_chunks import chunk_of
from options.weight_streaming.schedule import StreamedDivision
from tests.pretend import kernels, planted
from tests.pretend.cuda import Event, Stream
from tests.pretend.watch import Watch
from tests.workers.cases import close_engines, loader_of
from tests.workers.zero import KINDS, build
from training import runs
from training.config.keys import TrainConfig
from training.distributed import joining, processes
from training.distributed.failure_detector import Report
from training.distributed.gpu_progress import followed
from training.distributed.rank_monitor import RankMonitor, current_position
from training.engine import host_sums
from training.metrics.reporter import Reporter
from training.trained import with_trained

STEPS, TOKENS = 4, 8
HANGS_AFTER = 10  # instructions of a kind, in a job: the second step is over by then or under way

Phases = dict[str, Any]
Case = dict[str, Any]


def run_cases(path: Path, watch: Watch) -> None:
    """Run the cases of a file; the topology of the first says how many processes there are."""
    process = processes.ProcessInfo.from_environment()
    assert process is not None
    models.offload.LEAST = 1  # the tests' tensors are small
    host_sums.PIECE = 1000
    kernels.install(watch)
    for case in json.loads(path.read_text()):
        config = RunConfig.model_validate(case["config"])
        if not torch.distributed.is_initialized():
            joining.check_number(process, config.model_topo)
            joining.join(process)
        remembered = dict(vars(groups))
        bug: AbstractContextManager[Any] = planted.PLANTED[case["planted"]].bug() if case["planted"] else nullcontext()
        watch.found.clear()
        with bug:
            phases = WORK[case["work"]](config, case, partial(taken, watch))
        (path.parent / f"{case['name']}.{process.rank}.json").write_text(json.dumps(phases))
        torch.distributed.barrier()
        vars(groups).update(remembered)  # DeepSpeed takes the groups of one engine for the next
        close_engines()


def taken(watch: Watch) -> list[Any]:
    """What was noted since the last call."""
    notes = [[*finding, watch.lines[finding], count] for finding, count in watch.found.items()]
    watch.found.clear()
    return notes


def train(config: TrainConfig, case: Case, found: Callable[[], list[Any]]) -> Phases:
    folder = Path(config.model_path)
    loader, spec = loader_of(config), with_trained(read_spec(folder), config)
    streaming = config.weights_on_host
    kind = runs.trainer_kind(config) if streaming else KINDS[case["work"]]
    if case["kernel"]:
        spec.set_attention(case["kernel"])
    division = divide(config, spec, kind.in_stages)
    if isinstance(division, StreamedDivision) and not chunk_of(config):
        division = replace(division, slots=replace(division.slots, kept=2))
    trainer = kind.build(config, spec, folder, division)
    batch = loader.batch(0)
    losses = [trainer.eval_loss(loader, batch), trainer.train_step(loader, batch)]
    phases: Phases = {"warm-up": found(), "micro_batches": batch.n_micro_batches}
    events = len(Event.alive)
    clock, begin = StageClock(), time.perf_counter()
    with clock.step(trainer.engine, batch.n_micro_batches) if kind.in_stages and not streaming else nullcontext():
        losses.append(trainer.train_step(loader, batch))
    phases |= {"step": found(), "events": len(Event.alive) - events}
    phases |= {"stage_seconds": clock.seconds, "seconds": time.perf_counter() - begin}
    losses.append(trainer.eval_loss(loader, batch))
    return phases | {"evaluation": found(), "losses": losses}


def hang(config: TrainConfig, case: Case, found: Callable[[], list[Any]]) -> Phases:
    loader = loader_of(config)
    places: list[Report] = []

    def ask() -> None:
        while not Stream.waited_for:
            time.sleep(0.01)
        places.append(current_position(0))
        Stream.hangs = False

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    with hanging(case["hang"], after=0):
        build(KINDS["pipeline"], config).train_step(loader, loader.batch(0))
    asking.join()
    return {"place": asdict(places[0])}


@contextmanager
def hanging(name: str, after: int) -> Iterator[None]:
    """Let the GPU hang in an instruction of the schedule, once it has come to the end of `after` of its kind."""
    counted = count()

    def followed_to_there(instructions: Any, shared: bool) -> Any:
        kind = next(each for each in instructions if each.__name__ == name)

        def execute(*args: Any, **kwargs: Any) -> Any:
            Stream.hangs = Stream.hangs or next(counted) == after
            return instructions[kind](*args, **kwargs)

        return followed(instructions | {kind: execute}, shared)

    with patch("training.engine.pipeline.followed", followed_to_there):
        yield


def write(config: TrainConfig, case: Case, found: Callable[[], list[Any]]) -> Phases:
    model = load_model(config.model_path, device="cuda")
    prompt = list(range(10, 50))
    list(generate(model, prompt, TOKENS, set()))
    phases: Phases = {"warm-up": found()}
    for sampling in (Sampling(0.0), Sampling(0.7)):
        list(generate(model, prompt, TOKENS // 2, set(), sampling))
    return phases | {"tokens": found()}


def run(config: TrainConfig, case: Case, found: Callable[[], list[Any]]) -> Phases:
    process = processes.ProcessInfo.from_environment()
    assert process is not None
    phases: Phases = {}
    names = iter(["first", "warm-up", "step", "last"])
    report = Reporter.report

    def counted(reporter: Reporter, *args: Any) -> None:
        report(reporter, *args)
        phases[next(names)] = found()

    with (
        patch.object(Reporter, "report", counted),
        hanging(case["hang"][process.rank], after=HANGS_AFTER) if "hang" in case else nullcontext(),
        RankMonitor(process, config.model_topo.stage_of(process.rank), config.timeout_minutes) as monitor,
    ):
        runs.train_language_model(config, process, monitor, KINDS["pipeline"])
    return phases | {"rest": found()}


WORK: dict[str, Callable[[TrainConfig, Case, Callable[[], list[Any]]], Phases]] = {
    "pipeline": train,
    "zero": train,
    "generation": write,
    "hang": hang,
    "job": run,
}
