"""No module imports, through whatever others, itself: also not where types are checked only, or inside of functions."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_import_runs_in_a_circle() -> None:
    graph = grimp.build_graph("models", "data", "training", "common", "quickstart", "benchmarks", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "models.layers" in imports["models.spec"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
