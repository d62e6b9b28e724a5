"""Answers of a model in stages, each held by one process or shared by several (see `cases.py`).

Its cases are {"name", "config", "shares", "parts", "rows", "requests": [[prompt, most new tokens, stop, temperature,
seed], ...]}; writes <folder>/<name>.json, a list of the texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from options.demo.generation import Request, Sampling, generate_many
from options.demo.stages import StagedPasses, in_replica, load_stage
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo


def requests_of(described: list[Any]) -> list[Request]:
    """The requests of a case."""
    return [
        Request(prompt, most, set(stop), Sampling(temperature, seed=seed))
        for prompt, most, stop, temperature, seed in described
    ]


def run_case(case: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    process = ProcessInfo.from_environment()
    assert process is not None
    shares, parts = case["shares"], case["parts"]
    own = in_replica(process, shares, parts)
    pipeline = StagedPasses(load_stage(config.model_path, None, own, shares, parts=parts), process, shares, own)
    if process.rank:
        pipeline.follow()
        return
    next(generate_many(pipeline, requests_of(case["requests"]), case["rows"]))  # left with passes under way
    requests = requests_of(case["requests"])
    for _ in generate_many(pipeline, iter(requests), case["rows"]):
        pass
    pipeline.end()
    (folder / f"{case['name']}.json").write_text(json.dumps([request.text for request in requests]))
