"""Find keys of a config that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from data.settings import GDGPT, PLAIN
from training.config.deepspeed_keys import REFUSED, WHY_REFUSED
from training.config.section import suggest

if TYPE_CHECKING:
    from training.config.keys import TrainConfig
    from training.config.optimization import Zero

LARGEST = 10**12  # any whole number of a config
ADAM = "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused".split()
# Parameters of each optimizer, copied from its signature: importing their packages takes seconds.
PARAMETERS = {
    "AdamW": ADAM,
    "Adam": [*ADAM, "decoupled_weight_decay"],
    "Lion": "lr betas weight_decay use_triton decoupled_weight_decay".split(),
    "Adafactor": "lr beta2_decay eps d weight_decay foreach maximize".split(),
    "SGD": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused".split(),
}
CPU_ADAM = "lr bias_correction betas eps weight_decay amsgrad fp32_optimizer_states".split()
OFFLOADED = {  # DeepSpeed's own for the CPU
    "AdamW": CPU_ADAM,
    "Adam": CPU_ADAM,
    "Lion": "lr betas weight_decay fp32_optimizer_states".split(),
}


def contradictions(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each contradiction, the plainest first; `config` is a `TrainConfig`, which calls this."""
    for name, value in config:
        if type(value) is int and value > LARGEST:
            yield f"{name}: expected at most {LARGEST:,}, found {value}"
    yield from _of_zero(config.zero_optimization, config.weights_on_host)
    if config.offload_gradients and not config.zero_optimization.offloads:
        yield (
            "offload_gradients: an optimizer on the GPU needs them there; expected false, or "
            "zero_optimization.offload_optimizer: {device: cpu}"
        )
    yield from _of_precision(config)
    yield from _of_adapters(config)
    yield from of_optimizer(config)
    yield from (
        f"{name}: without effect, as prompt_format: {config.prompt_format} has no template; expected it left out"
        for name in ("template_args", "template_fallback")
        if config.prompt_format in (PLAIN, GDGPT) and getattr(config, name)
    )
    if config.compile is True and config.zero_optimization.stage == 3:
        yield "compile: ZeRO stage 3 gathers weights inside of the blocks; expected false or stage <= 2"
    yield from _of_evaluation(config)
    if config.export_hf and config.storage == "local":
        yield (
            "export_hf: with storage: local no host has all layers; expected false, and convert_model.py gather, then "
            "pp_to_hg, at the end"
        )
    yield from _of_batches_and_parts(config)
    if config.max_restarts:
        for unlike, expected in from_own_checkpoint(config, "a restart goes on from it"):
            if unlike:
                yield f"max_restarts: expected {expected}, or max_restarts: 0"


def _of_zero(zero: Zero, on_host: bool) -> Iterator[str]:
    for key in sorted(REFUSED & {f"zero_optimization.{name}" for name in zero.model_extra or {}}):
        yield f"{key}: {WHY_REFUSED}"
    if zero.offload_optimizer and (zero.offload_optimizer.model_extra or {}).get("super_offload"):
        yield f"zero_optimization.offload_optimizer.super_offload: {WHY_REFUSED}"
    for name in (name for name, value in (zero.model_extra or {}).items() if value == "auto"):  # HF Trainer fills it in
        yield f"zero_optimization.{name}: expected a value, found 'auto'; leave it out for DeepSpeed's own"
    if zero.offloads and not zero.stage and not on_host:
        yield "zero_optimization.offload_optimizer: stage 0 keeps the optimizer where it is; expected stage 1 or more"


def _of_precision(config: TrainConfig) -> Iterator[str]:
    if config.bf16.enabled and config.fp16.enabled:
        yield "bf16.enabled: expected at most one of bf16 and fp16"
    if config.tf32 and (config.bf16.enabled or config.fp16.enabled):
        yield "tf32: 16-bit products do not use it; expected false, or neither bf16 nor fp16"
    if not config.fp8.enabled:
        return
    if not config.bf16.enabled:
        yield "fp8.enabled: it rounds bf16 numbers; expected bf16.enabled: true"
    if config.v_schedule:
        yield (
            "fp8.enabled: dualpipev computes gradients of weights later, and in bf16; expected false or schedule: 1f1b"
        )
    if config.model_topo.tensor > 1:
        yield "fp8.enabled: linear layers that several processes share are not known to it; expected no model axis"
    if config.zero_optimization.stage == 3:
        yield "fp8.enabled: ZeRO stage 3 gathers weights inside of the blocks; expected false or stage <= 2"


