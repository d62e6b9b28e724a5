"""Data sets by their names on the hub: what `datasets` is asked for, and what is said where it cannot be."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from data.errors import DataError
from data.records.sources import files_of
from data.settings import Source
from tests.environments import environment
from tests.hub import COMMIT, NAME, TAGGED, serving
from tests.launching import run

GET = f"hf download --repo-type dataset {NAME}"


class FakeDatasets(ModuleType):
    """The part of the package that is called; it notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[Any] = []
        self.offline = False

    def load_dataset(self, name: str, subset: str | None, split: str, revision: str | None) -> Any:
        self.asked.append((name, subset, split, revision))
        if split == "dev":
            raise ValueError("Unknown split 'dev'.\nShould be one of ['train', 'test'].")
        folder = f"/cache/{COMMIT if self.offline else revision or COMMIT}"
        return SimpleNamespace(cache_files=[{"filename": f"{folder}/{split}-{number}.arrow"} for number in range(2)])


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDatasets:
    module, version = FakeDatasets(), metadata.version
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(metadata, "version", lambda name: "5.2.0" if name == "datasets" else version(name))
    return module


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"path": NAME}, (NAME, None, "train", None)),
        ({"path": f"{NAME}@{TAGGED}"}, (NAME, None, "train", TAGGED)),
        ({"path": NAME, "split": "test", "subset": "main"}, (NAME, "main", "test", None)),
    ],
)
def test_a_name_stands_for_the_files_in_the_cache(
    keys: dict[str, str], asked: tuple[str | None, ...], datasets: FakeDatasets
) -> None:
    files = files_of(Source.model_validate(keys))
    assert [file.name for file in files] == [f"{asked[2]}-0.arrow", f"{asked[2]}-1.arrow"]
    assert datasets.asked == [asked]


def test_another_revision_in_the_cache_is_none(datasets: FakeDatasets) -> None:
    datasets.offline = True  # where the package takes the newest that it has
    assert files_of(Source(path=f"{NAME}@{COMMIT}"))
    with pytest.raises(DataError, match="only another revision is in the cache"):
        files_of(Source(path=f"{NAME}@{TAGGED}"))


def test_what_is_here_wins(datasets: FakeDatasets, tmp_path: Path) -> None:
    (tmp_path / "someone").mkdir()
    (tmp_path / NAME).write_text("{}")
    assert files_of(Source(path=NAME)) == [Path(NAME)]
    for path in ("someone/other", "elsewhere/records.jsonl", "../a/b"):
        with pytest.raises(DataError, match=r"not found; expected a file, a folder or a glob$"):
            files_of(Source(path=path))
    with pytest.raises(DataError, match="no name on the hub; expected neither split nor subset"):
        files_of(Source(path=NAME, split="test"))
    assert datasets.asked == []


def test_what_the_hub_refuses_is_one_line(datasets: FakeDatasets) -> None:
    with pytest.raises(DataError, match=r"Unknown split 'dev'. Should be one of") as caught:
        files_of(Source(path=f"{NAME}@{COMMIT}", split="dev"))
    assert f"{GET} --revision {COMMIT} --local-dir FOLDER" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [None, "3.6.0"])
def test_a_missing_package_or_one_that_runs_code_is_named(
    version: str | None, datasets: FakeDatasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    with pytest.raises(DataError, match=r"pip install 'datasets>=4'") as caught:
        files_of(Source(path=NAME))
    assert f"{GET} --local-dir FOLDER" in str(caught.value)
    assert datasets.asked == []


LISTED = """
import sys
from data.records.sources import files_of
from data.settings import Source
for words in sys.argv[1:]:
    path, _, split = words.partition(":")
    print(*files_of(Source(path=path, split=split or None)))
"""


@pytest.mark.longest
def test_the_real_package_fetches_once_and_does_without_a_network(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "datasets>=4")
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "set" / "data" / f"{split}.jsonl").write_text(f'{{"question": "{split}?", "answer": "Yes."}}\n')
    sent: list[str] = []
    words = (python, "-c", LISTED, NAME, f"{NAME}@v1", f"{NAME}:test")
    with serving(tmp_path / "set", sent) as address:
        around = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        done = run(*words, **around)
    assert done.returncode == 0, done.stderr
    first, tagged, test = (Path(line) for line in done.stdout.splitlines())
    assert first.is_file() and first.parent == test.parent and COMMIT in first.parts and TAGGED in tagged.parts
    assert sorted(sent) == ["test.jsonl", "train.jsonl"]
    again = run(python, "-c", LISTED, f"{NAME}@{TAGGED}", **around, HF_HUB_OFFLINE="1")
    assert again.stdout.strip() == str(tagged)
