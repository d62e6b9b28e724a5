"""The naming rules of a derived decoder's layers, learned from what transformers writes to disk.

Each number of each weight has a mark of its own, so the tensors on disk say which weights they are made of, and in
which order. What is made in any other way is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from models.derived.outline import Outline, Underivable
from models.family import Rule

Tables = tuple[tuple[Rule, ...], tuple[Rule, ...], tuple[Rule, ...]]  # of embedding, blocks, head


def tables_of(model: Any, outline: Outline, whole: str | None = None) -> Tables:
    """Learn the naming rules of the three kinds of layer.

    Args:
        whole: the `model_type` of the model of images and text whose part for text this is, to be saved with it.
    """
    # A mark for each number of each weight, and what is on disk in its place.
    numbered, first = {}, 0
    for name, tensor in model.state_dict().items():
        numbered[name] = torch.arange(first, first + tensor.numel()).reshape(tensor.shape)
        first += tensor.numel()
    written = _saved_as_part(model, numbered, outline, whole) if whole else revert_weight_conversion(model, numbered)

    # Parts of each layer, by how their names begin: how they are called here, and the table that their rules go to.
    embedding, blocks, head = dict[Rule, None](), dict[Rule, None](), dict[Rule, None]()
    begin = {outline.embedding: "embed_tokens.", outline.projection: "norm.", outline.table: "embed_positions."}
    prefixes = {f"{outline.base}.{place}.": (ours, embedding) for place, ours in begin.items() if place}
    prefixes |= {f"{outline.base}.{outline.norm}.": ("norm.", head), f"{outline.head}.": ("lm_head.", head)}

    model_class = type(model).__name__
    for weights, names in _groups(numbered, written, model_class):
        disk, module = _in_order(written, names), _in_order(numbered, weights, written[names[0]])
        if len(disk) > 1 and len(module) > 1:
            raise Underivable(f"{model_class}: {module[0]} is made of {len(disk)} tensors and shares them")
        if len({written[name].shape for name in disk}) > 1:
            raise Underivable(f"{model_class}: {module[0]} is made of tensors of several shapes")
        _check_order([written[name] for name in disk], [numbered[name] for name in module])

        block = re.match(rf"{outline.base}\.{outline.blocks}\.(\d+)\.", module[0])
        if block:
            inside = [f"block.{name[block.end() :]}" for name in module]
            blocks |= {Rule(_one_or_more(_templates(disk, block[1])), _one_or_more(inside)): None}
            continue

        prefix = next(filter(module[0].startswith, prefixes), None)
        if prefix is None or len(disk) > 1 or len(module) > 1:
            raise Underivable(f"{model_class}: {module[0]} is no part of embedding, blocks or head")
        ours, table = prefixes[prefix]
        table |= {Rule(disk[0], ours + module[0].removeprefix(prefix)): None}
    return tuple(embedding), _shortened(blocks), tuple(head)


def _groups(
    numbered: dict[str, Tensor], written: dict[str, Tensor], model_class: str
) -> list[tuple[frozenset[str], list[str]]]:
    """Find which tensors on disk are made of which weights: the names of the weights, and of the tensors."""
    owners = {int(tensor.flatten()[0]): name for name, tensor in numbered.items()}
    starts = torch.tensor(sorted(owners))
    groups: dict[frozenset[str], list[str]] = {}
    for name, tensor in written.items():
        places = torch.searchsorted(starts, tensor.flatten(), right=True) - 1
        weights = frozenset(owners[int(starts[place])] for place in places.unique())
        groups.setdefault(weights, []).append(name)
    if sum(map(len, groups)) != len(numbered):
        raise Underivable(f"{model_class}: a weight goes to several groups of tensors on disk")
    return list(groups.items())


def _saved_as_part(model: Any, tensors: dict[str, Tensor], outline: Outline, whole: str) -> dict[str, Tensor]:
    """Save the tensors as transformers does inside a model of images and text."""
    mapping = [
        *(get_checkpoint_conversion_mapping(whole) or ()),
        *get_model_conversion_mapping(model, add_legacy=False),
    ]
    model._weight_conversions = [each for each in mapping if not isinstance(each, PrefixChange)]
    base, inside = f"{outline.base}.", f"{outline.base}.language_model."
    embedding = f"{outline.embedding}.weight"
    try:
        named = {re.sub(f"^{base}", inside, name): tensor for name, tensor in tensors.items()}
        found = revert_weight_conversion(model, named)
    finally:
        del model._weight_conversions
    begin = next(name for name in found if name.endswith(embedding)).removesuffix(embedding)
    return {name.replace(begin, base, 1) if name.startswith(begin) else name: each for name, each in found.items()}


def _in_order(tensors: dict[str, Tensor], names: Iterable[str], whole: Tensor | None = None) -> list[str]:
    """Sort names by the place of their first numbers."""
    firsts = {name: int(tensors[name].flatten()[0]) for name in names}
    if whole is not None and len(firsts) > 1:
        places = {int(number): place for place, number in enumerate(whole.flatten())}
        firsts = {name: places[first] for name, first in firsts.items()}
    return sorted(firsts, key=lambda name: firsts[name])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _check_order(disk: list[Tensor], module: list[Tensor]) -> None:
    if not torch.equal(_flat(disk), _flat(module)):
        raise Underivable(f"a weight {list(module[0].shape)} has its numbers in another order on disk")


def _templates(names: list[str], block: str) -> list[str]:
    """Generalise names: `{i}` for the block, `{e}` for the expert."""
    general = [re.sub(rf"(?<=\.){block}(?=\.)", "{i}", name, count=1) for name in names]
    if len(general) > 1:
        general = [re.sub(r"(?<=\.)\d+(?=\.)", "{e}", name, count=1) for name in general]
    return list(dict.fromkeys(general))


def _one_or_more(names: list[str]) -> str | tuple[str, ...]:
    return names[0] if len(names) == 1 and "{e}" not in names[0] else tuple(names)


def _shortened(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Replace rules with equal names on both sides by one general rule."""
    special, beginnings = [], dict[str, None]()
    for rule in rules:
        rest = rule.module.removeprefix("block.") if isinstance(rule.module, str) else None
        if isinstance(rule.disk, str) and rest is not None and rule.disk.endswith("{i}." + rest):
            beginnings[rule.disk.removesuffix(rest)] = None
        else:
            special.append(rule)
    return (*special, *(Rule(f"{beginning}*", "block.*") for beginning in beginnings))
