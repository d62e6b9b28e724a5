"""Entries of data_path: which files they mean, and how much of each an epoch takes."""

from __future__ import annotations

import bz2
import glob
import lzma
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from data.errors import DataError
from data.records import sources
from data.records.sources import as_sources, files_of, mixture
from data.settings import Source
from tests.data.helpers import read


def place(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def listed(folder: Path, pattern: str = "") -> tuple[list[str], list[str]]:
    """The files of a folder or a glob in it, and the lines that tell about the others."""
    lines: list[str] = []
    files = files_of(Source(path=str(folder / pattern)), lines.append)
    return [str(file.relative_to(folder)) for file in files], lines


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        files_of(Source(path=str(path)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_is_a_file_a_glob_a_folder_or_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path, *"b.jsonl a.json.gz c.parquet d.TSV e.ndjson.zst README.md x[1].json deep/f.json".split())
    monkeypatch.chdir(tmp_path)

    def names(path: str | list[str]) -> list[str]:
        return [file.name for file in files_of(Source(path=path))]

    assert names("b.jsonl") == ["b.jsonl"]
    assert names("README.md") == ["README.md"]  # who names a file wants it
    assert names(str(tmp_path)) == ["a.json.gz", "b.jsonl", "c.parquet", "d.TSV", "e.ndjson.zst", "x[1].json"]
    assert names("x[1].json") == ["x[1].json"]
    assert names("?.json*") == ["a.json.gz", "b.jsonl"]
    assert names("**/*.json") == ["f.json", "x[1].json"]
    assert names(["c.parquet", "deep", "b.*"]) == ["c.parquet", "f.json", "b.jsonl"]


@pytest.mark.parametrize(
    ("there", "read"),
    [
        # a data set's repository
        ("README.md dataset_infos.json data/train-0.parquet data/b.parquet", "data/b.parquet data/train-0.parquet"),
        ("data-00000-of-00001.arrow dataset_info.json state.json", "data-00000-of-00001.arrow"),
        ("README.txt LICENSE.txt data/a.parquet data/License.txt", "data/a.parquet"),
        ("a.txt b.txt.gz readme.txt", "a.txt b.txt.gz"),
        # what `datasets` and macOS leave beside the files
        ("data-00000-of-00001.arrow cache-1f2e.arrow state.json ._data.jsonl", "data-00000-of-00001.arrow"),
        ("cache-of-mine.jsonl .cache-of-mine.jsonl", "cache-of-mine.jsonl"),
        # what a name says of a split
        ("train.jsonl trains.jsonl", "train.jsonl trains.jsonl"),
        ("train-0.jsonl math_TRAIN.jsonl", "math_TRAIN.jsonl train-0.jsonl"),
        ("train_test_split.jsonl more.jsonl", "more.jsonl train_test_split.jsonl"),
        ("train.jsonl train_test_split.jsonl", "train.jsonl train_test_split.jsonl"),
        *(
            (f"train.jsonl {name}.jsonl", " ".join(sorted(["train.jsonl", f"{name}.jsonl"])))
            for name in "latest contest device interval evaluate_essays trainers invalid devices".split()
        ),
        # compressions, of which some are refused later
        ("a.jsonl b.jsonl.bz2 c.jsonl.XZ", "a.jsonl b.jsonl.bz2 c.jsonl.XZ"),
    ],
)
def test_of_a_folder_the_data_are_read(there: str, read: str, tmp_path: Path) -> None:
    assert listed(place(tmp_path, *there.split()))[0] == read.split()


@pytest.mark.parametrize(
    ("names", "splits", "one"),
    [
        (
            "data/train-0.parquet data/test-0.parquet data/validation-0.parquet",
            "test, train, validation",
            "data/*train*",
        ),
        ("train_sft-0.jsonl test_sft-0.jsonl", "test, train", "*train*"),
        ("gsm8k-train.jsonl gsm8k-dev.jsonl", "dev, train", "*train*"),
        ("Test.jsonl Train.jsonl", "test, train", "*Train*"),
        ("a.TEST.jsonl b.val2.jsonl", "test, val", "*TEST*"),
        ("train2024.jsonl eval2024.jsonl", "eval, train", "*train*"),
    ],
)
def test_splits_are_not_read_together(names: str, splits: str, one: str, tmp_path: Path) -> None:
    place(tmp_path, *names.split())
    assert refusal(tmp_path) == f"{tmp_path}: holds the splits {splits}; expected one of them, such as {tmp_path}/{one}"
    assert listed(tmp_path, one)[0]


@pytest.mark.parametrize("pattern", ["", "*"])
def test_files_of_unlike_names_are_told_in_a_line(pattern: str, tmp_path: Path) -> None:
    """Splits among them that no rule knows, too: whoever reads the log sees that a test set is trained on."""
    place(tmp_path, *"TrainSet.jsonl held-out-0.jsonl held-out-1.jsonl 测试集.jsonl".split())
    assert listed(tmp_path, pattern)[1] == [
        f"data: {tmp_path / pattern}: 3 sets are read as one: TrainSet, held-out, 测试集"
    ]


def test_texts_beside_other_files_are_refused(tmp_path: Path) -> None:
    place(tmp_path, "a.jsonl.gz", "notes.txt")
    told = f"{tmp_path}: holds a text, notes.txt, beside other data; expected one kind, such as "
    assert refusal(tmp_path) == f"{told}{tmp_path}/*.jsonl*, or a list of both"
    assert listed(tmp_path, "*.jsonl*")[0] == ["a.jsonl.gz"]


def test_a_file_in_a_compression_that_is_not_read_is_named_and_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "b"}'))
    (tmp_path / "c.jsonl.XZ").write_bytes(lzma.compress(b'{"text": "c"}'))
    with pytest.raises(DataError) as caught:
        list(read([Source(path=str(tmp_path))], "stop", pytest.fail))
    for name, how in (("b.jsonl.bz2", "bzip2"), ("c.jsonl.XZ", "xz")):
        assert f"{tmp_path}/{name}: is compressed by {how}; expected it unpacked, or gzip or zstd" in str(caught.value)


NO_FILES = "no data files in this folder; expected .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, .txt"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none.json", "not found; expected a file, a folder or a glob"),
        ("*.none", "not found; expected a file, a folder or a glob"),
        ("pipes/*", "not found; expected a file, a folder or a glob"),
        ("pipes/pipe.json", "not a regular file; expected a file, a folder or a glob"),
        ("pipes", NO_FILES),
        ("empty", NO_FILES),
        ("below", NO_FILES.replace("expected", "expected one of its folders test, train, or")),
        ("hub", NO_FILES.replace("expected", "expected one of its folders snapshots/abc, or")),
    ],
)
def test_a_path_that_leads_to_nothing_is_refused(path: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "pipe.json")
    place(tmp_path / "below", "dataset_dict.json", "train/data-0.arrow", "test/data-0.arrow")
    place(tmp_path / "hub", "snapshots/abc/train.jsonl", "refs/main")
    assert refusal(tmp_path / path) == f"{tmp_path / path}: {reason}"


