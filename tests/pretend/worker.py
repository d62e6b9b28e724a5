"""A process of its own that runs cases on the pretend device, one after the other.

usage: RANK=... worker.py FILE, with a launcher's environment. FILE is a JSON list of the cases that
`tests.pretend.run_cases` describes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bitsandbytes  # noqa: F401 - which looks for a GPU when it is imported; its kernels of CPUs stand in

from tests.pretend.device import install


def main() -> None:
    watch = install()
    from tests.pretend.run_cases import run_cases

    run_cases(Path(sys.argv[1]), watch)
    sys.stdout.flush()
    os._exit(0)  # what is torn down with the interpreter looks for a device


if __name__ == "__main__":
    main()
