"""The first minutes on a GPU, unattended: is it exact, how fast, what memory, where does the time go.

`python -m benchmarks.gpu`: each line of `WAYS` is one check or measurement, in order of value. Those that fit into
`--minutes` run, each in a process of its own (`benchmarks.unattended`), and `--out` has all that they leave. `--wheels`
installs what the machine lacks, from a folder.

The checks come first (`benchmarks.gpu_checks`, and the tests of the kernels). Measured are eight layers of llama-7b, or
fewer where the planner says that these do not fit (`benchmarks.gpu_models`), in bf16, one stage, AdamW, eight rows of
4,096 tokens a step. `--full` is the list for a second time: as many layers as fit, offloading, long rows. MFU counts
what the model needs (`options.planner.utilization`), not what is recomputed; attention's causal half that kernels skip
counts as well.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.gpu_models import Measurement
from benchmarks.unattended import Job, Row, parser, prepare, run_all
from benchmarks.workers import command

FULL = 2.0  # times the estimate for a model of so many more layers
TESTS = ("tests/models/attention/test_kernels.py", "tests/models/loss/test_lean.py",
         "tests/training/engine/test_trainer.py")  # fmt: skip
MFU = {"eager": 0.45, "compiled": 0.55}  # goals on an H100
MEMORY = 0.1  # how far the plan may be from what is measured
IDLE = 0.05  # share of a step
AHEAD = 1.1  # tokens/s, of those of transformers' Trainer with Liger's kernels


@dataclass(frozen=True)
class Way:
    """A check or a measurement.

    Attributes:
        minutes, needs: see `benchmarks.unattended.Job`.
        measurement: a name of `benchmarks.gpu_checks.CHECKS` for a check.
        gpu: whether it has no form for a CPU.
        reference: the way whose losses it must have.
        launched: whether the launcher starts it.
    """

    name: str
    minutes: float
    measurement: Measurement | str
    needs: tuple[str, ...] = ()
    gpu: bool = False
    reference: str = ""
    launched: bool = False

    def job(self, gpus: int | None, full: bool = False) -> Job:
        """Make its job.

        Args:
            gpus: of this machine; None for processes on its CPU, without the GPUs that there may be.
            full: with as many layers as fit.
        """
        measurement, minutes, processes = self.measurement, self.minutes, 1
        visible = "" if gpus is None else os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if isinstance(measurement, str):
            line = [*command(None, "benchmarks.gpu_checks"), measurement]
        else:
            if full and measurement.layers == Measurement.layers:
                measurement, minutes = replace(measurement, layers=None), FULL * minutes
            processes = math.prod(measurement.dims)
            line = command(processes if self.launched else None, "benchmarks.gpu_worker", visible)
            line += ["--measurement", json.dumps(asdict(measurement))]
            line += ["--reference", self.reference] if self.reference else []
        obstacle = "needs CUDA" if gpus is None and self.gpu else ""
        if gpus is not None and processes > gpus:
            obstacle = f"it takes {processes} GPUs, and there are {gpus}"
        environment = _environment(gpus) if gpus is None or not self.launched else {}  # the launcher chooses GPUs
        return Job(self.name, minutes, line, self.needs, obstacle, environment=environment)


def _environment(gpus: int | None) -> dict[str, str]:
    """Make the variables by which a process without the launcher takes one GPU: the Trainer takes all that it sees."""
    if gpus is None:
        return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


COMPILED = {"compile": True}
FP8 = COMPILED | {"fp8": {"enabled": True}}
OFFLOADED = {"offload_activations": True, "deterministic": True}
ON_HOST = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "offload_gradients": True,
    "deterministic": True,
}
WAYS = (
    *(Way(name, minutes, name) for name, minutes in (("attention", 0.5), ("parity", 0.6), ("race", 0.3))),
    Way("offload-off", 0.5, Measurement(layers=4, keys=OFFLOADED | {"offload_activations": False})),
    Way("offload-on", 0.5, Measurement(layers=4, keys=OFFLOADED), reference="offload-off"),
    Way("host-sums-off", 0.7, Measurement(layers=4, keys=ON_HOST | {"offload_gradients": False})),
    Way("host-sums-on", 0.7, Measurement(layers=4, keys=ON_HOST), reference="host-sums-off"),
    Way("eager", 0.6, Measurement()),
    Way("resume", 1.2, "resume"),
    Way("packed-varlen", 0.6, Measurement(rows="packed", attention="varlen"), gpu=True),
    Way("stages", 1.2, "stages"),
    Way("compiled", 1.3, Measurement(keys=COMPILED)),
    Way("profile", 0.8, Measurement(profile=True)),
    Way("trainer", 1.0, Measurement(engine="trainer")),
    Way("trainer-liger", 1.0, Measurement(engine="liger"), ("liger_kernel",), gpu=True),
    Way("zero", 0.5, "zero"),
    Way("fp8", 1.5, Measurement(keys=FP8), ("torchao",), gpu=True),
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
    Way("micro-batch-2", 0.6, Measurement(micro_batch=2)),
    Way("micro-batch-4", 0.6, Measurement(micro_batch=4)),
    Way("sums-bf16", 0.6, Measurement(keys={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}})),
    Way("deterministic", 0.6, Measurement(keys={"deterministic": True})),
    Way("recomputed", 0.7, Measurement(keys={"use_grad_ckpt": True})),
    Way("lion", 0.6, Measurement(keys={"optimizer": {"type": "Lion", "params": {"lr": 1.0e-5}}})),
    Way("profile-fp8", 1.7, Measurement(keys=FP8, profile=True), ("torchao",), gpu=True),
    Way("profile-compiled", 1.5, Measurement(keys=COMPILED, profile=True)),
    Way("1b", 0.6, Measurement("1b", layers=None)),
    Way("1b-compiled", 1.3, Measurement("1b", layers=None, keys=COMPILED)),
    Way("1b-trainer", 1.2, Measurement("1b", layers=None, engine="trainer")),
    Way("1b-trainer-liger", 1.2, Measurement("1b", layers=None, engine="liger"), ("liger_kernel",), gpu=True),
)
# What `--full` begins with.
FULL_WAYS = (
    Way("eager", 0.6, Measurement()),
    Way("offloaded", 1.0, Measurement(keys={"offload_activations": True})),
    Way("recomputed", 0.8, Measurement(keys={"use_grad_ckpt": True})),
    Way("compiled", 1.3, Measurement(keys=COMPILED)),
    Way("fp8", 1.5, Measurement(keys=FP8), ("torchao",), gpu=True),
    Way("long-rows", 1.0, Measurement(layers=4, length=32_768, keys={"use_grad_ckpt": True})),
)
KERNELS = "kernels"  # the tests of the kernels, before anything is measured with them


def words(row: Row) -> str:
    """Show a row's figures in a line."""
    if "said" in row:
        return str(row["said"])
    figures = [f"{row['layers']} layers, {row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.3f} s a step"]
    figures += [f"MFU {row['mfu']:.1%}"] if row["mfu"] is not None else []
    figures += [row["attention"]] if "attention" in row else []
    memory = f"{row['measured_bytes'] / 1e9:.2f} GB measured"
    if planned := row.get("planned_bytes"):
        memory = f"{planned / 1e9:.2f} GB planned, {memory} ({planned / row['measured_bytes'] - 1:+.1%})"
    figures.append(f"memory: {memory}")
    figures += [f"losses: within {row['difference']:.1e} of one process"] if "difference" in row else []
    figures += [f"losses: compared {row['compared']}"] if "compared" in row else []
    if "profile" in row:
        figures.append(", ".join(f"{name} {share:.1%}" for name, share in row["profile"]["classes"].items()))
    return "; ".join(figures)


