"""What training holds in memory: `python -m benchmarks.memory`, one module a part.

`lean_loss` (`benchmarks.lean_loss`): the loss without logits against the plain form. `planner` (`benchmarks.planning`):
what `--plan` predicts against what a run takes; ten minutes on two cores. `climb` (`benchmarks.climb`): the memory of
a run on a CPU over its steps; ten minutes too. `quickstart` (`benchmarks.quickstart`): all processes of the quickstart
together; ten minutes as well.
"""

from __future__ import annotations

from benchmarks import climb, lean_loss, planning, quickstart
from benchmarks.parts import run_parts

if __name__ == "__main__":
    run_parts(
        "Memory: peaks, predicted and measured.",
        {"lean_loss": lean_loss, "planner": planning, "climb": climb, "quickstart": quickstart},
    )
