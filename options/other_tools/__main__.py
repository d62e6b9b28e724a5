"""Run as `python -m options.other_tools FILE [NEW]`, from a clone; `pipetune init --from FILE [NEW]` is the same."""

from __future__ import annotations

from pathlib import Path

from common.command_line import Parser
from common.terminal import typed_name
from options.other_tools.command import write_or_exit


def main() -> None:
    parser = Parser(prog=typed_name(), description="Write a config from another tool's.")
    parser.add_argument("file", type=Path, help="YAML, JSON or a shell script of another tool")
    parser.add_argument("new", type=Path, nargs="?", default=Path("pipetune.yml"), help="default pipetune.yml")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="devices to train on; default: its own, or 1")
    arguments = parser.parse_args()
    write_or_exit(arguments.file, arguments.new, arguments.gpus)


if __name__ == "__main__":
    main()