def jobs(full: bool, cpu: bool) -> list[Job]:
    """Make all jobs, in order of value.

    Args:
        full: with as many layers as fit.
        cpu: without the GPU that there may be.
    """
    gpus = None if cpu else 1
    # Without the project's own options: they want the plugins of requirements-dev.txt.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *TESTS]
    tests = Job(KERNELS, 1.0, pytest, ("pytest", "hypothesis"), has_figures=False, environment=_environment(gpus))
    ahead: tuple[Way, ...] = FULL_WAYS if full else ()
    names = {way.name for way in ahead}
    ways = [*ahead, *(way for way in WAYS if way.name not in names)]
    return [*([] if full else [tests]), *(way.job(gpus, full) for way in ways)]


def missed(row: Row, rows: Sequence[Row]) -> str:
    """Name the goals that a row misses."""
    speeds = {each["way"]: each["tokens_per_s"] for each in (*rows, row) if "tokens_per_s" in each}
    mfu, goal, planned = row.get("mfu"), MFU.get(row["way"]), row.get("planned_bytes")
    found = [f"MFU below {goal:.0%}"] if mfu and goal and mfu < goal else []
    if mfu and planned and abs(planned / row["measured_bytes"] - 1) > MEMORY:
        found.append(f"plan beyond {MEMORY:.0%} of memory")
    if mfu and row.get("profile", {}).get("classes", {}).get("idle", 0) > IDLE:
        found.append(f"idle above {IDLE:.0%}")
    if mfu and row["way"] == "trainer-liger" and speeds.get("eager", 0) < AHEAD * row["tokens_per_s"]:
        found.append(f"eager below {AHEAD:g} times this")
    return ", ".join(found)


def main() -> None:
    made = parser(
        "benchmarks.gpu",
        "One GPU: speed, MFU and memory.",
        [KERNELS, *dict.fromkeys(way.name for way in (*WAYS, *FULL_WAYS))],
    )
    made.add_argument("--full", action="store_true", help="the second list: all layers that fit, long rows")
    chosen = made.parse_args()
    prepare(chosen, gpus=1)
    rows = run_all(jobs(chosen.full, chosen.device == "cpu"), chosen, words, missed)
    sys.exit(any("reason" in row for row in rows))


if __name__ == "__main__":
    main()
