"""What the plan says of llama-7b's speed, and of runs that others measured: `python -m benchmarks.roofline`.

Nothing is measured here, and no GPU is needed: the tables that stand in docs/performance.md, in Markdown.

- What a run gets of each device, by the constants in training/metrics/gpus.yml and devices.py.
- Where a step goes: FLOPs, bytes and launches of each kind of work in a micro-batch of one row of 4,096 tokens, and the
  milliseconds that they take on each device. The same by layer: the embedding, a block, and the head with the loss.
- What `deterministic` costs: attention's backward pass at the rates that others measured of FlashAttention-3's.
- What a setting saves: the same step when blocks are compiled, gradients are added to their fp32 sum without a copy,
  attention kernels are of FlashAttention-3's class, and the blocks' linear layers multiply in fp8.
- What fp8 gives: the speeds of three sizes of llama with it and without.
- Published runs: measured, and by a plan with the nearest config. tests/training/plan/test_published.py holds the plan
  to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_models import COMMON, MODELS
from models.attention.kernels import EAGER
from models.costs.fake_layers import LayerCase
from models.costs.layer_work import Operation, work_of
from models.spec import ModelSpec
from training.config.keys import TrainConfig
from training.config.sections import FP8
from training.metrics.devices import parse_devices
from training.plan import costs
from training.plan.inputs import Basis, Workload, layer_kinds
from training.plan.plan import Plan

DEVICES = ("A100-80G", "H100", "H200")
OTHERS = ("V100-32G", "A100-40G", *DEVICES, "H100PCIe", "L40S", "A10", "RTX4090", "RTX3090")
LENGTH, MICRO_BATCHES = 4096, 8
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LLAMA = COMMON | MODELS["7b"] | {"max_position_embeddings": LENGTH}
LLAMA3 = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA3_70B = LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA3_70B |= {"num_attention_heads": 64}
# MPT-7B's blocks have as many weights, 12 x 4096 x 4096; their layer norms and GELU are fewer kernels than these.
MPT = LLAMA | {"intermediate_size": 10922, "vocab_size": 50432, "tie_word_embeddings": True}
COPIED_SUM = 18  # bytes to add a 16-bit gradient to a sum in fp32 as DeepSpeed 0.19.8 does, through a copy in fp32
FLASH_3 = 0.75  # of large products, 0.54 of an H100's peak; forward 0.43 to 0.62, from 512 to 16,384 tokens
# (github.com/pytorch/benchmark, 2391)
# Rates of FlashAttention-3's deterministic backward pass, where its atomic one has 1.
DETERMINISTIC = {
    "each sum waits for its turn, up to (arXiv:2601.21824)": 1 - 0.379,
    "the shortest first (github.com/Dao-AILab/flash-attention, 1893)": 474.0 / 574.7,
}


@dataclass(frozen=True)
class Published:
    """A run that somebody measured.

    Attributes:
        source: where it is told.
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
        """In the published unit."""
        rows = plan.basis.config.train_batch_size / plan.seconds
        return rows if self.unit == "samples/s" else rows * self.length / plan.basis.config.model_topo.processes


def _recipe(length: int, speed: float, flash: bool) -> Published:
    """llama-7b in eight stages on A100s of 40 GB, in fp16; its README names 128 rows a step, here 1,024 are assumed."""
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
    """The plan of full rows for a model of which there is nothing but config.json."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        spec = ModelSpec.from_folder(Path(folder))
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
    """One stage, whether it fits or not."""
    return make_plan(LLAMA, device, (1, 1), MICRO_BATCHES, LENGTH, **(BF16 | {"use_flash_attn": True} | keys))


def what_a_run_gets() -> list[list[str]]:
    """A row for each device."""
    rows = [["", "peak, TFLOP/s", "large products", "attention, long documents", "memory, TB/s", "link, GB/s", "cores"]]
    for name in OTHERS:
        device = parse_devices(name)[1]
        products = device.products * device.half
        rates = (device.half, products, device.attention * products)
        memory, link = f"{device.bandwidth / 1e12:.2f}", f"{device.link / 1e9:.0f}"
        rows.append([name, *(f"{rate / 1e12:.0f}" for rate in rates), memory, link, str(device.cores)])
    return rows


def where_a_step_goes() -> list[list[str]]:
    """A row for each kind of work, of a micro-batch; the optimizer's once a step."""
    plans = [llama_7b(device) for device in DEVICES]
    basis = plans[0].basis
    spec, weights = basis.spec, plans[0].stages[0].parameters
    kernels: dict[str, list[Operation]] = {"products": [], "attention": [], "traffic": []}
    for layer in layer_kinds(spec):
        for operation in _kernels(basis, layer):
            kernels[operation.kind].append(operation)
    told = {kind: _told(operations) for kind, operations in kernels.items()}
    told["sums"] = ["", f"{weights * costs.FP32_SUM / 1e9:.0f} GB", ""]
    told["loss"] = _told(costs.loss_work(basis, torch.bfloat16, basis.device))
    told["optimizer"] = ["", f"{weights * costs.UPDATE / 1e9:.0f} GB", ""]
    rows = [["", "FLOPs", "memory traffic", "kernels", *(f"{device}, ms" for device in DEVICES)]]
    for name, figures in told.items():
        label, micro_batches = (f"{name}, once a step", 1) if name == "optimizer" else (name, MICRO_BATCHES)
        times = [1e3 * vars(plan.stages[0].spent)[name] / micro_batches for plan in plans]
        rows.append([label, *figures, *(f"{time:.1f}" for time in times)])
    rows.append(["a step of 8, a row", "", "", "", *(f"{1e3 * plan.seconds / MICRO_BATCHES:.0f}" for plan in plans)])
    rows.append(["MFU", "", "", "", *(f"{plan.mfu or 0:.1%}" for plan in plans)])
    return rows


