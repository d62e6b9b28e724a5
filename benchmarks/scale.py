"""Predict the speed of four models on 8 to 512 GPUs, in Markdown.

Nothing runs on a GPU: `--plan --search` looks for the fastest way to run a model on N H100s with 80 GB, eight to a
host, with NVLink inside and InfiniBand of 400 Gbit/s for each GPU between hosts. On 512 GPUs each
plan has more replicas. Rows are full, all tokens supervised, in bf16 with flash attention. It takes some minutes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.api import read_spec
from training.config.keys import TrainConfig
from training.metrics.devices import parse_devices
from training.plan.communication import Fabric
from training.plan.inputs import Basis, Workload
from training.plan.plan import Plan
from training.plan.search import search

GPU, LINKS, MOST = "H100-80G", "nvlink4,ib400", 512
HEADER = "model | tokens of a row | rows of a step | GPUs | dims | axes | sequence | schedule | recomputes | waiting"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Run:
    """A model, as its config.json has it, and what is asked of so many GPUs."""

    name: str
    fields: dict[str, Any]
    length: int
    rows: int
    gpus: int


RUNS = (
    Run("Llama-3.1-8B", LLAMA, 131072, 16, 8),
    Run(
        "Mixtral-8x7B",
        LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        4096,
        256,
        16,
    ),
    Run(
        "Llama-3.1-70B",
        LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        4096,
        256,
        64,
    ),
    Run(
        "Qwen3-235B-A22B",
        LLAMA
        | {"model_type": "qwen3_moe", "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True},
        4096,
        1024,
        128,
    ),
)


def basis_of(run: Run) -> Basis:
    """Make the planner's inputs, as one pipeline of one stage."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(run.fields), encoding="utf-8")
        spec = read_spec(Path(name))
    keys = {"model_path": "-", "data_path": "-", "save_path": "-", "bf16": {"enabled": True}, "use_flash_attn": True}
    config = TrainConfig.model_validate(keys | {"train_batch_size": run.rows, "max_seq_len": run.length})
    device = parse_devices(f"{run.gpus}x{GPU}")[1]
    return Basis(config, spec, Workload.assumed(config), device, named=Fabric.named(LINKS, device))


def plans(run: Run) -> Iterator[Plan]:
    """Yield the fastest plan, and the same on `MOST` GPUs."""
    best = search(basis_of(run), run.gpus)[0]
    yield best
    times, topo = MOST // run.gpus, best.basis.config.model_topo
    wider = topo.spread(topo.stages, topo.replicas * times)
    config = best.basis.config.model_copy(update={"model_topo": wider, "train_batch_size": run.rows * times})
    config = config.with_parts(best.parts)
    yield Plan.make(replace(best.basis, config=config, workload=Workload.assumed(config), known={}))


def row(run: Run, plan: Plan) -> str:
    """Make a line of the table."""
    config = plan.basis.config
    topo = config.model_topo
    cells = [
        run.name,
        f"{run.length:,}",
        f"{config.train_batch_size:,}",
        str(topo.processes),
        f"`{topo.process_topology.dims}`",
        f"`[{', '.join(topo.process_topology.axes)}]`",
        str(topo.sequence),
        config.schedule,
        "true" if config.use_grad_ckpt else "false",
        f"{plan.bubble:.0%}",
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.mfu or 0:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(f"| {HEADER} | tokens/s | MFU |\n|{'---|' * 12}")
    for each in RUNS:
        for found in plans(each):
            print(row(each, found), flush=True)
