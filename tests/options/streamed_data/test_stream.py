"""Streamed sets: each record once an epoch, one order however it is read, and no more on the disk than allowed."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.settings import Source
from data.tokenized import parallel, store
from data.tokenized.recipe import Recipe
from data.tokenized.store import Cache
from options.streamed_data.stream import Stream, StreamLoader, open_stream
from tests.launching import eventually

BATCH = 8
FILES = 6
WINDOW = 3_000  # bytes of samples
MANY = 10**6  # steps that nobody gets to

Open = Callable[..., Stream]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window ends with a chunk of records."""
    monkeypatch.setattr(parallel, "CHUNK_RECORDS", 4)


def texts(file: int) -> list[str]:
    """A file's records; each is in the set once, and one of them is long enough to be split."""
    return [f"file {file} record {number} " + "word " * (number % 7) for number in range(10 + 7 * file)] + ["x" * 200]


N_RECORDS = sum(len(texts(file)) for file in range(FILES))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Text files, JSON lines, and compressed ones."""
    folder = tmp_path / "set"
    folder.mkdir()
    for file in range(FILES):
        lines = [json.dumps({"text": text}) if file % 3 else text for text in texts(file)]
        whole = "".join(f"{line}\n" for line in lines).encode()
        name = ("a.txt", "b.jsonl", "c.jsonl.gz")[file % 3]
        (folder / f"{file}{name}").write_bytes(gzip.compress(whole) if name.endswith("gz") else whole)
    return folder


@pytest.fixture
def stream(tmp_path: Path, files: Path, tokenizer_folder: Path) -> Open:
    def make(data: Any = files / "*", folder: str = "samples", **options: Any) -> Stream:
        defaults: dict[str, Any] = {"gigabytes": 2 * WINDOW / 1e9, "seed": 3, "folder": tmp_path / folder}
        return open_stream(data, tokenizer_folder, 64, "plain", **defaults | options)

    return make


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Recipe]:
    """What was tokenized of this test's files, build by build; the window that another test left may still be made."""
    seen: list[Recipe] = []
    make = Cache.make

    def counted(cache: Cache, recipe: Recipe, *rest: Any, **options: Any) -> Path:
        if Path(recipe.files[0].path).is_relative_to(tmp_path):
            seen.append(recipe)
        return make(cache, recipe, *rest, **options)

    monkeypatch.setattr(Cache, "make", counted)
    return seen


def loader(stream: Stream, micro_batch_size: int = 1, replicas: int = 1) -> StreamLoader:
    return StreamLoader(stream, BATCH, micro_batch_size, replicas, seed=3, packing="batch", row_length=64)


def taken(stream: Stream, begin: int, count: int) -> list[tuple[int, ...]]:
    """Samples in the order of the stream, as their tokens."""
    steps = range(begin, begin + count, BATCH)
    found = []
    for first in steps:
        numbers = stream.take(first, min(BATCH, begin + count - first))
        found += [tuple(stream.samples[number]["input_ids"].tolist()) for number in numbers]
    return found


def step_of(cut: StreamLoader, step: int) -> list[tuple[int, ...]]:
    """The samples of a step, as they come out in tensors of all replicas."""
    batch = cut.batch(step)
    found = []
    for replica in range(cut.replicas):
        for (ids, positions), _ in cut.tensors(batch, replica):
            for row, places in zip(ids, positions, strict=True):
                starts = [*(places == 0).nonzero().flatten().tolist(), int((places >= 0).sum())]
                found += [tuple(row[a:b].tolist()) for a, b in pairwise(starts) if b > a]
    return sorted(found)


def on_disk(folder: Path) -> int:
    return len(list((folder / "datasets").iterdir()))


def n_samples(stream: Stream, epoch: int) -> int:
    windows = stream.windows
    return sum(made.samples for number, made in enumerate(windows.made) if windows.begin(number).epoch == epoch)


