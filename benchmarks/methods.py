"""Print the fewest GPUs that a method needs, by model and kind of GPU, in Markdown: a table of docs/performance.md.

Planned from the models' shapes: full rows of 2,048 tokens, 64 of them a step, bf16, AdamW, all blocks recomputed,
stages of one GPU each. Nothing is measured, and no GPU is needed. It takes two minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.quantities import GIGA
from models.api import read_spec
from models.spec import ModelSpec
from options import RunConfig
from options.planner.inputs import Basis, Workload
from options.planner.plan import Plan, fitting_parts
from options.planner.shapes import shape_of
from training.metrics.devices import Device, parse_devices
from training.trained import with_trained

MODELS = ("mistral-7b", "qwen3-14b", "qwen3-32b", "llama-3-70b")
DEVICES = ("RTX4090-24G", "A100-80G", "H100-80G")
ADAPTERS = {"r": 16, "alpha": 32}
METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": ADAPTERS},
    "LoRA over nf4": {"lora": ADAPTERS | {"base": "nf4"}},
}
COLUMNS = ["model", "method", *(f"{name}: GPUs (GB of the fullest)" for name in DEVICES)]
SHAPE: dict[str, Any] = {
    **dict.fromkeys(("model_path", "data_path", "save_path"), "-"),
    "train_batch_size": 64,
    "max_seq_len": 2048,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "bf16": {"enabled": True},
    "use_grad_ckpt": True,
}


def plain_spec(model: str) -> ModelSpec:
    """Return the spec of a model of which only the shape is known."""
    shape = shape_of(model)
    assert shape is not None
    return read_spec(Path(model), shape[1])


def fewest(spec: ModelSpec, keys: dict[str, Any], device: Device) -> Plan | None:
    """Plan the fewest stages that fit, as more stages need less memory each; None where a layer alone is too large."""
    known: dict[Any, Any] = {}

    def basis(stages: int) -> Basis:
        topology = {"process_topology": {"dims": [stages, 1]}}
        config = RunConfig.model_validate(SHAPE | keys | {"model_topo": topology})
        return Basis(config, with_trained(spec, config), Workload.assumed(config), device, known=known)

    numbers = range(1, spec.n_layers + 1)
    first = bisect_left(numbers, True, key=lambda stages: fitting_parts(basis(stages)) is not None)
    return Plan.make(basis(numbers[first])) if first < len(numbers) else None


def rows(models: tuple[str, ...] = MODELS) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for model in models:
        spec = plain_spec(model)
        for method, keys in METHODS.items():
            plans = [fewest(spec, keys, parse_devices(f"1x{name}")[1]) for name in DEVICES]
            yield [model, method, *map(_cell, plans)]


def _cell(plan: Plan | None) -> str:
    return f"{len(plan.stages)} ({plan.peak / GIGA:.1f})" if plan else "none"


def main() -> None:
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for row in rows():
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
