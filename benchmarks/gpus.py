"""Several GPUs that nobody watches: are the losses those of one, and how fast are they: `python -m benchmarks.gpus`.

The ways whose names begin with `exact` train a tiny model in fp32 and compare each step's loss with that of one process
(`exact-one`): messages that arrive in another order, or are added up twice, show there, and one that nobody sends ends
at the time limit. The others train blocks of llama-7b in bf16, eight rows of 4,096 tokens a step. All go through the
real launcher, on the first of the GPUs that CUDA_VISIBLE_DEVICES names, by number. Rows, `--wheels` and `--minutes` are
as in `benchmarks.gpu`.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.gpu import Way, words
from benchmarks.gpu_models import Measurement
from benchmarks.unattended import Job, parser, prepare, run_all

REFERENCE = "exact-one"
V_SCHEDULE: dict[str, Any] = {"schedule": "dualpipev"}


def exact(name: str, *dims: int, reference: str = REFERENCE, **keys: Any) -> Way:
    """Make a tiny run on stages and replicas whose losses are compared."""
    measurement = Measurement("tiny", None, attention="sdpa", dims=(dims[0], dims[1]), keys=keys, exact=True)
    return Way(name, 0.7, measurement, reference=reference, launched=True)


def fast(name: str, minutes: float, layers: int, *dims: int, **keys: Any) -> Way:
    """Make a run whose speed counts."""
    return Way(name, minutes, Measurement(layers=layers, dims=(dims[0], dims[1]), keys=keys), launched=True)


WAYS = (
    exact(REFERENCE, 1, 1, reference=""),
    exact("exact-pipeline", 2, 1),
    exact("exact-dualpipev", 2, 1, **V_SCHEDULE),
    exact("exact-replicas", 1, 2),
    exact("exact-2x2", 2, 2),
    exact("exact-four-stages", 4, 1),
    fast("pipeline", 1.0, 16, 2, 1),
    fast("dualpipev", 1.0, 16, 2, 1, **V_SCHEDULE),
    fast("replicas", 1.0, 8, 1, 2),
    fast("pipeline-compiled", 1.8, 16, 2, 1, compile=True),
    fast("2x2", 1.2, 16, 2, 2),
    fast("four-stages", 1.2, 32, 4, 1),
)


def jobs(gpus: int | None) -> list[Job]:
    """Make all jobs; see `Way.job`."""
    return [way.job(gpus) for way in WAYS]


def main() -> None:
    made = parser("benchmarks.gpus", "Several GPUs: losses equal to one process's, and speed.", [w.name for w in WAYS])
    chosen = made.parse_args()
    found = prepare(chosen, gpus=2)
    rows = run_all(jobs(found), chosen, words)
    sys.exit(any("reason" in row for row in rows))


if __name__ == "__main__":
    main()