@pytest.mark.slow
def test_every_record_comes_once_an_epoch_in_an_order_of_its_own(stream: Open) -> None:
    one = stream()
    taken(one, 0, 1_000)
    sizes = [n_samples(one, epoch) for epoch in range(2)]
    assert sizes[0] == sizes[1] > N_RECORDS, "the long texts are several samples"
    epochs = [taken(stream(), sum(sizes[:epoch]), sizes[epoch]) for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    whole = stream(gigabytes=1)
    assert sorted(taken(whole, 0, sizes[0])) == sorted(epochs[0])
    assert len(whole.windows.made) == 1
    assert sum(one.windows.begin(number).epoch == 0 for number in range(len(one.windows.made))) > 5
    assert [one.epoch(position) for position in (0, sizes[0] - 1, sizes[0])] == [0, 0, 1]
    orders = {tuple(map(tuple, each)) for each in (*epochs, taken(whole, 0, sizes[0]))}
    assert len(orders) == 3
    assert taken(stream(seed=4), 0, sizes[0]) != epochs[0]


def test_records_are_shuffled_inside_a_window(stream: Open) -> None:
    one = stream(gigabytes=1)
    numbers = one.take(0, 100)
    assert sorted(numbers) != numbers
    assert len({one.origin(number).split(":")[0] for number in numbers}) == FILES
    assert one.origin(numbers[0]).split(": record ")[0].startswith(str(Path(one.windows.sizes.popitem()[0]).parent))


@pytest.mark.parametrize(("micro_batch_size", "replicas"), [(1, 2), (2, 2), (4, 1)])
def test_a_step_does_not_depend_on_the_processes_nor_on_those_before(
    stream: Open, micro_batch_size: int, replicas: int
) -> None:
    reference, cut = loader(stream()), loader(stream(folder="other"), micro_batch_size, replicas)
    expected = {step: step_of(reference, step) for step in range(50)}
    assert all(len(samples) == BATCH for samples in expected.values())
    for step in (30, 0, 49, 7, 8):
        assert step_of(cut, step) == expected[step]


def test_the_tensors_of_a_batch_can_be_made_when_the_next_one_is_cut(stream: Open) -> None:
    cut, other = loader(stream()), loader(stream(folder="other"))
    for step in range(40):
        batch, _ = cut.batch(step), cut.batch(step + 1)
        found = [ids.tolist() for (ids, _), _ in cut.tensors(batch, 0)]
        assert found == [ids.tolist() for (ids, _), _ in other.tensors(other.batch(step), 0)]


def test_a_run_goes_on_anywhere_and_tokenizes_only_what_it_needs(stream: Open, builds: list[Recipe]) -> None:
    first = loader(stream())
    expected, known = {}, {}
    for step in range(60):
        expected[step] = step_of(first, step)
        known[step] = list(first.data.windows.made)
    for step in (0, 1, 11, 29, 30, 58):
        later = loader(stream(folder=f"from {step}"))
        later.data.resume(known[step])
        builds.clear()
        assert step_of(later, step + 1) == expected[step + 1]
        assert 1 <= len(builds) <= 2
        assert later.data.windows.made[: len(known[step])] == known[step]


def test_no_more_than_two_windows_are_on_the_disk(stream: Open, tmp_path: Path) -> None:
    cut = loader(stream(gigabytes=8 * WINDOW / 1e9))
    cut.data.until = MANY
    most = 0
    for step in range(60):
        cut.batch(step)
        most = max(most, on_disk(tmp_path / "samples"))
        folders = (tmp_path / "samples" / "datasets").iterdir()
        sizes = [sum(path.stat().st_size for path in folder.glob("*.bin")) for folder in folders]
        assert all(size < 5 * WINDOW for size in sizes), "the records of a chunk may lie above the limit"
    assert most == 2
    assert len(cut.data.windows.made) > 6
    cut.data.close()
    assert on_disk(tmp_path / "samples") == 0


def test_the_next_window_is_made_while_the_run_goes_on(stream: Open, tmp_path: Path, builds: list[Recipe]) -> None:
    cut = loader(stream())
    cut.data.until = MANY
    cut.batch(0)
    eventually(lambda: on_disk(tmp_path / "samples") == 2)
    assert len(builds) == 2
    windows = cut.data.windows
    while len(windows.made) == 1:
        cut.batch(1)
        cut.batch(2)
        cut.batch(3)
    assert [recipe.window for recipe in builds[:2]] == [windows._recipe_of(number).window for number in range(2)]


def test_nothing_is_made_beyond_the_end_of_the_run(stream: Open, tmp_path: Path, builds: list[Recipe]) -> None:
    cut = loader(stream())
    cut.data.until = BATCH
    cut.batch(0)
    for thread in threading.enumerate():
        if thread.name == "window":
            thread.join()
    assert len(builds) == on_disk(tmp_path / "samples") == 1


def test_a_start_removes_what_another_place_left_and_finds_what_it_needs(
    stream: Open, tmp_path: Path, builds: list[Recipe]
) -> None:
    first = loader(stream())
    for step in range(40):
        first.batch(step)
    left = on_disk(tmp_path / "samples")
    assert left > 4, "nobody was told to remove anything"
    again = loader(stream())
    again.data.resume(first.data.windows.made)
    again.data.until = 1
    builds.clear()
    again.batch(20)
    assert not builds
    assert on_disk(tmp_path / "samples") <= 2


def test_a_window_that_changed_is_noticed(stream: Open, files: Path) -> None:
    one = stream()
    taken(one, 0, 200)
    for path in files.glob("*.txt"):
        path.write_text(path.read_text().replace("record", "regard"))
    again = stream(folder="other")
    assert again.fingerprint() == one.fingerprint(), "of sizes only"
    again.resume(one.windows.made)
    with pytest.raises(DataError, match="gives other samples than when the run was first here"):
        taken(again, 0, 200)


def test_a_file_that_grows_is_noticed(stream: Open, files: Path) -> None:
    one = stream()
    before = one.fingerprint()
    for path in files.glob("*.jsonl"):
        path.write_text(path.read_text() + '{"text": "one more"}\n')
    with pytest.raises(DataError, match=r"has changed since this run began; expected [0-9]+ bytes"):
        taken(one, 0, 400)
    assert stream(folder="other").fingerprint() != before


def test_bad_records_are_left_out_and_counted_or_end_the_stream(
    stream: Open, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = files / "4b.jsonl"
    lines = place.read_text().splitlines()
    place.write_text("\n".join([*lines[:12], '{"tex": 1}', *lines[12:]]) + "\n")
    one = stream(on_bad_record="skip")
    taken(one, 0, 400)
    assert n_samples(one, 0) == n_samples(one, 1)
    with pytest.raises(DataError, match=r"4b.jsonl: record 13"):
        taken(stream(folder="other"), 0, 400)


def test_an_epoch_of_bad_records_is_no_endless_search(stream: Open, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"tex": 1}\n' * 40)
    with pytest.raises(DataError, match="no token is trained"):
        stream(bad, on_bad_record="skip").take(0, 1)


def test_windows_without_samples_are_passed_over(stream: Open, files: Path, tmp_path: Path) -> None:
    """A file that ends with nothing but bad records, where windows are as small as chunks."""
    good = [json.dumps({"text": text}) for text in texts(1)[:8]]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*good, *['{"tex": 1}'] * 12]) + "\n")
    one = stream(mixed, on_bad_record="skip", gigabytes=2e-9)
    found = taken(one, 0, 24)
    assert {made.samples for made in one.windows.made} == {0, 4}
    assert sorted(found[:8]) == sorted(found[8:16]) == sorted(found[16:])


