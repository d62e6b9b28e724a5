"""Choose kernels where they are `auto`, by trials on this machine.

Attention: on a GPU with flash attention each exact kernel runs one block on rows like the run's, and the fastest is
taken. The run's folder keeps the choice, as a run that resumes with another kernel would round otherwise. Elsewhere the
family's usual kernel is taken.

Compilation: on a GPU from Ampere on blocks are compiled where torch.compile can compile one of the run's; its program
is the one that the first step would make. Not compiled unless asked: blocks with experts, of which each micro-batch may
be compiled anew, and a CPU's; never those of ZeRO stage 3, which gathers weights inside of them.
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
from common.whole_files import kept, replace_checked
from data.loader import Loader
from models.attention.kernels import NAMES, candidates, choose_attention
from models.block_options import BlockOptions
from models.loss.lean import AMPERE
from models.spec import ModelSpec
from options.planner.inputs import Workload
from options.planner.timing import rank_rows, time_layer
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.distributed.processes import gather
from training.metrics.devices import this_device

KERNELS_FILE = "kernels.json"


class Kernels(NamedTuple):
    """The kernels of a run.

    Attributes:
        attention: transformers' name.
        compile: whether blocks are compiled.
        report: lines for the log.
    """

    attention: str
    compile: bool
    report: list[str]


Known = Annotated[str, Field(pattern=f"^({'|'.join(map(re.escape, NAMES))})$")]


class Trial(BaseModel):
    """Attention kernels timed on one machine.

    Attributes:
        known: what the times depend on.
        milliseconds: of a block, by kernel that can run it.
        failures: why the others cannot.
    """

    known: dict[str, Any]
    milliseconds: Annotated[dict[Known, PositiveFloat], Field(min_length=1)]
    failures: dict[Known, str]


def choose_kernels(config: TrainConfig, spec: ModelSpec, loader: Loader | None) -> Kernels:
    """Choose on rank 0 and broadcast; all ranks call it together, once the run's folder is there.

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
    """Return the kernel, and why."""
    dtype = training_dtype(config)
    if config.use_flash_attn != "auto":
        return choose_attention(config.use_flash_attn, dtype, spec.attention)
    kernels = candidates(dtype, spec.attention)
    if len(kernels) == 1:
        return choose_attention(False, dtype, spec.attention)
    workload = rank_rows(config, Workload.of(loader, config))

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
    return fastest(kernels, milliseconds, Path(config.save_path) / KERNELS_FILE, known)


def fastest(
    kernels: list[str], milliseconds: Callable[[str], float], file: Path, known: dict[str, Any]
) -> tuple[str, str]:
    """Return the kernel with which a block takes least time, and the times for the log.

    Args:
        milliseconds: time of a block with a kernel.
        file: keeps the times for later starts.
        known: what they depend on; those of another machine do not count.

    Raises:
        Exception: of the last kernel, where none can run a block.
    """
    found = kept(file, Trial.model_validate_json)
    if found and found.known == known:
        return _ranking(found, "as measured when the run began")
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
    with suppress(OSError):  # disk-full is reported when the config is written
        replace_checked(file, trial.model_dump_json(indent=2))
    return _ranking(trial, "of a block")


def _ranking(trial: Trial, what: str) -> tuple[str, str]:
    ranked = sorted(trial.milliseconds, key=lambda kernel: trial.milliseconds[kernel])
    times = [f"{NAMES[kernel]} {trial.milliseconds[kernel]:.1f} ms" for kernel in ranked]
    times += [f"{NAMES[kernel]} failed ({reason})" for kernel, reason in trial.failures.items()]
    return ranked[0], f"{NAMES[ranked[0]]}, the fastest {what}: {', '.join(times)}"


def _compilation(config: TrainConfig, experts: bool, trial: Callable[[], str | None]) -> tuple[bool, list[str]]:
    """Say whether blocks, with experts or without, are compiled, and lines for the log.

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
    """Say why torch.compile cannot compile a block, such as for want of a C compiler."""
    options = BlockOptions(compile=True, fp8=config.fp8.enabled)
    try:
        time_layer(1, config, spec, rank_rows(config, Workload.of(loader, config)), _device(), options)
    except Exception as error:  # of many kinds, from dynamo down to the driver
        return f"torch.compile does not work here: {reason_of(error)}"
    return None


def _device() -> torch.device:
    """Return the device of this process."""
    return torch.device(get_accelerator().current_device_name())
