"""How fast training runs, and what its safety costs: `python -m benchmarks.throughput`, one module a part.

`ideal` (`benchmarks.ideal`): how near a pipeline comes to the ideal speed-up. `peers` (`benchmarks.peers`): against
ZeRO-3 and transformers' Trainer. `checkpoints` (`benchmarks.checkpoints`): saving, verifying, bookkeeping. All of them
take half an hour on two cores, and want a machine that does nothing else.
"""

from __future__ import annotations

from benchmarks import checkpoints, ideal, peers
from benchmarks.parts import run_parts

PARTS = {"ideal": ideal, "peers": peers, "checkpoints": checkpoints}

if __name__ == "__main__":
    run_parts("Speed of training beside its peers, and what checkpoints cost.", PARTS)
