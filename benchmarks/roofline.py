"""Print planned speeds of llama-7b and of published runs.

Nothing is measured, and no GPU is needed: it prints tables of docs/performance.md, in Markdown. tests/training/plan/
test_published.py holds the plan to the published runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.gpu_models import COMMON, MODELS
from models.api import read_spec
from models.attention.kernels import EAGER
from training.config.keys import TrainConfig
from training.config.sections import FP8
from training.metrics.devices import parse_devices
from training.plan import costs
from training.plan.inputs import Basis, Workload
from training.plan.plan import Plan

DEVICES = ("A100-80G", "H100", "H200")
LENGTH, MICRO_BATCHES = 4096, 8
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LLAMA = COMMON | MODELS["7b"] | {"max_position_embeddings": LENGTH}
LLAMA3 = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
# MPT-7B's blocks have as many weights, 12 x 4096 x 4096; their layer norms and GELU are fewer kernels than these.
MPT = LLAMA | {"intermediate_size": 10922, "vocab_size": 50432, "tie_word_embeddings": True}
COPIED_SUM = 18  # bytes to add a 16-bit gradient to a sum in fp32 as DeepSpeed 0.19.8 does, through a copy in fp32
FLASH_3 = 0.75  # of large products, 0.54 of an H100's peak; forward 0.43 to 0.62, from 512 to 16,384 tokens
# (github.com/pytorch/benchmark, 2391)


@dataclass(frozen=True)
class Published:
    """A run that others measured.

    Attributes:
        speed: of the whole run in samples/s, or in tokens/s a GPU.
        attention: the kernel that it used, where it is not the plan's own for these keys.
    """

    name: str
    source: str
    speed: float
    unit: str
    model: dict[str, Any]
    devices: str
    dims: tuple[int, int]
    batch: int
    length: int
    keys: dict[str, Any] = field(default_factory=dict)
    parts: list[int] | None = None
    attention: str | None = None

    def plan(self) -> Plan:
        return make_plan(
            self.model, self.devices, self.dims, self.batch, self.length, self.attention, self.parts, **self.keys
        )

    def planned_speed(self, plan: Plan) -> float:
        """Return the speed in the published unit."""
        rows = plan.basis.config.train_batch_size / plan.seconds
        return rows if self.unit == "samples/s" else rows * self.length / plan.basis.config.model_topo.processes


def _recipe(length: int, speed: float, flash: bool) -> Published:
    """Make a run of llama-7b in eight stages, in fp16, of 1,024 rows a step."""
    return Published(
        name=f"llama-7b, 8 stages, {length} tokens" + (", flash attention" if flash else ""),
        source="github.com/CoinCheung/gdGPT, README",
        speed=speed,
        unit="samples/s",
        model=LLAMA,
        devices="A100-40G",
        dims=(8, 1),
        batch=1024,
        length=length,
        keys={"fp16": {"enabled": True}, "use_flash_attn": flash},
        parts=[5, 4, 4, 4, 4, 4, 4, 5],
        attention=None if flash else EAGER,
    )


PUBLISHED = [
    *(_recipe(*row, flash=False) for row in ((256, 56.85), (384, 49.43), (512, 43.16), (768, 32.84))),
    *(_recipe(*row, flash=True) for row in ((1024, 26.29), (1536, 19.48), (2048, 15.00), (4096, 7.75))),
    Published(
        name="MPT-7B, 8 replicas, micro-batches of 6",
        source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking",
        speed=10643,
        unit="tokens/s a GPU",
        model=MPT,
        devices="H100",
        dims=(1, 8),
        batch=48,
        length=2048,
        keys=BF16 | {"train_micro_batch_size_per_gpu": 6, "use_flash_attn": True},
    ),
    Published(
        name="llama-3-8b's shape, one GPU, compiled, all recomputed",
        source="github.com/KempnerInstitute/KempnerForge, benchmarks/mfu_scaling",
        speed=10471,
        unit="tokens/s a GPU",
        model=LLAMA3,
        devices="H200",
        dims=(1, 1),
        batch=8,
        length=4096,
        keys=BF16
        | {"train_micro_batch_size_per_gpu": 4, "use_flash_attn": True, "compile": True, "use_grad_ckpt": True},
    ),
]


def make_plan(
    model: dict[str, Any],
    devices: str,
    dims: tuple[int, int],
    batch: int,
    length: int,
    attention: str | None = None,
    parts: list[int] | None = None,
    **keys: Any,
) -> Plan:
    """Plan full rows of a model of which there is nothing but config.json."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        spec = read_spec(Path(folder))
        if attention:
            spec = replace(spec, family=replace(spec.family, attention=(attention,)))
        config = TrainConfig.model_validate(
            {
                "model_path": folder,
                "data_path": folder,
                "save_path": folder,
                "train_batch_size": batch,
                "max_seq_len": length,
                "model_topo": {"process_topology": {"dims": list(dims)}, "parts": parts},
                "compile": False,
                "use_flash_attn": False,
            }
            | keys
        )
        return Plan.make(Basis(config, spec, Workload.assumed(config), parse_devices(devices)[1]))


