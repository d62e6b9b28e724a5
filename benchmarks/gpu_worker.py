"""One measurement on a GPU, in processes of its own: train some steps and leave their figures.

`benchmarks.gpu` starts it alone, `benchmarks.gpus` through the real launcher. The first steps do not count: kernels are
chosen, compiled and loaded in them. Random weights are made on the GPU, which takes seconds instead of a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers

from benchmarks import shared_gpu
from benchmarks.gpu_models import MODELS, TINY, WHOLE, Measurement, Size, config_of, fit, samples_of
from benchmarks.kernel_classes import shares, spans_of
from benchmarks.steps import joined, train, train_by_transformers
from benchmarks.workers import RESULT, write_figures
from models.api import read_spec
from models.attention.flex import FLEX
from models.attention.kernels import CUDNN, FLASH, FLASH_3, TORCH, choose_attention
from models.attention.packed import VARLEN
from models.loading import SeededStates
from models.spec import ModelSpec
from options.planner.kernels import choose_kernels
from options.planner.planning import divide
from options.planner.utilization import Utilization
from training.batches import build_loader
from training.config.precision import training_dtype
from training.distributed.processes import gather
from training.engine.numerics import set_numerics
from training.engine.pipeline import PipelineTrainer
from training.launch.agent import free_port
from training.metrics.devices import this_device
from training.metrics.peak_memory import peak_memory

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.config.keys import TrainConfig

KERNELS = {"sdpa": TORCH, "cudnn": CUDNN, "varlen": VARLEN, "flex": FLEX, "flash": FLASH, "flash-3": FLASH_3}
AUTO = "auto"  # the fastest of them, as a run finds it
WARM, STEPS = 2, 5
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2  # relative, of losses in fp32 and bf16 that are summed in another order
ON_GPU = torch.cuda.is_available()


class Counted:
    """A `Pace` of steps one after the other, each printed as it ends; the last ones count.

    If a profile is wanted, two more follow: the profiler warms up in one and sorts the other's time by kernels.
    """

    def __init__(self, profile: bool) -> None:
        self._steps = WARM + STEPS + (2 if profile else 0)
        self.speeds: list[float] = []
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.profile: dict[str, Any] | None = None
        self._profiler: Any = None

    def wait(self) -> bool:
        if WARM + STEPS <= len(self.speeds) < self._steps:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU])
            self._profiler.__enter__()
        return len(self.speeds) < self._steps

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        self.speeds.append(tokens / seconds)
        self.seconds.append(seconds)
        self.losses += [more["loss"]] if "loss" in more else []
        print(f"step {len(self.speeds)}: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s", flush=True)
        if self._profiler:
            self._profiler.__exit__(None, None, None)
            self.profile = shares(spans_of(self._profiler, ON_GPU), seconds)
            self._profiler = None

    def figures(self, config: TrainConfig, spec: ModelSpec, batch: GlobalBatch) -> dict[str, Any]:
        """Return those of the steps that count."""
        counted = slice(WARM, WARM + STEPS)
        seconds = median(self.seconds[counted])
        devices = config.model_topo.processes * [torch.cuda.get_device_name() if ON_GPU else ""]
        utilization = Utilization(spec, training_dtype(config), devices)
        return {
            "layers": spec.n_blocks,
            "tokens_per_s": median(self.speeds[counted]),
            "mfu": utilization(batch.lengths, batch.supervised, seconds),
            "step_s": seconds,
            "steps_s": self.seconds,
            "losses": self.losses,
            "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
            **({"profile": self.profile} if self.profile else {}),
        }


class OnDevice(SeededStates):
    """Fresh weights that are made where they are used."""

    def read_layer(self, layer: int) -> dict[str, torch.Tensor]:
        with torch.device("cuda"):
            return super().read_layer(layer)


def by_pipetune(measurement: Measurement, folder: Path, size: Size, half: bool) -> dict[str, Any]:
    """Train with Pipetune's engine; this process is one of those of the run."""
    model = folder / f"model-{os.environ['RANK']}"
    samples = samples_of(measurement, MODELS[measurement.model]["vocab_size"], size)
    config = config_of(measurement, model, len(samples.samples), size, half)
    pace = Counted(measurement.profile)
    with ExitStack() as stack:
        if ON_GPU and not measurement.exact:
            stack.enter_context(patch("training.engine.building.SeededStates", OnDevice))
        stack.enter_context(joined(config))
        if not ON_GPU:
            torch.set_num_threads(1)  # of so little, sharing takes longer than computing
        before = 0 if ON_GPU else peak_memory()
        free = min(gather(torch.cuda.mem_get_info()[0])) if ON_GPU else None
        config, planned = fit(measurement, model, samples, size, this_device(), free, half)
        set_numerics(config)
        spec, loader = read_spec(model), build_loader(samples, config)
        if measurement.attention == AUTO:
            kernels = choose_kernels(config.model_copy(update={"use_flash_attn": "auto"}), spec, loader)
            attention = kernels.attention
            print(*kernels.report, sep="\n", flush=True)
        else:
            usual = choose_attention(config.use_flash_attn is True, training_dtype(config), spec.attention)
            attention = KERNELS.get(measurement.attention, usual.implementation)
            spec.set_attention(attention)
        if measurement.fused:  # from here on: the planner runs blocks on tensors without numbers, which Liger cannot
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)  # the loss is Pipetune's own
        train(PipelineTrainer.build(config, spec, model, divide(config, spec)), loader, pace)
        return pace.figures(config, spec, loader.batch(0)) | {
            "attention": attention,
            "planned_bytes": planned,
            "measured_bytes": max(gather(peak_memory() - before)),
            "expandable": all(each["is_expandable"] for each in torch.cuda.memory_snapshot()) if ON_GPU else None,
        }


