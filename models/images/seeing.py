"""Give a model of images and text its eyes, proven against transformers now or before."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from models.config_json import TEXT
from models.derived import known_or_proven
from models.errors import CheckpointError
from models.family import EYES
from models.images.eyes import Eyes
from models.images.model import with_eyes
from models.images.names import frozen_names
from models.images.proof import ImageProof, prove
from models.images.small import VISION, whole_config
from models.spec import ModelSpec

Train = Literal["nothing", "projector", "all"]


def seeing(spec: ModelSpec) -> ModelSpec:
    """Get the same model with its tower of images in the first layer.

    Raises:
        CheckpointError: it has none, or it does not hold against transformers'; the text says what is missing.
    """
    if spec.family.sees:
        return spec
    name = spec.raw.get("model_type")
    if not (spec.is_part and isinstance(spec.raw.get(VISION), dict)):
        raise CheckpointError(f"{name}: no {TEXT} and {VISION} in config.json; expected a model of images and text")
    if spec.labels:
        raise CheckpointError(f"{name}: scores texts; expected a language model, as images are not scored")
    try:
        config = whole_config(spec.raw)
        proof = known_or_proven(f"{name}-images", spec.raw, ImageProof, lambda: prove(spec))
        found = with_eyes(spec, config, proof.traits)
        found.shapes(0)
    except CheckpointError as error:
        raise CheckpointError(f"{name} with images: {error}") from None
    except Exception as error:  # whatever transformers makes of a small whole model
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{name} with images: its seams do not hold: {reason}") from None
    return replace(found, family=replace(found.family, proof=f"{spec.family.proof}; {proof}"))


def reached(spec: ModelSpec, train: Train) -> tuple[str, ...]:
    """Return how names in the first layer begin of what is trained of a model's eyes.

    Args:
        train: `projector`: the modules that give features the width of text, found by watching transformers' small
            model; deep features have theirs.
    """
    sees = spec.family.sees
    assert isinstance(sees, Eyes), "a model without eyes has nothing to train of them"
    projector = tuple(f"{EYES}.{name}." for name in sees.projector)
    return {"nothing": (), "projector": projector, "all": (f"{EYES}.",)}[train]


def frozen(spec: ModelSpec, train: Train) -> tuple[str, ...]:
    """Make the patterns of `Trained.freeze` for a model's eyes."""
    sees = spec.family.sees
    assert isinstance(sees, Eyes), "a model without eyes has nothing to freeze"
    return frozen_names(sees.rules, reached(spec, train))
