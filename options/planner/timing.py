"""Time layers on this machine: to calibrate a plan (`--plan --calibrate`), and to choose kernels where they are `auto`.

Calibration: one layer of each kind, with random weights, runs on the run's own shapes, in its dtype, on the device and
the threads of a rank; on a CPU the other ranks' cores work meanwhile, as they share its memory and its clock. The least
of five times counts, as other programs can only add time. It costs seven passes of a micro-batch through one block, the
embedding and the head.

Attention: on a GPU with flash attention each exact kernel runs one block on rows like the run's, and the fastest is
taken. The run's folder keeps the choice, as a run that resumes with another kernel would round otherwise. Elsewhere the
family's usual kernel is taken.

Compilation: on a GPU from Ampere on blocks are compiled where torch.compile can compile one of the run's; its program
is the one that the first step would make. Not compiled unless asked: blocks with experts, of which each micro-batch may
be compiled anew, and a CPU's; never those of ZeRO stage 3, which gathers weights inside of them.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Annotated, Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import BaseModel, Field, PositiveFloat
from torch import Tensor, nn

from common.terminal import reason_of
from common.whole_files import kept, replace_checked
from data.loader import Loader
from models.attention.kernels import NAMES, candidates, choose_attention
from models.block_options import PLAIN, BlockOptions
from models.layers import Block, Embedding, Head
from models.loss.lean import AMPERE, linear_cross_entropy
from models.offload import Returns
from models.router import n_experts
from models.spec import ModelSpec
from options.planner.costs import layer_times, update_time
from options.planner.inputs import Basis, Calibration, Workload, layer_kinds
from options.planner.memory import StateBytes
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.config.precision import FP8
from training.distributed.processes import gather, set_threads
from training.engine.gradients import add
from training.engine.numerics import set_numerics
from training.metrics.devices import this_device
from training.optimizer.optimizers import build_optimizer

KERNELS_FILE = "kernels.json"
WARM_UP, REPEATS = 2, 5
ROWS = 512  # of the products on the other cores


def calibrate(
    config: TrainConfig,
    spec: ModelSpec,
    workload: Workload,
    rounds: int = REPEATS,
    kinds: Collection[int] | None = None,
) -> Calibration:
    """Measure one layer of each kind, and the optimizer; the least of several rounds counts.

    Args:
        kinds: of the layers to measure; all where absent.
    """
    kinds = set(layer_kinds(spec)) if kinds is None else kinds
    set_numerics(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return _calibrate(config, spec, workload, device, rounds, kinds)
    threads, others = torch.get_num_threads(), config.model_topo.processes - 1
    set_threads(others + 1, spec.config.hidden_size)
    try:
        busy = min(others, len(os.sched_getaffinity(0)) - 1)
        with _busy_cores(busy, spec.config.hidden_size, training_dtype(config)):
            return _calibrate(config, spec, workload, device, rounds, kinds)
    finally:
        torch.set_num_threads(threads)


def _calibrate(
    config: TrainConfig,
    spec: ModelSpec,
    workload: Workload,
    device: torch.device,
    rounds: int,
    kinds: Collection[int],
) -> Calibration:
    torch.manual_seed(config.seed)
    as_timed = {"compile": False, "use_flash_attn": False, "fp8": FP8(), "schedule": "1f1b"}
    # Whole layers, on the tokens of a rank: with fewer heads or columns estimates are as wrong as with all.
    plain, workload = config.model_copy(update=as_timed | {"model_topo": ModelTopo()}), _rank_rows(config, workload)
    estimates = layer_times(Basis(plain, spec, workload, this_device(), recompute=frozenset()))
    layers: dict[str, tuple[float, float]] = {}
    for kind in sorted(kinds):
        forward, backward = time_layer(kind, config, spec, workload, device, rounds=rounds)
        planned = estimates[kind]
        # A frozen embedding has no backward pass.
        back = backward / planned.backward.total if planned.backward.total else 1.0
        layers[str(kind)] = (forward / planned.forward.total, back)
    update = _time_update(config, spec, device) / update_time(config, this_device())
    return Calibration.of(config, spec, layers, update)


def _rank_rows(config: TrainConfig, workload: Workload) -> Workload:
    """Return one rank's share of the rows, each a document of its own."""
    share = workload.shared(config.model_topo.sequence)
    return replace(share, attended=min(share.attended, share.length))


