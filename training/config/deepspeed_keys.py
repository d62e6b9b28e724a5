"""Sort DeepSpeed's own keys: refused, without effect, or not planned."""

from __future__ import annotations

from typing import Any

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
    "stage3_gather_fp16_weights_on_model_save buffer_count fast_init nvme_path pipeline_read pipeline_write".split()
)
ONLY_BELOW_3 = frozenset(  # of zero_optimization
    "use_multi_rank_bucket_allreduce allgather_bucket_size round_robin_gradients ignore_unused_parameters".split()
)
BELOW_3 = ONLY_BELOW_3 | {"reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "overlap_comm"}
BF16_ALONE = {"bf16_master_weights_and_grads", "bf16_optimizer_states"}
UNPLANNED = BELOW_3 - {"reduce_bucket_size"} | BF16_ALONE | {"fp16_master_weights_and_grads", "pin_memory"}
UNPLANNED |= {"offload_param", "zero_quantized_weights", "zero_quantized_gradients"}


def describe_ignored_keys(config: Any, in_stages: bool = True, plan: bool = False) -> list[str]:
    """List the given keys without effect in one line, and with `plan` those that a plan ignores in another."""
    zero = config.zero_optimization
    given = {"zero_optimization": zero.model_extra or {}, "bf16": config.bf16.model_fields_set}
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
    keys = [(f"{section}.{key}", key) for section, names in given.items() for key in sorted(names)]
    lines = {"no effect here": [place for place, key in keys if key in idle]}
    lines["not in the plan"] = [place for place, key in keys if plan and key in UNPLANNED - idle]
    return [f"{label}: {', '.join(places)}" for label, places in lines.items() if places]
