"""Open a model folder: read its spec, load the whole model or this process's shards of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.ahead.model import ahead_in_layers, looking_ahead, usable_ahead
from models.ahead.names import blocks_of
from models.architectures import declared_family
from models.causal_lm import CausalLM
from models.checkpoint.adapter import (
    AdaptedStates,
    base_folder,
    check_base,
    labels_of_adapter,
    open_factors,
)
from models.checkpoint.adapter_settings import SCORES, with_adapter
from models.checkpoint.hub import find_model
from models.checkpoint.layout import ADAPTER, has_huggingface_weights, resolve
from models.checkpoint.source import HuggingFaceSource, PipelineSource, open_source
from models.config_json import count_ahead, model_fields, read_json, reason_of
from models.derived import proven
from models.derived.outline import Underivable
from models.errors import CheckpointError
from models.images.layer_files import eyes_in_layers
from models.images.seeing import seeing
from models.parallel.groups import RankGroup
from models.parallel.tensor import TensorShare, obstacle
from models.router import experts_implementation
from models.scores import OWN_FIELDS, labels_of, scoring_family
from models.spec import ModelSpec


def read_spec(folder: Path, content: dict[str, Any] | None = None) -> ModelSpec:
    """Read `folder`/config.json, or take its content, and prove its family against transformers.

    Raises:
        CheckpointError: no such file, not JSON, no `model_type`, or values that transformers refuses.
    """
    path = folder / "config.json"
    raw, part = model_fields(path, content)
    if labels := labels_of(raw):
        part = {name: value for name, value in part.items() if name not in OWN_FIELDS}

    whole = raw["model_type"] if part["model_type"] != raw["model_type"] else None
    try:
        family = declared_family(part)
        fields = family.translate(part) if family and family.translate else part
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(deepcopy(fields))  # which it changes
        if not (family and family.translate):  # else transformers has nothing to compare with
            family = proven(config, fields, family, whole)
    except Underivable as error:
        if family and has_huggingface_weights(folder):  # config.json may name the class of another model
            HuggingFaceSource(folder, ModelSpec(family, config, raw, fields))
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # transformers raises many kinds for a config that makes no sense
        raise CheckpointError(f"{path}: {reason_of(error, part)}") from None

    # Layers that predict further ahead are no part of the model, but an export has them.
    numbers = range(config.num_hidden_layers, config.num_hidden_layers + count_ahead(fields))
    carried = [rf"^{re.escape(blocks_of(family))}\.{number}\." for number in numbers]
    family = replace(family, carried=(*family.carried, *carried))
    if labels:
        config.num_labels, config.tie_word_embeddings = len(labels), False
        family = scoring_family(family)
    config._experts_implementation = experts_implementation()
    spec = ModelSpec(family, config, raw, fields, is_part=whole is not None)
    spec.set_attention(family.attention[0])

    if ahead := ahead_in_layers(folder, spec):
        spec = looking_ahead(spec, ahead)
    if eyes_in_layers(folder):
        spec = seeing(spec)

    # A config of which no layer can be built ends here, before weights are read.
    try:
        for layer in (0, 1, spec.n_layers - 1):
            spec.shapes(layer)
        spec.positions()
    except Exception as error:  # whatever the layers make of it
        reason = f"{type(error).__name__}: {reason_of(error, fields)}"
        raise CheckpointError(f"{path}: no model can be built from it: {reason}") from None
    return spec


def adapted_spec(folder: Path, base: ModelSpec) -> ModelSpec:
    """Get a model with the adapters in a folder of either kind, and with the scores or layers ahead that it trained.

    Raises:
        CheckpointError: the folder holds no usable adapter.
    """
    if read_json(folder / ADAPTER).get("task_type") == SCORES and not base.labels:
        base = base.scoring(labels_of_adapter(folder))
    if ahead := ahead_in_layers(folder, base):
        base = looking_ahead(base, ahead)
    if eyes_in_layers(folder):
        base = seeing(base)
    return with_adapter(base, folder)


def base_source(source: PipelineSource | HuggingFaceSource, spec: ModelSpec) -> PipelineSource | HuggingFaceSource:
    """Open a base with the layers ahead and the tower that an adapter of it has."""
    own, other = spec.family, source.spec.family
    alike = own.ahead == other.ahead and own.sees == other.sees
    return source if alike else open_source(source.folder, spec.base)


def with_stored_ahead(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Get the same model with the layers that predict further ahead in its folder.

    Raises:
        CheckpointError: there are none, or they lie beside the model's own.
    """
    found = usable_ahead(folder, spec)
    if found is None:
        raise CheckpointError(f"{folder}: no layers that predict further ahead; mtp in a run's config trains some")
    return looking_ahead(spec, found)


