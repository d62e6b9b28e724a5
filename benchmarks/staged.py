"""Answers by a model in two stages against one process, one thread each: a worker of `benchmarks.generate`.

Rank 0 measures both, as the other process computes nothing while it is not asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

from benchmarks.generate import AT_ONCE, NEW, ROUNDS, prompts, seconds
from benchmarks.ranks import tell
from models import CausalLM, load_model
from models.generation import Passes, Request, generate_many
from training.demo.stages import Pipeline, load_stage
from training.distributed import processes

STAGES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    folder = parser.parse_args().folder
    place = processes.Place.from_environment()
    assert place is not None
    processes.join(place, timedelta(minutes=30))
    torch.set_num_threads(1)
    pipeline = Pipeline(load_stage(folder, None, place), place)
    if place.rank:
        pipeline.follow()
    else:
        tell(folder, measure(load_model(folder), pipeline))
        pipeline.end()
    processes.stop()


def measure(alone: CausalLM, pipeline: Pipeline) -> dict[str, float]:
    """How many times as fast the stages are, with as many requests and with as many for each stage."""

    def write(model: CausalLM | Passes, times: int) -> Callable[[], None]:
        def run() -> None:
            requests = [Request(prompt, NEW, set()) for prompt in prompts() * times]
            rows = AT_ONCE * (times if model is pipeline else 1)
            assert len(list(generate_many(model, requests, rows))) == NEW * len(requests)

        return run

    found = {}
    for name, times in (("pipelined_vs_one_thread", 1), ("pipelined_full_vs_one_thread", STAGES)):
        rounds = [[seconds(write(model, times)) for model in (alone, pipeline)] for _ in range(ROUNDS)]
        found[name] = median(one / staged for one, staged in rounds)
    return found


if __name__ == "__main__":
    main()
