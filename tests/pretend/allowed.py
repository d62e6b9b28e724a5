"""The waits of the host that are known, each with its reason. No mismatch and nothing that NCCL refuses is allowed."""

from __future__ import annotations

from typing import Any, NamedTuple

ENGINE, ZERO = "training/engine/pipeline.py", "training/engine/zero.py"
UPDATE = "training/engine/trainer.py take_step"  # of every trainer
DEEPSPEED, STAGES = "deepspeed/runtime", "deepspeed/runtime/zero/stage_1_and_2.py"
NUMBERS = "tensor of Python's numbers"
A_WEIGHT = 120  # most weights of a model of the tests
OPTIMIZERS = (UPDATE, f"{ZERO} train_step", "training/engine/stage_engine.py norm")


class Allowed(NamedTuple):
    """A wait.

    Attributes:
        most: how often in a step, an evaluation's batch or a run's rest.
    """

    what: str
    where: str
    most: int
    why: str


def _of_the_optimizer(what: str, function: str, most: int, why: str) -> list[Allowed]:
    """A wait inside of DeepSpeed's optimizers, whichever engine steps them."""
    return [Allowed(what, f"{where} > {function}", most, why) for where in OPTIMIZERS]


def _fetched(where: str, most: int) -> Allowed:
    why = "ZeRO stage 3: until weights are together, the first layer's once, large ones in each pass"
    return Allowed("synchronize a stream", f"{where} > {DEEPSPEED}/zero/partition_parameters.py wait", most, why)


