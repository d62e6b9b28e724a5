"""Move weights between the HuggingFace layout and the pipeline layout, or fetch them.

python convert_model.py hg_to_pp --input-path DIR --save-path DIR
python convert_model.py pp_to_hg --input-path DIR --save-path DIR
python convert_model.py download --model-name NAME --save-path DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from models import CheckpointError
from models.checkpoint.convert import hg_to_pp, pp_to_hg
from models.checkpoint.download import download


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "hg_to_pp":
            hg_to_pp(arguments.input_path, arguments.save_path, arguments.overwrite)
        elif arguments.command == "pp_to_hg":
            pp_to_hg(arguments.input_path, arguments.save_path, arguments.overwrite)
        else:
            download(arguments.model_name, Path(arguments.save_path))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert or download model checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("hg_to_pp", "HuggingFace folder -> pipeline layout"),
        ("pp_to_hg", "pipeline layout or a run's checkpoint -> HuggingFace folder"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--input-path", required=True, help="folder to read")
        command.add_argument("--save-path", required=True, help="folder to write")
        command.add_argument("--overwrite", action="store_true", help="replace --save-path where it exists")
    command = commands.add_parser("download", help="fetch a model from the HuggingFace hub")
    command.add_argument("--model-name", required=True, help="such as HuggingFaceTB/SmolLM2-135M-Instruct")
    command.add_argument("--save-path", required=True, help="folder to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
