"""A model before it has weights: its family, its config.json and its layers' shapes.

Reading a spec touches config.json only, so the converters, the planner and every training rank can afford it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from models.adapters import ALL, Trained
from models.ahead.names import MODULE
from models.attention.kernels import DROPOUT, WITHOUT_DROPOUT
from models.attention.positions import Positions
from models.attention.rope import DYNAMIC, YARN
from models.errors import CheckpointError
from models.family import EMBEDDING_WEIGHT, EYES, HEAD_WEIGHT, Family
from models.layers import Block, Embedding, Head
from models.parallel.groups import NO_GROUPS, RankGroups
from models.quantized_base import quantizable
from models.router import n_experts
from models.scores import SINGLE, check_labels, labels_of, scoring_family, scoring_fields
from models.weight_map import WeightMap


@dataclass(frozen=True)
class ModelSpec:
    """One concrete architecture: a family at a given size.

    Attributes:
        raw: the content of config.json.
        fields: what it says of the decoder, in field names that transformers knows.
        is_part: whether the checkpoint holds more than the decoder, as those of images and text do.
        language: the language model whose weights a model begins with that has more or other weights.
        trained: which weights are trained, and the adapters that layers are built with.
        fresh: makes the weights to begin with of those of `language`, given this spec and a seed; absent for scores.
    """

    family: Family
    config: PreTrainedConfig
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    is_part: bool = False
    trained: Trained = ALL
    language: ModelSpec | None = None
    fresh: Callable[[Any, ModelSpec, int], Any] | None = None
    _shapes: dict[int, dict[str, torch.Size]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def n_layers(self) -> int:
        """Embedding, blocks, head: the number that `parts` sums to."""
        return self.n_blocks + 2

    @property
    def context(self) -> int | None:
        """The model's longest text in tokens; None if it knows distances only (ALiBi)."""
        if self.family.rotary is None and self.family.first_row is None:
            return None
        rope = getattr(self.config, "rope_parameters", None) or {}
        longest = self.config.max_position_embeddings  # that of pretraining where somebody has added YaRN by hand
        stretched = {DYNAMIC: longest, YARN: rope.get("original_max_position_embeddings")}.get(
            str(rope.get("rope_type"))
        )
        if not stretched:
            return int(longest)
        return int(max(longest, stretched * (rope.get("factor") or 1)))

    @property
    def first_layers(self) -> int:
        """Count the layers, from the first on, that have to lie in one process: with blocks that images reach, too."""
        return 1 + (self.family.sees.deep if self.family.sees else 0)

    @property
    def labels(self) -> list[str]:
        """What the numbers stand for that the model gives a text; empty for a language model."""
        return labels_of(self.raw)

    @property
    def has_experts(self) -> bool:
        return n_experts(self.config) > 0

    @property
    def horizon(self) -> int:
        """How many tokens are predicted after each: the next one, and those of the layers ahead."""
        return 1 + (self.family.ahead.depth if self.family.ahead else 0)

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @property
    def tied_names(self) -> tuple[str, str] | None:
        """The two names, `<layer>.<name>`, of a tied weight."""
        if not self.tied:
            return None
        return f"0.{EMBEDDING_WEIGHT}", f"{self.n_layers - 1}.{HEAD_WEIGHT}"

    @property
    def shared_names(self) -> list[tuple[str, ...]]:
        """List the names of each weight that several layers share."""
        return [self.tied_names] if self.tied_names else []

    @property
    def attention(self) -> tuple[str, ...]:
        """The kernels with exact attention in training, the usual one first."""
        if not any(getattr(self.config, name, 0.0) for name in DROPOUT):
            return self.family.attention
        return tuple(kernel for kernel in self.family.attention if kernel not in WITHOUT_DROPOUT)

    def positions(self, groups: RankGroups = NO_GROUPS) -> Positions:
        """Make what the blocks of one process get besides hidden states."""
        made: Positions = (self.family.positions or Positions)(self.config, self.family.rotary)
        made.both_ways = self.family.sees.both_ways if self.family.sees else ()
        made.set_groups(groups)
        return made

    def set_attention(self, implementation: str) -> None:
        """Set the attention kernel, by transformers' name, of layers yet to be built."""
        self.config._attn_implementation = implementation

    @property
    def weight_map(self) -> WeightMap:
        return WeightMap(
            self.family, self.n_blocks, n_experts(self.config), key_heads(self.config), is_part=self.is_part
        )

    def build(self, layer: int, positions: Positions | None = None) -> Embedding | Block | Head:
        """Build a layer without loading weights, on torch's default device.

        Args:
            layer: 0 for the embedding, 1..N for the blocks, N+1 for the head.
            positions: None for a layer that is built only for its shapes.
        """
        module: Embedding | Block | Head
        if layer == 0:
            module = (self.family.embeds or Embedding)(self.family, self.config, positions)
        elif layer == self.n_blocks + 1:
            module = (self.family.projection or Head)(self.family, self.config)
            module.positions = positions
            if self.family.ahead:
                module.ahead = self.family.ahead.build(self.family, self.config, positions)
        else:
            module = Block(self.family, self.config, layer - 1, positions)
        ends = layer in (0, self.n_blocks + 1)
        self.trained.prepare(
            module,
            lambda name: ends and not name.startswith((f"{MODULE}.", f"{EYES}.")),
            partial(self.paths, layer),
            lambda name: name.startswith(f"{EYES}."),
        )
        return module

    def shapes(self, layer: int) -> dict[str, torch.Size]:
        """Get name and shape of every tensor of a layer; allocates nothing."""
        if layer not in self._shapes:
            with torch.device("meta"):
                module: nn.Module = self.build(layer)
            self._shapes[layer] = {name: tensor.shape for name, tensor in module.state_dict().items()}
        return self._shapes[layer]

    def training(self, trained: Trained) -> ModelSpec:
        """Get the same model with other weights trained."""
        return replace(self, trained=trained, _shapes={})

    def check_writes(self, where: object) -> None:
        """Refuse a model that scores texts where one that writes them is needed.

        Args:
            where: its folder or its name, for the message.

        Raises:
            CheckpointError: it does.
        """
        if self.labels:
            scores = ", ".join(self.labels)
            raise CheckpointError(f"{where}: scores texts ({scores}) and writes none; expected a language model")

    def scoring(self, labels: Sequence[str]) -> ModelSpec:
        """Get the model that gives a text a number for each label; itself where it does so already.

        Raises:
            CheckpointError: it has other labels, or transformers has no such class for the family.
        """
        if self.labels:
            check_labels(labels, self.labels, "the model")
            if len(labels) > 1 and (kind := self.raw.get("problem_type") or SINGLE) != SINGLE:
                raise CheckpointError(f"problem_type: {kind}, but labels train one class a text; expected {SINGLE}")
            return self
        config = deepcopy(self.config)
        config.num_labels, config.tie_word_embeddings = len(labels), False
        family, raw = scoring_family(self.family), scoring_fields(self.raw, labels)
        return replace(self, family=family, config=config, raw=raw, language=self, _shapes={})

    @property
    def plain(self) -> ModelSpec:
        """The model without adapters, layers ahead and eyes."""
        return replace(self.blind.base, family=replace(self.blind.family, ahead=None), _shapes={})

    @property
    def blind(self) -> ModelSpec:
        """The model without eyes, whose weights are then tensors of no layer."""
        return replace(self, family=self.family.sees.blind, _shapes={}) if self.family.sees else self

    @property
    def base(self) -> ModelSpec:
        """The model without adapters, as its checkpoint has it."""
        return self.training(ALL)

    def trained_names(self, layer: int) -> list[str]:
        """List the weights of a layer that are trained."""
        with torch.device("meta"):
            return [name for name, weight in self.build(layer).named_parameters() if weight.requires_grad]

    def packed_names(self, layer: int) -> list[str]:
        """List the weights of a layer that are held in 4 or 8 bits."""
        if not (self.trained.lora and self.trained.lora.base and 0 < layer <= self.n_blocks):
            return []
        with torch.device("meta"):
            return list(quantizable(self.build(layer)))

    def paths(self, layer: int, name: str) -> list[str]:
        """Get the names, in transformers' model, of a module or a weight of a layer: both of a tied one."""
        if f"{name}.".startswith("block."):
            return [self._block.replace("{i}", str(layer - 1)) + name.removeprefix("block")]
        module, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
        ends = [end.removesuffix(".weight") for end in self.tied_names or ()]
        places = [end.split(".") for end in ends] if f"{layer}.{module}" in ends else [[str(layer), module]]
        paths = [self._path(int(place), same) for place, same in places]
        return [f"{path}.weight" for path in paths] if is_weight else paths

    def path(self, layer: int, name: str) -> str:
        """Get the name in transformers' model of a module or a weight of a layer."""
        return self.paths(layer, name)[0]

    def _path(self, layer: int, module: str) -> str:
        """Get the name on disk of a module of the first or last layer; its own where it has no weight."""
        with suppress(KeyError):
            return self.weight_map.binding_of(layer, f"{module}.weight").disk[0].removesuffix(".weight")
        return module

    @property
    def _block(self) -> str:
        """How the names of a block's weights begin on disk, up to its number."""
        return self.family.block[0].disk_names[0].partition("{i}")[0] + "{i}"


def key_heads(config: PreTrainedConfig) -> int:
    """Count the key-value heads of a block."""
    heads = vars(config).get("num_key_value_heads")
    return int(config.num_attention_heads if heads is None else heads)