def llama_7b(device: str, **keys: Any) -> Plan:
    """Plan one stage, whether it fits or not."""
    return make_plan(LLAMA, device, (1, 1), MICRO_BATCHES, LENGTH, **(BF16 | {"use_flash_attn": True} | keys))


def what_settings_save() -> list[list[str]]:
    """Make a row for each setting, one on top of the other."""
    rows = [["", *(f"{device}, ms a row, MFU" for device in DEVICES)]]

    def add(label: str, plans: Iterable[Plan]) -> None:
        told = (f"{1e3 * plan.seconds / MICRO_BATCHES:.0f}, {plan.mfu or 0:.1%}" for plan in plans)
        rows.append([label, *told])

    with patch.object(costs, "FP32_SUM", COPIED_SUM):
        add("eager, gradients summed through fp32 copies", [llama_7b(device) for device in DEVICES])
    add("gradients summed as they are", [llama_7b(device) for device in DEVICES])
    compiled = [llama_7b(device, compile=True) for device in DEVICES]
    add("and `compile: true`", compiled)
    faster = [
        replace(plan.basis, device=replace(plan.basis.device, attention=FLASH_3))
        if plan.basis.device.attention < FLASH_3
        else plan.basis
        for plan in compiled
    ]
    add("and attention of FlashAttention-3's class", [Plan(basis, compiled[0].parts) for basis in faster])
    in_8_bits = [basis.changed(fp8=FP8(enabled=True)) for basis in faster]
    add("and `fp8`, which an A100 has not", [Plan(basis, compiled[0].parts) for basis in in_8_bits])
    return rows


def published_runs() -> list[list[str]]:
    """Make a row for each published run."""
    rows = [["run", "on", "published", "planned", "", "MFU planned", "what the slowest stage's time goes into"]]
    for run in PUBLISHED:
        plan = run.plan()
        speed = run.planned_speed(plan)
        slowest = max(plan.stages, key=lambda stage: stage.seconds)
        shares = {kind: seconds / plan.seconds for kind, seconds in vars(slowest.spent).items()}
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.01)
        digits = 2 if run.unit == "samples/s" else 0
        figures = [f"{run.speed:,.{digits}f} {run.unit}", f"{speed:,.{digits}f}", f"{speed / run.speed - 1:+.0%}"]
        rows.append([run.name, run.devices, *figures, f"{plan.mfu or 0:.0%}", parts])
    return rows


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print it in Markdown."""
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if number == 0:
            print(f"|{'---|' * len(row)}")


if __name__ == "__main__":
    print_table("What settings save", what_settings_save())
    print_table("Published runs", published_runs())
