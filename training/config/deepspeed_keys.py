"""Sort DeepSpeed's own keys: refused, without effect, or not planned; and read its JSON file as keys of a config."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from common.terminal import reason_of
from data.paths import read_small, with_home
from training.config.section import leaves, place_of
from training.errors import ConfigError

if TYPE_CHECKING:
    from training.config.keys import TrainConfig

# Without effect in a pipeline, or a change of what is trained that nobody has tested.
REFUSED = frozenset(
    "activation_checkpointing aio amp autotuning checkpoint comms_logger compression_training csv_monitor "
    "curriculum_learning data_efficiency disable_allgather dump_state elasticity flops_profiler "
    "gradient_predivide_factor hybrid_engine memory_breakdown pipeline prescale_gradients sparse_gradients "
    "torch_autocast wall_clock_breakdown zero_optimization.compute_grad_norm zero_optimization.elastic_checkpoint "
    "zero_optimization.legacy_stage1 zero_optimization.parameter_alignment zero_optimization.zenflow".split()
)
WHY_REFUSED = "DeepSpeed's, not tested here and not passed on; leave it out"
# Pipetune sets the first two itself, casts no inputs (the loss's scale is one), loads and exports in its own way, and
# offloads to no disk; fused_optimizer is in gdGPT's files.
IDLE = frozenset(
    "immediate_grad_update check_grad_overflow auto_cast fused_optimizer allgather_partitions load_from_fp32_weights "
    "cpu_offload_use_pin_memory gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save buffer_count cpuadam_cores_perc fast_init nvme_path pipeline_read "
    "pipeline_write".split()
)
ONLY_BELOW_3 = frozenset(  # of zero_optimization
    "use_multi_rank_bucket_allreduce allgather_bucket_size round_robin_gradients ignore_unused_parameters".split()
)
BELOW_3 = ONLY_BELOW_3 | {"reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "overlap_comm"}
BF16_ALONE = {"bf16_master_weights_and_grads", "bf16_optimizer_states"}
UNPLANNED = BELOW_3 - {"reduce_bucket_size"} | BF16_ALONE | {"fp16_master_weights_and_grads", "pin_memory"}
UNPLANNED |= {"offload_param", "zero_quantized_weights", "zero_quantized_gradients"}


FILE, OVERRIDES = "deepspeed_config", "overrides"


def take_up(raw: dict[str, Any], overrides: Collection[str] = ()) -> tuple[dict[str, Any], list[str], list[str]]:
    """Add the keys of the file that `deepspeed_config` names to a config's, and leave out what changes nothing.

    Args:
        overrides: dotted keys of `raw` that come from the command line, and so count against the file.

    Returns:
        The keys and values, what was left out, and a line for each value that the file means otherwise.

    Raises:
        ConfigError: the file cannot be read, has values for HF Trainer to fill in, or contradicts `raw`.
    """
    raw, lines = dict(raw), list[str]()
    if isinstance(path := raw.get(FILE), str):
        del raw[FILE]
        lines += _join(raw, _read(path), path, overrides)
    idle = [key for key in sorted(REFUSED) if key in raw and _changes_nothing(raw[key])]
    return {key: value for key, value in raw.items() if key not in idle}, idle, lines


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_small(with_home(path)).decode("utf-8-sig"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        problem = reason_of(error) if isinstance(error, OSError) else f"not JSON: {error}"
        raise ConfigError(f"{FILE}: {path}: {problem}; expected DeepSpeed's JSON file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{FILE}: {path}: expected DeepSpeed's keys and values, found {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"a key is repeated among {', '.join(found)}")
    return found


def _join(raw: dict[str, Any], theirs: dict[str, Any], path: str, overrides: Collection[str]) -> Iterator[str]:
    """Add the file's values to a config's; yield a line for what is read otherwise."""
    values, waiting = dict(leaves(theirs)), []
    kind = values.get("optimizer.type")
    if (adam := str(kind).lower()) in ("adam", "adamw"):  # as DeepSpeed's engine builds them
        values.pop("optimizer.params.torch_adam", None)
        decoupled = values.pop("optimizer.params.adam_w_mode", True) or adam == "adamw"
        values["optimizer.type"] = "AdamW" if decoupled else "Adam"
        if values["optimizer.type"] != kind:
            yield f"{FILE}: optimizer.type {kind} is {values['optimizer.type']} there (adam_w_mode)"
    for key, value in values.items():
        if any(f"{key}.".startswith(f"{each}.") for each in overrides):
            continue
        section, name = place_of(key, raw, path)
        own = section.get(name)
        if own is None and value == "auto":
            waiting.append(key)
        elif own is None:
            section[name] = value
        elif value not in (own, "auto"):
            raise ConfigError(f"{key}: {own}, but {path} ({FILE}) has {value}; expected the same, or only one of them")
    if waiting:
        raise ConfigError(
            f"{FILE}: {path}: 'auto' is for HF Trainer to fill in; expected values in the config, or nothing there for "
            f"the default: {', '.join(waiting)}"
        )
    if adam in ("adam", "adamw"):  # torch's AdamW decays by 0.01 where it gets no number
        section, name = place_of("optimizer.params.weight_decay", raw, path)
        section.setdefault(name, 0.0)


def _changes_nothing(value: Any) -> bool:
    """Say whether a key of DeepSpeed's is off: false, null, or a section that is."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_changes_nothing, value.values()))
    return value is None or value is False


def describe_ignored_keys(config: TrainConfig, in_stages: bool = True, plan: bool = False) -> list[str]:
    """List the given keys without effect in one line, and with `plan` those that a plan ignores in another."""
    zero = config.zero_optimization
    given: dict[str, Any] = {
        "zero_optimization": zero.model_extra or {},
        "bf16": config.bf16.model_fields_set,
    }
    given |= {"fp16": config.fp16.model_fields_set}
    if zero.offload_optimizer:
        given["zero_optimization.offload_optimizer"] = zero.offload_optimizer.model_extra or {}
    idle = IDLE | ({"overlap_comm"} if in_stages else set())
    if zero.stage == 3:
        idle |= ONLY_BELOW_3
    else:
        idle |= given["zero_optimization"].keys() - (BELOW_3 if zero.stage else set())
    if zero.stage == 1 and not zero.offloads and not config.data_types:  # then bf16 has an optimizer of its own
        idle |= BF16_ALONE
    unplanned = UNPLANNED - idle - (BF16_ALONE if zero.offloads or config.weights_on_host else set())
    keys: list[tuple[str, str]] = []
    for section, names in given.items():
        keys += [(f"{section}.{key}", key) for key in sorted(names)]
    lines = {"no effect here": [*config._left_out, *(place for place, key in keys if key in idle)]}
    lines["not in the plan"] = [place for place, key in keys if plan and key in unplanned]
    named = [f"{label}: {', '.join(places)}" for label, places in lines.items() if places]
    return [*config._read_otherwise, *named]
