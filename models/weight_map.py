"""A family's naming table for a model of a given size, readable in both directions.

The table relates groups of names: the tensors on disk and the tensors of one layer that hold the same numbers
(`Binding`). Most groups have one name on either side. `reshape_rows` is the whole arithmetic: tensors of one
side to those of the other, without a copy where one tensor is split into several.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT, Family, Rule


class Binding(NamedTuple):
    """Tensors on disk and tensors of a layer with the same numbers in the same order.

    Attributes:
        disk: names on disk; with several of them there is one name in the layer.
        layer: the layer's number.
        names: names in that layer's state dict.
        stacked: whether the names on disk are those of experts, which the layer stacks.
        groups: as in `reshape_rows`.
    """

    disk: tuple[str, ...]
    layer: int
    names: tuple[str, ...]
    stacked: bool = False
    groups: int = 1

    def disk_shapes(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Get name and shape of each tensor on disk from the layer's shapes."""
        first = shapes[self.names[0]]
        if len(self.disk) == len(self.names) == 1 and not self.stacked:
            return {self.disk[0]: first}
        if not self.stacked:
            rows = sum(shapes[name][0] for name in self.names) // len(self.disk)
            return dict.fromkeys(self.disk, torch.Size((rows, *first[1:])))
        experts, rows = first[0], first[1]
        parts = len(self.disk) // experts
        return dict.fromkeys(self.disk, torch.Size((rows // parts, *first[2:])))


@dataclass(frozen=True)
class WeightMap:
    """The names of all tensors of one model; looking a binding up by either side gives the same one."""

    family: Family
    n_blocks: int
    n_experts: int = 0
    n_key_heads: int = 1
    prefix: str | None = None  # how the names on disk begin, where it is otherwise than the family has it
    is_part: bool = False  # whether the checkpoint holds more than this model, as those with a vision tower do

    def for_names(self, disk_names: Iterable[str]) -> WeightMap:
        """Adapt the table to a checkpoint's names: their prefix, and the rules in use."""
        disk_names = list(disk_names)
        words = replace(self, prefix=None).tied_embedding
        rest = words.removeprefix(self.family.prefix)
        found = [name for name in disk_names if name == rest or name.endswith(f".{rest}")]
        prefix = None if words in found or not found else found[0].removesuffix(rest)
        spelled = replace(self, prefix=prefix)
        full = set(chain.from_iterable(map(spelled._full_names, disk_names)))
        block, embedding = block_rules(self.family, full), embedding_rules(self.family, disk_names)
        return replace(spelled, family=replace(self.family, block=block, embedding=embedding))

    def binding(self, disk_name: str) -> Binding | None:
        """Get the binding of a tensor on disk; None if the family has none."""
        for name in self._full_names(disk_name):
            for rule, patterns in self._disk_patterns:
                match = next((found for each in patterns if (found := each.fullmatch(name))), None)
                if match is None:
                    continue
                layer = self._layer_of(rule, match.groupdict())
                if layer is None:  # a block's name with a number out of range, as layers ahead may have
                    continue
                binding = self._bind(rule, layer, match.groupdict().get("rest", ""))
                # A general rule may not give a name to what a special rule before it stores in another way.
                if disk_name in binding.disk and self.binding_of(layer, binding.names[0]) == binding:
                    return binding
        return None

    def binding_of(self, layer: int, name: str) -> Binding:
        """Get the binding of a tensor in a layer's state dict."""
        for rule in self._rules_of(layer):
            for template in rule.module_names:
                match = pattern(template).fullmatch(name)
                if match is not None:
                    return self._bind(rule, layer, match.groupdict().get("rest", ""))
        raise KeyError(f"{self.family.name} has no tensor {name} in layer {layer}")

    def bindings(self, layer: int, names: Iterable[str]) -> list[Binding]:
        """Get the bindings that cover the tensors of a layer, each once."""
        return list(dict.fromkeys(self.binding_of(layer, name) for name in names))

    def on_disk(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a layer's tensors to those on disk; bindings must be complete."""
        shapes, found = {name: tensor.shape for name, tensor in state.items()}, dict[str, Tensor]()
        for binding in self.bindings(layer, state):
            wanted = binding.disk_shapes(shapes)
            pieces = reshape_rows([state[name] for name in binding.names], list(wanted.values()), binding.groups)
            found |= zip(wanted, pieces, strict=True)
        return found

    def is_carried(self, disk_name: str) -> bool:
        """Return whether a tensor is kept only to be given back."""
        prefix = self.family.prefix if self.prefix is None else self.prefix
        other = self.is_part and not disk_name.startswith(prefix) and self.binding(disk_name) is None
        return other or any(re.search(each, disk_name) for each in self.family.carried)

    @property
    def head_layer(self) -> int:
        return self.n_blocks + 1

    @property
    def tied_head(self) -> str:
        """The head's name on disk; tied checkpoints mostly leave it out."""
        return self.binding_of(self.head_layer, HEAD_WEIGHT).disk[0]

    @property
    def tied_embedding(self) -> str:
        """The name on disk of the embedding that a tied head shares."""
        return self.binding_of(0, EMBEDDING_WEIGHT).disk[0]

    @cached_property
    def _disk_patterns(self) -> list[tuple[Rule, list[re.Pattern[str]]]]:
        rules = (*self.family.embedding, *self.family.block, *self._head_rules)
        return [(rule, list(map(pattern, rule.disk_names))) for rule in rules]

    def spelled(self, name: str) -> str:
        """Spell a name of the family's as the checkpoint does."""
        return name if self.prefix is None else self._name_on_disk(name)

    def in_own_spelling(self, disk_name: str) -> str:
        """Spell a name on disk as the family does, where the checkpoint begins names in another way."""
        return self._full_names(disk_name)[0]

    def _full_names(self, disk_name: str) -> list[str]:
        """List the family's possible names of a tensor on disk."""
        if self.prefix is None:
            return [disk_name]
        inside = [self.family.prefix + disk_name.removeprefix(self.prefix)] if disk_name.startswith(self.prefix) else []
        return [*inside, disk_name.removeprefix(self._outer_prefix)]

    def _name_on_disk(self, name: str) -> str:
        """Put the checkpoint's prefix before the family's name of a tensor."""
        assert self.prefix is not None
        if name.startswith(self.family.prefix):
            return self.prefix + name.removeprefix(self.family.prefix)
        return self._outer_prefix + name

    @property
    def _outer_prefix(self) -> str:
        """The prefix of names such as `lm_head.weight`, which lack the family's prefix."""
        outside = (self.prefix or "").removesuffix(self.family.prefix)
        return outside if outside.endswith(".") and outside != self.prefix else ""

    def _layer_of(self, rule: Rule, found: Mapping[str, str]) -> int | None:
        """Get the layer of a matched rule; None for a number out of range."""
        if "e" in found and not _counts(found["e"], self.n_experts):
            return None
        if rule in self.family.embedding:
            return 0
        if rule in self._head_rules:
            return self.head_layer
        return int(found["i"]) + 1 if _counts(found["i"], self.n_blocks) else None

    def _rules_of(self, layer: int) -> tuple[Rule, ...]:
        if layer == 0:
            return self.family.embedding
        return self._head_rules if layer == self.head_layer else self.family.block

    @cached_property
    def _head_rules(self) -> tuple[Rule, ...]:
        ahead = self.family.ahead
        return (*self.family.head, *(ahead.rules(self.family, self.n_blocks) if ahead else ()))

    def _bind(self, rule: Rule, layer: int, rest: str) -> Binding:
        disk = [template.replace("{i}", str(layer - 1)) for template in rule.disk_names]
        stacked = "{e}" in disk[0]
        if stacked:
            of_each = product(range(self.n_experts), disk)
            disk = [template.replace("{e}", str(expert)) for expert, template in of_each]
        disk = [name.replace("*", rest) for name in disk]
        if self.prefix is not None and not rule.beside:
            disk = [self._name_on_disk(name) for name in disk]
        groups = self.n_key_heads if rule.by_key_head else 1
        return Binding(
            tuple(disk), layer, tuple(name.replace("*", rest) for name in rule.module_names), stacked, groups
        )


def reshape_rows(tensors: Sequence[Tensor], shapes: Sequence[torch.Size], groups: int = 1) -> list[Tensor]:
    """Join several tensors, row by row, into one of another shape, or cut one into views of itself.

    Args:
        groups: the one tensor has the rows of the several in this many turns, an equal share of each in each turn.
    """
    if groups > 1:
        return _reshape_in_turns(tensors, shapes, groups)
    if len(tensors) == len(shapes) == 1:
        return [tensors[0].reshape(shapes[0])]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
    pieces = flat.split([prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _reshape_in_turns(tensors: Sequence[Tensor], shapes: Sequence[torch.Size], groups: int) -> list[Tensor]:
    if len(tensors) > 1:
        turns = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
        return [torch.cat(turns, dim=1).reshape(shapes[0])]
    rows = [shape[0] // groups for shape in shapes]
    pieces = tensors[0].unflatten(0, (groups, -1)).split(rows, dim=1)
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _counts(number: str, limit: int) -> bool:
    """Return whether a text is a number below `limit` as Python writes it: not "00"."""
    return number.isascii() and number == str(int(number)) and int(number) < limit


def pattern(template: str) -> re.Pattern[str]:
    """Compile a name with `{i}`, `{e}` and `*`."""
    escaped = re.escape(template)
    for mark, group in ((r"\{i\}", r"(?P<i>\d+)"), (r"\{e\}", r"(?P<e>\d+)"), (r"\*", r"(?P<rest>.+)")):
        escaped = escaped.replace(mark, group)
    return re.compile(escaped)


def embedding_rules(family: Family, names: Collection[str]) -> tuple[Rule, ...]:
    """Choose a family's rules for its first layer; of several for parts beside the decoder the first that fits."""
    fitting = [rule for rule in family.embedding if any(map(pattern(rule.disk_names[0]).fullmatch, names))]
    chosen: dict[str | tuple[str, ...], Rule] = {}
    for rule in (*(each for each in fitting if each.beside), *family.embedding):
        chosen.setdefault(rule.module, rule)
    return tuple(chosen.values())


def block_rules(family: Family, names: Collection[str]) -> tuple[Rule, ...]:
    """Choose a family's block rules that fit the names on disk, in the family's spelling."""

    def lie_there(templates: Iterable[str]) -> bool:
        return any(any(map(each.fullmatch, names)) for each in map(pattern, templates))

    begin = [rule.disk_names[0].removesuffix("*") for rule in family.block if rule.module == "block.*"]

    def as_modules(rule: Rule) -> list[str]:
        return [prefix + name.removeprefix("block.") for prefix, name in product(begin, rule.module_names)]

    in_whole = (rule for rule in family.block_in_whole if lie_there(rule.disk_names))
    block = (rule for rule in family.block if lie_there(rule.disk_names) or not lie_there(as_modules(rule)))
    return (*in_whole, *block)
