"""Which kernels a run takes where its config says `auto`: of attention, and for what lies between the matrix products.

Attention: on a GPU that has flash attention each exact kernel runs one block forward and backward on rows like the
run's, and the fastest is taken. It takes a second or two, the log says the times, and the run's folder keeps the
choice, as a run that goes on with another kernel would round otherwise. Elsewhere the family's usual kernel is taken.

Compilation: on a GPU from Ampere on blocks are compiled, where one of the run's, forward and backward on rows like the
run's, shows that torch.compile can do it; its program is the one that the run's first step would make. Not those with
experts, of which each micro-batch may be compiled anew, nor those of ZeRO stage 3, which gathers weights inside of
them, nor a CPU's: they are compiled when asked, but for ZeRO's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, Field, PositiveFloat

from common.terminal import reason_of
from common.whole_files import kept, read_regular, replace_text
from data.loader import Loader
from models.attention.kernels import NAMES, candidates, choose_attention
from models.block_options import BlockOptions
from models.lean_loss import AMPERE
from models.spec import ModelSpec
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.distributed.processes import gather
from training.metrics.devices import this_device
from training.plan.calibration import of_a_process, time_layer
from training.plan.workload import Workload

FILE = "kernels.json"
Known = Annotated[str, Field(pattern=f"^({'|'.join(map(re.escape, NAMES))})$")]

Time = Callable[[str], float]  # milliseconds of a block with this attention


class Kernels(NamedTuple):
    """What a run takes.

    Attributes:
        attention: as transformers knows the kernel.
        compile: whether blocks are compiled.
        report: for the log.
    """

    attention: str
    compile: bool
    report: list[str]


class Trial(BaseModel):
    """What is kept of it.

    Attributes:
        known: what the times depend on.
        milliseconds: of a block, by kernel that can run it.
        failures: why the others cannot.
    """

    known: dict[str, Any]
    milliseconds: Annotated[dict[Known, PositiveFloat], Field(min_length=1)]
    failures: dict[Known, str]


def choose_kernels(config: TrainConfig, spec: ModelSpec, loader: Loader | None) -> Kernels:
    """Take what rank 0 finds best; all ranks call it together, once the run's folder is there.

    Args:
        loader: of the run's rows; every sample counts as `max_seq_len` tokens where absent.
    """
    chosen = None
    if torch.distributed.get_rank() == 0:
        attention, reason = _attention(config, spec, loader)
        spec.set_attention(attention)
        compiles, lines = _compilation(config, spec.has_experts, partial(_compile_trial, config, spec, loader))
        if config.fp8.enabled and not compiles:
            lines.append("warning: fp8 without compiled blocks: rounding takes longer than the products save")
        chosen = Kernels(attention, compiles, [f"attention: {reason}", *lines])
    kernels = gather(chosen)[0]
    assert kernels is not None
    spec.set_attention(kernels.attention)
    return kernels


def _attention(config: TrainConfig, spec: ModelSpec, loader: Loader | None) -> tuple[str, str]:
    """The kernel, and why."""
    dtype = training_dtype(config)
    if config.use_flash_attn != "auto":
        return choose_attention(config.use_flash_attn, dtype, spec.attention)
    kernels = candidates(dtype, spec.attention)
    if len(kernels) == 1:
        return choose_attention(False, dtype, spec.attention)

    workload = of_a_process(config, Workload.of(loader, config))

    def milliseconds(kernel: str) -> float:
        spec.set_attention(kernel)
        return 1000 * sum(time_layer(1, config, spec, workload, _device()))

    known = {
        "device": this_device().name,
        "torch": torch.__version__,
        "dtype": str(dtype),
        "deterministic": config.deterministic,
        "kernels": kernels,
    }
    return fastest(kernels, milliseconds, Path(config.save_path) / FILE, known)


def fastest(kernels: list[str], milliseconds: Time, file: Path, known: dict[str, Any]) -> tuple[str, str]:
    """The kernel with which a block takes least time, and the times in words.

    Args:
        file: where the times are kept, and where those of an earlier start are found.
        known: what they depend on; those of another machine do not count.

    Raises:
        Exception: what the last of them raised, where none can run a block.
    """
    found = kept(file, Trial.model_validate_json, read_regular)
    if found and found.known == known:
        return _told(found, "as measured when the run began")
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    for kernel in kernels:
        try:
            times[kernel] = milliseconds(kernel)
        except Exception as error:  # of many kinds: no memory for the scores, a package built for another torch
            failures[kernel] = reason_of(error)
            if len(failures) == len(kernels):
                raise
    trial = Trial(known=known, milliseconds=times, failures=failures)
    with suppress(OSError):  # a full disk is told when the config is written
        replace_text(file, trial.model_dump_json(indent=2) + "\n")
    return _told(trial, "of a block")


def _told(trial: Trial, what: str) -> tuple[str, str]:
    ranked = sorted(trial.milliseconds, key=lambda kernel: trial.milliseconds[kernel])
    shown = [f"{NAMES[kernel]} {trial.milliseconds[kernel]:.1f} ms" for kernel in ranked]
    shown += [f"{NAMES[kernel]} failed ({reason})" for kernel, reason in trial.failures.items()]
    return ranked[0], f"{NAMES[ranked[0]]}, the fastest {what}: {', '.join(shown)}"


def _compilation(config: TrainConfig, experts: bool, trial: Callable[[], str | None]) -> tuple[bool, list[str]]:
    """Whether blocks, with experts or without, are compiled, and what the log says of it.

    Args:
        trial: says why they cannot be.
    """
    on_gpu = torch.cuda.is_available()
    ampere = on_gpu and torch.cuda.get_device_capability() >= AMPERE
    if config.compile != "auto" or not on_gpu:
        return config.compiles(ampere, experts), []
    older = None if ampere else f"{torch.cuda.get_device_name()} is older than the GPUs that it is known to help"
    if obstacle := older or config.compile_obstacle(experts) or trial():
        return False, [f"blocks: not compiled: {obstacle}"]
    return True, ["blocks: compiled by torch.compile; the first steps take up to some minutes more"]


def _compile_trial(config: TrainConfig, spec: ModelSpec, loader: Loader | None) -> str | None:
    """Why torch.compile cannot make a program of a block, such as for want of a C compiler."""
    options = BlockOptions(compile=True, fp8=config.fp8.enabled)
    try:
        time_layer(1, config, spec, of_a_process(config, Workload.of(loader, config)), _device(), options)
    except Exception as error:  # of many kinds, from dynamo down to the driver
        return f"torch.compile does not work here: {reason_of(error)}"
    return None


def _device() -> torch.device:
    """Of this process."""
    return torch.device(get_accelerator().current_device_name())
