"""What of a folder of wheels is installed: what is missing, never torch or transformers."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks import wheels

WANTED = {
    name: Requirement(text)
    for name, text in {
        "torch": "torch>=2.11,<=2.13.0",
        "transformers": "transformers==5.23.0",
        "pydantic": "pydantic==2.14.3",
        "numpy": "numpy>=2.2,<3",
        "lion-pytorch": "lion-pytorch==0.2.5",
    }.items()
}


def wheel(name: str, version: str, tags: str = "py3-none-any") -> str:
    return f"{name}-{version}-{tags}.whl"


def test_what_is_missing_or_refused_is_chosen() -> None:
    there = {"pydantic": "2.12.0", "numpy": "2.3.0", "packaging": "24.0"}
    names = [
        wheel("pydantic", "2.14.3"),  # there in a version that is refused
        wheel("numpy", "2.4.6"),  # there in another one that will do
        wheel("lion_pytorch", "0.2.5"),  # missing, under its other spelling
        wheel("hjson", "3.1.0"),  # missing, and needed by others only
        wheel("hjson", "3.0.0"),  # older
        wheel("packaging", "26.3"),  # there, and no requirement of its own
        "README.txt",
        "deepspeed-0.19.8.tar.gz",
    ]
    assert wheels.chosen(names, there, WANTED) == ["hjson==3.1.0", "lion-pytorch==0.2.5", "pydantic==2.14.3"]


def test_torch_and_transformers_are_never_replaced() -> None:
    names = [wheel("torch", "2.13.0"), wheel("transformers", "5.23.0")]
    assert wheels.chosen(names, {"torch": "2.11.0+cu128", "transformers": "5.17.0"}, WANTED) == []
    assert wheels.chosen(names, {"torch": "2.9.0"}, WANTED) == ["transformers==5.23.0"]


def test_wheels_for_another_python_and_refused_versions_are_passed_over() -> None:
    names = [
        wheel("zstandard", "0.25.0", "cp27-cp27m-manylinux2014_x86_64"),
        wheel("zstandard", "0.25.0", "cp310-cp310-win_amd64"),
        wheel("lion_pytorch", "0.3.0"),
    ]
    assert wheels.chosen(names, {}, WANTED) == []


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    """A real wheel with one module."""
    about = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / wheel(name, version), "w") as made:
        for file, text in {**files, f"{about}/RECORD": record}.items():
            made.writestr(file, text)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip installs in this test, instead of the tests' own environment."""
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    monkeypatch.setenv("PIP_NO_WARN_CONFLICTS", "1")
    return tmp_path / "target"


def test_pip_installs_what_is_chosen_and_what_that_needs(tmp_path: Path, target: Path) -> None:
    make_wheel(tmp_path, "pipetune_missing", "1.5", needs="pipetune_deeper>=2")
    make_wheel(tmp_path, "pipetune_deeper", "2.0")
    make_wheel(tmp_path, "torch", "99.0")
    assert wheels.install(tmp_path) == ["wheels: pipetune-deeper==2.0, pipetune-missing==1.5"]
    assert sorted(path.name for path in target.glob("*.py")) == ["pipetune_deeper.py", "pipetune_missing.py"]


def test_without_what_a_package_needs_it_is_installed_all_the_same(tmp_path: Path, target: Path) -> None:
    make_wheel(tmp_path, "pipetune_missing", "1.5", needs="pipetune_nowhere")
    done, complaint = wheels.install(tmp_path)
    assert done == "wheels: pipetune-missing==1.5"
    assert complaint.startswith("wheels: installed without what they need, as pip says: ERROR: ")
    assert "pipetune_nowhere" in complaint.replace("-", "_")
    assert (target / "pipetune_missing.py").is_file()


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
    there: bool, line: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        make_wheel(tmp_path, "pipetune_broken", "1.0")
        wheels.install(tmp_path)
        (target / "pipetune_broken.py").write_text("import pipetune_deeper\n", encoding="utf-8")
        (target / "pipetune_broken-1.0.dist-info" / "top_level.txt").write_text("pipetune_broken\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(target))
        monkeypatch.setenv("PYTHONPATH", str(target))
    monkeypatch.setattr(wheels, "required", lambda: {"pipetune-broken": Requirement("pipetune-broken")})
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        wheels.check_imports()
