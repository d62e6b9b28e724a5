"""What a step takes beyond its passes, from the gradients' sum over the replicas on: a part of
`python -m benchmarks.throughput`.

One process with the thread that a rank has trains a llama of 42M parameters with AdamW. Each operation's tensors are
counted, read and written, communication apart. Steps that are not counted are timed, by what the thread works itself,
and the fastest one counts.

- `step_bytes`: by case, moved for a parameter.
- `step_seconds`: by case, for a billion parameters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ranks import run_ranks, tell

STEPS, LENGTH = 5, 16
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
BF16, CLIPPED = {"bf16": {"enabled": True}}, {"gradient_clipping": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "bf16": BF16 | {"gradient_clipping": 0},
    "bf16, clipped": BF16 | CLIPPED,
    "fp16, clipped": {"fp16": {"enabled": True, "initial_scale_power": 8}} | CLIPPED,
    "fp32, clipped": CLIPPED,
    "fp32, clipped, stage 0": CLIPPED | {"zero_optimization": {"stage": 0}},
}
OVERWRITING = {"copy_", "zero_", "fill_"}  # what they write is not read


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    found = {name: run_ranks(1, __name__, folder, "--case", json.dumps(keys)) for name, keys in CASES.items()}
    return {f"step_{figure}": {name: case[figure] for name, case in found.items()} for figure in ("bytes", "seconds")}


def table(figures: dict[str, Any]) -> Table:
    made = Table(title="a step beyond its passes, AdamW, one replica")
    for heading in ("case", "bytes a parameter", "seconds for 10^9"):
        made.add_column(heading, justify="left" if heading == "case" else "right")
    for name, moved in figures["step_bytes"].items():
        made.add_row(name, f"{moved:.1f}", f"{figures['step_seconds'][name]:.2f}")
    return made


class _Moved(TorchDispatchMode):
    """Adds up the bytes of operations, and keeps them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = {slot.name: value for slot, value in zip(function._schema.arguments, args, strict=False)} | (
            kwargs or {}
        )
        written = {slot.name for slot in function._schema.arguments if slot.is_write}
        if name.startswith("_fused_adam") and given.get("grad_scale") is None:
            written.discard("grads")
        storages = {leaf.untyped_storage()._cdata for leaf in _tensors(given)}
        made = [leaf for leaf in _tensors(result) if leaf.untyped_storage()._cdata not in storages]
        is_view = not made and not written
        if function.namespace != "c10d" and not is_view and "empty" not in name:
            read = [value for key, value in given.items() if name not in OVERWRITING or key not in written]
            self.bytes[name] = self.bytes.get(name, 0) + sum(
                leaf.numel() * leaf.itemsize
                for leaf in [*_tensors(read), *_tensors([given[key] for key in written]), *made]
            )
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _work(folder: Path, keys: dict[str, Any]) -> None:
    import torch
    from deepspeed.runtime.pipe import schedule

    from benchmarks.steps import joined
    from data.sample_set import InMemory, Sample
    from models.api import read_spec
    from training.config.keys import TrainConfig
    from training.data_setup import build_loader
    from training.engine.pipeline import PipelineTrainer
    from training.plan.auto import divide

    config = TrainConfig.model_validate(
        {
            "model_path": str(folder),
            "data_path": str(folder),
            "save_path": str(folder),
            "from_scratch": True,
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-5}},
            "model_topo": {"process_topology": {"axes": ["pipe", "data"], "dims": [1, 1]}, "parts": "auto"},
            **keys,
        }
    )
    ids = list(range(LENGTH))
    samples = InMemory(2 * [Sample(input_ids=ids, labels=ids)])
    seconds, moved = [], _Moved()
    with joined(config):
        torch.set_num_threads(1)
        loader, spec = build_loader(samples, config), read_spec(folder)
        trainer = PipelineTrainer.build(config, spec, folder, divide(config, spec))

        def noted(instruction: Callable[..., None]) -> Callable[..., None]:
            def run(*arguments: Any, **named: Any) -> None:
                with counting:
                    begin = time.thread_time()
                    instruction(*arguments, **named)
                    taken.append(time.thread_time() - begin)

            return run

        instructions = dict(trainer.engine._INSTRUCTION_MAP)
        for kind in (schedule.ReduceGrads, schedule.OptimizerStep):
            instructions[kind] = noted(instructions[kind])
        trainer.engine._INSTRUCTION_MAP = instructions
        for step in range(STEPS + 1):
            taken: list[float] = []
            counting = moved if step == STEPS else nullcontext()
            trainer.train_step(loader, loader.batch(0))
            seconds.append(sum(taken))
        weights = sum(weight.numel() for weight in trainer.engine.module.parameters())
    by_name = {name: size / weights for name, size in moved.bytes.items() if size >= weights / 10}
    tell(folder, {"bytes": sum(by_name.values()), "seconds": min(seconds[1:-1]) / weights * 1e9, "by_name": by_name})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", type=json.loads, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    _work(arguments.folder, arguments.case)
