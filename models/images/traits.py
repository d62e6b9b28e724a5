"""What a model does with images, found by watching transformers' small one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from models.attention.positions import attention_kind
from models.derived.outline import Underivable
from models.images.eyes import features_of, flat_features
from models.images.small import token_types
from models.images.tensors import FEATURES, UNEQUAL, form_of, inputs_of, pictures

ROUNDING = 1e-4  # of the largest number: experts that get other tokens round otherwise
BEFORE, BEHIND = [3, 4, 5], [6, 7]  # words around an image
# What may be given with features: they themselves, what is added behind blocks, and what led to them.
GIVEN = {"pooler_output", "deepstack_features", "last_hidden_state", "hidden_states", "attentions"}


class Traits(BaseModel):
    """What is found out; names and meanings are those of `Sees`."""

    inputs: tuple[str, ...]
    both_ways: tuple[str, ...]
    deep: int
    parts: tuple[str, ...]
    projector: tuple[str, ...]


@torch.no_grad()
def traits_of(whole: Any) -> Traits:
    """Find the traits of a small whole model.

    Raises:
        Underivable: it has not the seam that images go by.
    """
    base = getattr(whole, whole.base_model_prefix, None)
    if not hasattr(base, FEATURES):
        raise Underivable(f"transformers' {type(whole).__name__} has no base model with {FEATURES}")
    inputs = inputs_of(base)
    images = pictures(whole.config, inputs)

    watched = FeatureCalls(base, int(whole.config.get_text_config().hidden_size))
    try:
        found = watched.run(dict(zip(inputs, images, strict=True)))
    except Exception as error:  # whatever a tower makes of pictures that it does not know
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in zip(inputs, images, strict=True))
        raise Underivable(
            f"{FEATURES} takes no {shapes}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    features = getattr(found, "pooler_output", None)
    if features is None:
        raise Underivable(f"{type(base).__name__}.{FEATURES} gives no pooler_output")
    if unused := sorted(name for name in found if name not in GIVEN):
        raise Underivable(f"{type(base).__name__}.{FEATURES} gives {unused[0]} besides, which has no place here")
    deep = getattr(found, "deepstack_features", None) or ()
    projector = watched.projector([flat_features(each) for each in (features, *deep)])
    if not projector:
        raise Underivable(f"no part of {type(base).__name__} gives images the width of text")
    return Traits(
        inputs=inputs,
        both_ways=seen_both_ways(whole, found, inputs, images),
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
        self._giving: list[tuple[str, bool, Tensor]] = []  # name, whether it was given another width, what it gives

    def run(self, images: dict[str, Tensor]) -> Any:
        names = {module: name for name, module in self._base.named_modules() if name}

        def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            self.called.append(names[module])
            tensors = [each for each in (*given[:1], output) if isinstance(each, Tensor)]
            if len(tensors) == 2 and tensors[1].shape[-1] == self._width:
                self._giving.append((names[module], tensors[0].shape[-1] != self._width, output))

        hooks = [module.register_forward_hook(note) for module in names]
        try:
            return self._base.get_image_features(**images, return_dict=True)
        finally:
            for hook in hooks:
                hook.remove()

    def projector(self, features: list[Tensor]) -> tuple[str, ...]:
        """Name the outermost modules that give a tensor the text's width, and rows of the features.

        Some models put rows in another order, leave some out and add others. Where a tower itself gives that width, it
        is the modules behind it.
        """
        wanted = set(chain.from_iterable(map(_rows, features)))
        giving = [each for each in self._giving if not wanted.isdisjoint(_rows(each[2]))]
        found = [name for name, widens, _ in giving if widens] or [name for name, *_ in giving]
        return tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))


def _rows(tensor: Tensor) -> list[tuple[float, ...]]:
    """List how each row begins."""
    return list(map(tuple, tensor.flatten(0, -2)[:, :3].tolist()))


def seen_both_ways(whole: Any, found: Any, inputs: tuple[str, ...], images: list[Tensor]) -> tuple[str, ...]:
    """Find the kinds of attention in which an image's first token sees its last.

    Its features are changed at the last, and what comes of it at the first. Which kinds it is, their masks say.

    Raises:
        Underivable: features do not come to their places, or words see what follows them.
    """
    base, config = getattr(whole, whole.base_model_prefix), whole.config
    form, token = form_of(config, inputs), int(config.image_token_id)
    counts = [len(features_of(base, inputs, form.one(images, number))) for number in range(len(UNEQUAL))]
    ids = [*BEFORE, *chain.from_iterable([*[token] * count, *BEHIND] for count in counts)]
    row, features = torch.tensor([ids]), found.pooler_output
    first, last = len(BEFORE), len(BEFORE) + counts[0] - 1
    given = dict(zip(inputs, images, strict=True))

    def logits(row: Tensor) -> Tensor:
        computed: Tensor = whole(input_ids=row, **given, **token_types(whole, row), use_cache=False).logits[0]
        return computed

    base.get_image_features = lambda *_, **__: found
    try:
        with watched_masks(whole) as masks:
            plain = logits(row)
        found.pooler_output = changed(features, counts[0] - 1)
        moved = (logits(row) - plain).abs().amax(dim=-1) / plain.abs().max()
        found.pooler_output, row[0, -1] = features, row[0, -1] + 1
        foreseen = (logits(row) - plain).abs().amax(dim=-1) / plain.abs().max()
    finally:
        del base.get_image_features
    if moved[last] < ROUNDING:
        raise Underivable("features of images do not come to the places of image tokens")
    if foreseen[0] > ROUNDING:
        raise Underivable("words see those that follow them; expected attention that looks back, but within an image")
    if moved[first] < ROUNDING:
        return ()
    kinds = [attention_kind(config.get_text_config(), block) for block, mask in masks.items() if mask[first, last]]
    if not kinds:
        raise Underivable("tokens of an image see each other both ways, and no mask of a block says so")
    return tuple(sorted(set(kinds)))


def changed(features: Any, place: int) -> Any:
    """Change one of the features of images, [T, H] as they lie end to end."""
    several = [features] if isinstance(features, Tensor) else features
    copies = [each.clone(memory_format=torch.contiguous_format) for each in several]
    lying = chain.from_iterable(each.view(-1, each.shape[-1]) for each in copies)
    row = next(islice(lying, place, None))
    row += torch.linspace(-1, 1, len(row))  # no number for all: some norms take their mean away
    return copies[0] if isinstance(features, Tensor) else type(features)(copies)


@contextmanager
def watched_masks(whole: Any) -> Iterator[dict[int, Tensor]]:
    """Collect the mask that each block is given, [queries, keys]: true where a token is seen."""
    depth, masks = whole.config.get_text_config().num_hidden_layers, dict[int, Tensor]()
    lists = (each for each in whole.get_decoder().modules() if isinstance(each, nn.ModuleList) and len(each) == depth)

    def note(number: int, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            masks[number] = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0

    blocks = next(lists, ())
    hooks = [each.register_forward_pre_hook(partial(note, at), with_kwargs=True) for at, each in enumerate(blocks)]
    try:
        yield masks
    finally:
        for hook in hooks:
            hook.remove()
