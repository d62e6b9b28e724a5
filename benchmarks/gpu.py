"""One GPU that nobody watches: speed, MFU, memory and where the time goes: `python -m benchmarks.gpu`.

Each line of `WAYS` is one measurement, in order of value: those that fit into `--minutes` run, each in a process of its
own (`benchmarks.unattended`), and each is one row on the screen and in `--results`, runs/gpu.jsonl. `--wheels` installs
what the machine lacks, from a folder. Eight layers of llama-7b, or fewer where the planner says that these do not fit
(`benchmarks.gpu_models`), and all that fit with `--full`; in bf16, one stage, AdamW, eight rows of 4,096 tokens a step.
MFU counts what the model needs (`models.costs.flops`), not what is recomputed; attention's causal half that kernels
skip counts as well.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu_models import MODELS, Measurement
from benchmarks.ranks import command
from benchmarks.unattended import Job, Row, parser, prepare, run_all

FULL = 2.0  # times the estimate for a model of so many more layers
TESTS = (
    "tests/models/attention/test_kernels.py",
    "tests/models/test_lean_loss.py",
    "tests/training/engine/test_prefetch.py",
)


@dataclass(frozen=True)
class Way:
    """A measurement.

    Attributes:
        minutes, needs: see `benchmarks.unattended.Job`.
        gpu: whether it has no form for a CPU.
    """

    name: str
    minutes: float
    measurement: Measurement
    needs: tuple[str, ...] = ()
    gpu: bool = False

    def job(self, full: bool, cpu: bool, environment: dict[str, str]) -> Job:
        measurement, minutes = self.measurement, self.minutes
        if full and measurement.layers is not None:
            measurement, minutes = replace(measurement, layers=None), FULL * minutes
        words = [*command(None, "benchmarks.gpu_worker"), "--measurement", json.dumps(asdict(measurement))]
        obstacle = "it has no form for a CPU" if cpu and self.gpu else ""
        return Job(self.name, minutes, words, self.needs, obstacle, environment=environment)


COMPILED = {"compile": True}
FP8 = COMPILED | {"fp8": {"enabled": True}}
WAYS = (
    Way("eager", 0.6, Measurement()),
    Way("compiled", 1.3, Measurement(keys=COMPILED)),
    Way("fp8", 1.5, Measurement(keys=FP8), ("torchao",), gpu=True),
    Way("packed-varlen", 0.6, Measurement(rows="packed", attention="varlen"), gpu=True),
    Way("packed-sdpa", 0.6, Measurement(rows="packed", attention="sdpa")),
    Way("packed-flex", 1.0, Measurement(rows="packed", attention="flex"), ("triton",), gpu=True),
    Way("packed-flash", 0.6, Measurement(rows="packed", attention="flash"), ("flash_attn",), gpu=True),
    Way("packed-flash-3", 0.6, Measurement(rows="packed", attention="flash-3"), ("flash_attn_interface",), gpu=True),
    Way("full-sdpa", 0.6, Measurement(attention="sdpa")),
    Way("full-flex", 1.0, Measurement(attention="flex"), ("triton",), gpu=True),
    Way("full-varlen", 0.6, Measurement(attention="varlen"), gpu=True),
    Way("full-flash", 0.6, Measurement(attention="flash"), ("flash_attn",), gpu=True),
    Way("full-cudnn", 0.6, Measurement(attention="cudnn"), gpu=True),
    Way("full-flash-3", 0.6, Measurement(attention="flash-3"), ("flash_attn_interface",), gpu=True),
    Way("full-auto", 1.0, Measurement(attention="auto")),
    Way("packed-compiled", 1.3, Measurement(rows="packed", keys=COMPILED)),
    Way("packed-fp8", 1.5, Measurement(rows="packed", keys=FP8), ("torchao",), gpu=True),
    Way("fused", 0.7, Measurement(fused=True), ("liger_kernel",), gpu=True),
    Way("trainer", 1.2, Measurement(engine="trainer")),
    Way("trainer-liger", 1.2, Measurement(engine="liger"), ("liger_kernel",), gpu=True),
    Way("micro-batch-2", 0.6, Measurement(micro_batch=2)),
    Way("micro-batch-4", 0.6, Measurement(micro_batch=4)),
    Way("sums-bf16", 0.6, Measurement(keys={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}})),
    Way("deterministic", 0.6, Measurement(keys={"deterministic": True})),
    Way("recomputed", 0.7, Measurement(keys={"use_grad_ckpt": True})),
    Way("lion", 0.6, Measurement(keys={"optimizer": {"type": "Lion", "params": {"lr": 1.0e-5}}})),
    Way("profile", 0.8, Measurement(profile=True)),
    Way("profile-fp8", 1.7, Measurement(keys=FP8, profile=True), ("torchao",), gpu=True),
    Way("profile-compiled", 1.5, Measurement(keys=COMPILED, profile=True)),
    Way("1b", 0.6, Measurement("1b", layers=None)),
    Way("1b-compiled", 1.3, Measurement("1b", layers=None, keys=COMPILED)),
    Way("1b-trainer", 1.2, Measurement("1b", layers=None, engine="trainer")),
    Way("1b-trainer-liger", 1.2, Measurement("1b", layers=None, engine="liger"), ("liger_kernel",), gpu=True),
)
KERNELS = "kernels"  # the tests of the kernels, before anything is measured with them


def words(row: Row) -> str:
    """A row's figures in a line."""
    if "said" in row:
        return str(row["said"])
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    told = f"{row['layers']} layers, {row['tokens_per_s']:,.0f} tokens/s{mfu}, {row['step_s']:.3f} s a step"
    told += f"; {row['attention']}" if "attention" in row else ""
    told += f"; memory: {memory(row)}"
    if "difference" in row:
        told += f"; losses: within {row['difference']:.1e} of one process"
    told += f"; losses: compared {row['compared']}" if "compared" in row else ""
    if "profile" in row:
        told += "; " + ", ".join(f"{name} {share:.1%}" for name, share in row["profile"]["classes"].items())
    return told


def memory(row: dict[str, Any]) -> str:
    """Planned and measured."""
    measured = f"{row['measured_bytes'] / 1e9:.2f} GB measured"
    if "planned_bytes" not in row:
        return measured
    error = row["planned_bytes"] / row["measured_bytes"] - 1
    return f"{row['planned_bytes'] / 1e9:.2f} GB planned, {measured} ({error:+.1%})"


def jobs(full: bool, cpu: bool) -> list[Job]:
    """All of them, in order of value.

    Args:
        full: as many layers as fit.
        cpu: without the GPU that there may be.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # the Trainer would take all that it sees
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if cpu else {"CUDA_VISIBLE_DEVICES": first}
    # Without the project's own options: they want the plugins of requirements-dev.txt.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *TESTS]
    tests = Job(KERNELS, 1.0, pytest, ("pytest", "hypothesis"), tells=False, environment=environment)
    return [tests, *(way.job(full, cpu, environment) for way in WAYS)]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("benchmarks.gpu", "One GPU: speed, MFU and memory.", [KERNELS, *(way.name for way in WAYS)])
    made.add_argument("--full", action="store_true", help=f"all {MODELS['7b']['num_hidden_layers']} layers that fit")
    chosen = made.parse_args(arguments)
    prepare(chosen, gpus=1)
    rows = run_all(jobs(chosen.full, chosen.device == "cpu"), chosen, words)
    sys.exit(any("reason" in row for row in rows))


if __name__ == "__main__":
    main()
