"""What lies between the matrix products of a block, eager, compiled and with kernels made by hand.

`python -m benchmarks.small_kernels` measures nothing and needs no GPU: it prints a table of docs/performance.md, in
Markdown. A block runs forward on fake tensors, and the bytes of each operation that only moves data go to the part of
the block that it is in. Kernels made by hand, as Liger has them, read and write everything once.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.roofline import LENGTH, LLAMA, print_table
from models.api import read_spec
from models.costs import LayerCase, Recorder, fake_layer, work_of
from models.spec import ModelSpec

MIXTRAL = LLAMA | {"model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3 = LLAMA | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4}
QWEN3 |= {"moe_intermediate_size": 768, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
BLOCKS = {"llama-7b": LLAMA, "mixtral-8x7b's shape": MIXTRAL, "qwen3-30b-a3b's shape": QWEN3}
# The parts, by what the class of a module ends with, the outer modules first.
PARTS = {"SparseMoeBlock": "experts", "MLP": "SwiGLU", "RMSNorm": "norms", "Attention": "rotary angles"}
REST = "the rest"
COLUMNS = ["norms", "rotary angles", "SwiGLU", "experts", REST]
CASE = LayerCase(1, 1, LENGTH, torch.bfloat16, flash=True)
ONCE, GATED = 4, 6  # bytes of an element that is read and written, and of one made of two


def between_products(spec: ModelSpec) -> tuple[Counter[str], Counter[str]]:
    """Bytes of a block's forward pass by part: eager, and where Liger's kernels take the place of three of them."""
    eager: Counter[str] = Counter()
    fused: Counter[str] = Counter()
    inside: list[str] = []
    with fake_layer(spec, CASE) as fake, Recorder() as recorder:

        def enter(module: nn.Module, arguments: Any) -> None:
            count()
            inside.append(next((part for end, part in PARTS.items() if type(module).__name__.endswith(end)), ""))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            count()
            part = inside.pop()
            if part == "norms":
                fused[part] += ONCE * output.numel()
            elif part == "SwiGLU":
                fused[part] += GATED * output.numel() // spec.config.hidden_size * spec.config.intermediate_size

        def count() -> None:
            part = next(filter(None, inside if "experts" in inside else reversed(inside)), REST)
            eager[part] += sum(each.bytes for each in recorder.noted if each.kind == "traffic")
            recorder.noted.clear()

        for module in fake.module.modules():
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
        fake.run()
        count()
    config = spec.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fused["rotary angles"] = ONCE * LENGTH * head * (config.num_attention_heads + config.num_key_value_heads)
    fused.update({part: eager[part] for part in ("experts", REST)})
    return eager, fused


def rows() -> list[list[str]]:
    """Bytes a token and hidden dimension, a row for each block."""
    table = [["", *COLUMNS, "eager", "with Liger", "compiled"]]
    for name, fields in BLOCKS.items():
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            spec = read_spec(Path(folder))
        eager, fused = between_products(spec)
        compiled = work_of(spec, CASE, compiled=True).forward
        totals = [eager.total(), fused.total(), sum(each.bytes for each in compiled if each.kind == "traffic")]
        size = LENGTH * spec.config.hidden_size
        parts = [f"{eager[part] / size:.0f}" if eager[part] else "" for part in COLUMNS]
        table.append([name, *parts, *(f"{total / size:.0f}" for total in totals)])
    return table


if __name__ == "__main__":
    print_table("Between the products of a forward pass, bytes a token and hidden dimension", rows())
