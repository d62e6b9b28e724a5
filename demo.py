"""Talk to a model in either layout: a HuggingFace folder, a pipeline folder, a run's checkpoint.

    python demo.py --model DIR --prompt TEXT [--max-new-tokens N] [--greedy]
    python demo.py --model DIR --prompts-file IN.jsonl --output OUT.jsonl
    python demo.py --model DIR          an interactive chat

A model is asked with the prompts it was trained with; docs/demo.md tells the rest.
"""

from __future__ import annotations

from training.demo.command_line import parse_arguments, talk
from training.errors import one_line_at_the_end


def main() -> None:
    arguments = parse_arguments()
    with one_line_at_the_end():
        talk(arguments)


if __name__ == "__main__":
    main()
