"""Print what weight streaming is predicted to reach beside the schedules, in Markdown (docs/performance.md).

Nothing is measured, and no GPU is needed: `python -m benchmarks.weight_streaming`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_models import COMMON
from benchmarks.roofline import SHAPES, Run
from options.planner.plan import Plan
from options.weight_streaming.plan import Streaming

LLAMA_8B = SHAPES["llama-3-8b"]
QWEN_32B: dict[str, Any] = COMMON | {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
RUNS = (("Llama-3.1-8B", LLAMA_8B, 8), ("Qwen3-32B", QWEN_32B, 8), ("Llama-3.1-8B", LLAMA_8B, 1))
DEVICE, BATCH, LENGTH = "RTX4090", 256, 4096
KEYS: dict[str, Any] = {
    "bf16": {"enabled": True},
    "use_flash_attn": "auto",
    "compile": "auto",
    "use_grad_ckpt": True,
    "packing": False,
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


def main() -> None:
    print(f"| model | {DEVICE} | schedule | memory, GB | host, GB | bubble | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for name, model, gpus in RUNS:
        plans = [planned(model, gpus, schedule) for schedule in ("1f1b", "dualpipev")[: 2 if gpus > 1 else 1]]
        for plan in plans:
            config, host = plan.basis.config, sum(stage.memory.host for stage in plan.stages)
            fits = "" if plan.fits else ": does not fit"
            sums = ", sums on the host" if config.offload_gradients else ""
            speed = f"{plan.bubble:.1%} | {plan.tokens_per_s:,.0f}" if plan.fits else " | "
            label = f"{config.schedule}{sums} | {plan.peak / 1e9:.1f}{fits}"
            print(f"| {name} | {gpus} | {label} | {host / 1e9:.0f} | {speed} |")
        if streamed := Streaming(plans[0].basis, gpus).best():
            cut = streamed.slots
            slots = f"{len(cut.forward)} + {cut.heads} + {len(cut.backward)} slots, {cut.a_round} a round"
            sizes = f"{streamed.peak / 1e9:.1f} | {streamed.host / 1e9:.0f}"
            speed = f"{streamed.bubble:.1%} | {streamed.tokens_per_s:,.0f}"
            print(f"| {name} | {gpus} | weight streaming: {slots} | {sizes} | {speed} |")


def planned(model: dict[str, Any], gpus: int, schedule: str) -> Plan:
    """Plan a run, with sums in host memory where it does not fit without."""
    for gradients in (False, True):
        keys = KEYS | {"schedule": schedule, "offload_gradients": gradients}
        plan = Run(model, DEVICE, (gpus, 1), BATCH, LENGTH, keys).plan()
        if plan.fits:
            break
    return plan


if __name__ == "__main__":
    main()
