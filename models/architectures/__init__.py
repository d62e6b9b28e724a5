"""The registry of model families: `model_type` in config.json -> the file that declares the family.

A declaration is imported only when a checkpoint asks for it, so that starting up does not pay for the others.
docs/adding-a-model.md walks through a new one.
"""

from importlib import import_module

from models.architectures.family import Family, Native, Rule, Tie
from models.architectures.weight_map import Binding, WeightMap, cut
from models.errors import CheckpointError

__all__ = ["FAMILIES", "Binding", "Family", "Native", "Rule", "Tie", "WeightMap", "cut", "family_of"]

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
    """The family that serves a `model_type`.

    Raises:
        CheckpointError: no family does.
    """
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"model_type {model_type!r} is not supported; Pipetune knows {known}")
    family: Family = import_module(f"models.architectures.{FAMILIES[model_type]}").FAMILY
    return family