def test_devices_unknown_users_and_names_of_a_hub_are_refused() -> None:
    assert "not a regular file" in refusal("/dev/zero")
    assert "no such user" in refusal("~nosuchuser/a.json")
    assert "not found" in refusal("a\0b.json")
    assert "hf download --repo-type dataset tatsu-lab/alpaca --local-dir FOLDER" in refusal("tatsu-lab/alpaca")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"path": ""},
        {"path": []},
        {"path": "a", "repeat": 0},
        {"path": "a", "repeat": -1},
        {"path": "a", "repeat": float("nan")},
        {"path": "a", "weight": float("inf")},
        {"path": "a", "weight": 1, "repeat": 2},
        {"path": "a", "format": "alpacca"},
        {"path": "a", "repeats": 2},
    ],
)
def test_a_wrong_entry_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Source(**fields)


def test_entries_may_be_paths_or_sources() -> None:
    source = Source(path="b", repeat=2)
    assert as_sources("a") == as_sources(Path("a")) == as_sources(["a"]) == [Source(path="a")]
    assert as_sources(["a", source]) == [Source(path="a"), source]
    assert as_sources(source) == [source]
    with pytest.raises(DataError, match="at least one file"):
        as_sources([])
    with pytest.raises(DataError, match="a weight for all 2 entries or for none, found 1"):
        as_sources(["a", Source(path="b", weight=1)])


def taken(sources: list[Source], sizes: list[int], seed: int = 0) -> list[Counter[int]]:
    """How often an epoch holds each record, for each source."""
    numbers = mixture(sources, sizes, seed).tolist()
    assert numbers == sorted(numbers)
    counts, first = [], 0
    for size in sizes:
        counts.append(Counter({n: c for n, c in Counter(numbers).items() if first <= n < first + size}))
        first += size
    assert sum(map(Counter.total, counts)) == len(numbers)
    return counts


def test_without_a_word_each_record_is_taken_once() -> None:
    assert mixture(as_sources(["a", "b"]), [3, 2], 0).tolist() == [0, 1, 2, 3, 4]


def test_repeat_counts_how_often_a_record_is_taken() -> None:
    sources = [Source(path="a", repeat=3), Source(path="b", repeat=0.5), Source(path="c", repeat=2.25)]
    thrice, half, more = taken(sources, [4, 100, 8])
    assert thrice == dict.fromkeys(range(4), 3)
    assert len(half) == half.total() == 50
    assert Counter(more.values()) == {2: 6, 3: 2}


def test_a_half_is_drawn_from_the_seed_and_from_everywhere() -> None:
    half = [Source(path="a", repeat=0.5)]
    (first,), (again,), (other,) = taken(half, [1000]), taken(half, [1000]), taken(half, [1000], seed=1)
    assert first == again != other
    assert 200 < sum(number < 500 for number in first) < 300
    (_, beside), (_, beside_more) = (
        taken([Source(path="x"), *half], [5, 1000]),
        taken([Source(path="x"), *half], [6, 1000]),
    )
    assert [n - 5 for n in beside] == [n - 6 for n in beside_more]