def _of_adapters(config: TrainConfig) -> Iterator[str]:
    if not config.lora:
        return
    if config.freeze:
        yield "freeze: adapters leave all other weights as they are; expected lora or freeze"
    if config.from_scratch:
        yield "from_scratch: adapters need the model that they adapt; expected false, or no lora"
    if config.fp8.enabled:
        yield "fp8.enabled: layers with adapters multiply in 16 bits; expected false, or no lora"
    if config.lora.base and config.zero_optimization.stage == 3:
        yield "lora.base: ZeRO stage 3 divides weights in 16 bits; expected stage <= 2, or no lora.base"
    if config.lora.base == "fp8" and config.model_topo.tensor > 1:
        yield "lora.base: processes do not share weights in fp8; expected no model axis, or no lora.base"
    if config.lora.base and config.compile is True:
        yield "lora.base: products with packed weights are not compiled; expected compile: auto or false"


def of_optimizer(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each setting that an optimizer does not support.

    Adafactor keeps a row and a column for a matrix, but a number for each element of a vector, and scales its steps by
    the norm of a whole tensor. ZeRO, and DeepSpeed's bf16 and fp16 optimizers, flatten the weights of a stage into one
    vector: the memory would be Lion's, and the steps would depend on how the model is divided.
    """
    kind, zero = config.optimizer.type, config.zero_optimization
    joined = {
        f"zero_optimization.stage: {zero.stage}": zero.stage > 0,
        "bf16.enabled: true": config.bf16.enabled,
        "fp16.enabled: true": config.fp16.enabled,
    }
    if kind == "Adafactor":
        for key in (key for key, found in joined.items() if found):
            yield f"{key} joins the weights, which Adafactor needs apart; expected stage 0 and fp32"
        if config.model_topo.tensor > 1:
            yield "model_topo: a model axis cuts the weights, which Adafactor needs whole; expected none"
    known = OFFLOADED if zero.offloads and config.zero_force_ds_cpu_optimizer else PARAMETERS
    for name in (name for name in config.optimizer.params if name not in known.get(kind, [name])):
        yield f"optimizer.params.{name}: {kind} does not take it{suggest(name, known[kind], 'optimizer.params')}"
    if kind not in known:
        yield (
            f"optimizer.type: {kind} cannot be offloaded; expected one of {', '.join(OFFLOADED)}, or "
            "zero_force_ds_cpu_optimizer: false"
        )


def _of_evaluation(config: TrainConfig) -> Iterator[str]:
    evaluates = config.eval_interval or config.eval_at_start
    held_out = config.eval_data_path or config.eval_share
    if evaluates and config.data_path and not held_out:  # what a Pipeline trains on stands in no config
        yield "eval_data_path: expected records to evaluate on, or neither eval_interval nor eval_at_start"
    if config.eval_share and config.eval_data_path:
        yield "eval_share: eval_data_path has the records to evaluate on; expected only one of them"


def _of_batches_and_parts(config: TrainConfig) -> Iterator[str]:
    rows, replicas = config.micro_batch_size, config.model_topo.row_replicas
    unit = rows * replicas
    each = " with rows of their own" if config.model_topo.sequence > 1 else ""
    if config.train_batch_size % unit:
        yield (
            f"train_batch_size: {config.train_batch_size} is not a multiple of {unit} "
            f"(train_micro_batch_size_per_gpu {rows} x {replicas} replicas{each})"
        )
    parts, chunks = config.model_topo.parts, config.chunks
    if parts is not None and len(parts) != chunks:
        what = f"{chunks} chunks, two a stage with dualpipev" if config.v_schedule else f"{chunks} stages"
        yield f"model_topo.parts: expected one entry for each of {what}, found {parts}"
    steps = config.gradient_accumulation_steps
    if config.train_micro_batch_size_per_gpu == "auto" and not config.is_planned:
        yield (
            "train_micro_batch_size_per_gpu: auto is for the planner to choose, and options.planner is not among the "
            "options; expected a number of rows"
        )
    if config.train_micro_batch_size_per_gpu == "auto":
        if steps is not None:
            yield f"gradient_accumulation_steps: {steps} contradicts train_micro_batch_size_per_gpu: auto; leave it out"
    elif steps not in (None, config.train_batch_size // unit):
        yield (
            f"gradient_accumulation_steps: {steps} contradicts train_batch_size {config.train_batch_size}; "
            f"expected {config.train_batch_size // unit}, or leave it out"
        )


def from_own_checkpoint(config: TrainConfig, why: str) -> Iterator[tuple[bool, str]]:
    """Yield what a run lacks to go on from its own checkpoint: whether it does, and what is expected."""
    yield config.resume != "auto", "resume: auto, as the run goes on from its own checkpoint"
    yield not (config.save_interval or config.save_minutes), f"save_interval or save_minutes, {why}"
