"""Packages for a machine without a network: collect their wheels here, install them there.

`python -m benchmarks.wheels FOLDER` downloads what a machine lacks (its packages: benchmarks/gpu_machine.txt, or
`--have FILE`), every dependency of a dependency included. `--wheels FOLDER` of `benchmarks.gpu` installs there what is
missing, and what is there in a version that requirements.txt refuses. torch and transformers are never replaced: they
belong to the machine's CUDA, and what is measured is what is installed. Where pip does not find all that the packages
need, they are installed without asking; what is really missing then shows when everything is imported, before any
measurement.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.workers import ROOT, environment

if TYPE_CHECKING:
    from packaging.requirements import Requirement

HELD = ("torch", "transformers")
MACHINE = Path(__file__).with_name("gpu_machine.txt")
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
"""
EXTRAS = ("hypothesis", "torchao", "liger-kernel")  # for the kernels' tests, fp8 and the comparison with Liger
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def required() -> dict[str, Requirement]:
    """Return what requirements.txt asks for on this machine, by name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines if (text := line.partition("#")[0].strip())]
    return {canonicalize_name(each.name): each for each in map(Requirement, texts)}


def collect(folder: Path, have: Path, python: str) -> list[Path]:
    """Download into a folder what a machine lacks; all its wheels.

    Args:
        have: a file of the machine's packages, one `name==version` or `name` a line.
        python: the machine's, as in 3.12.

    Raises:
        SystemExit: a package has no wheel for that machine.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename

    lines = (line.partition("#")[0].partition("==") for line in have.read_text(encoding="utf-8").splitlines())
    there = {canonicalize_name(name.strip()): version.strip() for name, _, version in lines if name.strip()}
    target = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    asked = [*required().values(), *map(Requirement, EXTRAS)]
    folder.mkdir(parents=True, exist_ok=True)
    while asked:
        need = asked.pop(0)
        name = canonicalize_name(need.name)
        if need.marker and not need.marker.evaluate(target):
            continue
        if name in there and (name in HELD or not there[name] or need.specifier.contains(there[name], True)):
            continue
        wheel = _download(str(need.specifier), name, folder, python)
        there[name] = str(parse_wheel_filename(wheel.name)[1])
        asked += map(Requirement, _needs(wheel))
    return sorted(folder.glob("*.whl"))


def _download(versions: str, name: str, folder: Path, python: str) -> Path:
    """A package's wheel for the other machine; built here where it has none and is pure Python, as DeepSpeed is."""
    where = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform in PLATFORMS:
        where += ["--platform", platform]
    with tempfile.TemporaryDirectory() as made:
        _, complaint = _pip("download", "--no-deps", "--dest", made, *where, name + versions)
        if complaint:
            _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, name + versions)
        found = [path for path in Path(made).glob("*.whl") if not complaint or path.name.endswith("-none-any.whl")]
        if not found:
            sys.exit(f"error: {name}{versions}: no wheel for Python {python}: {complaint}")
        return Path(shutil.move(found[0], folder / found[0].name))


def _needs(wheel: Path) -> list[str]:
    """Return the requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


def check_imports() -> None:
    """Import everything that the ways need, once, before any of them starts.

    Raises:
        SystemExit: a package is missing or broken; the line names it.
    """
    owners = packages_distributions()
    wanted = required()
    absent = sorted(wanted.keys() - installed().keys())
    if absent:
        sys.exit(f"error: not installed: {', '.join(absent)}; collect them with python -m benchmarks.wheels FOLDER")
    from packaging.utils import canonicalize_name

    modules = {
        module
        for module, names in owners.items()
        # xxhash 3.8.2 lists _xxhash in top_level.txt and has no such module: what is private is imported by its owner.
        if module.isidentifier() and not module.startswith("_") and wanted.keys() & set(map(canonicalize_name, names))
    }
    words = [*sorted(modules), "benchmarks.gpu_worker", "training.job", "transformers.trainer"]
    command = [sys.executable, "-c", IMPORT_EACH, *words]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"error: cannot import {(run.stderr.strip() or 'anything').splitlines()[-1]}")


def installed() -> dict[str, str]:
    """List the versions of what this python finds, by name."""
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    for each in distributions():
        if each.metadata["Name"]:  # else it is what a broken installation left
            found.setdefault(canonicalize_name(each.metadata["Name"]), each.version)  # the first in the path counts
    return found


def install(folder: Path) -> list[str]:
    """Let pip install what is missing, or there in a version that requirements.txt refuses; return lines for the log.

    Raises:
        SystemExit: there is no such folder, or pip cannot install.
    """
    from packaging.utils import canonicalize_name

    if not folder.is_dir():
        sys.exit(f"error: --wheels: {folder} is not there; expected a folder of wheels")
    there, wanted = installed(), required()
    names = {canonicalize_name(path.name.partition("-")[0]) for path in folder.glob("*.whl")}
    packages = [str(wanted.get(name, name)) for name in sorted(names - {name for name in HELD if name in there})]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as held:
        held.writelines(f"{name}=={there[name]}\n" for name in HELD if name in there)
        held.flush()
        words = ["--no-index", "--find-links", str(folder.resolve()), "--constraint", held.name, *packages]
        done, complaint = _pip("install", *words) if packages else ("", "")
        lines = [f"wheels: installed without what they need, as pip says: {complaint}"] if complaint else []
        if complaint:
            done, complaint = _pip("install", "--no-deps", *words)
    if complaint:
        sys.exit(f"error: --wheels: pip says: {complaint}")
    return [f"wheels: {done or f'nothing in {folder} is missing'}", *lines]


def differences() -> list[str]:
    """List what is not as requirements.txt has it: nobody should read figures without knowing."""
    there, wanted = installed(), required()
    absent = [name for name in wanted if name not in there]
    unlike = [
        f"{name} {there[name]} ({each.specifier})"
        for name, each in wanted.items()
        if name in there and not each.specifier.contains(there[name], True)
    ]
    lines = [f"not installed: {', '.join(absent)}"] if absent else []
    return lines + ([f"other than in requirements.txt: {', '.join(unlike)}"] if unlike else [])


def _pip(command: str, *words: str) -> tuple[str, str]:
    """Run pip; return what it installed, and its complaint if it failed."""
    run = subprocess.run(
        [sys.executable, "-m", "pip", command, "--disable-pip-version-check", *words],
        # Some images forbid installing beside the system's packages; DeepSpeed's wheel is made without its kernels.
        env=os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1", "DS_BUILD_OPS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    if run.returncode:
        return "", next((line for line in lines if line.startswith("ERROR")), (lines or ["nothing"])[-1])
    done = [line for line in lines if line.startswith("Successfully installed")]
    return (done or [""])[0].removeprefix("Successfully installed "), ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wheels", description="Collect what a machine lacks.")
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--have", type=Path, default=MACHINE, help="the machine's packages, one name==version a line")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python (%(default)s)")
    chosen = parser.parse_args()
    wheels = collect(chosen.folder, chosen.have, chosen.python)
    sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in wheels}
    for name, size in sizes.items():
        print(f"{size:6.1f} MB  {name}")
    print(f"{sum(sizes.values()):6.1f} MB  in all")


if __name__ == "__main__":
    main()
