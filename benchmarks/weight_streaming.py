"""Print what weight streaming is predicted to reach beside the schedules, and beside llmq, in Markdown.

Nothing is measured, and no GPU is needed: `python -m benchmarks.weight_streaming` (docs/performance.md). `--only NAME`
prints one of the tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.roofline import SHAPES, Run
from common.quantities import GIGA
from options.planner.costs import Roofline, in_fp8
from options.planner.inputs import Workload
from options.planner.layer_costs import product
from options.planner.micro_batch import ROWS, choose_rows
from options.planner.plan import Plan
from options.weight_streaming.plan import StreamedPlan, Streaming, least, passes
from options.weight_streaming.schedule import Slot, simulate_turns
from training.config.precision import training_dtype
from training.metrics.devices import HOST_LINK

DEVICE = "RTX4090"
RUNS = (("Llama-3.1-8B", "llama-3-8b", 8), ("Qwen3-32B", "qwen3-32b", 8), ("Llama-3.1-8B", "llama-3-8b", 1))
KEYS: dict[str, Any] = {
    "bf16": {"enabled": True},
    "use_flash_attn": "auto",
    "compile": "auto",
    "use_grad_ckpt": True,
    "packing": False,
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}
STREAMED = KEYS | {"schedule": "weight_streaming", ROWS: "auto"}
FP8: dict[str, Any] = {"fp8": {"enabled": True}}
STATES: dict[str, Any] = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
# Model, its shape, GPUs, keys, what is named of them, GB of a host, and llmq's tokens/s (benchmarks/4090x4.md there).
PEER_COLUMNS = ["model", DEVICE, "", "rows", "slots", "memory, GB", "host, GB"]
PEERS: tuple[tuple[str, str, int, dict[str, Any], str, float | None, int], ...] = (
    ("Qwen2.5-7B", "qwen2-7b", 4, {}, "bf16", None, 10_897),
    ("Qwen2.5-7B", "qwen2-7b", 4, FP8, "fp8", None, 16_487),
    ("Qwen2.5-7B", "qwen2-7b", 1, {}, "bf16", None, 2_777),
    ("Qwen2.5-7B", "qwen2-7b", 1, FP8, "fp8", None, 4_328),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, {}, "bf16", None, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES, "bf16, bf16 states", None, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES, "bf16, bf16 states", 400, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES | FP8, "fp8, bf16 states", 500, 3_395),
)


def main() -> None:
    tables = {"schedules": schedules, "peers": peers, "kept": kept, "sent": sent}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=tables, nargs="+", default=list(tables))
    for name in parser.parse_args().only:
        for number, row in enumerate(tables[name]()):
            print(f"| {' | '.join(row)} |")
            if number == 0:
                print("|---" * len(row) + "|")
        print()


def schedules() -> Iterator[list[str]]:
    """Yield rows of weight streaming beside the schedules: 256 rows of 4,096 tokens a step, one in a micro-batch."""
    yield ["model", DEVICE, "schedule", "memory, GB", "host, GB", "bubble", "tokens/s"]
    for name, shape, gpus in RUNS:
        plans = [planned(SHAPES[shape], gpus, schedule) for schedule in ("1f1b", "dualpipev")[: 2 if gpus > 1 else 1]]
        for plan in plans:
            config, host = plan.basis.config, sum(stage.memory.host for stage in plan.stages)
            sums = ", sums on the host" if config.offload_gradients else ""
            memory = f"{plan.peak / GIGA:.1f}{'' if plan.fits else ': does not fit'}"
            speed = [f"{plan.bubble:.1%}", f"{plan.tokens_per_s:,.0f}"] if plan.fits else ["", ""]
            yield [name, str(gpus), f"{config.schedule}{sums}", memory, f"{host / GIGA:.0f}", *speed]
        if streamed := Streaming(plans[0].basis, gpus).best():
            speed = [f"{streamed.bubble:.1%}", f"{streamed.tokens_per_s:,.0f}"]
            sizes = [f"{streamed.peak / GIGA:.1f}", f"{streamed.host / GIGA:.0f}"]
            yield [name, str(gpus), f"weight streaming: {slots_of(streamed)}", *sizes, *speed]


def planned(model: dict[str, Any], gpus: int, schedule: str) -> Plan:
    """Plan a run, with sums in host memory where it does not fit without."""
    for gradients in (False, True):
        keys = KEYS | {"schedule": schedule, "offload_gradients": gradients}
        plan = Run(model, DEVICE, (gpus, 1), 256, 4096, keys).plan()
        if plan.fits:
            break
    return plan


def slots_of(plan: StreamedPlan) -> str:
    """Say how many slots of which kind there are, and how many micro-batches a round has."""
    cut = plan.slots
    return f"{len(cut.forward)} + {cut.heads} + {len(cut.backward)} slots, {cut.a_round} a round"


def peers() -> Iterator[list[str]]:
    """Yield rows of plans beside llmq's figures, for rows of 1,024 tokens, 512 a step."""
    yield [*PEER_COLUMNS, "bubble", "tokens/s", "no bubble", "NVIDIA's rates", "llmq"]
    for name, shape, gpus, keys, said, host, published in PEERS:
        plan = fastest(shape, gpus, keys, host)
        named = f"{said}, a host of {host:.0f} GB" if host else said
        memory, rows = f"{plan.peak / GIGA:.1f}", str(plan.basis.config.micro_batch_size)
        bound = plan.basis.workload.tokens * gpus / plan.step.work
        speeds = [f"{each:,.0f}" for each in (plan.tokens_per_s, bound, at_best(plan), published)]
        yield [
            name,
            str(gpus),
            named,
            rows,
            slots_of(plan),
            memory,
            f"{plan.host / GIGA:.0f}",
            f"{plan.bubble:.1%}",
            *speeds,
        ]


