"""Run a module of the GPU benchmarks on the pretend device: `python -m tests.pretend.rehearse MODULE WORD...`.

Ends with code 1 and the findings where the device would have refused something. Waits are not looked at: these modules
measure and compare, so they wait on purpose.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.pretend.device import install


def main() -> None:
    watch = install()
    from tests.pretend import kernels

    kernels.install(watch)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    refused = {finding: count for finding, count in watch.found.items() if finding[0] != "wait"}
    print(*refused.items(), sep="\n", flush=True)
    os._exit(bool(refused))  # what is torn down with the interpreter looks for a device


if __name__ == "__main__":
    main()
