"""Measure memory and speed of both converters.

Checkpoints of random data shaped like llama-7B (bf16, 13.5 GB) and like Mixtral-8x7B with three blocks go to the
pipeline layout and back by `convert_model.py`, beside `cp -r` on the same disk. Every command starts with the source
out of the system's cache and ends when the target is on the disk. Peak memory is the largest resident set. A
checkpoint gets fewer blocks where the disk does not hold it three times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Report, run_parts, table_of
from benchmarks.workers import ROOT, run_workers, write_figures

SHARD_BYTES = SPARE_BYTES = 5 * 10**9  # of the disk, SPARE_BYTES are left alone
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA_7B | {"model_type": "mixtral", "intermediate_size": 14336, "num_hidden_layers": 3}
MIXTRAL |= {"num_key_value_heads": 8, "num_local_experts": 8}
SHAPES: dict[str, dict[str, Any]] = {"llama": LLAMA_7B, "mixtral": MIXTRAL}


def measure(name: str, folder: Path) -> Report:
    """Make a checkpoint and take it there and back."""
    # In a process of its own: the system counts a parent's largest memory as its children's.
    blocks, layer = run_workers(None, "benchmarks.convert", folder, "make", config=SHAPES[name])
    source, layers = folder / "huggingface", folder / "layers"
    gigabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    commands = {"cp -r": run(["cp", "-r", str(source), str(folder / "copy")], source)}
    shutil.rmtree(folder / "copy")
    for command, read, written in (("hg_to_pp", source, layers), ("pp_to_hg", layers, folder / "back")):
        words = [sys.executable, "convert_model.py", command, "--input-path", str(read), "--save-path", str(written)]
        commands[command] = run(words, read)
    title = f"{name}: {blocks} blocks, {gigabytes:.1f} GB, largest block {layer / 1e9:.2f} GB"
    rows = (
        (command, f"{gigabytes / seconds:.2f}", f"{commands['cp -r'][0] / seconds:.2f}", f"{peak / 1e9:.2f}")
        for command, (seconds, peak) in commands.items()
    )
    table = table_of(title, ("command", "GB/s", "of cp's speed", "peak memory, GB"), rows)
    figures = {"gb": gigabytes, "blocks": blocks, "largest_block_gb": layer / 1e9, "commands": commands}
    return Report({name: figures}, table)


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write random bf16 weights that the disk holds three times."""
    import torch

    from models.api import read_spec
    from models.checkpoint.tensor_files import SafetensorsWriter, TensorInfo
    from models.conversion.to_huggingface import divide_into_files

    source = folder / "huggingface"
    source.mkdir()
    while True:
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = read_spec(source)
        shapes = [list(spec.shapes(layer).values()) for layer in range(spec.n_layers)]
        sizes = [2 * sum(map(torch.Size.numel, of_layer)) for of_layer in shapes]
        if 3 * sum(sizes) + SPARE_BYTES <= shutil.disk_usage(folder).free or spec.n_blocks == 1:
            break
        config["num_hidden_layers"] = spec.n_blocks - 1

    infos: dict[str, TensorInfo] = {}
    for layer in range(spec.n_layers):
        for binding in spec.weight_map.bindings(layer, spec.shapes(layer)):
            on_disk = binding.disk_shapes(spec.shapes(layer))
            infos |= {name: TensorInfo(torch.bfloat16, shape) for name, shape in on_disk.items()}
    files = divide_into_files(infos, SHARD_BYTES)
    noise = torch.randn(max(info.shape.numel() for info in infos.values()) + len(infos)).bfloat16()
    with SafetensorsWriter(source, files, infos) as writer:
        for number, (name, info) in enumerate(infos.items()):
            writer.write(name, noise[number : number + info.shape.numel()].view(info.shape))

    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map.update(dict.fromkeys(names, file))
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (source / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    write_figures(folder, (spec.n_blocks, sizes[1]))


def run(words: list[str], source: Path) -> tuple[float, int]:
    """Run a command until its output is on the disk; seconds, peak bytes."""
    from models.checkpoint.source import forget_cached

    for path in source.iterdir():
        forget_cached(path)
    os.sync()
    begin = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    printed = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.monotonic() - begin
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{printed}")
    return seconds, usage.ru_maxrss * 1024


if __name__ == "__main__":
    run_parts(
        "Memory and speed of both converters against cp.",
        {name: partial(measure, name) for name in SHAPES},
        {"make": make_checkpoint},
    )
