"""Measure a pipeline's speed on a CPU; forty minutes on two idle cores.

Each part trains one model in several ways, one step of each in turn (`benchmarks.workers`), on full rows of random
words; figures are medians of the steps, ratios medians of the rounds' ratios to the first way.

- `ideal`, `large_head`: two stages of one thread against one process of one thread. With m micro-batches and p stages,
  1f1b without any cost of its own is p m / (m + p - 1) times as fast. Two copies of the model that train at the same
  time show what two cores, which share the memory, give at all.
- `rows`: micro-batches of several sizes in two stages against transformers' Trainer in one process with both cores,
  and which of them `auto` chooses.
- `division`: `parts: auto` against divisions by hand, for a model whose head is 40 % of the work.
- `unequal`: two stages whose passes last as long as a plan says of two cards, the second of half the speed; what a pass
  does not compute it sleeps. `parts: auto` against an even split, each named with its planned step.
- `schedules`: dualpipev against 1f1b with four micro-batches.
- `replicas`: gradients summed during the last backward pass against DeepSpeed's sums after it; the least bytes
  of the loopback interface, which others may use.
- `lora`: a step that trains adapters, over a base in 32 and in 4 bits, against one that trains all weights.
- `preference`: a step of DPO, and the forward-only pass of its reference, against one of SFT on the same documents, two
  in a row.
- `mtp`: a step that trains a layer ahead along, against one without, for a model of 24 blocks.
- `streaming`, `streaming64`: weight streaming in two processes against two that do the same without depending on each
  other, with 8 and 64 layers: "worked" is a process's time in turns, and "simulated" the step that the planner's
  simulation makes of the times of all turns; "own" is the memory that a process shares with nobody, after a step.
- `chunks`: two stages with two rows of 4,096 tokens a step, whole and in eight chunks each: "worked" is a process's
  time in passes, "simulated" the step that the schedule makes of the mean times of its passes.
- `images`: how long a step waits for pixels (`benchmarks.images`).
- `wide`: two processes that share each row (`sequence: 2`) or each layer (a `model` axis) of 8,192 tokens.
- `zero3`, `packed`, `full`: two stages of one thread against ZeRO-3 in two processes, and against transformers' Trainer
  in one process with both cores. `packed` trains on maths problems and tool dialogues (`benchmarks.tokenizing`), which
  the Trainer gets in micro-batches of 4 that transformers' own collator pads; in `full` blocks are compiled.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks import images, peers
from benchmarks.memory import LORA, MODEL, NF4
from benchmarks.report import Report, run_parts, table_of
from benchmarks.tokenizing import RECORDS, make_tokenizer
from benchmarks.workers import Turn, Turns

if TYPE_CHECKING:  # the process that compares needs no torch
    from data.sample_set import SampleSet
    from options import RunConfig
    from training.engine.trainer import Trainer

SMALL: dict[str, Any] = {
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
WIDER = SMALL | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
# The width and vocabulary of SmolLM2-135M.
LARGE_HEAD = SMALL | peers.SMOLLM2 | {"num_hidden_layers": 12, "max_position_embeddings": 512}
TRAINER_BATCH = 4  # samples in a micro-batch of the Trainer; 8 take more memory than there is
PLAIN: dict[str, Any] = {"zero_optimization": {"stage": 0}}  # so that all ways fit into memory at once
DUALPIPEV: dict[str, Any] = {"schedule": "dualpipev"}
ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "stage3_prefetch_bucket_size": 50_000_000}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ONE = "one process, one thread"
LASTING = 10.0  # seconds of a step with `parts: auto`, of `unequal`
COPIES = "one of two copies", "the other copy"


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        keys: of the config.
        topology: keys of its `model_topo`.
        threads: of each process.
        beside: whether its steps run at the same time as those of the way before.
        lasting: seconds that a forward and a backward pass of each stage take at least.
    """

    keys: dict[str, Any]
    dims: tuple[int, ...] = (1, 1)
    topology: dict[str, Any] | None = None
    threads: int = 1
    beside: bool = False
    lasting: tuple[tuple[float, float], ...] = ()
    engine: Literal["pipeline", "zero", "trainer", "reference"] = "pipeline"


