"""One measurement on a GPU, in processes of its own: train some steps and tell what they took.

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
from benchmarks.ranks import RESULT, tell
from benchmarks.steps import Straight, joined, train
from models.api import read_spec
from models.attention.flex import FLEX
from models.attention.kernels import CUDNN, FLASH, FLASH_3, TORCH, choose_attention
from models.attention.packed import VARLEN
from models.loading import SeededStates
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.data_setup import build_loader
from training.distributed.processes import free_port, gather
from training.engine.numerics import set_numerics
from training.engine.pipeline import PipelineTrainer
from training.metrics.devices import this_device
from training.metrics.peak_memory import peak_memory
from training.metrics.utilization import Utilization
from training.plan.auto import divide
from training.plan.timing import choose_kernels

if TYPE_CHECKING:
    from data.loader import GlobalBatch
    from training.config.keys import TrainConfig

KERNELS = {"sdpa": TORCH, "cudnn": CUDNN, "varlen": VARLEN, "flex": FLEX, "flash": FLASH, "flash-3": FLASH_3}
AUTO = "auto"  # the fastest of them, as a run finds it
WARM, STEPS = 2, 5
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2  # relative, of losses in fp32 and bf16 that are summed in another order
ON_GPU = torch.cuda.is_available()


class Seen(Straight):
    """The steps one after the other, each told as it ends.

    Where that is asked for, one more is taken apart by kinds of kernels, after one in which the profiler warms up.
    """

    def __init__(self, profile: bool) -> None:
        super().__init__(WARM + STEPS + (2 if profile else 0))
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.profile: dict[str, Any] | None = None
        self._profiler: Any = None

    def wait(self) -> bool:
        goes_on = super().wait()
        if goes_on and len(self.speeds) >= WARM + STEPS:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU])
            self._profiler.__enter__()
        return goes_on

    def done(self, seconds: float, tokens: int, **more: Any) -> None:
        super().done(seconds, tokens, **more)
        self.seconds.append(seconds)
        self.losses += [more["loss"]] if "loss" in more else []
        print(f"step {len(self.speeds)}: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s", flush=True)
        if self._profiler:
            self._profiler.__exit__(None, None, None)
            self.profile = shares(spans_of(self._profiler, ON_GPU), seconds)
            self._profiler = None

    def figures(self) -> dict[str, Any]:
        """Of the steps that count."""
        counted = slice(WARM, WARM + STEPS)
        return {
            "tokens_per_s": median(self.speeds[counted]),
            "step_s": median(self.seconds[counted]),
            "steps_s": self.seconds,
            "losses": self.losses,
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
    samples = samples_of(measurement, words(measurement), size)
    config = config_of(measurement, model, len(samples.samples), size, half)
    pace = Seen(measurement.profile)
    with ExitStack() as stack:
        if ON_GPU and not measurement.exact:
            stack.enter_context(patch("training.engine.trainer.SeededStates", OnDevice))
        stack.enter_context(joined(config))
        if not ON_GPU:
            torch.set_num_threads(1)  # of so little, sharing takes longer than computing
        before = 0 if ON_GPU else peak_memory()
        free = min(gather(torch.cuda.mem_get_info()[0])) if ON_GPU else None
        config, planned = fit(measurement, model, samples, size, this_device(), free, half)
        set_numerics(config)
        spec = read_spec(model)
        usual = choose_attention(config.use_flash_attn is True, training_dtype(config), spec.attention)
        loader = build_loader(samples, config)
        if measurement.attention == AUTO:
            kernels = choose_kernels(config.model_copy(update={"use_flash_attn": "auto"}), spec, loader)
            attention = kernels.attention
            print(*kernels.report, sep="\n", flush=True)
        else:
            attention = KERNELS[measurement.attention] if measurement.attention else usual.implementation
            spec.set_attention(attention)
        if measurement.fused:  # from here on: the planner runs blocks on tensors without numbers, which Liger cannot
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)  # the loss is Pipetune's own
        trainer = PipelineTrainer.build(config, spec, model, divide(config, spec))
        train(trainer, loader, pace)
        figures = pace.figures()
        return {
            "layers": spec.n_blocks,
            "attention": attention,
            "mfu": mfu(config, spec, loader.batch(0), figures["step_s"]),
            "planned_bytes": planned,
            "measured_bytes": max(gather(peak_memory() - before)),
            "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
            "expandable": all(each["is_expandable"] for each in torch.cuda.memory_snapshot()) if ON_GPU else None,
            **figures,
        }


def by_the_trainer(measurement: Measurement, folder: Path, size: Size, half: bool) -> dict[str, Any]:
    """Train the same with transformers' Trainer: as many layers as Pipetune would train."""
    from benchmarks.tokenizing import make_tokenizer
    from benchmarks.trainers import by_transformers

    model = folder / "model"
    samples = samples_of(measurement, words(measurement), size)
    free = torch.cuda.mem_get_info()[0] if ON_GPU else None
    config, _ = fit(measurement, model, samples, size, this_device(), free, half)
    make_tokenizer(model)
    pace = Seen(profile=False)
    by_transformers(config, samples, pace, measurement.micro_batch, liger=measurement.engine == "liger")
    spec = read_spec(model)
    figures = pace.figures()
    return {
        "layers": spec.n_blocks,
        "mfu": mfu(config, spec, build_loader(samples, config).batch(0), figures["step_s"]),
        "measured_bytes": peak_memory(),
        "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
        **figures,
    }


def words(measurement: Measurement) -> int:
    """Of the model's vocabulary."""
    return int(MODELS[measurement.model]["vocab_size"])


def mfu(config: TrainConfig, spec: ModelSpec, batch: GlobalBatch, seconds: float) -> float | None:
    """What the model needs, not what is recomputed, of what the devices could do."""
    utilization = Utilization(spec, training_dtype(config), config.model_topo.processes)
    return utilization(batch.lengths, batch.supervised, seconds)


def tolerance_of(measurement: Measurement) -> float:
    """How far, relatively, this way's losses may be from another's: not at all where sums keep their order."""
    if measurement.keys.get("deterministic"):
        return 0.0
    half = measurement.keys.get("bf16", {}).get("enabled", ON_GPU and not measurement.exact)
    return HALF_TOLERANCE if half else TOLERANCE


def against(losses: list[float], reference: Path, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Compare losses with those of another way: the largest relative difference.

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
    tokens = WHOLE.length * WHOLE.rows
    size = Size(measurement.length, tokens // measurement.length) if half else TINY
    if not half:
        measurement = replace(measurement, model="tiny")
    if measurement.engine == "pipetune":
        if "RANK" not in os.environ:  # no launcher, which would be one more thing to go wrong
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ |= alone | {"MASTER_PORT": str(free_port())}
        found = by_pipetune(measurement, folder, size, half)
    else:
        found = by_the_trainer(measurement, folder, size, half)
    compared = against(found["losses"], reference, tolerance_of(measurement)) if reference else {}
    about = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "measurement": asdict(measurement),
        "length": size.length,
    }
    tell(folder, about | found | compared)


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
