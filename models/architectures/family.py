"""What a model family declares.

A family states, once, everything that Pipetune must know about an architecture: which `model_type`s it serves, which
transformers classes it wraps, which tensors on disk belong to which layer, and what is tied. The pipeline, both
converters, the direct loader and the exporter read the same table; the reverse direction is the table inverted
(`WeightMap`), never typed again.

Layers are numbered as everywhere in Pipetune: 0 is the embedding, 1..N the blocks, N+1 the final norm and head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from transformers import PreTrainedConfig

from models.positions import Positions


@dataclass(frozen=True)
class Rule:
    """One line of the naming table: a name on disk and the name inside the layer's module.

    `{i}` stands for the block's number (from 0, as on disk); `*` for any rest, the same on both sides.
    """

    disk: str
    module: str


@dataclass(frozen=True)
class Tie:
    """A weight of the head that is the same tensor as a weight of the embedding when the config says so."""

    embedding: str
    head: str


@dataclass(frozen=True)
class Family:
    """The declaration of one architecture.

    Attributes:
        name: the family's short name, as in the READMEs.
        decoder_layer: transformers' class of one block, called as `decoder_layer(config, index)`.
        norm: makes the final norm.
        rotary: transformers' class that turns position ids into (cos, sin), or None for models without it.
        positions: the class that derives masks, angles and biases for the blocks.
        embedding_norm: makes the norm right after the embedding, where there is one.
        eager_only: whether transformers' layer computes attention by itself instead of calling a kernel.
        optional_prefix: how names on disk begin in some checkpoints and not in others.
        embedding, block, head: the naming table of each kind of layer.
        tie: the pair of weights that `config.tie_word_embeddings` makes one.
        carried: regular expressions of names on disk that no module owns but that a round trip must give back
            (buffers that older releases of transformers stored).
    """

    name: str
    decoder_layer: Callable[[PreTrainedConfig, int], nn.Module]
    norm: Callable[[PreTrainedConfig], nn.Module]
    rotary: Callable[..., nn.Module] | None
    embedding: tuple[Rule, ...]
    block: tuple[Rule, ...]
    head: tuple[Rule, ...]
    tie: Tie
    carried: tuple[str, ...] = ()
    positions: type[Positions] = Positions
    embedding_norm: Callable[[PreTrainedConfig], nn.Module] | None = None
    eager_only: bool = False
    optional_prefix: str = ""


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives in the pipeline: the layer's number and the name in that layer's state dict."""

    layer: int
    name: str


@dataclass(frozen=True)
class WeightMap:
    """A family's naming table for a given depth, readable in both directions.

    `slot(disk_name(s)) == s` for every slot and `disk_name(slot(n)) == n` for every name that has a slot.
    """

    family: Family
    n_blocks: int
    prefixed: bool = True  # whether the names on disk have the family's optional prefix

    def for_names(self, disk_names: Iterable[str]) -> WeightMap:
        """The same table in the spelling of a checkpoint: with the optional prefix or without."""
        prefix = self.family.optional_prefix
        return replace(self, prefixed=not prefix or any(name.startswith(prefix) for name in disk_names))

    def slot(self, disk_name: str) -> Slot | None:
        """The place of a tensor on disk, or None where the family has none for it."""
        full_name = disk_name if self.prefixed else self.family.optional_prefix + disk_name
        return self._slot(full_name) or self._slot(disk_name)  # not every name takes the prefix: lm_head.weight

    def _slot(self, disk_name: str) -> Slot | None:
        for rule, pattern in self._disk_patterns:
            match = pattern.fullmatch(disk_name)
            if match is None:
                continue
            found = match.groupdict()
            layer = self._layer_of(rule, found.get("i"))
            if layer is not None:
                return Slot(layer, rule.module.replace("*", found.get("rest", "")))
        return None

    def disk_name(self, slot: Slot) -> str:
        """The name on disk of a tensor of the pipeline.

        Raises:
            KeyError: the family has no such tensor.
        """
        for rule in self._rules_of_layer(slot.layer):
            match = _pattern(rule.module).fullmatch(slot.name)
            if match is not None:
                rest = match.groupdict().get("rest", "")
                name = rule.disk.replace("*", rest).replace("{i}", str(slot.layer - 1))
                return name if self.prefixed else name.removeprefix(self.family.optional_prefix)
        raise KeyError(f"{self.family.name} has no tensor {slot.name} in layer {slot.layer}")

    def is_carried(self, disk_name: str) -> bool:
        """Whether the tensor is kept beside the layers only to be given back."""
        return any(re.search(pattern, disk_name) for pattern in self.family.carried)

    @property
    def head_layer(self) -> int:
        return self.n_blocks + 1

    @cached_property
    def _disk_patterns(self) -> list[tuple[Rule, re.Pattern[str]]]:
        rules = (*self.family.embedding, *self.family.block, *self.family.head)
        return [(rule, _pattern(rule.disk)) for rule in rules]

    def _layer_of(self, rule: Rule, block_number: str | None) -> int | None:
        if rule in self.family.embedding:
            return 0
        if rule in self.family.head:
            return self.head_layer
        number = int(block_number or 0)
        canonical = str(number) == block_number  # "00" would not come back as it was
        return number + 1 if canonical and number < self.n_blocks else None

    def _rules_of_layer(self, layer: int) -> tuple[Rule, ...]:
        if layer == 0:
            return self.family.embedding
        return self.family.head if layer == self.head_layer else self.family.block


def _pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a name with `{i}` and `*`."""
    escaped = re.escape(template)
    return re.compile(escaped.replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\*", r"(?P<rest>.+)"))