def test_weights_are_shares_of_an_epoch_that_stays_as_long() -> None:
    sources = [Source(path="a", weight=3), Source(path="b", weight=1)]
    large, small = taken(sources, [900, 100])
    assert (large.total(), small.total()) == (750, 250)
    assert set(large.values()) == {1}  # thinned out
    assert set(small.values()) == {2, 3}  # repeated
    small, large = taken(sources, [100, 900])
    assert (small.total(), large.total()) == (750, 250)
    equal = [Source(path="a", weight=9), Source(path="b", weight=1)]
    assert mixture(equal, [900, 100], 0).tolist() == list(range(1000))


def test_the_smallest_share_is_one_record_and_no_source_is_empty() -> None:
    tiny, _ = taken([Source(path="a", weight=1e-9), Source(path="b", weight=1)], [10, 10])
    assert tiny.total() == 1
    with pytest.raises(DataError, match=r"b\.json: no usable records"):
        mixture(as_sources(["a.json", "b.json"]), [1, 0], 0)


TREE = ("a.json", "b/a.json", "b/c/d.json", "b/c/e/d.txt", ".hidden/f.json", "b/.g.json", "[x]/h.json", "i/j/k/l.json")
GLOBS = (
    "*.json **/*.json b/** **/c/**/*.txt **/d.* [ab]* [[]x]/* */*/*.json b/c/../*.json **/b/**/c/* ** ? **/**/d.json"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "."}\n', encoding="utf-8")
    (tmp_path / "i" / "link").symlink_to(tmp_path / "b")
    return tmp_path


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("pattern", GLOBS.split())
def test_a_glob_means_the_files_that_pythons_own_does(
    pattern: str, relative: bool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    path = pattern if relative else f"{tree}/{pattern}"
    expected = sorted({Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file()})
    if expected:
        assert files_of(Source(path=path)) == expected
    else:
        assert "not found" in refusal(path)


@pytest.mark.parametrize("pattern", ["**", "**/*.json", "**/nothing", "*/*/*/*"])
def test_a_glob_that_leads_too_far_is_given_up(pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_PLACES", 4)
    (tree / "i" / "back").symlink_to(tree)  # followed for as long as the system lets one
    assert refusal(tree / pattern).startswith(f"{tree / pattern}: leads to more than 4 places")


@pytest.mark.parametrize(("folder", "pattern"), [("", ""), ("", "train*"), ("zh/", "**/*.jsonl"), ("data/", "")])
def test_a_link_to_nowhere_is_refused(folder: str, pattern: str, tmp_path: Path) -> None:
    place(tmp_path, f"{folder}train-00000-of-00002.jsonl")
    (tmp_path / folder / "train-00001-of-00002.jsonl").symlink_to("../blobs/gone")
    told = "train-00001-of-00002.jsonl: a link to ../blobs/gone, which is not there"
    assert told in refusal(tmp_path / pattern)


@pytest.mark.parametrize(
    ("names", "pattern", "missing"),
    [
        ("a-00000-of-00003.jsonl a-00002-of-00003.jsonl", "", "a-00001-of-00003.jsonl"),
        ("a_1of3.jsonl a_3of3.jsonl", "", "a_2of3.jsonl"),
        ("part_1_of_2.csv.gz", "", "part_0_of_2.csv.gz (or 2, counted from 1)"),
        ("data/a-00000-of-00002-ab12.parquet b.txt", "data", "a-00001-of-00002.parquet"),
    ],
)
def test_a_numbered_set_with_a_gap_is_refused(names: str, pattern: str, missing: str, tmp_path: Path) -> None:
    assert f"{missing} not found; expected all " in refusal(place(tmp_path, *names.split()) / pattern)


def test_what_is_odd_about_a_folder_is_told_in_a_line(tmp_path: Path) -> None:
    place(tmp_path, "top.jsonl", "zh/train.jsonl", "zh/deep/b.jsonl", "notes.docx", "README.md", ".hidden/a.jsonl")
    assert listed(tmp_path) == (["top.jsonl"], [f"data: not read in {tmp_path}: notes.docx, zh/ (2)"])
    assert listed(tmp_path, "t*")[1] == []
    assert f"data: not read in {tmp_path}/*: zh/ (2)" in listed(tmp_path, "*")[1]
    beside = place(tmp_path / "beside", "data.jsonl", "test.jsonl")
    assert listed(beside)[1] == [f"data: {beside}: 2 sets are read as one: data, test"]
    some = place(tmp_path / "some", "a-00000-of-00003.jsonl", "a-00002-of-00003.jsonl")
    assert listed(some, "a-00000*") == (["a-00000-of-00003.jsonl"], [])  # whoever names one of a set wants it
