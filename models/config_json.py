"""Read config.json, before transformers makes a config object of it."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from common.whole_files import read_regular
from models.architectures import FAMILIES
from models.errors import CheckpointError

# Numbers of layers behind the blocks, which predict tokens further ahead.
AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
# Far above any model: more layers and experts would be counted, one by one, for hours, and wider heads fill the memory.
MOST = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "num_experts", "num_local_experts"), 10_000)
MOST |= {"head_dim": 2**16, "kv_channels": 2**16, "hidden_size": 2**20, "max_position_embeddings": 2**40}
MOST |= dict.fromkeys(AHEAD, 100)
AMOUNTS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")  # JSON may hold NaN and Infinity
MOST_BYTES = 2**24  # of a config.json
TEXT, TIED = "text_config", "tie_word_embeddings"
QUANTIZATION = "quantization_config"  # `checkpoint.quantized` dequantizes such weights


def model_fields(path: Path, raw: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read config.json, or take its content: all of it, and the part that describes the decoder.

    Raises:
        CheckpointError: no such file, no JSON, no `model_type`, impossible sizes, or none of transformers' decoders.
    """
    raw = read_json(path) if raw is None else raw
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f'{path}: no model_type; expected a name such as "llama"')

    part, text = raw, raw.get(TEXT)
    if raw["model_type"] in FAMILIES:  # of which none has parts
        part = {name: value for name, value in raw.items() if name != TEXT}
    elif whole_of(f"{raw['model_type']}_text"):
        part = _part_inside(path, raw)
    elif isinstance(text, dict) and isinstance(text.get("model_type"), str):
        part = text | {name: raw[name] for name in (TIED,) if name in raw}  # outside of the part

    for name in SIZES:  # transformers checks types, and fails in the middle of its layers where one is 0
        if isinstance(found := part.get(name), int) and found < 1:
            raise CheckpointError(f"{path}: {name}: expected at least 1, found {found}")
    for name, most in MOST.items():
        if isinstance(found := part.get(name), (int, float)) and not found <= most:
            raise CheckpointError(f"{path}: {name}: expected at most {most:,}, found {found}")
    for name in AMOUNTS:
        found = part.get(name, 1)
        if found is not None and not (type(found) in (int, float) and 0 < found < math.inf):
            raise CheckpointError(f"{path}: {name}: expected a number above 0, found {found!r}")

    for fields in (raw, part):
        _normalise_dtype(fields)
    _check_known(path, raw, part)
    return raw, {name: value for name, value in part.items() if name != QUANTIZATION}


def _check_known(path: Path, raw: dict[str, Any], part: dict[str, Any]) -> None:
    """Refuse what is none of transformers' decoders."""
    model_type = part["model_type"]
    known = {*FAMILIES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    if model_type not in known and (part is raw or whole_of(model_type) is None):
        if part is not raw:
            raise CheckpointError(
                f"{path}: model_type {raw['model_type']!r} is not supported: transformers has its part for text "
                f"({model_type}) only inside of the model of images and text; expected a checkpoint for text alone"
            )
        declared = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not supported: transformers has no decoder of this name, and "
            f"Pipetune declares {declared}"
        )


def whole_of(model_type: str) -> str | None:
    """Name the model of images and text that a decoder lies in, where transformers has it nowhere else."""
    whole = model_type.removesuffix("_text")
    only_there = model_type in CONFIG_MAPPING_NAMES and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    inside = only_there and whole != model_type and whole in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return whole if inside else None


def _part_inside(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Get the fields of a decoder that transformers has only inside of a whole model.

    Older checkpoints have them beside those of the whole (Qwen2.5-VL), so transformers itself takes them apart.
    """
    try:
        whole = CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw))
        tied = bool(getattr(whole, TIED, False))
        fields: dict[str, Any] = whole.get_text_config().to_dict() | {TIED: tied}
    except Exception as error:  # transformers raises many kinds for a config that makes no sense
        raise CheckpointError(f"{path}: {reason_of(error, raw)}") from None
    return fields


def _normalise_dtype(fields: dict[str, Any]) -> None:
    """Spell the dtype without `torch.`; "auto" is the same as none."""
    for name in ("torch_dtype", "dtype"):
        if fields.get(name) in (None, "auto"):
            fields.pop(name, None)
        elif isinstance(fields[name], str):
            fields[name] = fields[name].removeprefix("torch.")


def count_ahead(fields: dict[str, Any]) -> int:
    """Count the layers behind the blocks that predict further ahead, as far as config.json tells."""
    return max((count for name in AHEAD if isinstance(count := fields.get(name), int)), default=0)


def reason_of(error: Exception, fields: dict[str, Any]) -> str:
    """Put an error on one line; name the field where transformers does not know a word."""
    word = error.args[0] if isinstance(error, KeyError) and error.args else None
    named = next(_fields_with(word, fields), None) if isinstance(word, str) else None
    return f"{named}: transformers knows no {word!r}" if named else " ".join(str(error).split())


def _fields_with(word: str, fields: dict[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if value == word:
            yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _fields_with(word, value))


def write_json(path: Path, value: object, sort_keys: bool = False) -> None:
    """Write JSON for people to read."""
    path.write_text(json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise OSError(f"larger than {MOST_BYTES / 1e6:.0f} MB")
        raw = json.loads(read_regular(path).decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; expected a model folder with a config.json") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def stop_ids(folder: Path) -> set[int]:
    """Read the end tokens from generation_config.json, else from config.json."""
    paths = (folder / "generation_config.json", folder / "config.json")
    if (path := next(filter(Path.is_file, paths), None)) is None:
        return set()
    ids = read_json(path).get("eos_token_id")
    if ids is None:
        return set()
    try:
        return set(map(operator.index, ids if isinstance(ids, list) else [ids]))
    except TypeError:
        raise CheckpointError(f"{path}: eos_token_id: expected a number or a list of numbers, found {ids!r}") from None