TURNS, HANDOVER = "options/weight_streaming/turns.py", "options/weight_streaming/handover.py"
STREAMING = [  # by micro-batch and turn
    Allowed("synchronize an event", f"{TURNS} _wait_for", 60, "no more than two micro-batches are queued"),
    Allowed("synchronize an event", f"{HANDOVER} _set_after", 60, "a thread that counts what the device has done"),
    Allowed("synchronize an event", f"{HANDOVER} _wait_for_all_but_last", 60, "two blocks' products at most are there"),
    Allowed("tolist", f"{TURNS} _take", 4, "the losses of a turn of the head"),
]
STEP = [
    *STREAMING,
    Allowed("float", f"{ENGINE} train_step", 1, "the step's loss is reported"),
    Allowed("float", "training/loop.py train_step", 1, "the gradient's norm is reported; it came with the loss"),
    Allowed("tolist", "training/distributed/signals.py agreed", 1, "all ranks leave the loop after the same step"),
    Allowed("tolist", "training/metrics/peak_memory.py peak_memory_by_stage", 1, "the memory is reported"),
    Allowed("float", f"{ZERO} _mean", 1, "the step's loss is reported"),
    Allowed("bool", f"{ZERO} _clip_gradients", 1, "a gradient that is not finite must not change the weights"),
    Allowed("bool", "training/engine/stage_engine.py clip_fp32_gradients", 1, "the same in a pipeline"),
    Allowed("bool", "training/engine/gradients.py _divide", 2, "clipped only where it has to be; the norm is there"),
    *_of_the_optimizer(
        NUMBERS,
        f"{DEEPSPEED}/utils.py mask_nan_or_inf_with_val_inplace",
        1,
        "DeepSpeed marks a norm that is not finite",
    ),
    *_of_the_optimizer("bool", f"{DEEPSPEED}/utils.py is_invalid_grad_norm", 2, "DeepSpeed drops such a gradient"),
    *_of_the_optimizer(
        "bool", f"{DEEPSPEED}/utils.py clip_tensors_by_global_norm", 1, "DeepSpeed clips where it has to"
    ),
    *_of_the_optimizer(
        "item", "torch/optim/_adafactor.py _single_tensor_adafactor", 2 * A_WEIGHT, "torch asks for two norms a weight"
    ),
    Allowed(
        "copy from host to device",
        f"training/engine/stage_engine.py norm > {STAGES} get_grad_norm_direct",
        1,
        "DeepSpeed makes the norm 0 of a stage with nothing to train",
    ),
    *_of_the_optimizer("item", f"{STAGES} has_overflow", 1, "fp16: DeepSpeed leaves out a step that overflows"),
    Allowed(
        "copy from host to device",
        f"{ENGINE} train_step > {DEEPSPEED}/pipe/engine.py _aggregate_total_loss",
        1,
        "DeepSpeed makes room for the loss on the stages that do not have it",
    ),
    # ZeRO stage 3, all DeepSpeed's own.
    Allowed(
        "synchronize a stream",
        f"{ZERO} train_step > {DEEPSPEED}/zero/stage3.py independent_gradient_partition_epilogue",
        8,
        "after each backward pass, until the gradients are in their shards",
    ),
    _fetched(f"{ZERO} train_step", 9),
    _fetched(UPDATE, 9),
    _fetched("models/layers.py forward", 4),
    *_of_the_optimizer(NUMBERS, f"{DEEPSPEED}/zero/stage3.py get_grad_norm_direct", 1, "the sum of the norms"),
    # The optimizer on the CPU: gradients and weights cross over, which cannot be without waiting for them.
    *(
        Allowed(
            "bool", f"{where} > {STAGES} update_offload_overflow_tracker", A_WEIGHT, "gradients looked at, one by one"
        )
        for where in ("training/engine/gradients.py reduce_gradients", f"{ZERO} train_step")
    ),
    *_of_the_optimizer(NUMBERS, f"{STAGES} has_overflow", 1, "in 16 bits: all ranks hear of a gradient that overflows"),
    *_of_the_optimizer("synchronize an event", f"{STAGES} _wait_for_offload_copies", 1, "they have to have arrived"),
    *_of_the_optimizer(
        "item", f"{STAGES} complete_grad_norm_calculation_for_cpu_offload", A_WEIGHT, "their norms, one by one"
    ),
    *_of_the_optimizer(NUMBERS, f"{STAGES} complete_grad_norm_calculation_for_cpu_offload", 1, "the sum of these"),
]
EVALUATION = [
    *STREAMING,
    Allowed("float", f"{ENGINE} eval_loss", 1, "the batch's loss is reported"),
    Allowed("float", f"{ZERO} _mean", 1, "the batch's loss is reported"),
    _fetched("models/layers.py forward", 4),
    Allowed(
        "copy from host to device",
        f"{ENGINE} eval_loss > {DEEPSPEED}/pipe/engine.py _bcast_pipe_scalar",
        1,
        "DeepSpeed makes room for the loss on the stages that do not have it",
    ),
]
EACH_TOKEN = "a token is known before the next one is computed"
TOKENS = [
    Allowed(NUMBERS, "options/demo/generation.py inputs", 8, EACH_TOKEN),
    Allowed(NUMBERS, "models/attention/cache.py positions", 8, "the position of each text, sent with its token"),
    Allowed("int", "options/demo/generation.py choose", 8, EACH_TOKEN),
    Allowed("bool", "options/demo/generation.py take", 8, "logits that are not finite give no token"),
]
ALLOWED = {"step": STEP, "evaluation": EVALUATION, "tokens": TOKENS}
WAITING = ("warm-up", "rest")  # phases that may wait: a build reads weights, a checkpoint writes them


def unexpected(phases: dict[str, Any]) -> list[str]:
    """What is no allowed wait of its phase."""
    found = []
    for phase in phases.keys() & {*ALLOWED, *WAITING}:
        known = {(each.what, each.where): each.most for each in ALLOWED.get(phase, [])}
        for kind, what, where, line, count in phases[phase]:
            if kind == "wait" and (phase in WAITING or count <= known.get((what, where), 0)):
                continue
            found.append(f"{phase}: {kind}: {what}, {count} times, {where} (line {line})")
    return found