def what_layers_take() -> list[list[str]]:
    """A row for each kind of layer, of a micro-batch: forward and backward pass, and its gradients' sums."""
    plans = [llama_7b(device) for device in DEVICES]
    basis = plans[0].basis
    spec, last = basis.spec, basis.spec.n_layers - 1
    times = [costs.layer_times(plan.basis) for plan in plans]
    rows = [["", "FLOPs", "memory traffic", "kernels", *(f"{device}, ms" for device in DEVICES)]]
    for label, layer in {"embedding": 0, "a block": 1, "head and loss": last}.items():
        operations = _kernels(basis, layer)
        operations += costs.loss_work(basis, torch.bfloat16, basis.device) if layer == last else []
        a_weight = costs.FP32_SUM + (costs.HEAD_GRADIENT if layer == last else 0)
        summed = a_weight * sum(shape.numel() for shape in spec.shapes(layer).values())
        spent = (1e3 * (each[layer].forward + each[layer].backward).total for each in times)
        rows.append([label, *_told(operations, summed), *(f"{time:.2f}" for time in spent)])
    return rows


def what_order_costs() -> list[list[str]]:
    """A row for each rate: how much longer a step takes, of whose kernels only attention's backward pass is another."""
    plans = [llama_7b(device) for device in DEVICES]
    backward = [sum(layer.backward.attention for layer in costs.layer_times(plan.basis)) for plan in plans]
    rows = [["", *(f"{device}, ms a row" for device in DEVICES)]]
    for label, rate in DETERMINISTIC.items():
        more = [seconds * (1 / rate - 1) for seconds in backward]
        shares = [MICRO_BATCHES * each / plan.seconds for each, plan in zip(more, plans, strict=True)]
        rows.append([label, *(f"+{1e3 * each:.0f}, {share:.1%}" for each, share in zip(more, shares, strict=True))])
    return rows


def what_settings_save() -> list[list[str]]:
    """One after the other."""
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


def what_fp8_gives() -> list[list[str]]:
    """Speeds of one H100, whether a model fits or not."""
    runs = {
        f"llama-7b, rows of {LENGTH:,}, compiled": (LLAMA, LENGTH, True),
        "the same, eager": (LLAMA, LENGTH, False),
        "llama-3-8b's shape, rows of 8,192, compiled": (LLAMA3, 8192, True),
        "llama-3-70b's shape, rows of 8,192, compiled": (LLAMA3_70B, 8192, True),
    }
    rows = [["", "bf16", "fp8", ""]]
    for label, (model, length, compiled) in runs.items():
        keys = BF16 | {"use_flash_attn": True, "compile": compiled}
        plans = (make_plan(model, "H100", (1, 1), 8, length, **keys, fp8={"enabled": fp8}) for fp8 in (False, True))
        before, after = (plan.tokens_per_s for plan in plans)
        rows.append([label, f"{before:,.0f}", f"{after:,.0f}", f"x {after / before:.2f}"])
    return rows


def published_runs() -> list[list[str]]:
    """A row for each."""
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


def _kernels(basis: Basis, layer: int) -> list[Operation]:
    """Of a layer's forward and backward pass, as the plan has counted them."""
    cases = ((asked[1], work) for asked, work in basis.known.items() if asked[0] is work_of)
    counted = next(work for case, work in cases if isinstance(case, LayerCase) and case.layer == layer)
    return [*counted.forward, *counted.backward]


def _told(operations: Sequence[Operation], summed: float = 0.0) -> list[str]:
    """FLOPs, bytes and launches; `summed` are bytes of what is no kernel of a layer."""
    flops = sum(operation.flops for operation in operations)
    moved = sum(operation.bytes for operation in operations) + summed
    digits = 0 if moved >= 1e10 else 1
    return [f"{flops / 1e12:.1f} T" if flops else "", f"{moved / 1e9:.{digits}f} GB", str(len(operations))]


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """In Markdown."""
    print(f"\n{title}\n")
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if number == 0:
            print(f"|{'---|' * len(row)}")


if __name__ == "__main__":
    print_table("What a run gets of a device, in 16 bits", what_a_run_gets())
    print_table(
        f"llama-7b in bf16, a row of {LENGTH:,} tokens, {MICRO_BATCHES} micro-batches a step", where_a_step_goes()
    )
    print_table("The same by layer", what_layers_take())
    print_table("What `deterministic` costs", what_order_costs())
    print_table("What settings save", what_settings_save())
    print_table("What fp8 gives, tokens/s of one H100", what_fp8_gives())
    print_table("Published runs", published_runs())
