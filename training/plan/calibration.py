"""How long the layers really take on this machine: `--plan --calibrate`.

One layer of each kind is built with random weights and run on the run's own shapes, in its dtype and on the device and
the threads that a rank has; forward and backward pass are timed apart, gradients are added up as the run adds them, and
the optimizer takes a step; the least of five times counts, as what else the machine does can only add. By how much they
differ from the estimates lies in the run's folder, where `parts: auto` finds it: a factor stays useful when the data
change. For another model, precision or kind of device it is passed over. It costs seven passes of a micro-batch through
one block, the embedding and the head.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.layers import Embedding, Head
from models.lean_loss import linear_cross_entropy
from models.spec import ModelSpec
from training.atomic_files import replace_text
from training.config.deepspeed_config import training_dtype
from training.config.keys import TrainConfig
from training.metrics.devices import this_device
from training.optimizer.optimizers import build_optimizer
from training.plan.costs import Factors, LayerTimes, kinds
from training.plan.optimizer_memory import StateBytes
from training.plan.workload import Workload

FILE = "calibration.json"
WARM_UP, REPEATS = 2, 5


class Calibration(NamedTuple):
    """How this machine's times differ from estimates.

    Attributes:
        device: they were measured on.
        dtype: of the run.
        model: digest of config.json.
    """

    device: str
    dtype: str
    model: str
    factors: Factors

    @classmethod
    def read(cls, folder: Path, config: TrainConfig, spec: ModelSpec) -> Calibration | None:
        """What an earlier `--calibrate` left in the run's folder, where it fits this run and this kind of device."""
        try:
            found = json.loads((folder / FILE).read_text(encoding="utf-8"))
            factors = Factors(**found.pop("factors"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        now = {"device": device_name(), "dtype": str(training_dtype(config)), "model": _digest(spec)}
        return cls(**found, factors=factors) if now == found else None

    def write(self, folder: Path) -> Path:
        """Into the run's folder, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / FILE, json.dumps(self._asdict() | {"factors": asdict(self.factors)}, indent=2) + "\n")
        return folder / FILE


def calibrate(config: TrainConfig, spec: ModelSpec, workload: Workload) -> Calibration:
    """Measure one layer of each kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // config.model_topo.processes))
    torch.manual_seed(config.seed)
    expected = LayerTimes(spec, config, workload, this_device())
    layers = {}
    for kind in dict.fromkeys(kinds(spec)):
        forward, backward = _time_layer(kind, config, spec, workload, device)
        estimate = expected.layer(kind)
        layers[str(kind)] = (forward / estimate.forward, backward / estimate.backward)
    replicas = config.model_topo.replicas if config.zero_optimization.stage else 1
    update = _time_update(config, spec, device) / replicas / expected.update
    return Calibration(device_name(), str(training_dtype(config)), _digest(spec), Factors(layers, update))


def device_name() -> str:
    """Of this process's device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _digest(spec: ModelSpec) -> str:
    return hashlib.sha256(json.dumps(spec.raw, sort_keys=True).encode()).hexdigest()


def _time_layer(
    kind: int, config: TrainConfig, spec: ModelSpec, workload: Workload, device: torch.device
) -> tuple[float, float]:
    """Seconds of the forward and the backward pass of one micro-batch."""
    dtype = training_dtype(config)
    module = spec.build(kind, spec.positions()).to(device=device, dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    if StateBytes.of(config).gradient > dtype.itemsize:
        _sum_in_fp32(module)
    length = math.ceil(workload.length)
    positions = (torch.arange(length, device=device) % math.ceil(workload.attended)).repeat(workload.rows, 1)
    ids = torch.randint(spec.config.vocab_size, positions.shape, device=device)
    hidden = torch.randn(*positions.shape, spec.config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    sums = (torch.zeros(2, spec.config.num_experts, device=device),) if spec.family.router else ()
    stream = (ids, positions) if isinstance(module, Embedding) else (hidden, positions, *sums)
    supervised = max(1, round(ids.numel() * workload.supervised))

    def forward() -> Tensor:
        output: Tensor
        if isinstance(module, Head):
            rows = module.norm(hidden).flatten(0, 1)[:supervised]
            return linear_cross_entropy(rows, module.projection(), ids.flatten()[:supervised], module.cap)
        output = module(stream)[0]
        return output

    times = []
    for _ in range(WARM_UP + REPEATS):
        begin = _now(device)
        output = forward()
        middle = _now(device)
        output.backward(torch.ones_like(output))
        times.append((middle - begin, _now(device) - middle))
    forward_times, backward_times = zip(*times[WARM_UP:], strict=True)
    return min(forward_times), min(backward_times)


def _time_update(config: TrainConfig, spec: ModelSpec, device: torch.device) -> float:
    """Seconds of the optimizer for one parameter."""
    where = torch.device("cpu") if config.zero_optimization.offloads else device
    shapes = spec.shapes(1)
    weights = {name: nn.Parameter(torch.zeros(shape, device=where)) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(config, weights.items())
    times = []
    for _ in range(WARM_UP + REPEATS):
        begin = _now(where)
        optimizer.step()
        times.append(_now(where) - begin)
    return min(times[WARM_UP:]) / sum(weight.numel() for weight in weights.values())


def _sum_in_fp32(module: nn.Module) -> None:
    """Add 16-bit gradients up in fp32 as they arrive, as the run's optimizer does."""

    def add(total: Tensor, parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad.float())
        parameter.grad = None

    for parameter in module.parameters():
        total = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(partial(add, total))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
