"""Print planned speeds of published runs, in Markdown: a table of docs/performance.md.

Nothing is measured, and no GPU is needed. tests/training/plan/test_published.py holds the plan to the published runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_models import COMMON, MODELS
from models.api import read_spec
from models.attention.kernels import EAGER
from training.config.keys import TrainConfig
from training.metrics.devices import parse_devices
from training.plan.inputs import Basis, Workload
from training.plan.plan import Plan

BF16: dict[str, Any] = {"bf16": {"enabled": True}, "use_flash_attn": True}
LLAMA = COMMON | MODELS["7b"] | {"max_position_embeddings": 4096}
LLAMA3 = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
# MPT-7B's blocks have as many weights, 12 x 4096 x 4096; their layer norms and GELU are fewer kernels than these.
MPT = LLAMA | {"intermediate_size": 10922, "vocab_size": 50432, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Run:
    """Training on full rows, of a model of which there is nothing but config.json.

    Attributes:
        attention: the kernel that it uses, where it is not the plan's own for these keys.
    """

    model: dict[str, Any]
    devices: str
    dims: tuple[int, int]
    batch: int
    length: int
    keys: dict[str, Any] = field(default_factory=dict)
    parts: list[int] | None = None
    attention: str | None = None

    def plan(self) -> Plan:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.model), encoding="utf-8")
            spec = read_spec(Path(folder))
        if self.attention:
            spec = replace(spec, family=replace(spec.family, attention=(self.attention,)))
        paths = dict.fromkeys(("model_path", "data_path", "save_path"), "-")
        topology = {"process_topology": {"dims": list(self.dims)}, "parts": self.parts}
        shape = {"train_batch_size": self.batch, "max_seq_len": self.length, "model_topo": topology}
        config = TrainConfig.model_validate(paths | shape | {"compile": False, "use_flash_attn": False} | self.keys)
        return Plan.make(Basis(config, spec, Workload.assumed(config), parse_devices(self.devices)[1]))


@dataclass(frozen=True)
class Published:
    """A run that others measured: its speed as a whole in samples/s, or in tokens/s a GPU."""

    name: str
    speed: float
    unit: str
    run: Run

    def planned_speed(self, plan: Plan) -> float:
        """Return the speed in the published unit."""
        rows = self.run.batch / plan.seconds
        return rows if self.unit == "samples/s" else rows * self.run.length / plan.basis.config.model_topo.processes


def _recipe(length: int, speed: float, flash: bool) -> Published:
    """Make a run of gdGPT's README: llama-7b in eight stages, in fp16, of 1,024 rows a step."""
    keys = {"fp16": {"enabled": True}, "use_flash_attn": flash}
    parts, attention = [5, 4, 4, 4, 4, 4, 4, 5], None if flash else EAGER
    run = Run(LLAMA, "A100-40G", (8, 1), 1024, length, keys, parts, attention)
    name = f"llama-7b, 8 stages, {length} tokens" + (", flash attention" if flash else "")
    return Published(name, speed, "samples/s", run)


PUBLISHED = [
    *(_recipe(*row, flash=False) for row in ((256, 56.85), (384, 49.43), (512, 43.16), (768, 32.84))),
    *(_recipe(*row, flash=True) for row in ((1024, 26.29), (1536, 19.48), (2048, 15.00), (4096, 7.75))),
    Published(  # github.com/mosaicml/llm-foundry, scripts/train/benchmarking
        "MPT-7B, 8 replicas, micro-batches of 6",
        10643,
        "tokens/s a GPU",
        Run(MPT, "H100", (1, 8), 48, 2048, BF16 | {"train_micro_batch_size_per_gpu": 6}),
    ),
    Published(  # github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling
        "llama-3-8b's shape, one GPU, compiled, all recomputed",
        10471,
        "tokens/s a GPU",
        Run(
            *(LLAMA3, "H200", (1, 1), 8, 4096),
            BF16 | {"train_micro_batch_size_per_gpu": 4, "compile": True, "use_grad_ckpt": True},
        ),
    ),
]


def row(published: Published) -> list[str]:
    """Make a row of the table."""
    plan, run = published.run.plan(), published.run
    speed = published.planned_speed(plan)
    slowest = max(plan.stages, key=lambda stage: stage.seconds)
    shares = {kind: seconds / plan.seconds for kind, seconds in vars(slowest.spent).items()}
    spent = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.01)
    digits = 2 if published.unit == "samples/s" else 0
    speeds = [f"{published.speed:,.{digits}f} {published.unit}", f"{speed:,.{digits}f}"]
    return [published.name, run.devices, *speeds, f"{speed / published.speed - 1:+.0%}", f"{plan.mfu or 0:.0%}", spent]


if __name__ == "__main__":
    print("| run | on | published | planned | | MFU planned | what the slowest stage's time goes into |")
    print(f"|{'---|' * 7}")
    for each in PUBLISHED:
        print(f"| {' | '.join(row(each))} |")
