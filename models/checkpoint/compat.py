"""A HuggingFace folder's settings as older releases of transformers read them, beside today's.

transformers 5 keeps the rotary base in `rope_parameters` and names its tokenizer class `TokenizersBackend`.
transformers 4, and every server that pins it, looks for `rope_theta` and `rope_scaling`, takes the default base
*silently* where they are absent, and refuses the class. What is added here says the same as today's keys, which stay,
so that both compute the same logits. What saving a loaded model leaves behind, the path and the options of that
loading, is taken out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from models.config_json import read_json, write_json
from models.spec import ModelSpec

LEFTOVERS = (
    "_name_or_path _model_name_or_path name_or_path is_local local_files_only _attn_implementation_autoset".split()
)


def write_compat(folder: Path) -> None:
    """Rewrite config.json and tokenizer_config.json of a HuggingFace folder in place.

    Raises:
        CheckpointError: one of them is no JSON object.
    """
    spec = ModelSpec.from_folder(folder)
    _rewrite(folder / "config.json", older_fields(spec.raw, spec.config) | spec.raw)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        _rewrite(tokenizer, older_tokenizer(read_json(tokenizer), folder / "chat_template.jinja"))


def older_fields(raw: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """What transformers 4 looks for and a config.json of transformers 5 (`raw`) says under other names."""
    older = {"torch_dtype": raw["dtype"]} if "dtype" in raw else {}
    if "rope_parameters" in raw:
        if "num_local_experts" in raw:
            older["num_experts"] = raw["num_local_experts"]  # as Qwen3-MoE had it
        rope = config.rope_parameters
        angles = rope.get("full_attention", rope)  # Gemma 3 has one base for these layers, another for the rest
        scaling = {key: value for key, value in angles.items() if key not in ("rope_theta", "partial_rotary_factor")}
        older |= {key: value for key, value in angles.items() if key not in scaling}
        if "sliding_attention" in rope:
            older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if scaling["rope_type"] == "longrope":  # of which Phi-3's class takes three keys, with the name before this one
            scaling["type"] = scaling.pop("rope_type")
            older["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        if scaling.get("rope_type") != "default":
            older["rope_scaling"] = scaling
    return older


def older_tokenizer(settings: dict[str, Any], template: Path) -> dict[str, Any]:
    """tokenizer_config.json with class, special tokens and chat template where transformers 4 looks for them."""
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if template.is_file():
        settings.setdefault("chat_template", template.read_text(encoding="utf-8"))
    return settings


def _rewrite(path: Path, settings: dict[str, Any]) -> None:
    write_json(path, {key: value for key, value in settings.items() if key not in LEFTOVERS})
