"""Translate what the tools say about low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from options.other_tools.draft import Draft, as_list, is_true
from training.errors import ConfigError

ALL = ("all", "all-linear", "all_linear")
UNLIKE = {  # other ways of adapting, which would train something else
    "use_dora": "DoRA",
    "peft_use_dora": "DoRA",
    "pissa_init": "PiSSA",
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_badam": "BAdam",
    "use_llama_pro": "LLaMA Pro",
    "loftq_config": "LoftQ",
    "relora": "ReLoRA",
}


@dataclass(frozen=True)
class Adapter:
    """Hold their values.

    Attributes:
        targets: names of modules, a list of them, or a word for all linear layers.
        saved: modules that are trained whole.
        bits: that the base is held in; None for its own.
    """

    r: Any
    alpha: Any
    dropout: Any
    targets: Any
    saved: Any = None
    bits: Any = None


def put_adapter(draft: Draft, adapter: Adapter, wanted: bool) -> None:
    """Set our section `lora`, where adapters are wanted at all.

    Raises:
        ConfigError: an adapter of another kind is wanted, or a base in 8 bits.
    """
    for name, kind in UNLIKE.items():
        value = draft.take(name)
        if value and (not isinstance(value, (bool, str)) or is_true(value)):
            raise ConfigError(f"{name}: {value}: {kind} is not trained here; expected LoRA, or all weights")
    rslora = is_true(draft.take("use_rslora", "peft_use_rslora", otherwise=False))
    ratio = draft.take("loraplus_lr_ratio", "lorap_lr_ratio")
    begin = as_list(draft.take("adapter_name_or_path", "lora_model_dir", "adapters", otherwise=[]))
    draft.drop("loraplus_lr_embedding", "create_new_adapter", "quantization_method", "bnb_4bit_quant_type")
    draft.drop("double_quantization", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "quant_method")
    draft.drop("use_bnb_nested_quant", "lora_bias", "init_weights", "lora_fan_in_fan_out", "lora_task_type")
    if not wanted:
        return

    draft.put("lora.r", int(adapter.r), f"rank {adapter.r}")
    draft.put("lora.alpha", float(adapter.alpha), f"alpha {adapter.alpha}")
    if adapter.dropout:
        draft.put("lora.dropout", float(adapter.dropout), f"dropout {adapter.dropout}")
    names = as_list(adapter.targets)
    all_linear = len(names) == 1 and names[0] in ALL
    draft.put("lora.targets", "all-linear" if all_linear else names, f"targets: {', '.join(map(str, names))}")
    if adapter.saved:
        draft.put("lora.modules_to_save", as_list(adapter.saved), f"trained whole: {adapter.saved}")
    if rslora:
        draft.put("lora.rslora", True, "rslora")
    if ratio:
        draft.put("lora.lr_ratio", float(ratio), f"lr_ratio {ratio}")
    if begin:
        draft.put("lora.start_from", begin[0], f"adapter: {begin[0]}")
    if adapter.bits and int(adapter.bits) == 4:
        draft.put("lora.base", "nf4", "4 bits")
    elif adapter.bits:
        draft.lost[f"base in {adapter.bits} bits"] = "held in 16 bits; lora.base: nf4 holds it in 4"
