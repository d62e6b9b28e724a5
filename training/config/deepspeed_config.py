"""Make DeepSpeed's config, and check a config against device and model."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from models.block_options import fp8_obstacle
from models.parallel import tensor
from models.parallel.groups import RankGroup
from models.spec import ModelSpec, key_heads
from training.config.deepspeed_keys import IDLE
from training.config.keys import TrainConfig
from training.config.mistakes import in_our_words
from training.config.precision import training_dtype
from training.config.section import suggest
from training.errors import ConfigError

ZERO = "zero_optimization"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_device(config: TrainConfig) -> None:
    """Check `zero_optimization` by DeepSpeed's own model, and fp16 on this device.

    A CPU without fp16 instructions computes in fp16 all the same, slowly: enough for a test.

    Raises:
        ConfigError: DeepSpeed does not have a key or refuses a value, or trains wrongly with it.
    """
    try:
        known = DeepSpeedZeroConfig.model_validate(config.zero_optimization.model_dump(exclude_none=True))
    except ValidationError as error:
        first = error.errors()[0]
        reason = in_our_words(first["msg"])
        reason += f", found {first['input']!r}" if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            reason = f"DeepSpeed does not have it{suggest(first['loc'][-1], DeepSpeedZeroConfig.model_fields, ZERO)}"
        raise ConfigError(f"{'.'.join([ZERO, *map(str, first['loc'])])}: {reason}") from None
    if known.stage == 3 and config.model_topo.processes % max(1, known.zero_hpz_partition_size):
        raise ConfigError(f"{ZERO}.zero_hpz_partition_size: expected a divisor of the number of processes")
    if known.stage == 3 and known.offload_param and known.offload_param.device == "nvme":
        raise ConfigError(f"{ZERO}.offload_param.device: expected cpu or none, found 'nvme'")
    asked = [key for key in QUANTIZED if known.stage == 3 and getattr(known, key)]
    if asked and not torch.cuda.is_available():  # DeepSpeed 0.19.8 takes quantized gradients there, and does not do it
        raise ConfigError(f"{ZERO}.{asked[0]}: its kernels need CUDA, which this machine does not have")
    # DeepSpeed 0.19.8 divides gradients by the scale all the same.
    if config.fp16.enabled and known.stage == 0 and not config.weights_on_host:
        raise ConfigError(f"{ZERO}.stage: 0 does not scale the loss, which fp16 needs; expected 1 or more")
    if get_accelerator().device_name() == "cpu":
        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks for the instructions, torch needs none


def router_loss_weight(config: TrainConfig, spec: ModelSpec) -> float:
    """Return the config's weight of the router loss, or transformers' own.

    Raises:
        ConfigError: a weight for a model without such a loss.
    """
    wanted = config.aux_router_loss.weight
    if not spec.family.router:
        if wanted:
            raise ConfigError(
                f"aux_router_loss.weight: {spec.family.name} has no loss of its router in transformers; expected a "
                "mixture-of-experts that has"
            )
        return 0.0
    if wanted is None:
        return float(spec.config.router_aux_loss_coef) if getattr(spec.config, "output_router_logits", False) else 0.0
    return wanted


def check_fp8(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse fp8 for a model whose blocks cannot compute in it.

    Raises:
        ConfigError: they cannot.
    """
    if config.fp8.enabled and (obstacle := fp8_obstacle(spec)):
        raise ConfigError(f"fp8.enabled: {obstacle}; expected false")


def check_length(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse texts that are longer than the model's table of positions.

    Raises:
        ConfigError: they may be.
    """
    if spec.family.first_row is not None and config.max_seq_len > (rows := spec.context or 0):
        reason = f"{spec.family.name} has learned {rows} positions (max_position_embeddings, n_positions)"
        raise ConfigError(f"max_seq_len: {config.max_seq_len}, but {reason}; expected at most {rows}")


def check_sharing(config: TrainConfig, spec: ModelSpec) -> None:
    """Check that this model's layers can be shared by a `model` axis, its rows by `sequence`, and as options demand.

    Raises:
        ConfigError: they cannot.
    """
    topo, name, keys = config.model_topo, spec.family.name, key_heads(spec.config)
    if reason := tensor.obstacle(spec, topo.tensor, topo.experts == "spread"):
        raise ConfigError(f"model_topo.process_topology: {reason}")
    if topo.sequence > 1 and not spec.family.shares_rows:
        raise ConfigError(
            f"model_topo.sequence: in {name} tokens meet elsewhere than in attention (linear attention, or an indexer "
            "that chooses keys); expected 1"
        )
    parts = (RankGroup(topo.tensor, rank).part(keys) for rank in range(topo.tensor))  # with their queries
    held = {len(range(keys)[part]) * int(spec.config.num_attention_heads) // keys for part in parts}
    for heads in (heads for heads in held if heads % topo.sequence):
        where = " in a process that shares its layers" if topo.tensor > 1 else ""
        raise ConfigError(
            f"model_topo.sequence: {topo.sequence} does not divide the {heads} heads of attention that {name} has"
            f"{where}; expected a divisor"
        )
    config.check_model(spec)


def loss_scaler(config: TrainConfig) -> Any:
    """Make the loss scale of a run as DeepSpeed's engine does; without fp16 it is 1."""
    keys = DeepSpeedFP16Config(**config.fp16.model_dump(exclude_none=True, exclude=set(IDLE)))
    return CreateLossScaler(
        training_dtype(config), keys.loss_scale, keys.loss_scale == 0, keys.dynamic_loss_scale_args()
    )


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """Make DeepSpeed's config.

    bf16 accumulates gradients in fp32 unless `data_types` says otherwise: in a sum of a hundred micro-batches 8 bits
    of mantissa lose the small ones. They are accumulated as they arrive, parameter by parameter: DeepSpeed's other way
    collects them after the backward pass of the last stage's module, and misses the head, which the loss calls.
    """
    # Each step sets its number of micro-batches; at the start DeepSpeed only checks that there are enough.
    topo = config.model_topo
    rows = max(config.train_batch_size, config.least_micro_batches * config.micro_batch_size * topo.row_replicas)
    resolved: dict[str, Any] = {
        "train_batch_size": rows * topo.sequence,  # DeepSpeed counts rows that replicas share once for each
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        # Only where it may have to clip does DeepSpeed compute the norm, and skip a step whose norm is not finite.
        "gradient_clipping": config.gradient_clipping or torch.finfo(torch.float32).max,
        "zero_optimization": config.zero_optimization.model_dump(exclude_none=True),
        "zero_allow_untested_optimizer": config.zero_allow_untested_optimizer,
        "zero_force_ds_cpu_optimizer": False,  # build_optimizer already chose
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},  # ranks of a model axis have both whole
        "steps_per_print": None,  # Pipetune reports progress itself
        "timers": {"throughput": {"enabled": False}},  # which would wait for the device in each micro-batch
    }
    for name, precision in (("bf16", config.bf16), ("fp16", config.fp16)):
        if precision.enabled:
            resolved[name] = precision.model_dump(exclude_none=True, exclude=set(IDLE))
    if config.bf16.enabled:
        resolved["bf16"] |= {"immediate_grad_update": True, "check_grad_overflow": True}
        if config.zero_optimization.stage:
            resolved["data_types"] = {"grad_accum_dtype": "fp32"}
    return resolved | config.model_dump(include={"communication_data_type", "data_types"}, exclude_none=True)