@dataclass(frozen=True)
class Case:
    """A model, the rows of a step, and the ways to train it; the first one is compared with.

    Attributes:
        ideal: how many times as fast as the first way the others could be.
        records: whether the rows are records instead of random words.
        simulated: whether the passes of each step are recorded, and the step simulated with their times.
    """

    model: dict[str, Any]
    rows: int
    length: int
    rounds: int
    ways: dict[str, Way]
    ideal: float = 1.0
    records: bool = False
    simulated: bool = False


def against_one(rows: int, length: int, model: dict[str, Any]) -> Case:
    """Compare two stages with one process."""
    ways = {
        ONE: Way(PLAIN),
        "1f1b": Way(PLAIN, (2, 1)),
        "dualpipev": Way(PLAIN | DUALPIPEV, (2, 1)),
        COPIES[0]: Way(PLAIN),
        COPIES[1]: Way(PLAIN, beside=True),
        "one process, two threads": Way(PLAIN, threads=2),
    }
    return Case(model, rows, length, 5, ways, ideal=2 * rows / (rows + 1))


def against_peer(
    rows: int, length: int, name: str, peer: Way, keys: dict[str, Any] | None = None, records: bool = False
) -> Case:
    """Compare two stages with another way to train."""
    keys = keys or {}
    ways = {"1f1b": Way(keys, (2, 1)), "dualpipev": Way(keys | DUALPIPEV, (2, 1))}
    return Case(LARGE_HEAD, rows, length, 3, {name: replace(peer, keys=peer.keys | keys)} | ways, records=records)


