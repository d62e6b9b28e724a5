"""The registry of declared model families: `model_type` in config.json -> the file. All others are derived.

A declaration is imported only when a checkpoint asks for it, so that starting up does not pay for the others, and so is
what derives and proves (`models.derived`). docs/adding-a-model.md walks through a new declaration.
"""

from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig

from models.architectures.family import Family, Native, Rule, Tie
from models.architectures.weight_map import Binding, WeightMap, cut

__all__ = ["FAMILIES", "Binding", "Family", "Native", "Rule", "Tie", "WeightMap", "cut", "family_of", "proven_family"]

FAMILIES = {
    "baichuan": "baichuan",
    "bloom": "bloom",
    "chatglm": "chatglm",
    "gemma2": "gemma2",
    "glm": "glm",
    "internlm2": "internlm2",
    "llama": "llama",
    "qwen": "qwen",
}


def family_of(model_type: str) -> Family:
    """The family that a file declares for a `model_type`, one of `FAMILIES`."""
    family: Family = import_module(f"{__name__}.{FAMILIES[model_type]}").FAMILY
    return family


def proven_family(
    config: PreTrainedConfig, fields: dict[str, Any], declared: Family | None, whole: str | None = None
) -> Family:
    """The family of a config, held against transformers.

    Args:
        fields: of the config.json that `config` was read from.
        declared: what a file declares; derived from transformers where absent.
        whole: the `model_type` of the model of images and text whose part for text it is.

    Raises:
        CheckpointError: it is not understood, or does not hold.
    """
    family: Family = import_module("..derived.proven", __name__).proven(config, fields, declared, whole)
    return family
