"""train_ds.py on a disk that takes SLOW_SECONDS for each file of the checkpoint SLOW_STEP."""

from __future__ import annotations

import os
import time
from pathlib import Path

import train_ds
from training.checkpoint import deepspeed_files


class SlowFile(deepspeed_files.SummedFile):
    def __init__(self, path: Path) -> None:
        if f"step-{int(os.environ['SLOW_STEP']):06d}" in str(path):
            time.sleep(float(os.environ["SLOW_SECONDS"]))
        super().__init__(path)


if __name__ == "__main__":
    deepspeed_files.SummedFile = SlowFile  # type: ignore[misc]
    train_ds.main()