TRAINER = Way({}, engine="trainer", threads=os.cpu_count() or 1)
MICRO_BATCHES = {"Trainer": TRAINER} | {
    f"{rows} rows": Way(PLAIN | {"train_micro_batch_size_per_gpu": rows}, (2, 1)) for rows in (1, 2, 4, 8)
}
SCHEDULES = {
    "1f1b": Way({}, (2, 1), {"parts": [7, 7]}),
    "dualpipev": Way(DUALPIPEV, (2, 1), {"parts": [4, 3, 3, 4]}),
}
SUMS = {  # who names `reduce_scatter`, DeepSpeed's default, leaves the sums to DeepSpeed
    "afterwards": Way({"zero_optimization": {"stage": 1, "reduce_scatter": True}}, (1, 2)),
    "while computing": Way({"zero_optimization": {"stage": 1}}, (1, 2)),
}
TRAINED = {
    "all weights": Way({}, (2, 1)),
    "LoRA": Way(LORA, (2, 1)),
    "QLoRA": Way(NF4, (2, 1)),
}
DPO: dict[str, Any] = {"preference": {"loss": "dpo"}, "from_scratch": False}
PREFERRED = {
    "SFT": Way({"train_batch_size": 8, "pack_len": 512}, (2, 1)),  # each document for itself
    "DPO": Way(DPO, (2, 1)),
    "reference": Way(DPO, (2, 1), engine="reference"),
}
AHEAD = {
    "without": Way({}, (2, 1)),
    "mtp": Way({"mtp": {"weight": 0.1, "init": "copy"}}, (2, 1)),
}
RECOMPUTED: dict[str, Any] = {"use_grad_ckpt": True, "optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}
STREAMED = {
    ONE: Way(PLAIN | RECOMPUTED),
    "weight streaming": Way(PLAIN | RECOMPUTED | {"schedule": "weight_streaming"}, (2, 1)),
    "1f1b": Way(PLAIN | RECOMPUTED, (2, 1)),
    COPIES[0]: Way(PLAIN | RECOMPUTED),
    COPIES[1]: Way(PLAIN | RECOMPUTED, beside=True),
}
SHARED = {
    ONE: Way(PLAIN),
    "two share each row": Way(PLAIN, (1, 2), {"sequence": 2}),
    "two share each layer": Way(
        PLAIN, (1, 1, 2), {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}
    ),
    COPIES[0]: Way(PLAIN),
    COPIES[1]: Way(PLAIN, beside=True),
}
CHUNKS = {
    "whole rows": Way(PLAIN, (2, 1)),
    "8 chunks a row": Way(PLAIN | {"row_chunk": 512}, (2, 1)),
}
CASES = {
    "ideal": against_one(16, 512, SMALL),
    "large_head": against_one(16, 256, LARGE_HEAD),
    "rows": Case(LARGE_HEAD, 16, 256, 3, MICRO_BATCHES),
    "division": Case(LARGE_HEAD, 8, 256, 5, {}),  # see `with_divisions`
    "unequal": Case(SMALL, 8, 32, 5, {}, simulated=True),  # see `with_cards`
    "schedules": Case(WIDER, 4, 256, 9, SCHEDULES),
    "replicas": Case(SMALL, 4, 128, 7, SUMS),
    "lora": Case(MODEL, 4, 512, 5, TRAINED),
    "preference": Case(MODEL, 4, 512, 5, PREFERRED),
    "mtp": Case(SMALL | {"num_hidden_layers": 24}, 8, 512, 7, AHEAD),
    # Of p stages and R rows in n chunks a step takes (R + (p - 1) / n) units of a row.
    "chunks": Case(SMALL | {"num_hidden_layers": 6}, 2, 4096, 5, CHUNKS, ideal=(2 + 1) / (2 + 1 / 8), simulated=True),
    "wide": Case(SMALL | {"num_hidden_layers": 4}, 1, 8192, 5, SHARED, ideal=2),
    "streaming": Case(SMALL | {"num_hidden_layers": 8}, 32, 256, 5, STREAMED, ideal=2),
    "streaming64": Case(SMALL | {"num_hidden_layers": 64}, 8, 256, 3, STREAMED, ideal=2),
    "zero3": against_peer(32, 256, "ZeRO-3", Way({"zero_optimization": ZERO}, (1, 2), engine="zero")),
    "packed": against_peer(64, 1024, "Trainer", TRAINER, BF16, records=True),
    "full": against_peer(32, 512, "Trainer", TRAINER, BF16 | {"train_micro_batch_size_per_gpu": 2, "compile": True}),
}


def measure(name: str, folder: Path) -> Report:
    """Measure every way of a case."""
    case = CASES[name]
    if any(way.engine == "trainer" for way in case.ways.values()):
        make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(case.model), encoding="utf-8")
    if any({"lora", "preference"} & way.keys.keys() for way in case.ways.values()):
        from benchmarks.steps import save_random_model

        save_random_model(folder)
    if not case.ways:
        case = with_cards(case, folder) if case.simulated else with_divisions(case, folder)
    with Turns(folder) as turns:
        for way, asked in case.ways.items():
            processes = None if asked.engine == "trainer" else math.prod(asked.dims)  # which takes ranks for its own
            turns.add(way, processes, "benchmarks.throughput", "train", asked.beside, case=name, chosen=vars(asked))
        turns.rounds(case.rounds)
        figures = {way: figures_of(turns, way, case) for way in case.ways}
    title = f"{name}: a step of {case.rows} rows of {case.length:,} tokens"
    if case.ways is MICRO_BATCHES:
        title += f"; {rows_by_plan(case, folder)}"
    columns = (
        "way",
        "start, s",
        "step, s",
        "worked, s",
        "simulated, s",
        "tokens/s",
        "of the first",
        "of the ideal",
        "peak, MB",
        "own, MB",
        "sent, MB",
    )
    rows = [
        (
            way,
            f"{row['startup_s']:.1f}",
            f"{row['step_s']:.3f}",
            f"{row['worked_s']:.3f}" if row["worked_s"] else "",
            f"{row['simulated_s']:.3f}" if row["simulated_s"] else "",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.3f}",
            f"{row['of_ideal']:.3f}" if case.ideal > 1 else "",
            f"{row['peak_mb']:,.0f}",
            f"{row['own_mb']:,.0f}",
            f"{row['sent_mb']:.0f}",
        )
        for way, row in figures.items()
    ]
    known = [any(cells) for cells in zip(*rows, strict=True)]
    return Report({name: figures}, table_of(title, compress(columns, known), (compress(row, known) for row in rows)))


