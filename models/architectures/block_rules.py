"""Which rules of a family's blocks a checkpoint goes by, as the names in it show.

What a rule stores in a form of its own, as each expert for itself, may lie on disk as the modules have it too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from models.family import Family, Rule


def pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a name with `{i}`, `{e}` and `*`."""
    escaped = re.escape(template)
    for mark, group in ((r"\{i\}", r"(?P<i>\d+)"), (r"\{e\}", r"(?P<e>\d+)"), (r"\*", r"(?P<rest>.+)")):
        escaped = escaped.replace(mark, group)
    return re.compile(escaped)


def block_rules(family: Family, names: Collection[str]) -> tuple[Rule, ...]:
    """The rules of a family that fit what lies on disk; all that it has for itself where nothing shows.

    Args:
        names: on disk, in the family's spelling.
    """

    def lie_there(templates: Iterable[str]) -> bool:
        return any(each.fullmatch(name) for each in map(pattern, templates) for name in names)

    begin = [rule.disk_names[0].removesuffix("*") for rule in family.block if rule.module == "block.*"]

    def as_modules(rule: Rule) -> list[str]:
        return [each + name.removeprefix("block.") for each in begin for name in rule.module_names]

    in_whole = (rule for rule in family.block_in_whole if lie_there(rule.disk_names))
    block = (rule for rule in family.block if lie_there(rule.disk_names) or not lie_there(as_modules(rule)))
    return (*in_whole, *block)
