"""Measure a pipeline's speed on a CPU; forty minutes on two idle cores.

Each part trains one model in several ways, one step of each in turn (`benchmarks.turns`), on full rows of random
words; figures are medians of the steps, ratios medians of the rounds' ratios to the first way.

- `ideal`, `large_head`: two stages of one thread against one process of one thread. With m micro-batches and p stages,
  1f1b without any cost of its own is p m / (m + p - 1) times as fast. Two copies of the model that train at the same
  time show what two cores, which share the memory, give at all.
- `division`: `parts: auto` against divisions by hand, for a model whose head is 40 % of the work.
- `schedules`: dualpipev against 1f1b with four micro-batches.
- `replicas`: gradients summed during the last backward pass against DeepSpeed's sums after it; the least bytes
  of the loopback interface, which others may use.
- `wide`: two processes that share each row (`sequence: 2`) or each layer (a `model` axis) of 8,192 tokens.
- `peers`: against ZeRO-3 and transformers' Trainer (`benchmarks.peers`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import peers
from benchmarks.parts import Figures, Part, run_parts, table_of
from benchmarks.turns import Turn, Turns

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
WIDER = MODEL | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS = peers.MODEL["num_hidden_layers"] + 2
PLAIN: dict[str, Any] = {"zero_optimization": {"stage": 0}}  # so that all ways fit into memory at once
ONE = "one process, one thread"
COPIES = "one of two copies", "the other copy"
TENSOR = {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}


@dataclass(frozen=True)
class Way:
    """One way to train: keys of the config, and threads of each process."""

    keys: dict[str, Any] = field(default_factory=dict)
    dims: tuple[int, ...] = (1, 1)
    threads: int = 1
    beside: bool = False  # at the same time as the way before


@dataclass(frozen=True)
class Case:
    """A model, the rows of a step, and the ways to train it; the first one is compared with.

    Attributes:
        ideal: how many times as fast as the first way the others could be.
    """

    model: dict[str, Any]
    rows: int
    length: int
    rounds: int
    ways: dict[str, Way]
    ideal: float = 1.0


def against_one(rows: int, length: int, model: dict[str, Any]) -> Case:
    """Compare two stages with one process."""
    ways = {
        ONE: Way(PLAIN),
        "1f1b": Way(PLAIN, (2, 1)),
        "dualpipev": Way(PLAIN | {"schedule": "dualpipev"}, (2, 1)),
        COPIES[0]: Way(PLAIN),
        COPIES[1]: Way(PLAIN, beside=True),
        "one process, two threads": Way(PLAIN, threads=2),
    }
    return Case(model, rows, length, 5, ways, ideal=2 * rows / (rows + 1))


DIVISION = Case(peers.MODEL, 8, 256, 5, {})
CASES = {
    "ideal": against_one(16, 512, MODEL),
    "large_head": against_one(16, 256, peers.MODEL),
    "division": DIVISION,
    "schedules": Case(
        WIDER,
        4,
        256,
        9,
        {
            "1f1b": Way({"parts": [7, 7]}, (2, 1)),
            "dualpipev": Way({"schedule": "dualpipev", "parts": [4, 3, 3, 4]}, (2, 1)),
        },
    ),
    "replicas": Case(  # who names `reduce_scatter`, DeepSpeed's default, leaves the sums to DeepSpeed
        MODEL,
        4,
        128,
        7,
        {
            "afterwards": Way({"zero_optimization": {"stage": 1, "reduce_scatter": True}}, (1, 2)),
            "while computing": Way({"zero_optimization": {"stage": 1}}, (1, 2)),
        },
    ),
    "wide": Case(
        MODEL | {"num_hidden_layers": 4},
        1,
        8192,
        5,
        {
            ONE: Way(PLAIN),
            "two share each row": Way(PLAIN | {"sequence": 2}, (1, 2)),
            "two share each layer": Way(PLAIN | {"process_topology": TENSOR}, (1, 1, 2)),
            COPIES[0]: Way(PLAIN),
            COPIES[1]: Way(PLAIN, beside=True),
        },
        ideal=2,
    ),
}


def measure(name: str, folder: Path) -> Figures:
    """Measure every way of a case."""
    case = CASES[name]
    (folder / "config.json").write_text(json.dumps(case.model), encoding="utf-8")
    if case is DIVISION:
        case = with_divisions(case, folder)
    with Turns(folder) as turns:
        for way, asked in case.ways.items():
            given = {"case": name, "dims": asked.dims, "threads": asked.threads, "keys": asked.keys}
            turns.add(way, math.prod(asked.dims), "benchmarks.throughput", "train", asked.beside, **given)
        turns.rounds(case.rounds)
        first = next(iter(case.ways))
        return {
            name: {
                way: {
                    "startup_s": turns.ways[way].startup,
                    "step_s": turns.median(way, "seconds"),
                    "tokens_per_s": turns.speed(way),
                    "ratio": (ratio := turns.ratio(way, first)),
                    "of_ideal": ratio / (case.ideal / 2 if way in COPIES else case.ideal),
                    "peak_mb": turns.median(way, "peak") / 1e6,
                    "sent_mb": min(step["sent"] for step in turns.ways[way].steps[1:]) / 1e6,
                }
                for way in case.ways
            }
        }


def with_divisions(case: Case, folder: Path) -> Case:
    """Add `parts: auto` and the divisions by hand around it."""
    from benchmarks.steps import run_config
    from models.api import read_spec
    from training.metrics.devices import this_device
    from training.plan.inputs import Basis, Workload
    from training.plan.plan import best_parts

    config = run_config(folder, 2, case.rows, case.length, **PLAIN)
    spec = read_spec(folder)
    auto = best_parts(Basis(config, spec, Workload.assumed(config), this_device()))
    tried = dict.fromkeys((auto[0], auto[0] - 1, auto[0] + 1, LAYERS // 2))
    ways = {f"[{each}, {LAYERS - each}]": Way(PLAIN | {"parts": [each, LAYERS - each]}, (2, 1)) for each in tried}
    return replace(case, ways=ways)


def table(name: str, figures: Figures) -> Table:
    """Show every way beside the first."""
    case = CASES[name]
    title = f"{name}: a step of {case.rows} rows of {case.length:,} tokens, fp32"
    columns = ("way", "start, s", "step, s", "tokens/s", "of the first", "of the ideal", "peak, MB", "sent, MB")
    rows = (
        (
            way,
            f"{row['startup_s']:.1f}",
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.3f}",
            f"{row['of_ideal']:.3f}" if case.ideal > 1 else "",
            f"{row['peak_mb']:,.0f}",
            f"{row['sent_mb']:.0f}",
        )
        for way, row in figures[name].items()
    )
    return table_of(title, columns, rows)


def train_way(folder: Path, case: str, dims: list[int], threads: int, keys: dict[str, Any]) -> None:
    """Train on one rank."""
    import psutil
    import torch

    from benchmarks.steps import joined, rows_loader, run_config, train
    from models.api import read_spec
    from training.engine.pipeline import PipelineTrainer
    from training.metrics.peak_memory import peak_memory, peak_memory_by_stage
    from training.plan.auto import divide

    asked, model = CASES[case], folder.parent
    topology = {"process_topology": {"dims": dims}}
    topology |= {key: keys.pop(key) for key in ("parts", "sequence", "process_topology") if key in keys}
    config = run_config(model, dims[0], asked.rows, asked.length, **keys | {"model_topo": topology})
    with joined(config):
        torch.set_num_threads(threads)
        loader, before = rows_loader(config, asked.model["vocab_size"]), peak_memory()
        spec = read_spec(model)
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent

        def figures() -> dict[str, int]:
            nonlocal sent
            last, sent = sent, psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            return {"sent": sent - last, "peak": max(peak_memory_by_stage(trainer.stage, dims[0])) - before}

        train(trainer, loader, Turn(folder), figures)


if __name__ == "__main__":
    parts: dict[str, Part] = {name: (partial(measure, name), partial(table, name)) for name in CASES}
    parts |= {"peers": (peers.measure, peers.table)}
    run_parts("Speed of a pipeline on a CPU.", parts, {"train": train_way})