def with_divisions(case: Case, folder: Path) -> Case:
    """Add `parts: auto` and the divisions by hand around it."""
    from benchmarks.steps import run_config, topology
    from models.api import read_spec
    from options.planner.inputs import Basis, Workload
    from options.planner.plan import best_parts
    from training.metrics.devices import this_device

    config = run_config(folder, case.rows, case.length, **PLAIN, **topology(2, 1))
    auto = best_parts(Basis(config, read_spec(folder), Workload.assumed(config), this_device()))
    layers = sum(auto)
    tried = dict.fromkeys((auto[0], auto[0] - 1, auto[0] + 1, layers // 2))
    ways = {f"[{each}, {layers - each}]": Way(PLAIN, (2, 1), {"parts": [each, layers - each]}) for each in tried}
    return replace(case, ways=ways)


def with_cards(case: Case, folder: Path) -> Case:
    """Add `parts: auto` on two cards, of which the second has half the speed, and an even split."""
    from benchmarks.steps import run_config, topology
    from models.api import read_spec
    from options.planner.inputs import Basis, Workload
    from options.planner.plan import Plan, best_parts
    from training.metrics.devices import mixed, this_device
    from training.topology import even_parts, layer_ranges

    config, card = run_config(folder, case.rows, case.length, **PLAIN, **topology(2, 1)), this_device()
    slower = replace(card, half=card.half / 2, single=card.single / 2, bandwidth=card.bandwidth / 2)
    basis = Basis(config, read_spec(folder), Workload.assumed(config), mixed([card, slower]))
    auto, ways = best_parts(basis), {}
    unit = LASTING / Plan(basis, auto).simulated(case.rows).seconds
    for parts in (auto, even_parts(sum(auto), 2, 1)):
        plan, lasting = Plan(basis, parts), []
        for begin, end in layer_ranges(parts):
            forward = sum(time.forward.total for time in plan.times[begin:end])
            backward = sum(time.backward.total for time in plan.times[begin:end])
            lasting.append((unit * forward, unit * backward))
        planned = unit * plan.simulated(case.rows).seconds
        ways[f"{parts}, planned {planned:.2f} s"] = Way(PLAIN, (2, 1), {"parts": parts}, lasting=tuple(lasting))
    return replace(case, ways=ways)


def rows_by_plan(case: Case, folder: Path) -> str:
    """Return what `train_micro_batch_size_per_gpu: auto` says of a case, as one of two stages would choose."""
    import torch

    from benchmarks.steps import run_config, topology
    from models.api import read_spec
    from options.planner.inputs import Workload
    from options.planner.micro_batch import choose_rows
    from training.metrics.devices import this_device

    torch.set_num_threads(1)
    config = run_config(folder, case.rows, case.length, **PLAIN, **topology(2, 1))
    _, line = choose_rows(config, read_spec(folder), this_device(), Workload.assumed, in_stages=True)
    return line


def figures_of(turns: Turns, way: str, case: Case) -> dict[str, float]:
    """Collect the figures of a way; its ratio is to the first way."""
    ratio = turns.ratio(way, next(iter(case.ways)))
    return {
        "startup_s": turns.ways[way].startup,
        "step_s": turns.median(way, "seconds"),
        "tokens_per_s": turns.speed(way),
        "ratio": ratio,
        "of_ideal": ratio / (case.ideal / 2 if way in COPIES else case.ideal),
        "peak_mb": turns.median(way, "peak") / 1e6,
        "own_mb": turns.median(way, "own") / 1e6,
        "worked_s": turns.median(way, "worked"),
        "simulated_s": turns.median(way, "simulated"),
        "sent_mb": min(step["sent"] for step in turns.ways[way].steps[1:]) / 1e6,
    }


def train_way(folder: Path, case: str, chosen: dict[str, Any]) -> None:
    """Train in one process of a way."""
    import numpy
    import psutil
    import torch

    from benchmarks.steps import (
        joined,
        lasting,
        run_config,
        time_passes,
        time_turns,
        topology,
        train,
        train_by_transformers,
    )
    from models.api import read_spec
    from options.multi_token.drafting import Drafting
    from options.planner.planning import divide
    from options.preference.collation import judged
    from training.batches import build_loader
    from training.distributed.processes import gather
    from training.measures import loss_of
    from training.metrics.peak_memory import peak_memory
    from training.runs import trainer_kind
    from training.trained import with_trained

    asked, model, way = CASES[case], folder.parent, Way(**chosen)
    paths = {"data_path": RECORDS, "cache_dir": str(model / "cache"), "save_path": str(folder / "run")}
    keys = topology(*way.dims, **way.topology or {}) | paths | {"template_fallback": "rewrite"} | way.keys
    config = run_config(model, asked.rows, asked.length, **keys)
    before, sent, timed = peak_memory(), 0, None

    def figures() -> dict[str, float]:
        nonlocal sent
        last, sent = sent, psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        peak = peak_memory() - before
        maps = [each for each in psutil.Process().memory_maps() if "memfd:" not in each.path]  # what pools share
        own = sum(each.private_clean + each.private_dirty for each in maps)
        most = (peak, own) if way.engine == "trainer" else (max(gather(each)) for each in (peak, own))
        worked, simulated = timed() if timed else (0.0, 0.0)
        memory = dict(zip(("peak", "own"), most, strict=True))
        return {"sent": sent - last, "worked": worked, "simulated": simulated, **memory}

    if way.engine == "trainer":
        train_by_transformers(config, samples_of(asked, config), Turn(folder), TRAINER_BATCH, figures=figures)
        return
    engine: type[Trainer] = trainer_kind(config, way.engine != "zero")
    with joined(config):
        torch.set_num_threads(way.threads)  # joining divides the cores among the processes
        loader, spec = build_loader(samples_of(asked, config), config), with_trained(read_spec(model), config)
        if config.preference:
            judged(loader).reference = numpy.zeros((len(loader.data.lengths), 2), numpy.float32)
        before = peak_memory()
        division = divide(config, spec, engine.in_stages)
        trainer = engine.build(config, spec, model, division)
        if config.mtp:
            Drafting(SimpleNamespace(spec=spec), config.mtp).connect(trainer, [loader])
        if slots := getattr(division, "slots", None):  # of weight streaming
            timed = time_turns(trainer, slots, asked.rows)
        if asked.simulated:
            timed = time_passes(lasting(trainer, way.lasting))
        if way.engine == "reference":
            loss_of(trainer).recorded = []
            trainer.train_step = trainer.eval_loss  # type: ignore[method-assign]
        train(trainer, loader, Turn(folder), figures)


def samples_of(case: Case, config: RunConfig) -> SampleSet:
    """Read the records, or make full rows."""
    from rich.console import Console

    from benchmarks.steps import random_rows
    from training.data_setup import RecordReader

    if case.records:
        return RecordReader(config, Path(config.model_path), Console(quiet=True)).read("data", config.data_path)
    documents = config.train_batch_size // case.rows  # in each row, as samples of their own
    return random_rows(
        case.model["vocab_size"], config.train_batch_size, config.max_seq_len // documents, bool(config.preference)
    )


if __name__ == "__main__":
    parts = {name: partial(measure, name) for name in CASES} | {"peers": peers.measure_all, "images": images.measure}
    run_parts("Speed of a pipeline on a CPU.", parts, {"train": train_way})
