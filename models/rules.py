"""Choose the rules of a family's naming table that fit the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import product

from models.family import Family, Rule


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
