"""Build transformers' model of a decoder, also one that it has only inside of its model of images and text.

Such a model is built whole, small towers with it, and the towers are taken out: what is left is a decoder whose blocks
lie a level deeper, run by transformers' own code.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from models.config_json import TIED, whole_of
from models.derived.shrink import shrunk_vision


def decoder_class(config: PreTrainedConfig) -> Any:
    """Get transformers' class of a decoder, or of the model that it lies in."""
    whole = whole_of(config.model_type)
    if whole is None:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[whole]]


def decoder_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Build transformers' model of a decoder, with eager attention."""
    whole = whole_of(config.model_type)
    if whole is None:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)

    kind: Any = CONFIG_MAPPING[whole]
    vision = shrunk_vision(kind().vision_config.to_dict(), config.hidden_size)
    around = kind(text_config=config, vision_config=vision, **{TIED: config.tie_word_embeddings})
    model = decoder_class(config)._from_config(around, attn_implementation="eager", dtype=dtype)

    base, embedding = getattr(model, model.base_model_prefix), model.get_input_embeddings()
    for name, child in list(base.named_children()):
        if all(each is not embedding for each in child.modules()):
            delattr(base, name)
    return model
