"""Memory and speed of both converters: `python -m benchmarks.convert`.

A checkpoint with the shapes of llama-7B (bf16, 13.5 GB, three shards) is made of random data, and taken to the pipeline
layout and back by `convert_model.py` itself. The yardstick is `cp -r` of the same bytes on the same disk in the same
run. Every command starts with the source out of the system's cache and ends when the target is on the disk. Peak memory
is the largest resident set that the system saw, imports included.

A second checkpoint has the shapes of Mixtral-8x7B with fewer blocks: converting it may take one block's experts on top.

Both shrink to what the disk holds, three times over, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from models.api import read_spec
from models.checkpoint.source import forget_cached
from models.checkpoint.tensor_files import SafetensorsWriter, TensorInfo
from models.conversion.to_huggingface import divide
from models.spec import ModelSpec

ROOT = Path(__file__).parent.parent
SHARD_BYTES = 5 * 10**9
SPARE_BYTES = 5 * 10**9  # of the disk, left alone
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}

SHAPES = {"llama": LLAMA_7B, "mixtral": MIXTRAL}


@dataclass(frozen=True)
class Measured:
    """One command: how long it took, and its peak memory."""

    seconds: float
    rss_gb: float


@dataclass(frozen=True)
class Result:
    """One checkpoint through both converters.

    Attributes:
        gb: the checkpoint's size.
        blocks: how many blocks it has.
        layer_gb: the size of its largest block.
    """

    gb: float
    blocks: int
    layer_gb: float
    cp: Measured
    hg_to_pp: Measured
    pp_to_hg: Measured

    @property
    def peak_rss_gb(self) -> float:
        return max(self.hg_to_pp.rss_gb, self.pp_to_hg.rss_gb)

    @property
    def speed_vs_cp(self) -> float:
        return self.cp.seconds / max(self.hg_to_pp.seconds, self.pp_to_hg.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and speed of both converters against cp.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; its disk is the one measured")
    parser.add_argument("--only", choices=SHAPES, help="measure one of the two checkpoints alone")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    results: dict[str, Result] = {}
    for name in [arguments.only] if arguments.only else SHAPES:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="benchmark-") as folder:
            results[name] = measure(SHAPES[name], Path(folder), console)
    if arguments.json:
        print(json.dumps(figures(results)))
    else:
        for name, result in results.items():
            Console().print(table(name, result))


def measure(config: dict[str, Any], folder: Path, console: Console) -> Result:
    """Make a checkpoint and take it there and back."""
    source = folder / "huggingface"
    source.mkdir()
    spec = fit(config, source)
    console.print(f"{config['model_type']}: making {spec.n_blocks} blocks")
    # In a process of its own: the system counts a parent's largest memory as its children's.
    maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(source,))
    maker.start()
    maker.join()
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    console.print(f"cp of {size / 1e9:.1f} GB")
    copied = run(["cp", "-r", str(source), str(folder / "copy")], source)
    shutil.rmtree(folder / "copy")
    converted = []
    for command, read, written in (
        ("hg_to_pp", source, folder / "layers"),
        ("pp_to_hg", folder / "layers", folder / "back"),
    ):
        words = [sys.executable, "convert_model.py", command, "--input-path", str(read), "--save-path", str(written)]
        console.print(command)
        converted.append(run(words, read))
    layer = sum(shape.numel() for shape in spec.shapes(1).values()) * 2 / 1e9
    return Result(size / 1e9, spec.n_blocks, layer, copied, *converted)


def fit(config: dict[str, Any], folder: Path) -> ModelSpec:
    """The largest spec of this shape that the disk holds three times, with its config.json written."""
    while True:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = read_spec(folder)
        size = sum(shape.numel() for layer in range(spec.n_layers) for shape in spec.shapes(layer).values()) * 2
        if 3 * size + SPARE_BYTES <= shutil.disk_usage(folder).free or spec.n_blocks == 1:
            return spec
        config = config | {"num_hidden_layers": spec.n_blocks - 1}


def make_checkpoint(folder: Path) -> None:
    """Write random bf16 weights for a config.json, in shards of 5 GB."""
    spec = read_spec(folder)
    infos = {
        name: TensorInfo(torch.bfloat16, shape)
        for layer in range(spec.n_layers)
        for binding in spec.weight_map.bindings(layer, spec.shapes(layer))
        for name, shape in binding.disk_shapes(spec.shapes(layer)).items()
    }
    files = divide(infos, SHARD_BYTES)
    noise = torch.randn(max(info.shape.numel() for info in infos.values()) + len(infos)).bfloat16()
    with SafetensorsWriter(folder, files, infos) as writer:
        for number, (name, info) in enumerate(infos.items()):
            writer.write(name, noise[number : number + info.shape.numel()].view(info.shape))
    weight_map = {name: file for file, names in files.items() for name in names}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def run(words: list[str], source: Path) -> Measured:
    """Run a command on a source that is not in memory, until its output is on the disk."""
    for path in source.iterdir():
        forget_cached(path)
    os.sync()
    begin = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.monotonic() - begin
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{told}")
    return Measured(seconds, usage.ru_maxrss * 1024 / 1e9)


def figures(results: dict[str, Result]) -> dict[str, Any]:
    """The JSON object; its two first keys are those of the first checkpoint, the llama unless it was left out."""
    first = next(iter(results.values()))
    made: dict[str, Any] = {"peak_rss_gb": first.peak_rss_gb, "speed_vs_cp": first.speed_vs_cp}
    for name, result in results.items():
        made[name] = {
            "checkpoint_gb": result.gb,
            "blocks": result.blocks,
            "largest_block_gb": result.layer_gb,
            "peak_rss_gb": result.peak_rss_gb,
            "speed_vs_cp": result.speed_vs_cp,
            "seconds": {key: getattr(result, key).seconds for key in ("cp", "hg_to_pp", "pp_to_hg")},
        }
    return made


def table(name: str, result: Result) -> Table:
    """The same for people."""
    title = f"{name}: {result.blocks} blocks, {result.gb:.1f} GB bf16, largest block {result.layer_gb:.2f} GB"
    made = Table(title=title)
    for column in ("command", "seconds", "GB/s", "of cp's speed", "peak memory, GB"):
        made.add_column(column, justify="left" if column == "command" else "right")
    for command in ("cp", "hg_to_pp", "pp_to_hg"):
        measured: Measured = getattr(result, command)
        made.add_row(
            command if command != "cp" else "cp -r",
            f"{measured.seconds:.1f}",
            f"{result.gb / measured.seconds:.2f}",
            f"{result.cp.seconds / measured.seconds:.2f}",
            f"{measured.rss_gb:.2f}",
        )
    return made


if __name__ == "__main__":
    main()
