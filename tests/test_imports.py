"""No module imports itself through others, not even inside of functions.

Imports for type checking alone do not count: a hook's arguments (`training.callbacks`) are what calls it.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.conftest import ROOT

PRODUCT = ("common", "data", "models", "options", "training")


def test_no_import_runs_in_a_circle() -> None:
    packages = "options", "models", "data", "training", "common", "quickstart", "benchmarks"
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "models.layers" in imports["models.spec"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "limit"), [("training.job", 100), ("training.option", 110), ("options.planner.planning", 200)]
)
def test_a_job_and_its_options_are_read_without_the_reading_of_records(module: str, limit: int) -> None:
    """Types count: what a hook or an objective is given has an interface of its own (an evening's reading)."""
    graph = grimp.build_graph(*PRODUCT, cache_dir=None)
    named = graph.find_upstream_modules(module)
    assert len(named) < limit
    foreign = ["data.chat.chat_template", "data.records", "data.tokenized", "models.api", "training.api"]
    foreign += ["training.language_model"]
    if not module.startswith("options."):
        foreign += ["options", "models.derived"]
    assert [name for name in sorted(named) if name.startswith(tuple(foreign))] == []


def test_no_import_is_written_as_a_string() -> None:
    """The graph above would not see it."""
    found = []
    for path in (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
            if name in ("import_module", "__import__") and isinstance(call.args[0], ast.Constant | ast.JoinedStr):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found == []


def test_no_two_classes_share_a_name() -> None:
    """A search for a name finds one thing."""
    places: dict[str, list[str]] = {}
    for path in (path for package in (*PRODUCT, "quickstart", "pipetune") for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
