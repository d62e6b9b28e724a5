"""What `parts: auto` and `use_grad_ckpt: auto` come to: decided once a run, by rank 0 for all, and handed down.

The layers are divided by `training.plan.partition`. Of each stage as few blocks recompute as fit into the memory of the
smallest device; the rest keep what they have and save the time. On a CPU none recomputes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from data.loader import Loader
from models.spec import ModelSpec
from training.checkpoint.folder import CheckpointRecord
from training.config.keys import TrainConfig
from training.distributed.processes import gather
from training.metrics.devices import Device, this_device
from training.plan.basis import MEASURED_FILE, Basis
from training.plan.plan import Plan
from training.plan.workload import Workload
from training.topology import Division


def divide(
    config: TrainConfig,
    spec: ModelSpec,
    in_stages: bool = True,
    loader: Loader | None = None,
    saved: CheckpointRecord | None = None,
) -> Division:
    """How a run's model is divided. All ranks call it together.

    Args:
        in_stages: whether there is a pipeline; else each process has all layers (ZeRO).
        loader: of the data to plan for; where absent, every sample counts as `max_seq_len` tokens.
        saved: of the checkpoint that the run goes on from.

    Raises:
        ConfigError: the config and the model do not fit each other.
    """
    parts = config.parts_for(spec.n_layers)
    automatic = config.use_grad_ckpt == "auto"
    if in_stages and (automatic or parts is None):
        device = min(gather(this_device()), key=lambda device: device.memory or math.inf)
        chosen = gather(choose(config, spec, device, loader, saved) if torch.distributed.get_rank() == 0 else None)[0]
        assert chosen is not None
        return chosen
    report = ["gradient checkpointing: auto, all blocks, as it is not known how ZeRO divides the memory"]
    return Division(
        config.topology(parts if in_stages and parts else []),
        config.recomputed(spec.n_blocks),
        tuple(report if automatic else []),
    )


def choose(
    config: TrainConfig,
    spec: ModelSpec,
    device: Device,
    loader: Loader | None = None,
    saved: CheckpointRecord | None = None,
) -> Division:
    """The division of a pipeline over such devices, with what the log says of it; see `divide`."""
    basis, report = Basis.of_run(config, spec, Workload.of(loader, config), device)
    if config.parts_for(spec.n_layers) is None:
        parts, reason = _going_on(basis, saved)
        report.append(f"parts: auto, {reason}")
        basis = replace(basis, config=config.with_parts(parts))
    plan = Plan.make(basis)
    recompute = plan.basis.recomputed
    if config.use_grad_ckpt == "auto":
        counts = ", ".join(str(len(recompute.intersection(stage.layers))) for stage in plan.stages)
        told = f"{counts} blocks of the stages recompute" if recompute else "no block recomputes"
        report.append(f"gradient checkpointing: auto, {told}")
    return Division(config.topology(plan.parts), recompute, tuple(report))


def _going_on(basis: Basis, saved: CheckpointRecord | None) -> tuple[list[int], str]:
    """The parts of a run that goes on as it was divided, or none, and why.

    Only on the same parts it has the same bits; so what was measured meanwhile changes them where the config asks.
    """
    config, measured = basis.config, basis.measured
    if saved and len(saved.topology.parts) == config.chunks and "model_topo.parts" not in saved.settings:
        if config.rebalance and measured and len(measured.parts) == config.chunks:
            return measured.better or measured.parts, f"the best ones by measured steps ({MEASURED_FILE})"
        better = f"; rebalance: true takes {measured.better}" if measured and measured.better else ""
        return saved.topology.parts, f"as at the checkpoint{better}"
    if measured:
        return [], f"by measured costs, of the run's own steps ({MEASURED_FILE})"
    estimated = "estimated costs; --plan --calibrate measures them"
    return [], f"by {'measured costs, of --calibrate' if basis.calibration else estimated}"
