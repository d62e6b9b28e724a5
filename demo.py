"""Talk to a model in either layout: a HuggingFace folder, a pipeline folder, a run's checkpoint.

    python demo.py --model DIR --prompt TEXT [--input TEXT | --raw] [--max-new-tokens N] [--greedy]
    python demo.py --model DIR --prompts-file IN.jsonl --output OUT.jsonl
    python demo.py --model DIR          an interactive chat
    python demo.py                      the same, with what the last run in this folder wrote
    deepspeed --num_gpus N demo.py ...  the same, with the model in N processes

A model gets the prompts it was trained with; docs/demo.md has all options.
"""

from __future__ import annotations

from options.demo.command_line import open_demo, parse_arguments
from training.distributed import joining
from training.distributed.processes import ProcessInfo
from training.errors import exit_with_one_line


def main() -> None:
    arguments = parse_arguments()
    process = ProcessInfo.from_environment()
    if process is not None:
        joining.end_with_launcher(process)
    with exit_with_one_line(process.rank if process else None, page="docs/demo.md"):
        open_demo(arguments, process)


if __name__ == "__main__":
    main()
