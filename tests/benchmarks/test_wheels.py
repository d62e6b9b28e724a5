"""What of a folder of wheels is installed: what is missing or refused, never torch or transformers."""

from __future__ import annotations

import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from benchmarks import wheels


class Places(NamedTuple):
    """Folders of this test: wheels, where packages are found, and where pip installs."""

    wheels: Path
    there: Path
    target: Path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Keep pip away from the tests' own environment."""
    found = Places(tmp_path / "wheels", tmp_path / "there", tmp_path / "target")
    found.wheels.mkdir()
    found.there.mkdir()
    monkeypatch.setenv("PIP_PREFIX", str(found.target))
    monkeypatch.setenv("PIP_NO_WARN_CONFLICTS", "1")
    monkeypatch.setenv("PYTHONPATH", str(found.there))
    monkeypatch.syspath_prepend(str(found.there))
    pure = sysconfig.get_path("purelib", vars={"base": str(found.target)})
    return found._replace(target=Path(pure))


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> Path:
    """A real wheel with one module."""
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for file, text in {**files, f"{about}/RECORD": record}.items():
            made.writestr(file, text)
    return wheel


def put_there(places: Places, name: str, version: str) -> None:
    with zipfile.ZipFile(make_wheel(places.there, name, version)) as wheel:
        wheel.extractall(places.there)


def test_what_is_missing_or_refused_is_installed_with_what_it_needs(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"pipetune-refused": ">=2", "pipetune-other": ">=1", "torch": ">=90"}
    monkeypatch.setattr(wheels, "required", lambda: {name: Requirement(name + wanted[name]) for name in wanted})
    make_wheel(places.wheels, "pipetune_missing", "1.5", needs="pipetune_deeper>=2")
    make_wheel(places.wheels, "pipetune_deeper", "2.0")
    make_wheel(places.wheels, "torch", "99.0")
    for name in ("pipetune_refused", "pipetune_other"):
        put_there(places, name, "1.0")
        make_wheel(places.wheels, name, "2.5")
    (line,) = wheels.install(places.wheels)
    assert line.startswith("wheels: ")
    installed = {"pipetune_missing", "pipetune_deeper", "pipetune_refused"}
    assert {path.stem for path in places.target.glob("*.py")} == installed
    assert {word.rpartition("-")[0].replace("-", "_") for word in line.split()[1:]} == installed


def test_without_what_a_package_needs_it_is_installed_all_the_same(places: Places) -> None:
    make_wheel(places.wheels, "pipetune_missing", "1.5", needs="pipetune_nowhere")
    done, complaint = wheels.install(places.wheels)
    assert "missing-1.5" in done
    assert complaint.startswith("wheels: installed without what they need, as pip says: ERROR: ")
    assert "pipetune_nowhere" in complaint.replace("-", "_")
    assert (places.target / "pipetune_missing.py").is_file()


def test_a_folder_without_anything_new_and_one_that_is_not_there(tmp_path: Path) -> None:
    assert wheels.install(tmp_path) == [f"wheels: nothing in {tmp_path} is missing"]
    with pytest.raises(SystemExit, match=r"^error: --wheels: .*nowhere is not there; expected a folder of wheels$"):
        wheels.install(tmp_path / "nowhere")


def test_what_differs_from_the_requirements_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: version for name, version in wheels.installed().items() if name != "gguf"}
    monkeypatch.setattr(wheels, "installed", lambda: there | {"transformers": "4.57.0"})
    absent, other = wheels.differences()
    assert absent == "not installed: gguf"
    assert f"transformers 4.57.0 ({wheels.required()['transformers'].specifier})" in other


@pytest.mark.parametrize(
    ("there", "line"),
    [
        (True, "cannot import pipetune_broken: ModuleNotFoundError: No module named 'pipetune_deeper'"),
        (False, "not installed: pipetune-broken; collect"),
    ],
)
def test_what_is_missing_or_broken_ends_it_once_by_its_name(
    there: bool, line: str, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        put_there(places, "pipetune_broken", "1.0")
        (places.there / "pipetune_broken.py").write_text("import pipetune_deeper\n", encoding="utf-8")
    monkeypatch.setattr(wheels, "required", lambda: {"pipetune-broken": Requirement("pipetune-broken")})
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        wheels.check_imports()


@pytest.mark.slow
def test_a_private_module_that_a_package_only_lists_is_not_asked_for(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_there(places, "pipetune_lists", "1.0")
    about = places.there / "pipetune_lists-1.0.dist-info"
    (about / "top_level.txt").write_text("_pipetune_lists\npipetune_lists\n", encoding="utf-8")
    monkeypatch.setattr(wheels, "required", lambda: {"pipetune-lists": Requirement("pipetune-lists")})
    wheels.check_imports()