@contextmanager
def _busy_cores(ranks: int, hidden: int, dtype: torch.dtype) -> Iterator[None]:
    """Keep cores busy as other ranks would, in threads of this process."""
    done, threads = Event(), torch.get_num_threads()

    def multiply() -> None:
        torch.set_num_threads(threads)  # which counts for this thread
        rows, weights = torch.ones(ROWS, hidden, dtype=dtype), torch.ones(hidden, 4 * hidden, dtype=dtype)
        while not done.is_set():
            torch.nn.functional.silu(rows @ weights)

    with ThreadPoolExecutor(max(1, ranks)) as pool:
        for _ in range(ranks):
            pool.submit(multiply)
        try:
            yield
        finally:
            done.set()


def time_layer(
    kind: int,
    config: TrainConfig,
    spec: ModelSpec,
    workload: Workload,
    device: torch.device,
    options: BlockOptions = PLAIN,
    rounds: int = REPEATS,
) -> list[float]:
    """Return seconds of the forward and the backward pass of a micro-batch through a layer of random weights."""
    dtype = training_dtype(config)
    module = spec.build(kind, spec.positions()).to(device=device, dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    if isinstance(module, Block):
        options.apply(kind, module, Returns())
    if StateBytes.of(config).sum > dtype.itemsize:
        _sum_in_fp32(module)
    length = math.ceil(workload.length)
    positions = (torch.arange(length, device=device) % math.ceil(workload.attended)).repeat(workload.rows, 1)
    ids = torch.randint(spec.config.vocab_size, positions.shape, device=device)
    hidden = torch.randn(*positions.shape, spec.config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    sums = (torch.zeros(2, n_experts(spec.config), device=device),) if spec.family.router else ()
    inputs = (ids, positions) if isinstance(module, Embedding) else (hidden, positions, *sums)
    supervised = max(1, round(ids.numel() * workload.supervised))

    def forward(_: None) -> Tensor:
        output: Tensor
        if isinstance(module, Head):
            rows = module.norm(hidden).flatten(0, 1)[:supervised]
            return linear_cross_entropy(rows, module.projection(), ids.flatten()[:supervised], module.cap)
        output = module(inputs)[0]
        return output

    def backward(output: Tensor) -> None:
        output.backward(torch.ones_like(output))

    return _least_seconds(device, forward, backward, rounds=rounds)


def _time_update(config: TrainConfig, spec: ModelSpec, device: torch.device) -> float:
    """Return seconds of the optimizer for one parameter."""
    where = torch.device("cpu") if config.zero_optimization.offloads else device
    weights = {name: nn.Parameter(torch.zeros(shape, device=where)) for name, shape in spec.shapes(1).items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(config, weights.items())
    (seconds,) = _least_seconds(where, lambda _: optimizer.step())
    return seconds / sum(weight.numel() for weight in weights.values())


def _sum_in_fp32(module: nn.Module) -> None:
    """Add 16-bit gradients up in fp32 as they arrive, as the run's optimizer does."""

    def take(total: Tensor, parameter: Tensor) -> None:
        assert parameter.grad is not None
        add(total, parameter.grad)
        parameter.grad = None

    for parameter in (weight for weight in module.parameters() if weight.requires_grad):
        total = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(partial(take, total))


def _least_seconds(device: torch.device, *works: Callable[[Any], Any], rounds: int = REPEATS) -> list[float]:
    """Time each of several works, done in turn, each with the result of the one before; the least of several rounds."""
    times = []
    warm_up = min(WARM_UP, rounds - 1)
    for _ in range(warm_up + rounds):
        result, moments = None, [_now(device)]
        for work in works:
            result = work(result)
            moments.append(_now(device))
        times.append([end - begin for begin, end in pairwise(moments)])
    return [min(each) for each in zip(*times[warm_up:], strict=True)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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
    workload = _rank_rows(config, Workload.of(loader, config))

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
        time_layer(1, config, spec, _rank_rows(config, Workload.of(loader, config)), _device(), options)
    except Exception as error:  # of many kinds, from dynamo down to the driver
        return f"torch.compile does not work here: {reason_of(error)}"
    return None


def _device() -> torch.device:
    """Return the device of this process."""
    return torch.device(get_accelerator().current_device_name())
