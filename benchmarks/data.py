"""What the data wing costs and saves: `python -m benchmarks.data`, one module a part.

`tokenizing` (`benchmarks.tokenizing`): speed against the bare tokenizer, memory, a second start. `packing`
(`benchmarks.packing`): how little padding is left, and what that does to the speed of training. `many`
(`benchmarks.many`): a long dialogue, tiny records, the order of many samples. It takes 3 GB of disk and a quarter of an
hour on two cores.
"""

from __future__ import annotations

from benchmarks import many, packing, tokenizing
from benchmarks.parts import run_parts

if __name__ == "__main__":
    parts = {"tokenizing": tokenizing, "packing": packing, "many": many}
    run_parts("Tokenizing and packing: speed, memory, padding.", parts)
