"""Packages for a machine without a network, from a folder of wheels that was carried along.

Installed is what is not there, and what is there in a version that requirements.txt refuses, where the folder has one
that it takes. torch and transformers are never replaced: they belong to the machine's CUDA, and what is measured is
what is installed. pip looks for what these packages need in the same folder; where it does not find all of it, the
wheels are installed without asking, as one package less is better than none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ranks import ROOT

if TYPE_CHECKING:
    from packaging.requirements import Requirement

HELD = ("torch", "transformers")


def required() -> dict[str, Requirement]:
    """What requirements.txt asks for on this machine, by name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines if (text := line.partition("#")[0].strip())]
    return {canonicalize_name(each.name): each for each in map(Requirement, texts)}


def installed() -> dict[str, str]:
    """The versions of what this python finds, by name."""
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    for each in distributions():
        if each.metadata["Name"]:  # else it is what a broken installation left
            found.setdefault(canonicalize_name(each.metadata["Name"]), each.version)  # the first in the path counts
    return found


def chosen(names: Iterable[str], there: Mapping[str, str], wanted: Mapping[str, Requirement]) -> list[str]:
    """Which of some wheels to install, as `name==version`.

    Args:
        names: of files; other files than wheels for this python are passed over.
        there: versions of what is installed.
        wanted: see `required`.
    """
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    from packaging.version import Version

    supported = set(sys_tags())
    newest: dict[str, Version] = {}
    for file in names:
        try:
            name, version, _, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        asked = wanted.get(name)
        if supported.isdisjoint(tags) or (asked and version not in asked.specifier):
            continue
        satisfied = name in there and (name in HELD or not asked or asked.specifier.contains(there[name], True))
        if not satisfied and (name not in newest or newest[name] < version):
            newest[name] = version
    return [f"{name}=={version}" for name, version in sorted(newest.items())]


def install(folder: Path) -> list[str]:
    """Install what `chosen` says into the environment of this python; what was done, in lines.

    Raises:
        SystemExit: there is no such folder, or pip cannot install.
    """
    if not folder.is_dir():
        sys.exit(f"error: --wheels: {folder} is not there; expected a folder of wheels")
    there = installed()
    missing = chosen([path.name for path in folder.iterdir()], there, required())
    if not missing:
        return [f"wheels: nothing in {folder} is missing"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as held:
        held.writelines(f"{name}=={there[name]}\n" for name in HELD if name in there)
        held.flush()
        complaint = _pip(folder, "--constraint", held.name, *missing)
    lines = [f"wheels: {', '.join(missing)}"]
    if complaint:
        lines.append(f"wheels: installed without what they need, as pip says: {complaint}")
        complaint = _pip(folder, "--no-deps", *missing)
    if complaint:
        sys.exit(f"error: --wheels: pip says: {complaint}")
    return lines


def differences() -> list[str]:
    """What is not as requirements.txt has it, in lines: nobody should read figures without knowing."""
    there = installed()
    absent = [name for name in required() if name not in there]
    others = {name: each for name, each in required().items() if name in there and name not in absent}
    unlike = [
        f"{name} {there[name]} ({each.specifier})"
        for name, each in others.items()
        if not each.specifier.contains(there[name], True)
    ]
    lines = [f"not installed: {', '.join(absent)}"] if absent else []
    return lines + ([f"other than in requirements.txt: {', '.join(unlike)}"] if unlike else [])


def _pip(folder: Path, *words: str) -> str:
    """Let pip install from a folder alone; its complaint, if any, in a line."""
    options = ["--no-index", "--find-links", str(folder.resolve()), "--disable-pip-version-check", "--quiet"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words],
        env=os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1"},  # nobody is there to make a virtual environment
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if not run.returncode:
        return ""
    errors = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    return next((line for line in errors if line.startswith("ERROR")), (errors or ["nothing"])[-1])
