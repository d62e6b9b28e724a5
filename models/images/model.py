"""A model with eyes: the same layers, of which the first has a tower besides."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from models.attention.kernels import BOTH_WAYS
from models.attention.packed import AXES
from models.derived.outline import Underivable
from models.images.embedding import SeeingEmbedding
from models.images.eyes import Eyes, base_class
from models.images.names import rules_of
from models.images.traits import Traits
from models.spec import ModelSpec


def with_eyes(spec: ModelSpec, config: PreTrainedConfig, traits: Traits) -> ModelSpec:
    """Get the same model with a tower in its first layer.

    Args:
        config: of the whole model.
    """
    rules = rules_of(config, traits.parts)
    axes = AXES if hasattr(base_class(config), "get_rope_index") else 0
    sees = Eyes(
        traits.inputs,
        int(config.image_token_id),
        axes,
        traits.both_ways,
        traits.deep,
        spec.family,
        traits.parts,
        traits.projector,
        rules,
        config,
    )
    kernels = spec.family.attention
    if sees.both_ways and not (kernels := tuple(each for each in kernels if each in BOTH_WAYS)):
        raise Underivable("no attention kernel takes masks of images whose tokens see each other both ways")
    family = replace(
        spec.family,
        embedding=(*spec.family.embedding, *rules),
        embeds=SeeingEmbedding,
        sees=sees,
        attention=kernels,
        shares_rows=False,  # an image's tokens would lie on several processes
        chunks_rows=False,  # and in several chunks
    )
    return replace(spec, family=family, _shapes={})
