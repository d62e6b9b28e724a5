"""What a model of images and text has besides its decoder, by transformers' own classes: its eyes.

The base model of transformers is built without its language model, with one block less than any, and its own
`get_image_features` and `get_rope_index` are called. Nothing of a tower is written here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

from common.placed_document import PlacedDocument
from models.attention.packed import Documents
from models.derived.derive import FEW_WORDS, compute_buffers
from models.derived.outline import Underivable
from models.family import Rule
from models.images.tensors import GRIDS, pictures
from models.sees import Beginnings, Sees

TYPES = "mm_token_type_ids"  # 1 for tokens of images, by transformers' name
UNHEARD = {"audio_config"}  # parts of config.json that are left out where a model is built to see


def whole_class(config: PreTrainedConfig) -> Any:
    """Get transformers' class of a model of images and text."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def whole_names(config: PreTrainedConfig) -> Beginnings:
    """Find how names begin in transformers' whole model."""
    with torch.device("meta"):
        whole = whole_class(config)(without_blocks(config))
    decoder = next(name for name, module in whole.named_modules() if module is whole.get_decoder())
    return Beginnings(f"{decoder}.", f"{whole.base_model_prefix}.")


def base_class(config: PreTrainedConfig) -> Any:
    """Get transformers' class of what such a model has below its head."""
    if type(config) not in MODEL_MAPPING:
        raise Underivable(f"transformers has no base model of {type(config).__name__}")
    return MODEL_MAPPING[type(config)]


def without_blocks(config: PreTrainedConfig) -> PreTrainedConfig:
    """Get the config of the same model without blocks of text, with few words, in torch's default dtype."""
    bare = copy.deepcopy(config)
    text = bare.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, FEW_WORDS, None
    for part in (bare, text, bare.vision_config):
        part.dtype = None
    for name in UNHEARD & vars(bare).keys():
        setattr(bare, name, None)
    return bare


@dataclass(frozen=True)
class Eyes(Sees):
    """The eyes of a model, by transformers' classes.

    Attributes:
        parts: children of transformers' base model that make features.
        projector: the modules of these that give them the text's width.
        rules: how checkpoints name their weights: as published, as transformers writes them, as it has them in memory.
        config: of the whole model.
    """

    parts: tuple[str, ...]
    projector: tuple[str, ...]
    rules: tuple[Rule, ...] = field(repr=False)
    config: PreTrainedConfig = field(repr=False, compare=False)
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def whole(self) -> Beginnings:
        if "names" not in self._kept:
            self._kept["names"] = whole_names(self.config)
        names: Beginnings = self._kept["names"]
        return names

    def build(self) -> Any:
        """Build transformers' base model without its language model, on torch's default device."""
        eyes = self._whole()
        for name, _ in list(eyes.named_children()):
            if name not in self.parts:
                delattr(eyes, name)
        compute_buffers(eyes, self._whole)
        return eyes

    def _whole(self) -> Any:
        return base_class(self.config)(without_blocks(self.config))

    def pictures(self, images: int, tokens: int, pixels: Callable[..., Tensor]) -> list[Tensor]:
        high = max(1, isqrt(tokens))
        return pictures(self.config, self.inputs, [(high, max(1, round(tokens / high)))] * images, pixels)

    def axes_of(self, input_ids: Tensor, images: Mapping[str, Tensor]) -> Tensor:
        """Compute the positions of one document [L] along three axes, [3, L], of the grids of its `images`."""
        if "eyes" not in self._kept:
            with torch.device("meta"):
                self._kept["eyes"] = self._whole()
        rope_index = self._kept["eyes"].get_rope_index
        types = (input_ids == self.image_token)[None].int()
        options = {TYPES: types} if TYPES in inspect.signature(rope_index).parameters else {}
        grids = {GRIDS: images[GRIDS]} if images.get(GRIDS) is not None else {}
        positions: Tensor = rope_index(input_ids=input_ids[None], **grids, **options)[0]
        return positions[:, 0]

    def marks_of(self, parts: Iterable[PlacedDocument], shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        axes = torch.arange(shape[1]).repeat(self.axes, shape[0], 1) if self.axes else None
        together = torch.full(shape, -1) if self.both_ways else None
        count = 0
        for row, begin, ids, images in parts:
            places = slice(begin, begin + len(ids))
            if axes is not None:
                axes[:, row, places] = self.axes_of(ids, images) if images else torch.arange(len(ids))
            if together is not None:
                seen = ids == self.image_token
                begins = self._begins(ids)
                together[row, places][seen] = (count - 1 + begins.cumsum(0))[seen]
                count += int(begins.sum())
        return axes, together

    def documents(self, input_ids: Tensor, documents: Documents, images: Sequence[Tensor]) -> Documents:
        if not (self.axes or self.both_ways):
            return documents
        grids = dict(zip(self.inputs, images, strict=True))[GRIDS].cpu() if self.axes else None
        parts, seen = list[PlacedDocument](), 0
        for row, ids in enumerate(input_ids.cpu()):
            for first, last in documents.within(row, 0, len(ids)):
                count = int(self._begins(ids[first:last]).sum())
                own = {} if grids is None or not count else {GRIDS: grids[seen : seen + count]}
                parts.append(PlacedDocument(row, first, ids[first:last], own))
                seen += count
        return documents.seeing(*self.marks_of(parts, documents.shape))

    def _begins(self, ids: Tensor) -> Tensor:
        """Find where images begin in a document [L]: true at the first of image tokens that stand side by side."""
        at_image = ids == self.image_token
        return at_image & ~torch.cat([at_image.new_zeros(1), at_image[:-1]])


def flat_features(found: Any) -> Any:
    """Lay the features of images end to end, [T, H], as `get_image_features` gives them in one tensor or several."""
    return found.flatten(0, -2) if isinstance(found, Tensor) else torch.cat([each.flatten(0, -2) for each in found])


def features_of(base: Any, inputs: tuple[str, ...], images: Sequence[Tensor]) -> Tensor:
    """Compute the features of images, [T, H], by transformers' base model."""
    found: Tensor = flat_features(
        base.get_image_features(**dict(zip(inputs, images, strict=True)), return_dict=True).pooler_output
    )
    return found


def rest(module: nn.Module) -> None:
    """Put what has no trained weight into evaluation mode."""
    if not any(weight.requires_grad for weight in module.parameters()):
        module.eval()
        return
    for child in module.children():
        if next(child.parameters(), None) is not None:
            rest(child)
