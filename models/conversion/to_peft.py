"""Export the adapter of a run as a folder of peft's, which transformers and servers load beside the base."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.adapters import is_factor
from models.api import adapted_spec, read_spec
from models.checkpoint.adapter import LayerFiles
from models.checkpoint.adapter_settings import SAW, adapted_paths, peft_config, trained_in_full
from models.checkpoint.digest import DIGEST
from models.checkpoint.layout import ADAPTER, Manifest, side_files
from models.checkpoint.peft_names import PEFT_PREFIX, PEFT_WEIGHTS, WholeNames, peft_name, to_peft
from models.checkpoint.side_files import copy_files
from models.config_json import read_json, write_json
from models.conversion.check_adapter import MERGE, dense_beside_experts
from models.errors import CheckpointError
from models.family import EYES
from models.images.eyes import whole_names
from models.images.small import whole_config
from models.scores import LABELS
from models.spec import ModelSpec

TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "spiece")


def write_adapter(folder: Path, target: Path) -> None:
    """Write the adapter in a run's checkpoint, with the tokenizer that it was trained with.

    Raises:
        CheckpointError: the checkpoint is damaged, or peft has no names for its layers.
    """
    plain = read_spec(folder)
    spec = adapted_spec(folder, plain)
    if plain.family.translate:
        raise CheckpointError(
            f"{folder}: {plain.family.name}'s own code joins layers that have adapters of their own here, so peft has "
            "no names for them; expected --merge"
        )
    if spec.family.ahead:
        raise CheckpointError(f"{folder}: peft has no names for layers that predict ahead; expected --merge")
    _check_modules(folder, spec)

    settings = read_json(folder / ADAPTER)
    whole = WholeNames(*whole_names(whole_config(spec.raw))) if settings.get(SAW) else None
    named = whole.named if whole else peft_name
    factors, saved, of_eyes = LayerFiles(folder), dict[str, Tensor](), list[str]()
    for layer in range(spec.n_layers):
        for name, tensor in factors.read(layer, spec.trained_names(layer)).items():
            path = named(spec, layer, name)
            of_eyes += [path.removeprefix(PEFT_PREFIX)] if name.startswith(f"{EYES}.") else []
            saved[path] = to_peft(name, tensor).clone()

    notes = {"format": "pt"} | {name: settings[name] for name in [DIGEST] if name in settings}
    if plain.labels:
        notes[LABELS] = json.dumps(plain.labels)
    (target / PEFT_WEIGHTS).write_bytes(save(saved, notes))  # an OSError on a full disk, which `save_file` has none of

    base, revision = _loadable(Path(settings["base_model_name_or_path"]))
    told = peft_config(spec.blind, base) | {"revision": revision}
    write_json(target / ADAPTER, told | (_targets_in_whole(spec.blind, whole, of_eyes) if whole else {}))
    copy_files(folder, target, [name for name in side_files(folder) if name.startswith(TOKENIZER)])
    if dense_beside_experts(spec):
        what = f"warning: peft reads this adapter in part; {MERGE} (convert_model.py check)"
        print(what, file=sys.stderr, flush=True)


def _targets_in_whole(spec: ModelSpec, whole: WholeNames, of_eyes: list[str]) -> dict[str, Any]:
    """Name what is trained in the whole model in full: its tower has modules of the same last names.

    Args:
        of_eyes: the weights of the tower and its projector that are trained.
    """
    modules, weights = (list(map(partial(whole.of, spec), paths)) for paths in adapted_paths(spec))
    saved = list(map(partial(whole.of, spec), trained_in_full(spec)))
    factors = [path.removesuffix(".weight") for path in of_eyes]
    modules += [path.rpartition(".")[0] for path in factors if path.endswith("lora_A")]
    saved += dict.fromkeys(path.rpartition(".")[0] for path in of_eyes if not is_factor(path.removesuffix(".weight")))
    return {"target_modules": modules, "target_parameters": weights or None, "modules_to_save": saved or None}


def _check_modules(folder: Path, spec: ModelSpec) -> None:
    """Refuse a module trained in full whose name in transformers is another one: peft would pass over it."""
    whole = [] if spec.is_part or spec.labels else trained_in_full(spec)
    if whole:
        with torch.device("meta"):
            known = dict(AutoModelForCausalLM.from_config(spec.config).named_modules())
        if missing := [name for name in whole if name not in known]:
            raise CheckpointError(f"{folder}: {missing[0]}: peft has no module of this name; expected --merge")


def _loadable(base: Path) -> tuple[str, str | None]:
    """Name a base as peft finds it, with its revision: on the hub, else the HuggingFace folder that it came from."""
    manifest = Manifest.read(base)
    origin = Path(manifest.origin) if manifest and manifest.origin else base
    kind, *owner = origin.parent.parent.name.split("--")  # `models--OWNER--NAME/snapshots/COMMIT` in the hub's cache
    if origin.parent.name == "snapshots" and kind == "models":
        return "/".join(owner), origin.name
    return str(origin if origin.is_dir() else base), None
