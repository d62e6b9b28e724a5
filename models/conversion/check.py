"""Check that a HuggingFace folder is whole and loads in transformers; let transformers 4 read its settings too.

transformers 5 keeps the rotary base in `rope_parameters` and names its tokenizer class `TokenizersBackend`.
transformers 4, and every server that pins it, looks for `rope_theta` and `rope_scaling`, takes the default base
*silently* where they are absent, and refuses the class. `write_compat` adds the older keys beside today's, so that both
compute the same logits, and removes what saving a loaded model leaves behind: its path and the options of loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from models.api import read_spec
from models.checkpoint.layout import Layout, layout_of, resolve, weight_index
from models.checkpoint.source import HuggingFaceSource
from models.config_json import TEXT, read_json, write_json
from models.errors import CheckpointError
from models.spec import ModelSpec
from models.weight_map import WeightMap

ALONE = "; the language model alone, without the parts beside it"  # said of a conversion that leaves out a tower
# Names of rotary settings in transformers 4, where a family has its own.
ROTARY = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
LEFTOVERS = (
    "_name_or_path _model_name_or_path name_or_path is_local local_files_only _attn_implementation_autoset".split()
)


def check(input_path: str | Path) -> list[str]:
    """List what keeps transformers from loading a folder, if anything. No weights are read.

    Raises:
        CheckpointError: it is no HuggingFace folder, or its config.json cannot be used.
    """
    folder = resolve(input_path)
    if layout_of(folder) is not Layout.HUGGINGFACE:
        raise CheckpointError(f"{folder}: in the pipeline layout, which only Pipetune reads; export it with pp_to_hg")
    spec, problems = read_spec(folder), []
    try:
        source = HuggingFaceSource(folder, spec)
        for layer in range(spec.n_layers):
            source.check_layer(layer)
        if odd := odd_prefix(source.weight_map):
            problems.append(odd)
        if len(source.files) > 1 and weight_index(folder) is None:
            problems.append("no index of its weight files")
    except CheckpointError as error:
        problems.append(str(error))

    if code := foreign_code(spec):
        problems.append(code)
    try:
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for files that are missing or damaged
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problems.append(f"the tokenizer does not load: {reason}")
    return problems


def odd_prefix(weight_map: WeightMap) -> str | None:
    """Describe a prefix of weight names that only Pipetune reads, as wrappers of torch and peft leave it, if any."""
    usual = (None, "", f"model.{weight_map.family.prefix}")
    if weight_map.prefix in usual or weight_map.is_part:
        return None
    return f"the names of its weights begin with {weight_map.prefix}, which transformers does not look for"


def foreign_code(spec: ModelSpec) -> str | None:
    """Say what to do about a config.json that needs its publisher's code; None where it needs none."""
    if not spec.family.translate:
        return None
    remedy = "export it with --layout native" if spec.family.native else "transformers has no class for it"
    return f"config.json asks for the publisher's Python files; {remedy}"


def write_compat(folder: Path) -> None:
    """Rewrite config.json and tokenizer_config.json of a HuggingFace folder in place."""
    spec = read_spec(folder)
    config = _older_fields(spec, spec.raw) | spec.raw
    if spec.is_part and TEXT in spec.raw:  # the decoder of a model of images and text
        config |= {TEXT: _older_fields(spec, spec.raw[TEXT]) | spec.raw[TEXT]}
    rewritten = {folder / "config.json": config}
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        rewritten[tokenizer] = _older_tokenizer(read_json(tokenizer), folder / "chat_template.jinja")
    for path, settings in rewritten.items():
        write_json(path, {key: value for key, value in settings.items() if key not in LEFTOVERS})


def _older_fields(spec: ModelSpec, raw: dict[str, Any]) -> dict[str, Any]:
    """Get the fields of a part of config.json under the names of transformers 4, where they differ."""
    older = {"torch_dtype": raw["dtype"]} if "dtype" in raw else {}
    if "rope_parameters" in raw:
        if "num_local_experts" in raw:
            older["num_experts"] = raw["num_local_experts"]  # as Qwen3-MoE had it
        rope = spec.config.rope_parameters
        angles = rope.get("full_attention", rope)  # Gemma 3 has one base for these layers, another for the rest
        scaling = {key: value for key, value in angles.items() if key not in ("rope_theta", "partial_rotary_factor")}
        names = ROTARY.get(spec.config.model_type, {})
        older |= {names.get(key, key): value for key, value in angles.items() if key not in scaling}
        if "sliding_attention" in rope:
            older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if scaling["rope_type"] == "longrope":  # of which Phi-3's class takes three keys, with the name before this one
            scaling["type"] = scaling.pop("rope_type")
            older["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        if scaling.get("rope_type") != "default":
            older["rope_scaling"] = scaling
    return older


def _older_tokenizer(settings: dict[str, Any], template: Path) -> dict[str, Any]:
    """Put class, special tokens and chat template of tokenizer_config.json where transformers 4 looks for them."""
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if template.is_file():
        settings.setdefault("chat_template", template.read_text(encoding="utf-8"))
    return settings
