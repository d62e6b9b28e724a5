"""The first layer of a model that sees: words, and in the place of image tokens the features of images.

It takes `(input_ids [B, S], position_ids [B, S], *images)`, the tensors of `Sees.inputs` of all images of the
micro-batch, in the order of rows and places; none where there are no images. A tower that is not trained runs in
evaluation mode, and autograd keeps nothing of it. The blocks of one that is recompute as transformers has them do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from models.attention.positions import Deep, Positions
from models.family import Family
from models.images.eyes import flat_features, rest
from models.layers import Embedding


class SeeingEmbedding(Embedding):
    """Layer 0 with transformers' tower and projector."""

    def __init__(self, family: Family, config: PreTrainedConfig, positions: Positions | None = None) -> None:
        super().__init__(family, config, positions)
        assert family.sees is not None
        self.sees = family.sees
        self.words = config.vocab_size
        self.eyes: Any = family.sees.build()
        self._blocks = [each for each in self.eyes.modules() if isinstance(each, GradientCheckpointingLayer)]
        for block in self._blocks:
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def embedded(self, input_ids: Tensor, position_ids: Tensor, *images: Tensor) -> Tensor:
        at_image = input_ids == self.sees.image_token
        count = int(at_image.sum())
        if not images:
            # A token behind a row's beginning is one that the model wrote: a word, as in transformers' `generate`.
            if count and not bool((position_ids[:, 0] > 0).all()):
                raise ValueError(
                    f"{count} image tokens ({self.sees.image_token}) and no images; expected as many features"
                )
            return super().embedded(input_ids, position_ids)

        self._check(position_ids, images)
        features, *deep = self.features(images)
        if len(features) != count:
            raise ValueError(f"{count} image tokens ({self.sees.image_token}) and {len(features)} features of images")

        # The id of an image may lie outside of the vocabulary.
        hidden = super().embedded(input_ids.masked_fill(at_image, 0), position_ids)
        if deep and self._positions:
            places = at_image.flatten().nonzero().squeeze(-1)
            self._positions.set_deep(Deep(places, deep))
        return hidden.masked_scatter(at_image[..., None], features.to(hidden.dtype))

    def features(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute what images are at the places of their tokens, [T, H], and what is added behind the first blocks."""
        for block in self._blocks:
            block.gradient_checkpointing = self.recompute
        dtype = next(self.eyes.parameters()).dtype
        # A pipeline asks for gradients of all inputs that are not integers.
        given = [each.detach().to(dtype) if each.is_floating_point() else each for each in images]
        compute: Callable[..., Any] = self.eyes.get_image_features
        if self.recompute and self.training and not self._blocks:  # a tower that transformers recomputes as a whole
            compute = partial(checkpoint, compute, use_reentrant=False)
        found = compute(**dict(zip(self.sees.inputs, given, strict=True)), return_dict=True)
        deep = found.deepstack_features if self.sees.deep else ()
        return [flat_features(each) for each in (found.pooler_output, *deep)]

    def _check(self, position_ids: Tensor, images: tuple[Tensor, ...]) -> None:
        """Refuse images without what the blocks have to know of them."""
        if len(images) != len(self.sees.inputs):
            raise ValueError(f"images: {len(images)} tensors; expected {', '.join(self.sees.inputs)}")
        if self._positions is None:
            return
        if self._positions.part is not None:
            raise ValueError("images: expected whole rows, not parts of them in chunks or on several processes")
        documents = self._positions.documents(position_ids)
        if self.sees.axes and documents.axes is None:
            raise ValueError("images without their positions along three axes; expected Documents.axes")
        if self.sees.both_ways and documents.together is None:
            raise ValueError(
                "images of unknown places, whose tokens see each other both ways; expected Documents.together"
            )

    def train(self, mode: bool = True) -> SeeingEmbedding:
        super().train(mode)
        rest(self.eyes)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> SeeingEmbedding:
        """Apply a function to all but the eyes, which transformers initialises as it builds them."""
        for child in self.children():
            if child is not self.eyes:
                child.apply(fn)
        fn(self)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SeeingEmbedding:
        """Move or cast, but for numbers that are computed and not loaded: rounded angles would be wrong ones."""
        loaded = self.eyes.state_dict().keys()
        buffers = [(name, each) for name, each in self.eyes.named_buffers() if name not in loaded]
        computed = {name: each for name, each in buffers if each.is_floating_point()}
        super()._apply(fn, recurse)
        for name, each in computed.items():
            owner, _, leaf = name.rpartition(".")
            module = self.eyes.get_submodule(owner)
            setattr(module, leaf, each.to(getattr(module, leaf).device))
        return self