def open_model(
    path: str | Path, adapter: str | Path | None = None, ahead: bool = False, sees: bool = False
) -> tuple[ModelSpec, Any]:
    """Open a model's weights, or those of a base and an adapter.

    Args:
        path: a model, or a run that trained an adapter.
        adapter: a folder of peft's or of a run, to use with the model at `path`.
        ahead: whether layers that predict further ahead are a part of the model, in a HuggingFace folder too.
        sees: whether the tower of images is a part of the model, in any folder.

    Raises:
        CheckpointError: a folder is none of these, or has no such layers or tower.
    """
    folder = find_model(path, adapter=True)
    if (folder / ADAPTER).is_file():
        if adapter:
            raise CheckpointError(f"{folder}: an adapter itself; expected the model that {adapter} belongs to")
        folder, adapter = base_folder(folder), folder
    spec = read_spec(folder)
    if ahead and adapter:
        reason = "drafts need a whole model"
        raise CheckpointError(f"{adapter}: {reason}; expected the merged model (pp_to_hg --merge)")
    if ahead:
        spec = with_stored_ahead(folder, spec)
    source = open_source(folder, spec)
    adapter = resolve(adapter, adapter=True) if adapter else None
    if adapter:
        check_base(adapter, source)
    if sees:
        spec = seeing(spec)
        source = open_source(folder, spec)
    if adapter is None:
        return spec, source
    spec = adapted_spec(adapter, spec)
    return spec, AdaptedStates(base_source(source, spec), spec, open_factors(adapter, spec))


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    part: Sequence[int] | None = None,
    adapter: str | Path | None = None,
    ahead: bool = False,
    sees: bool = False,
) -> CausalLM:
    """Load the model of a folder of either layout, in evaluation mode.

    Args:
        path: a HuggingFace folder, a pipeline-layout folder, a checkpoint of a run, a run's `save_path`, or a model's
            name on the HuggingFace hub.
        dtype: the dtype to hold the weights in; as stored where absent.
        part: which layers to load; all where absent.
        adapter, ahead, sees: as `open_model`.

    Raises:
        CheckpointError: the folder is damaged, incomplete or of an unknown family.
    """
    spec, source = open_model(path, adapter, ahead, sees)
    return CausalLM(spec, source, dtype or source.dtype(), torch.device(device), part).eval()


def load_share(
    path: str | Path,
    group: distributed.ProcessGroup,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    part: Sequence[int] | None = None,
    adapter: str | Path | None = None,
) -> CausalLM:
    """Load this process's shard of every layer, or of those of `part`, for tensor parallelism.

    All processes of the group call it and must then ask the same: they see the same logits and choose the same tokens.

    Raises:
        CheckpointError: see `load_model`; or the processes cannot share the layers.
    """
    spec, source = open_model(path, adapter)
    if reason := obstacle(spec, group.size()):
        raise CheckpointError(f"{path}: tensor parallelism: {reason}")
    share = TensorShare(spec, RankGroup(group.size(), group.rank(), group))
    return CausalLM(spec, source, dtype or source.dtype(), torch.device(device), part, share).eval()