def at_best(plan: StreamedPlan) -> float:
    """Return tokens/s of GPUs that do nothing but multiply, at the rates that NVIDIA names."""
    ideal = replace(
        plan.basis.device,
        products=1.0,
        attention=1.0,
        half_length=0.0,
        bandwidth=math.inf,
        kernel=0.0,
        launch=0.0,
        cores=1,
    )
    forward, backward = passes(replace(plan.basis.changed(offload_gradients=False), device=ideal))
    return plan.basis.workload.tokens * plan.gpus / plan.basis.micro_batches / (sum(forward) + sum(backward))


def fastest(shape: str, gpus: int, keys: dict[str, Any], host: float | None) -> StreamedPlan:
    """Plan rows of 1,024 tokens, 512 a step, in micro-batches that the planner chooses.

    Args:
        host: gigabytes of main memory.
    """
    basis = Run(SHAPES[shape], DEVICE, (gpus, 1), 512, 1024, STREAMED | keys).basis()
    memory = int(host * GIGA) if host else None
    rows, _ = choose_rows(basis.config, basis.spec, basis.device, Workload.assumed, True, memory)
    config = basis.config.model_copy(update={ROWS: rows})
    found = replace(basis, config=config, workload=Workload.assumed(config), main_memory=memory)
    plan = Streaming(found, gpus).best()
    assert plan is not None, f"{shape} does not fit"
    return plan


def kept() -> Iterator[list[str]]:
    """Yield rows of what it gains to keep more than blocks' inputs in host memory, as far as the bus is free for it."""
    yield ["model", DEVICE, "", "kept of a block", "host, GB", "bubble", "tokens/s", ""]
    for name, shape, gpus, keys, said, host, _ in PEERS:
        if host or (gpus == 1 and keys):
            continue
        plan = fastest(shape, gpus, keys, host)
        every = Streaming(plan.basis, gpus).plans
        for what, numbers, seconds in parts_of(plan):
            found = [each for each in (keeping(other, numbers, seconds) for other in every) if each.fits]
            best = least(found)
            assert best is not None
            speed = [f"{best.bubble:.1%}", f"{best.tokens_per_s:,.0f}", f"{plan.seconds / best.seconds - 1:+.1%}"]
            yield [name, str(gpus), said, what, f"{best.host / GIGA:.0f}", *speed]


def parts_of(plan: StreamedPlan) -> Iterator[tuple[str, int, float]]:
    """Yield what may be kept of a block: its name, its numbers of a micro-batch, and seconds to compute it again."""
    basis, config = plan.basis, plan.basis.spec.config
    tokens, hidden = round(basis.share.micro_tokens), config.hidden_size
    dtype = training_dtype(basis.config)
    first = product(tokens, hidden, config.intermediate_size, dtype.itemsize, dtype.itemsize)
    work = list(in_fp8([first], True))[-1:] if basis.in_fp8 else [first]
    seconds = Roofline(basis.device, dtype, 1, 1).pass_of(work).total
    yield "its input", 0, 0.0
    yield "and one product of the MLP", tokens * config.intermediate_size, seconds
    yield "and both", 2 * tokens * config.intermediate_size, 2 * seconds


def keeping(plan: StreamedPlan, numbers: int, seconds: float) -> StreamedPlan:
    """Plan it with more kept of each block, which goes to host memory and back beside the computing."""
    size = numbers * training_dtype(plan.basis.config).itemsize
    forward, backward = plan.slots.forward, plan.slots.backward
    blocks = [[forward[0] - 1, *forward[1:]], [*backward[:0:-1], backward[0] - 1]]  # without the embedding
    turns, head = list(plan.turns), plan.slots.heads
    for number, count in enumerate(blocks[0]):
        turns[number] = replace(turns[number], leaves=turns[number].leaves + count * size)
    for number, count in enumerate(blocks[1], len(forward) + head):
        turn = turns[number]
        turns[number] = replace(turn, enters=turn.enters + count * size, seconds=turn.seconds - count * seconds)
    host = {**plan.of_host, "kept": sum(blocks[0]) * size * plan.slots.a_round}
    device = {**plan.of_device, "on their way": 2 * size}
    return simulated(replace(plan, turns=turns, of_host=host, of_device=device))


def simulated(plan: StreamedPlan) -> StreamedPlan:
    """Simulate a plan's turns again."""
    micro_batches = plan.basis.micro_batches
    return replace(plan, step=simulate_turns(plan.turns, plan.gpus, micro_batches, plan.slots.a_round, HOST_LINK))


def sent() -> Iterator[list[str]]:
    """Yield rows of what it would gain at most to send the weights' 8-bit copies, which the host would make."""
    yield ["model", DEVICE, "rounded on the GPU, tokens/s", "sent in 8 bits", ""]
    for name, shape, gpus, keys, _, host, _ in PEERS:
        if "fp8" in keys:
            plan = fastest(shape, gpus, keys, host)
            halved = simulated(replace(plan, turns=[sent_in_8_bits(turn) for turn in plan.turns]))
            speeds = [f"{plan.tokens_per_s:,.0f}", f"{halved.tokens_per_s:,.0f}"]
            yield [name, str(gpus), *speeds, f"{plan.seconds / halved.seconds - 1:+.1%}"]


def sent_in_8_bits(turn: Slot) -> Slot:
    """Halve the bytes of a turn whose weights are rounded, and leave the rounding out."""
    return replace(turn, weights=turn.weights / 2, begins=0.0) if turn.begins else turn


if __name__ == "__main__":
    main()
