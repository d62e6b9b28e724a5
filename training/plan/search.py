"""Which dims, parts, micro-batch and schedule are fastest on so many devices: every sensible combination is planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from training.plan.plan import Basis, Plan, fitting_parts

SHOWN = 5
LARGEST = 16  # rows in a micro-batch


def search(basis: Basis, devices: int) -> list[Plan]:
    """The fastest plans that fit, best first; of equally fast ones those that need less memory."""
    divided = ((candidate, fitting_parts(candidate)) for candidate in _candidates(basis, devices))
    plans = [Plan(candidate, parts) for candidate, parts in divided if parts]
    return sorted(plans, key=lambda plan: (round(plan.seconds, 9), plan.peak))[:SHOWN]


def _candidates(basis: Basis, devices: int) -> Iterator[Basis]:
    config, work, topo = basis.config, basis.workload, basis.config.model_topo
    rows = work.rows * work.micro_batches * topo.replicas  # in a step
    for stages in (number for number in range(1, devices + 1) if devices % number == 0):
        replicas = devices // stages
        for size in (2**power for power in range(int(math.log2(LARGEST)) + 1)):
            if config.train_batch_size % (size * replicas):
                continue
            workload = replace(work, rows=size, micro_batches=max(1, math.ceil(rows / (size * replicas))))
            for schedule in ("1f1b", "dualpipev"):
                for recompute in (False, True):
                    changes = {
                        "model_topo": topo.spread(stages, replicas),
                        "train_micro_batch_size_per_gpu": size,
                        "schedule": schedule,
                        "use_grad_ckpt": recompute,
                    }
                    found = config.model_copy(update=changes)
                    if found.chunks > basis.spec.n_layers or workload.micro_batches < found.least_micro_batches:
                        continue
                    if schedule == "dualpipev" and not found.v_schedule:
                        continue
                    yield replace(basis, config=found, workload=workload)
