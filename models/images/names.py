"""How checkpoints name the weights of a tower and its projector: as transformers itself writes them.

transformers' model of the real size is made on the meta device and its names are converted as for a checkpoint; a
tensor that comes out as the same object was renamed and no more. Any other is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from models.derived.outline import Underivable
from models.family import EYES, Rule
from models.images.eyes import whole_class, without_blocks

Pair = tuple[str, str]  # how names on disk begin, and in the base model


def rules_of(config: PreTrainedConfig, parts: Iterable[str]) -> tuple[Rule, ...]:
    """Learn the rules for the weights of some parts, and of the base model itself.

    For each weight there are several: as published, as transformers writes a model that it did not read, and as it has
    them in memory, which programs write that know of no conversion.
    """
    with torch.device("meta"):
        whole = whole_class(config)(without_blocks(config))
    base, state = f"{whole.base_model_prefix}.", whole.state_dict()
    own = [name for name in state if name.startswith(base)]
    own = [name for name in own if name.split(".")[1] in parts or name.count(".") == 1]

    fresh = revert_weight_conversion(whole, dict(state))
    whole._weight_conversions = get_model_conversion_mapping(whole, add_legacy=False)
    published = revert_weight_conversion(whole, dict(state))

    rules = dict[Rule, None]()
    for written in (published, fresh, state):
        names = {id(tensor): name for name, tensor in written.items()}
        if other := [name for name in own if id(state[name]) not in names]:
            raise Underivable(f"{type(whole).__name__} stores {other[0]} in another form; expected it as it is")
        pairs = dict.fromkeys(beginnings(names[id(state[name])], name.removeprefix(base)) for name in own)
        # The longest beginning fits alone.
        for disk, inside in sorted(pairs, key=lambda pair: -len(pair[1])):
            rules |= {Rule(disk, f"{EYES}.{inside}", beside=True): None}
    return tuple(rules)


def written_names(config: PreTrainedConfig) -> list[str]:
    """Name the tensors that transformers writes of a whole model that it did not read, a tied weight once."""
    with torch.device("meta"):
        whole = whole_class(config)(config)
    kept, doubled = dict(whole.named_parameters()), dict(whole.named_parameters(remove_duplicate=False))
    state = {name: each for name, each in whole.state_dict().items() if name in kept or name not in doubled}
    return list(revert_weight_conversion(whole, state))


def beginnings(disk: str, own: str) -> Pair:
    """Cut what two names end with alike, but for their first words, and put `*` in its place."""
    rest = own.split(".")[1:]
    while rest and not disk.endswith("." + ".".join(rest)):
        rest = rest[1:]
    if not rest:
        return disk, own
    end = ".".join(rest)
    return disk.removesuffix(end) + "*", own.removesuffix(end) + "*"


def frozen_names(rules: Iterable[Rule], spared: Iterable[str]) -> tuple[str, ...]:
    """Make regular expressions for the names on disk of all that rules name, but for some modules' weights.

    Args:
        spared: beginnings of names in the first layer.
    """
    found: dict[str | tuple[str, ...], str] = {}
    for rule in rules:
        begin, own = (side[0].removesuffix("*") for side in (rule.disk_names, rule.module_names))
        if rule.module in found or any(own.startswith(each) for each in spared):
            continue
        apart = [re.escape(each.removeprefix(own)) for each in spared if each.startswith(own)]
        found[rule.module] = f"^{re.escape(begin)}" + (f"(?!{'|'.join(apart)})" if apart else "")
    return tuple(found.values())