def test_a_window_that_an_epoch_just_fills_is_its_last(stream: Open, tmp_path: Path) -> None:
    path = tmp_path / "full.txt"
    path.write_text("".join(f"record {number}\n" for number in range(8)))  # two whole chunks
    stretch = stream(path, gigabytes=2e-9)  # so each chunk is a window
    taken(stretch, 0, 24)
    assert [window.samples for window in stretch.windows.made][:6] == [4] * 6
    assert [stretch.windows.begin(number).epoch for number in range(6)] == [0, 0, 1, 1, 2, 2]


def test_repeats_are_whole(stream: Open, files: Path) -> None:
    twice = stream(Source(path=f"{files}/*", repeat=2), gigabytes=1)
    once = stream(folder="other", gigabytes=1)
    taken(once, 0, 1)
    found = taken(twice, 0, 2 * n_samples(once, 0))
    assert all(count % 2 == 0 for count in Counter(found).values())
    for entry in ({"repeat": 0.5}, {"weight": 1.0}):
        with pytest.raises(DataError, match=r"expected a whole repeat, or no stream_gb"):
            stream(Source(path=f"{files}/*", **entry))


def test_waiting_is_told(stream: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("options.streamed_data.windows.POLL", 0.05)
    build = store._build

    told: list[None] = []

    def slow(*arguments: Any) -> Path:
        eventually(lambda: len(told) > 3)
        return build(*arguments)

    monkeypatch.setattr(store, "_build", slow)
    one = stream()
    one.waiting = lambda: told.append(None)
    one.take(0, 1)


def test_a_look_makes_no_window(stream: Open) -> None:
    one = stream()
    assert 1 <= len(one.windows.peek()) < 20
    assert not one.windows.made
