"""Time layers on this machine, to calibrate a plan (`--plan --calibrate`).

One layer of each kind, with random weights, runs on the run's own shapes, in its dtype, on the device and
the threads of a rank; on a CPU the other ranks' cores work meanwhile, as they share its memory and its clock. The least
of five times counts, as other programs can only add time. It costs seven passes of a micro-batch through one block, the
embedding and the head.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from models.block_options import PLAIN, BlockOptions
from models.images.embedding import SeeingEmbedding
from models.layers import Block, Embedding, Head
from models.loss.lean import linear_cross_entropy
from models.offload import Returns
from models.router import n_experts
from models.spec import ModelSpec
from options.planner.costs import layer_times, tower_passes, update_time
from options.planner.inputs import Basis, Images, Workload, layer_kinds
from options.planner.measurements import TOWER, Calibration
from options.planner.memory import StateBytes
from options.planner.row_chunks import chunk_of
from options.planner.tower import go_back
from options.row_chunks.keys import KEY
from training.config.keys import TrainConfig
from training.config.model_topo import ModelTopo
from training.config.precision import FP8, training_dtype
from training.distributed.joining import set_threads
from training.engine.gradients import add
from training.engine.numerics import set_numerics
from training.metrics.devices import this_device
from training.optimizer.optimizers import build_optimizer

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
    whole, spec = spec, spec.blind  # random ids are no images
    as_timed = {"compile": False, "use_flash_attn": False, "fp8": FP8(), "schedule": "1f1b", KEY: None}
    # Whole layers, on the tokens of a rank: with fewer heads or columns estimates are as wrong as with all.
    plain, workload = config.model_copy(update=as_timed | {"model_topo": ModelTopo()}), rank_rows(config, workload)
    estimates = layer_times(Basis(plain, spec, workload, this_device(), recompute=frozenset()))
    layers: dict[str, tuple[float, float]] = {}
    for kind in sorted(kinds):
        forward, backward = time_layer(kind, config, spec, workload, device, rounds=rounds)
        planned = estimates[kind]
        # A frozen embedding has no backward pass.
        back = backward / planned.backward.total if planned.backward.total else 1.0
        layers[str(kind)] = (forward / planned.forward.total, back)
    if whole.family.sees and workload.images.number and 0 in kinds:
        image = Images(1.0, workload.images.tokens)
        seen = Basis(plain, whole, replace(workload, images=image), this_device(), recompute=frozenset())
        measured = time_tower(config, whole, round(image.tokens), device, rounds)
        planned_passes = [each.total for each in tower_passes(seen, this_device())]
        ratios = [took / most if most else 1.0 for took, most in zip(measured, planned_passes, strict=True)]
        layers[TOWER] = ratios[0], ratios[1]
    update = _time_update(config, spec, device) / update_time(config, this_device())
    return Calibration.of(config, spec, layers, update)


def rank_rows(config: TrainConfig, workload: Workload) -> Workload:
    """Return one rank's share of the rows, or as many tokens as a chunk has, each row a document of its own."""
    share = workload.shared(config.model_topo.sequence)
    share = replace(share, length=min(share.length, chunk_of(config) or share.length))
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
            states = [module.norm(hidden)]
            for layer in module.ahead or ():
                states.append(layer(states[0].detach(), states[-1], positions))
            rows = torch.cat([each.flatten(0, 1)[:supervised] for each in states])
            targets = ids.flatten()[:supervised].repeat(len(states))
            return linear_cross_entropy(rows, module.projection(), targets, module.cap)
        output = module(inputs)[0]
        return output

    def backward(output: Tensor) -> None:
        output.backward(torch.ones_like(output))

    return _least_seconds(device, forward, backward, rounds=rounds)


def time_tower(config: TrainConfig, spec: ModelSpec, tokens: int, device: torch.device, rounds: int) -> list[float]:
    """Return seconds of the forward and the backward pass of an image through a tower of random weights."""
    dtype, sees = training_dtype(config), spec.family.sees
    assert sees is not None
    with torch.device("meta"):
        module = spec.build(0)
    assert isinstance(module, SeeingEmbedding)
    weights = {name: torch.randn(shape, dtype=dtype) * 0.02 for name, shape in spec.shapes(0).items()}
    module.load_state_dict(weights, assign=True)
    module.to(device).train()
    if StateBytes.of(config).sum > dtype.itemsize:
        _sum_in_fp32(module)
    images = [each.to(device) for each in sees.pictures(1, tokens, torch.randn)]
    return _least_seconds(device, lambda _: module.features(images), go_back, rounds=rounds)


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
