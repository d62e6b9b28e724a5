"""Which architectures vLLM and SGLang have a class of their own for, read from their wheels without installing them.

`pip download --no-deps vllm==0.32.0 sglang==0.5.23`, then `python -m benchmarks.server_classes *.whl` writes
benchmarks/server_classes.json, from which `benchmarks.families` takes a column. Nothing of the wheels is run: vLLM
lists its classes in a table, SGLang names them at the end of each file. Other architectures both run, where they can,
with transformers' class.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

CLASSES = Path(__file__).with_suffix(".json")
VLLM = "vllm/model_executor/models/registry.py"
VLLM_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
SGLANG = "sglang/srt/models/"
SGLANG_NAME = "EntryClass"


def assigned(source: str) -> Iterator[tuple[str, ast.expr]]:
    """What a module assigns to names, unread."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def classes_of(wheel: Path) -> list[str]:
    """The architectures that a server's wheel has classes for, by the names in config.json's `architectures`."""
    found: set[str] = set()
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name != VLLM and not (name.startswith(SGLANG) and name.endswith(".py")):
                continue
            for target, value in assigned(archive.read(name).decode()):
                if target in VLLM_TABLES and isinstance(value, ast.Dict):
                    found |= {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
                elif target == SGLANG_NAME:
                    classes = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
                    found |= {each.id for each in classes if isinstance(each, ast.Name)}
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="List the architectures that servers have classes for.")
    parser.add_argument("wheels", type=Path, nargs="+")
    found = {" ".join(wheel.name.split("-")[:2]): classes_of(wheel) for wheel in parser.parse_args().wheels}
    CLASSES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print({server: len(names) for server, names in found.items()})


if __name__ == "__main__":
    main()
