"""No module imports itself through others, not even inside of functions.

Imports for type checking alone do not count: a hook's arguments (`training.callbacks`) are what calls it.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_import_runs_in_a_circle() -> None:
    packages = "models", "data", "training", "common", "quickstart", "benchmarks"
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "models.layers" in imports["models.spec"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
