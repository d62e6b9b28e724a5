"""How fast training runs, and what its safety costs: `python -m benchmarks.throughput`, one module a part.

`ideal` (`benchmarks.ideal`): how near a pipeline comes to the ideal speed-up. `division` (`benchmarks.division`):
`parts: auto` against divisions by hand. `peers` (`benchmarks.peers`): against ZeRO-3 and transformers' Trainer.
`schedules` (`benchmarks.schedules`): dualpipev against 1f1b. `simulated` (`benchmarks.simulated`): both at 2 to 16
stages. `checkpoints` (`benchmarks.checkpoints`): saving, verifying, bookkeeping. `gradient_sum`
(`benchmarks.gradient_sum`): 16-bit gradients into fp32 sums. `step` (`benchmarks.optimizer_step`): bytes and time of
a step beyond its passes. `replicas` (`benchmarks.replicas`): sums over replicas that begin during the last backward
pass. `auto` (`benchmarks.auto`): what `--auto` chooses against ten configs by hand. `wide` (`benchmarks.wide`): two
processes that share each row, or each layer. All of them take an hour on two
cores, and want a machine that does nothing else.
"""

from __future__ import annotations

from benchmarks import (
    auto,
    checkpoints,
    division,
    gradient_sum,
    ideal,
    optimizer_step,
    peers,
    replicas,
    schedules,
    simulated,
    wide,
)
from benchmarks.parts import run_parts

PARTS = {
    "ideal": ideal,
    "division": division,
    "peers": peers,
    "schedules": schedules,
    "simulated": simulated,
    "checkpoints": checkpoints,
    "gradient_sum": gradient_sum,
    "step": optimizer_step,
    "replicas": replicas,
    "auto": auto,
    "wide": wide,
}

if __name__ == "__main__":
    run_parts("Speed of training beside its peers, and what checkpoints cost.", PARTS)
