"""Print the test files that reach, by imports, what has changed since the branch `main`: `make test-for` runs them.

What a test does not import counts where it is known: conftest.py of its folders, and the files of tests that it starts.
Whatever else has changed (a script at the top, a file of data) is said, as imports know nothing of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# How a file names what its processes run: a script, or a worker of the shared ones.
STARTED = re.compile(r'"tests/workers/(\w+)\.py"|\branks\.(?:run|run_all|jobs)\([^"\n]*"(\w+)"')


def affected(changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the test files that reach changed files, and the changed files that no test is known to reach.

    Args:
        changed: paths below the project's folder, as in git.
    """
    graph = _graph()
    tests: set[str] = set()
    unknown = []
    for path in changed:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        reached: set[str] = set()
        if path.endswith(".py") and module in graph.modules:
            # Whoever imports a module of a package runs the package's __init__.py, too.
            is_package = path.endswith("/__init__.py")
            reached = graph.find_downstream_modules(module, as_package=is_package) | {module}
        files = {f"{name.replace('.', '/')}.py" for name in reached if name.split(".")[-1].startswith("test_")}
        if path.endswith(".md"):
            files = {"tests/docs"}
        tests |= files
        if not files:
            unknown.append(path)
    return sorted(tests), unknown


@cache
def _graph() -> grimp.ImportGraph:
    """Build the graph of imports, with what tests get without importing it."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    graph.remove_import(importer="tests.conftest", imported="tests.ranks")  # of a fixture that few tests take
    graph.add_import(importer="tests.ranks", imported="tests.workers.cases")
    for path in (ROOT / "tests").rglob("*.py"):
        place = path.relative_to(ROOT)
        module = ".".join(place.with_suffix("").parts)
        given: set[str] = set()
        if path.name.startswith("test_"):
            folders = [folder for folder in place.parents if (ROOT / folder / "conftest.py").exists()]
            given = {".".join((*folder.parts, "conftest")) for folder in folders}
        text = path.read_text(encoding="utf-8")
        given |= {f"tests.workers.{script or worker}" for script, worker in STARTED.findall(text)}
        if "ranks.jobs(" in text or "ranks.train(" in text:
            given.add("tests.workers.jobs")
        for imported in given & graph.modules:
            graph.add_import(importer=module, imported=imported)
    return graph


def _changed() -> list[str]:
    """List what differs from where this branch left `main`, and what git does not know yet."""
    base = _git("merge-base", "main", "HEAD")[0]
    return _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")


def _git(*words: str) -> list[str]:
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"error: git {' '.join(words)}: {result.stderr.strip()}")
    return result.stdout.splitlines()


if __name__ == "__main__":
    tests, unknown = affected(_changed())
    if unknown:
        print(f"no test is known to reach: {', '.join(unknown)}", file=sys.stderr)
    print("\n".join(tests))
