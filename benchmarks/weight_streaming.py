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
from common.quantities import GIGA, counted
from options.planner.inputs import Workload
from options.planner.micro_batch import ROWS, choose_rows
from options.planner.plan import Plan
from options.weight_streaming.plan import MOST_KEPT, Streaming
from options.weight_streaming.schedule import Slot, simulate_turns
from options.weight_streaming.streamed_plan import StreamedPlan, least
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
PEER_COLUMNS = ["model", DEVICE, "", "rows", "slots", "kept", "memory, GB", "host, GB"]
PEERS: tuple[tuple[str, str, int, dict[str, Any], str, float, int], ...] = (
    ("Qwen2.5-7B", "qwen2-7b", 4, {}, "bf16", 500, 10_897),
    ("Qwen2.5-7B", "qwen2-7b", 4, FP8, "fp8", 500, 16_487),
    ("Qwen2.5-7B", "qwen2-7b", 1, {}, "bf16", 500, 2_777),
    ("Qwen2.5-7B", "qwen2-7b", 1, FP8, "fp8", 500, 4_328),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, {}, "bf16", 1000, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES, "bf16, bf16 states", 1000, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES, "bf16, bf16 states", 500, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES, "bf16, bf16 states", 400, 2_208),
    ("Qwen2.5-32B", "qwen2.5-32b", 4, STATES | FP8, "fp8, bf16 states", 500, 3_395),
)

ROOMY = 6  # of these have a host with room for kept products


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
        memory, rows = f"{plan.peak / GIGA:.1f}", str(plan.basis.config.micro_batch_size)
        bound = plan.basis.workload.tokens * gpus / plan.step.work
        speeds = [f"{each:,.0f}" for each in (plan.tokens_per_s, bound, at_best(plan), published)]
        yield [
            name,
            str(gpus),
            said,
            rows,
            slots_of(plan),
            str(plan.slots.kept),
            memory,
            f"{plan.host / GIGA:.0f} of {host:.0f}",
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
    streaming, slots = Streaming(replace(plan.basis, device=ideal), plan.gpus), plan.slots
    turns = streaming.slots(slots.forward, slots.backward, slots.kept)
    seconds = sum(turn.seconds / turn.share[1] for turn in turns)
    return plan.basis.workload.tokens * plan.gpus / plan.basis.micro_batches / seconds


def fastest(shape: str, gpus: int, keys: dict[str, Any], host: float) -> StreamedPlan:
    """Plan rows of 1,024 tokens, 512 a step, in micro-batches that the planner chooses.

    Args:
        host: gigabytes of main memory.
    """
    basis = Run(SHAPES[shape], DEVICE, (gpus, 1), 512, 1024, STREAMED | keys).basis()
    memory = int(host * GIGA)
    rows, _ = choose_rows(basis.config, basis.spec, basis.device, Workload.assumed, True, memory)
    config = basis.config.model_copy(update={ROWS: rows})
    found = replace(basis, config=config, workload=Workload.assumed(config), main_memory=memory)
    plan = Streaming(found, gpus).best()
    assert plan is not None, f"{shape} does not fit"
    return plan


def kept() -> Iterator[list[str]]:
    """Yield rows of the fastest plans with each number of kept products, of which the planner chooses one."""
    yield ["model", DEVICE, "", "kept of a block", "host, GB", "bubble", "tokens/s", "", "chosen"]
    for name, shape, gpus, keys, said, host, _ in PEERS[:ROOMY]:
        chosen = fastest(shape, gpus, keys, host)
        streaming = Streaming(chosen.basis, gpus)
        fitting, plain = [plan for plan in streaming.plans if plan.fits], math.inf
        for count in range(MOST_KEPT + 1):
            best = least(list(streaming.keeping(fitting, count)) if count else fitting)
            if best is None:
                continue
            plain = plain if count else best.seconds
            speed = [f"{best.bubble:.1%}", f"{best.tokens_per_s:,.0f}", f"{plain / best.seconds - 1:+.1%}"]
            memory, mark = f"{best.host / GIGA:.0f} of {host:.0f}", "x" if count == chosen.slots.kept else ""
            what = "and " + counted(count, "product") if count else "its input"
            yield [name, str(gpus), said, what, memory, *speed, mark]


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