def by_the_trainer(measurement: Measurement, folder: Path, size: Size, half: bool) -> dict[str, Any]:
    """Train the same with transformers' Trainer: as many layers as Pipetune would train."""
    from benchmarks.tokenizing import make_tokenizer

    model = folder / "model"
    samples = samples_of(measurement, MODELS[measurement.model]["vocab_size"], size)
    free = torch.cuda.mem_get_info()[0] if ON_GPU else None
    config, _ = fit(measurement, model, samples, size, this_device(), free, half)
    make_tokenizer(model)
    pace, liger = Counted(profile=False), measurement.engine == "liger"
    train_by_transformers(config, samples, pace, measurement.micro_batch, liger)
    batch = build_loader(samples, config).batch(0)
    return pace.figures(config, read_spec(model), batch) | {"measured_bytes": peak_memory()}


def tolerance_of(measurement: Measurement) -> float:
    """Say how far, relatively, this way's losses may be from another's: not at all where sums keep their order."""
    if measurement.keys.get("deterministic"):
        return 0.0
    half = measurement.keys.get("bf16", {}).get("enabled", ON_GPU and not measurement.exact)
    return HALF_TOLERANCE if half else TOLERANCE


def against(losses: list[float], reference: Path, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Compare losses with those of another way; return the largest relative difference.

    Raises:
        SystemExit: it is larger than rounding explains.
    """
    if not reference.is_file():
        return {"compared": "with nothing: the way to compare with has left no losses"}
    wanted = json.loads(reference.read_text(encoding="utf-8"))["losses"]
    differences = [abs(one / other - 1) for one, other in zip(losses, wanted, strict=True)]
    if not all(difference <= tolerance for difference in differences):  # NaN is no difference either
        sys.exit(f"error: losses {losses}; expected {wanted}, within {tolerance:g} of themselves")
    return {"difference": max(differences)}


def work(measurement: Measurement, folder: Path, reference: Path | None) -> None:
    """Measure and leave the figures."""
    half = ON_GPU and not measurement.exact
    size = Size(measurement.length, WHOLE.length * WHOLE.rows // measurement.length) if half else TINY
    if not half:
        measurement = replace(measurement, model="tiny")
    if measurement.engine == "pipetune" and "RANK" not in os.environ:  # no launcher, one more thing to go wrong
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= alone | {"MASTER_PORT": str(free_port())}
    train_it = by_pipetune if measurement.engine == "pipetune" else by_the_trainer
    found = train_it(measurement, folder, size, half)
    compared = against(found["losses"], reference, tolerance_of(measurement)) if reference else {}
    about = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "measurement": asdict(measurement),
        "length": size.length,
    }
    write_figures(folder, about | found | compared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measurement", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--reference", help="the way, run before, whose losses these should have")
    parser.add_argument("--share", type=int, help="start so many ranks, which share one GPU")
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    if arguments.share and "RANK" not in os.environ:
        sys.exit(shared_gpu.run_shared(arguments.share, ["-m", "benchmarks.gpu_worker", *sys.argv[1:]]))
    if arguments.share:
        shared_gpu.install()
    other = arguments.folder.parent / arguments.reference / RESULT if arguments.reference else None
    work(Measurement(**arguments.measurement), arguments.folder, other)
