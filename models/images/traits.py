"""What a model does with images, found by watching transformers' small one."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from models.derived.outline import Underivable
from models.images.eyes import flat_features
from models.images.small import token_types
from models.images.tensors import inputs_of, pictures

ROUNDING = 1e-4  # of the largest number: experts that get other tokens round otherwise
BEFORE, BEHIND = [3, 4, 5], [6, 7]  # words around an image
SEAMS = ("get_image_features", "get_placeholder_mask")  # transformers' own, which everything here goes by


class Traits(BaseModel):
    """What is found out; names and meanings are those of `Sees`."""

    inputs: tuple[str, ...]
    both_ways: bool
    deep: int
    parts: tuple[str, ...]
    projector: tuple[str, ...]


@torch.no_grad()
def traits_of(whole: Any) -> Traits:
    """Find the traits of a small whole model.

    Raises:
        Underivable: it has not the seams that images go by.
    """
    base = getattr(whole, whole.base_model_prefix)
    if missing := [name for name in SEAMS if not hasattr(base, name)]:
        raise Underivable(f"transformers' {type(base).__name__} has no {missing[0]}")
    inputs = inputs_of(base)
    images = dict(zip(inputs, pictures(whole.config, inputs), strict=True))

    watched = FeatureCalls(base, int(whole.config.get_text_config().hidden_size))
    found = watched.run(images)
    features = getattr(found, "pooler_output", None)
    if features is None:
        raise Underivable(f"{type(base).__name__}.get_image_features gives no pooler_output")
    deep = getattr(found, "deepstack_features", None) or ()
    projector = watched.projector([flat_features(each) for each in (features, *deep)])
    if not projector:
        raise Underivable(f"no part of {type(base).__name__} gives images the width of text")
    return Traits(
        inputs=inputs,
        both_ways=sees_ahead(whole, found, images),
        deep=len(deep),
        parts=tuple(dict.fromkeys(name.partition(".")[0] for name in watched.called)),
        projector=projector,
    )


class FeatureCalls:
    """The modules that one call of `get_image_features` goes through.

    Attributes:
        called: their names.
    """

    def __init__(self, base: Any, width: int) -> None:
        self._base, self._width = base, width
        self.called: list[str] = []
        self._widening: list[tuple[str, Tensor]] = []

    def run(self, images: dict[str, Tensor]) -> Any:
        names = {module: name for name, module in self._base.named_modules() if name}

        def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            self.called.append(names[module])
            tensors = [each for each in (*given[:1], output) if isinstance(each, Tensor)]
            if len(tensors) == 2 and tensors[0].shape[-1] != self._width == tensors[1].shape[-1]:
                self._widening.append((names[module], output))

        hooks = [module.register_forward_hook(note) for module in names]
        try:
            return self._base.get_image_features(**images, return_dict=True)
        finally:
            for hook in hooks:
                hook.remove()

    def projector(self, features: list[Tensor]) -> tuple[str, ...]:
        """Name the outermost modules that give a tensor the text's width, and whose numbers the features are."""
        wanted = [each.flatten().sort().values for each in features]  # some towers put the rows in another order
        found = [name for name, output in self._widening if _is_one_of(output.flatten().sort().values, wanted)]
        return tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))


def _is_one_of(numbers: Tensor, others: list[Tensor]) -> bool:
    return any(torch.equal(numbers, each) for each in others)


def sees_ahead(whole: Any, found: Any, images: dict[str, Tensor]) -> bool:
    """Return whether an image's first token sees its last: another last feature then changes what the first gives."""
    base = getattr(whole, whole.base_model_prefix)
    token = int(whole.config.image_token_id)
    features: Any = found.pooler_output
    if isinstance(features, Tensor) and features.dim() != 3:
        raise Underivable(f"{type(base).__name__}.get_image_features gives {features.dim()} dimensions; expected 3")
    counts = [len(each) for each in features]
    ids = [*BEFORE, *[token] * counts[0], *BEHIND]
    for count in counts[1:]:
        ids += [*[token] * count, *BEHIND]
    row = torch.tensor([ids])

    logits = []
    try:
        for change in (0.0, 1.0):
            changed = [each.clone() for each in features]
            changed[0][-1] += change
            found.pooler_output = torch.stack(changed) if isinstance(features, Tensor) else tuple(changed)
            base.get_image_features = lambda *_, **__: found
            logits.append(whole(input_ids=row, **images, **token_types(whole, row), use_cache=False).logits[0])
    finally:
        del base.get_image_features
    first, last = len(BEFORE), len(BEFORE) + counts[0] - 1
    moved = (logits[0] - logits[1]).abs().amax(dim=-1) / logits[0].abs().max()
    if moved[last] < ROUNDING:
        raise Underivable("features of images do not come to the places of image tokens")
    return bool(moved[first] > ROUNDING)
