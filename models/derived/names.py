"""The naming table of an architecture, learned from transformers' own saver.

transformers renames, stacks and cuts weights between a checkpoint and its modules. How is not read from its tables: a
small model whose every number is another one is given to what `save_pretrained` does, and where each number comes out
says which tensors hold the same ones, and in which order. What one block teaches is written for all of them.
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
    """The rules of the three kinds of layer.

    Args:
        whole: the `model_type` of the model of images and text whose part for text this is, to be saved with it.

    Raises:
        Underivable: a weight lies outside of them, or its numbers lie in another order on disk.
    """
    numbered, first = {}, 0
    for name, tensor in model.state_dict().items():
        numbered[name] = torch.arange(first, first + tensor.numel()).reshape(tensor.shape)
        first += tensor.numel()
    owners = {int(tensor.flatten()[0]): name for name, tensor in numbered.items()}
    starts = torch.tensor(sorted(owners))
    written = _saved_as_part(model, numbered, outline, whole) if whole else revert_weight_conversion(model, numbered)
    groups: dict[frozenset[str], list[str]] = {}
    for name, tensor in written.items():
        places = torch.searchsorted(starts, tensor.flatten(), right=True) - 1
        sources = frozenset(owners[int(starts[place])] for place in places.unique())
        groups.setdefault(sources, []).append(name)
    if sum(map(len, groups)) != len(numbered):
        raise Underivable(f"{type(model).__name__}: a weight goes to several groups of tensors on disk")
    embedding, blocks, head = dict[Rule, None](), dict[Rule, None](), dict[Rule, None]()
    prefixes = {
        f"{outline.base}.{outline.embedding}.": ("embed_tokens.", embedding),
        f"{outline.base}.{outline.norm}.": ("norm.", head),
        f"{outline.head}.": ("lm_head.", head),
    }
    for sources, names in groups.items():
        disk, module = _in_order(written, names), _in_order(numbered, sources, written[names[0]])
        if len(disk) > 1 and len(module) > 1:
            raise Underivable(f"{type(model).__name__}: {module[0]} is made of {len(disk)} tensors and shares them")
        if len({written[name].shape for name in disk}) > 1:
            raise Underivable(f"{type(model).__name__}: {module[0]} is made of tensors of several shapes")
        _check_order([written[name] for name in disk], [numbered[name] for name in module])
        block = re.match(rf"{outline.base}\.{outline.blocks}\.(\d+)\.", module[0])
        if block:
            inside = [f"block.{name[block.end() :]}" for name in module]
            blocks |= {Rule(_one_or_more(_templates(disk, block[1])), _one_or_more(inside)): None}
            continue
        found = next(((prefix, *into) for prefix, into in prefixes.items() if module[0].startswith(prefix)), None)
        if found is None or len(disk) > 1 or len(module) > 1:
            raise Underivable(f"{type(model).__name__}: {module[0]} is no part of embedding, blocks or head")
        prefix, ours, table = found
        table |= {Rule(disk[0], ours + module[0].removeprefix(prefix)): None}
    return tuple(embedding), _shortened(blocks), tuple(head)


def _saved_as_part(model: Any, tensors: dict[str, Tensor], outline: Outline, whole: str) -> dict[str, Tensor]:
    """What the saver makes of the tensors in a model of another type, under names that begin as those of this one."""
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
    """Names of tensors by the place of their first numbers: in what they make up, or by themselves."""
    firsts = {name: int(tensors[name].flatten()[0]) for name in names}
    if whole is not None and len(firsts) > 1:
        places = {int(number): place for place, number in enumerate(whole.flatten())}
        firsts = {name: places[first] for name, first in firsts.items()}
    return sorted(firsts, key=lambda name: firsts[name])


def _check_order(disk: list[Tensor], module: list[Tensor]) -> None:
    sides = [torch.cat([tensor.flatten() for tensor in side]) for side in (disk, module)]
    if not torch.equal(*sides):
        raise Underivable(f"a weight {list(module[0].shape)} has its numbers in another order on disk")


def _templates(names: list[str], block: str) -> list[str]:
    """The names with `{i}` for the number of the block and, where they are those of experts, `{e}`, each once."""
    general = [re.sub(rf"(?<=\.){block}(?=\.)", "{i}", name, count=1) for name in names]
    if len(general) > 1:
        general = [re.sub(r"(?<=\.)\d+(?=\.)", "{e}", name, count=1) for name in general]
    return list(dict.fromkeys(general))


def _one_or_more(names: list[str]) -> str | tuple[str, ...]:
    return names[0] if len(names) == 1 and "{e}" not in names[0] else tuple(names)


def _shortened(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """One rule for all weights that have the same names on both sides, behind the others."""
    special, beginnings = [], dict[str, None]()
    for rule in rules:
        rest = rule.module.removeprefix("block.") if isinstance(rule.module, str) else None
        if isinstance(rule.disk, str) and rest is not None and rule.disk.endswith("{i}." + rest):
            beginnings[rule.disk.removesuffix(rest)] = None
        else:
            special.append(rule)
    return (*special, *(Rule(f"{beginning}*", "block.*") for beginning in beginnings))
