"""The product's expressions do one thing each, so that a line can be read at once.

Nothing is chosen within a choice, counted or indexed by a truth value, or looped over twice in one comprehension: such
things get a statement or a name of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import chain

import pytest

from tests.conftest import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def test_an_expression_does_one_thing() -> None:
    folders = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    paths = [*ROOT.glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    for folder in folders:
        paths += folder.rglob("*.py")
    assert len(paths) > 300
    found = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        faults = _faults(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{name}:{line}: {fault}" for line, fault in faults]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("a if b else c if d else e", "a conditional expression within another"),
        ("[a if b else c] if d else e", "a conditional expression within another"),
        ("'s' * (count != 1)", "a truth value as a factor"),
        ("(not a) * b", "a truth value as a factor"),
        ("' ' * bool(a)", "a truth value as a factor"),
        ("words[a > b]", "a truth value as an index"),
        ("words[: not a]", "a truth value as an index"),
        ("words[a and b > c]", "a truth value as an index"),
        ("[a for b in c for a in b]", "a comprehension over two things"),
        ("[[a for a in b] for b in c]", "a comprehension within another's element"),
        ("{a: sum(b for b in a) for a in c}", "a comprehension within another's element"),
    ],
)
def test_what_does_two_things_is_found(code: str, fault: str) -> None:
    assert [found for _, found in _faults(ast.parse(code))] == [fault]


@pytest.mark.parametrize(
    "code",
    ["a if b else c", "count * (given or 1)", "words[a:b]", "count += a != b", "[a for a in [b for b in c if d]]"],
)
def test_what_does_one_thing_is_not(code: str) -> None:
    assert list(_faults(ast.parse(code))) == []


def _faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every fault in a file's syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and _has(ast.iter_child_nodes(node), ast.IfExp):
            yield node.lineno, "a conditional expression within another"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and (_true(node.left) or _true(node.right)):
            yield node.lineno, "a truth value as a factor"
        elif isinstance(node, ast.Subscript) and any(map(_true, _indices(node))):
            yield node.lineno, "a truth value as an index"
        elif isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield node.lineno, "a comprehension over two things"
        elif isinstance(node, COMPREHENSIONS) and _has(_elements(node), *COMPREHENSIONS):
            yield node.lineno, "a comprehension within another's element"


def _has(parts: Iterable[ast.AST], *kinds: type[ast.AST]) -> bool:
    """Say whether something of these kinds lies in parts of an expression."""
    return any(isinstance(inner, kinds) for inner in chain.from_iterable(map(ast.walk, parts)))


def _elements(node: ast.AST) -> list[ast.AST]:
    """Return what a comprehension makes of each thing: an element, or a key and a value."""
    parts = (getattr(node, name, None) for name in ("elt", "key", "value"))
    return [part for part in parts if isinstance(part, ast.AST)]


def _indices(node: ast.Subscript) -> list[ast.expr | None]:
    place = node.slice
    return [place.lower, place.upper, place.step] if isinstance(place, ast.Slice) else [place]


def _true(node: ast.AST | None) -> bool:
    """Say whether an expression is a truth value, as far as its syntax tells."""
    if isinstance(node, ast.BoolOp):
        return any(map(_true, node.values))
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, bool)
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    is_made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    return is_constant or is_not or is_made or isinstance(node, ast.Compare)
