"""Several GPUs that nobody watches: are the losses those of one, and how fast are they: `python -m benchmarks.gpus`.

The ways whose names begin with `exact` train a tiny model in fp32 and compare each step's loss with that of one process
(`exact-one`): messages that arrive in another order, or are added up twice, show there, and one that nobody sends ends
at the time limit. The others train blocks of llama-7b in bf16, eight rows of 4,096 tokens a step. All go through the
real launcher, on the first of the GPUs that CUDA_VISIBLE_DEVICES names, by number. Rows, `--wheels` and `--minutes` are
as in `benchmarks.gpu`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu import Way, words
from benchmarks.gpu_models import Measurement
from benchmarks.ranks import command
from benchmarks.unattended import Job, parser, prepare, run_all

REFERENCE = "exact-one"
V_SCHEDULE: dict[str, Any] = {"schedule": "dualpipev"}


def exact(*dims: int, **keys: Any) -> Measurement:
    """A tiny run on stages and replicas whose losses are compared."""
    return Measurement("tiny", None, attention="sdpa", dims=(dims[0], dims[1]), keys=keys, exact=True)


WAYS = (
    Way(REFERENCE, 0.7, exact(1, 1)),
    Way("exact-pipeline", 0.7, exact(2, 1), reference=REFERENCE),
    Way("exact-dualpipev", 0.7, exact(2, 1, **V_SCHEDULE), reference=REFERENCE),
    Way("exact-replicas", 0.7, exact(1, 2), reference=REFERENCE),
    Way("exact-2x2", 0.7, exact(2, 2), reference=REFERENCE),
    Way("exact-four-stages", 0.7, exact(4, 1), reference=REFERENCE),
    Way("pipeline", 1.0, Measurement(layers=16, dims=(2, 1))),
    Way("dualpipev", 1.0, Measurement(layers=16, dims=(2, 1), keys=V_SCHEDULE)),
    Way("replicas", 1.0, Measurement(dims=(1, 2))),
    Way("pipeline-compiled", 1.8, Measurement(layers=16, dims=(2, 1), keys={"compile": True})),
    Way("2x2", 1.2, Measurement(layers=16, dims=(2, 2))),
    Way("four-stages", 1.2, Measurement(layers=32, dims=(4, 1))),
)


def jobs(gpus: int | None) -> list[Job]:
    """All of them.

    Args:
        gpus: of this machine; None for processes on its CPU.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if gpus is None else {}
    visible = "" if gpus is None else os.environ.get("CUDA_VISIBLE_DEVICES", "")  # which the launcher would ignore
    made = []
    for way in WAYS:
        assert isinstance(way.measurement, Measurement)
        processes = math.prod(way.measurement.dims)
        line = [*command(processes, "benchmarks.gpu_worker", visible)]
        line += ["--measurement", json.dumps(asdict(way.measurement))]
        line += ["--reference", way.reference] if way.reference else []
        few = gpus is not None and processes > gpus
        obstacle = f"it takes {processes} GPUs, and there are {gpus}" if few else ""
        made.append(Job(way.name, way.minutes, line, obstacle=obstacle, environment=environment))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("benchmarks.gpus", "Several GPUs: losses equal to one process's, and speed.", [w.name for w in WAYS])
    chosen = made.parse_args(arguments)
    found = prepare(chosen, gpus=2)
    rows = run_all(jobs(found), chosen, words)
    sys.exit(any("reason" in row for row in rows))


if __name__ == "__main__":
    main()
