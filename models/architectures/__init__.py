"""The declared model families by `model_type` of config.json; all others are derived (`models.derived`).

docs/adding-a-model.md walks through a new declaration.
"""

from typing import Any

from models.architectures import baichuan, bloom, chatglm, internlm2, llama, qwen
from models.family import Family

FAMILIES: dict[str, Family] = {
    "baichuan": baichuan.FAMILY,
    "bloom": bloom.FAMILY,
    "chatglm": chatglm.FAMILY,
    "gemma2": llama.GEMMA2,
    "glm": llama.GLM,
    "internlm2": internlm2.FAMILY,
    "llama": llama.FAMILY,
    "qwen": qwen.FAMILY,
}


def declared_family(fields: dict[str, Any]) -> Family | None:
    """Find the declared family of a config.json; None if it is to be derived."""
    family = FAMILIES.get(fields["model_type"])
    return family.variant(fields) if family and family.variant else family
