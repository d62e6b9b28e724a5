"""Convert weights between the HuggingFace and the pipeline layout, to ONNX and GGUF; download or check a model.

python convert_model.py hg_to_pp --input-path DIR --save-path DIR
python convert_model.py pp_to_hg --input-path DIR --save-path DIR [--best] [--merge] [--dtype bf16] [--compat]
python convert_model.py gather --input-path DIR --hosts node1,node2 --save-path DIR
python convert_model.py hg_to_onnx --input-path DIR --save-path DIR
python convert_model.py hg_to_gguf --input-path DIR --save-path FILE [--dtype bf16] [--converter PATH]
python convert_model.py check --input-path DIR
python convert_model.py download --model-name NAME --save-path DIR
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from common.command_line import Parser
from common.terminal import safe_line, typed_name
from options import RunConfig
from training.errors import exit_with_one_line
from training.option import Conversions, add_to_export

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # torch's names


def main() -> None:
    arguments = parse_arguments()
    with exit_with_one_line(page="docs/conversion.md"):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for. torch is imported here, as wrong words should not wait for it."""
    import torch

    from models.checkpoint.hub import download
    from models.checkpoint.layout import ADAPTER, resolve
    from models.conversion.check import check
    from models.conversion.check_adapter import check_adapter
    from models.conversion.check_ahead import readers_of_ahead
    from models.conversion.to_huggingface import ExportOptions, pp_to_hg
    from models.conversion.to_pipeline import hg_to_pp

    match arguments.command:
        case "hg_to_pp":
            hg_to_pp(arguments.input_path, arguments.save_path, arguments.overwrite, arguments.verify)
        case "pp_to_hg":
            from models.checkpoint.adapter import base_folder
            from training.checkpoint.chosen import choose_checkpoint
            from training.checkpoint.folder import check_weights

            options = ExportOptions(
                layout=arguments.layout,
                dtype=getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None,
                max_shard_bytes=arguments.max_shard_size,
                verify=arguments.verify,
                compat=arguments.compat,
                merge=arguments.merge,
                add_tokenizer=add_tokenizer,
                add_card=add_card,
            )
            folder, lines = choose_checkpoint(arguments.input_path, arguments.best)
            for line in lines:
                print(safe_line(line), flush=True)
            check_weights(folder)
            adapter = (folder / ADAPTER).is_file()
            if arguments.merge and adapter:
                check_weights(base_folder(folder))
            pp_to_hg(folder, arguments.save_path, arguments.overwrite, options)
            what = "adapter, for peft, beside its base" if adapter and not arguments.merge else "model"
            print(safe_line(f"written: {arguments.save_path}, a HuggingFace folder ({what})"))
        case "check":
            folder = resolve(arguments.input_path, adapter=True)
            if (folder / ADAPTER).is_file():
                problems, notes = check_adapter(folder)
            else:
                problems = check(folder)
                notes = [] if problems else readers_of_ahead(folder)
            for line in [*(problems or ["complete"]), *notes]:
                print(safe_line(f"{arguments.input_path}: {line}"))
            if problems:
                sys.exit(1)
        case "download":
            download(arguments.model_name, arguments.save_path)
        case _:
            arguments.act(arguments)


def make_parser() -> Parser:
    source, target, overwrite, verify = (Parser(add_help=False) for _ in range(4))
    source.add_argument("--input-path", required=True, type=Path, help="folder to read")
    target.add_argument("--save-path", required=True, type=Path, help="folder or GGUF file to write")
    overwrite.add_argument("--overwrite", action="store_true", help="replace --save-path where it exists")
    verify.add_argument("--verify", action="store_true", help="read everything back and compare it")

    parser = Parser(prog=typed_name(), description="Convert or download model checkpoints.")
    parser.meant = {"merge": "pp_to_hg --merge", "export": "pp_to_hg"}
    commands = parser.add_subparsers(dest="command", required=True)
    to_folder = [source, target, overwrite]
    commands.add_parser("hg_to_pp", help="HuggingFace folder -> pipeline layout", parents=[*to_folder, verify])

    purpose = "pipeline layout or a run's checkpoint -> HuggingFace folder"
    export = commands.add_parser("pp_to_hg", help=purpose, parents=[*to_folder, verify])
    purpose = "of a run's folder: the best checkpoint by evaluation, not the newest"
    export.add_argument("--best", action="store_true", help=purpose)
    purpose = "native: ChatGLM3, Baichuan-7B, InternLM2, Qwen under transformers' own names, to load without their code"
    export.add_argument("--layout", choices=("original", "native"), default="original", help=purpose)
    purpose = "of a run that trained an adapter: add it to its base and write the whole model, not a folder for peft"
    export.add_argument("--merge", action="store_true", help=purpose)
    purpose = "add what transformers 4 looks for to config and tokenizer settings"
    export.add_argument("--compat", action="store_true", help=purpose)
    export.add_argument("--dtype", choices=DTYPES, help="cast the weights; as in the original where absent")
    purpose = "divide the weights into files of at most SIZE, such as 2GB; as in the original, else 5GB, where absent"
    export.add_argument("--max-shard-size", type=file_size, metavar="SIZE", help=purpose)

    for option in RunConfig.options:
        option.add_conversions(Conversions(commands, *to_folder))

    purpose = "say whether a HuggingFace folder or an adapter's is whole, and what loads it"
    commands.add_parser("check", help=purpose, parents=[source])
    fetch = commands.add_parser("download", help="fetch a model from the HuggingFace hub", parents=[target])
    fetch.add_argument("--model-name", required=True, help="such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION")
    return parser


def parse_arguments() -> argparse.Namespace:
    return make_parser().parse_args()


def file_size(text: str) -> int:
    """Parse a size such as "5GB", "500MB" or "2GiB"; a number without a unit is more likely a slip than bytes."""
    size = 0
    with suppress(ValidationError):
        size = 0 if text.strip().isdecimal() else int(TypeAdapter(ByteSize).validate_python(text))
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 5GB or 500MB")
    return size


def add_tokenizer(source: Path, target: Path, native: bool) -> None:
    """Write a tokenizer.json where transformers would not read the folder's own tokenizer right."""
    alone = (source / "tokenizer.model").is_file() and not (source / "tokenizer.json").is_file()
    if native or alone:
        from data.chat.native.kinds import export_tokenizer  # a second, which matters beside small models
        from data.errors import DataError

        try:
            export_tokenizer(source, target, native)
        except DataError as error:
            if native:
                raise
            print(safe_line(f"warning: no tokenizer.json is written: {error}"), file=sys.stderr)  # the weights are good


def add_card(source: Path, target: Path) -> None:
    """Write what options add to a run's checkpoint, such as its model card."""
    if (source / "checkpoint.json").is_file():
        add_to_export(RunConfig.options, source, target)


if __name__ == "__main__":
    main()
