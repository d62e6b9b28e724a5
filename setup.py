"""Build the package: the packages and entry points of this folder, all under the one name `pipetune`.

In a clone `data`, `models`, `options` and `training` are top-level names, as the scripts beside them like it. Installed
they would collide with other people's, so a copy lies inside of `pipetune`, and its imports say so: `from models.spec
import ...` becomes `from pipetune.models.spec import ...`. Nothing else changes; what the code imports by a string it
names by `__name__` or `__package__`. Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

NAME = "pipetune"
PACKAGES = ("common", "data", "models", "options", "training")
SCRIPTS = ("train_ds.py", "train_ds_zero.py", "convert_model.py", "demo.py")


class BuildUnderOneName(build_py):
    """Copy the packages as setuptools does, then the entry points, and rename what they import."""

    def run(self) -> None:
        if self.editable_mode:
            raise SystemExit("a clone runs as it is: python train_ds.py ...; expected pip install . without -e")
        super().run()
        package = Path(self.build_lib) / NAME
        for script in SCRIPTS:
            self.copy_file(script, str(package / script))
        self.copy_tree("configs", str(package / "configs"))  # for `pipetune init`
        for path in package.rglob("*.py"):
            path.write_text(renamed(path.read_text(encoding="utf-8"), path), encoding="utf-8")


def renamed(source: str, path: Path) -> str:
    """Return the source with every import of a package under the one name."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and top(node.module or "") in PACKAGES:
            line, place = node.lineno - 1, node.col_offset + len("from ")
            lines[line] = f"{lines[line][:place]}{NAME}.{lines[line][place:]}"
        elif isinstance(node, ast.Import) and any(top(each.name) in PACKAGES for each in node.names):
            raise SystemExit(f"{path}: line {node.lineno}: expected from ... import ..., which can be renamed")
    return "".join(lines)


def top(name: str) -> str:
    return name.partition(".")[0]


def requirements(kind: str = "") -> list[str]:
    """Read the packages of a file of requirements, without its comments and options."""
    lines = Path(f"requirements{kind}.txt").read_text(encoding="utf-8").splitlines()
    return [package for line in lines if (package := line.partition("#")[0].strip()) and not package.startswith("-")]


def description() -> str:
    """Return README.md without pictures and links that lead to files of the clone."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    install_requires=requirements(),
    extras_require={
        "dev": requirements("-dev"),
        "gpu": requirements("-gpu"),
        "onnx": [each for each in requirements("-dev") if each.startswith("onnx")],
        "qlora": [each for each in requirements("-dev") if each.startswith("bitsandbytes")],
        "wandb": ["wandb"],
        "swanlab": ["swanlab"],
        "mlflow": ["mlflow"],
        "datasets": ["datasets>=4"],
    },
    packages=[NAME, *(f"{NAME}.{each}" for each in find_packages() if top(each) in PACKAGES)],
    package_dir={NAME: NAME} | {f"{NAME}.{part}": part for part in PACKAGES},
    package_data={"": ["*.json", "*.yml"]},
    cmdclass={"build_py": BuildUnderOneName},
)
