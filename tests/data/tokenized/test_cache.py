"""The cache of tokenized data: whole or not there, and another one for every change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.digests import Digests
from data.errors import DataError
from data.paths import default_folder
from data.tokenized import recipe
from data.tokenized.dataset import Dataset
from data.tokenized.loading import load_dataset
from data.tokenized.recipe import DataFile, digest_of
from data.tokenized.sample_file import INDEX, INDEX_FILE, SAMPLES
from tests.conftest import ROOT
from tests.data.caches import LIMIT, Load, caches, left_over, plain_recipe, records, write


def test_a_second_start_tokenizes_nothing_and_reads_only_what_changed(
    tmp_path: Path, load: Load, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", records(5))
    first = load(data)
    assert builds == [str(data)]
    written = (first.folder / SAMPLES).stat()
    data.touch()
    assert load(data).folder == first.folder
    monkeypatch.setattr(Digests, "take", None)  # whoever calls it fails
    second = load(data)
    assert second.folder == first.folder and second.fingerprint() == first.fingerprint()
    assert (first.folder / SAMPLES).stat().st_mtime_ns == written.st_mtime_ns
    assert len(caches(tmp_path)) == 1


def test_every_change_of_what_samples_depend_on_gives_another_cache(
    tmp_path: Path, tokenizer_folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, tokenizer)

    def key(**changes: Any) -> str:
        return plain_recipe(data, tokenizer, **changes).key([digest_of(data)])

    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    keys = [
        key(),
        key(max_seq_len=LIMIT + 1),
        key(prompt_format="chat_template"),
        key(prompt_format="gdgpt"),
        key(on_bad_record="skip"),
    ]
    keys.append(key(prompt_format=str(template)))
    named = DataFile(str(data), columns={"answer": "a"})
    keys.append(replace(plain_recipe(data, tokenizer), files=(named,)).key([digest_of(data)]))
    keys += [key(truncate="oldest"), key(mask="all"), key(template_fallback="refuse"), key(template_args={"a": 1})]
    template.write_text("{% for message in messages %}{{ message['content']  }}{% endfor %}")
    keys.append(key(prompt_format=str(template)))
    write(data, records(3, answer="One is a numbeR."))
    keys.append(key())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_text((tokenizer / name).read_text().rstrip() + "\n ")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "LATER", f"{recipe.LATER} tokenized/columns")
        recipe.code_digest.cache_clear()
        keys.append(key())
    recipe.code_digest.cache_clear()  # or a build in another process would have another identity
    renamed = data.rename(tmp_path / "a.txt")  # read as lines of text
    keys.append(plain_recipe(renamed, tokenizer).key([digest_of(renamed)]))
    assert len(set(keys)) == len(keys)


def test_a_copy_of_the_data_elsewhere_finds_the_cache(tmp_path: Path, load: Load) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    first = load(data)
    (tmp_path / "elsewhere").mkdir()
    copy = write(tmp_path / "elsewhere" / "b.jsonl", records(3))
    second = load(copy)
    assert second.folder == first.folder
    assert second.origin(2) == f"{copy}: record 3"


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_read_anew(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    before = data.stat()
    first = load(data)
    write(data, records(3, answer="One is a numbeR."))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert data.stat().st_size == before.st_size
    assert data.stat().st_mtime_ns == before.st_mtime_ns
    assert load(data).fingerprint() != first.fingerprint()
    monkeypatch.setattr("common.digests.SETTLED", 60.0)  # what was just written may change in the same tick
    (just := tmp_path / "just.jsonl").write_text("")
    digests = Digests(tmp_path / "digests")
    digests.take([just], lambda: "1")
    assert digests.known([just]) is None


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "changed": lambda note: b"0" + note,
    "cut": lambda note: note[:20],
    "emptied": lambda _: b"",
    "of another user": lambda note: note,
}


@pytest.mark.parametrize("damage", SPOILT)
def test_a_note_that_is_damaged_or_of_another_user_is_ignored_with_a_warning(
    damage: str, tmp_path: Path, settled: None, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    digests = Digests(tmp_path / "digests")
    digests.take([data], lambda: "1" * 64)
    (note,) = (tmp_path / "digests").iterdir()
    note.write_bytes(SPOILT[damage](note.read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        if damage == "of another user":
            patch.setattr(os, "getuid", lambda: -5)
        assert digests.known([data]) is None and digests.known([data]) is None
    reason = damage if damage == "of another user" else "damaged"
    assert caplog.messages == [f"warning: {note}: ignored: {reason}"]
    assert digests.take([data], lambda: "2") == digests.known([data]) == "2"


def use(dataset: Dataset) -> None:
    """Everything that a run may look at."""
    assert dataset.lengths.sum() and dataset.supervised.sum() and len(dataset.digests) == len(dataset)
    assert sum(dataset.of_type(kind).sum() for kind in dataset.types) == len(dataset)
    assert all(dataset.origin(number) for number in range(len(dataset)))
    assert dataset.total.largest_id
    assert len(ids_of(dataset)) == len(dataset)


def ids_of(dataset: Dataset) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in dataset.samples]  # type: ignore[attr-defined]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "samples cut": (SAMPLES, lambda content: content[:-1]),
    "samples emptied": (SAMPLES, lambda _: b""),
    "a sample lost": (SAMPLES, lambda content: content[:-4]),
    "index cut": (INDEX_FILE, lambda content: content[: -INDEX.itemsize]),
    **{
        f"a wrong {name} in the index": (
            INDEX_FILE,
            partial(flipped, at=3 * INDEX.itemsize + offset),
        )
        for name, (_, offset, *_) in (INDEX.fields or {}).items()
    },
    "meta cut": ("meta.json", lambda content: content[:20]),
    "meta replaced": ("meta.json", lambda content: content.replace(b'"duplicates": 0', b'"duplicates": 1')),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "meta lost"])
def test_a_damaged_cache_is_built_anew_by_the_next_start(
    tmp_path: Path, load: Load, builds: list[str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "a.jsonl", records(50))
    first = load(data)
    samples, lengths = ids_of(first), first.lengths.tolist()
    name, spoil = DAMAGES.get(damage, ("meta.json", bytes))
    path = first.folder / name
    content = spoil(path.read_bytes())
    path.unlink()  # what the first one has mapped stays as it was
    if damage != "meta lost":
        path.write_bytes(content)
    second = load(data)
    assert len(builds) == 2
    assert caplog.messages == [f"warning: {first.folder}: these tokenized records are damaged; tokenizing anew"]
    assert (ids_of(second), second.lengths.tolist()) == (samples, lengths)
    assert len(caches(tmp_path)) == 1
    assert not left_over(tmp_path)


@pytest.mark.parametrize("at", [0, 1000, -1])
def test_a_wrong_sample_is_found_where_it_is_used_and_mended_by_the_next_start(
    at: int, tmp_path: Path, load: Load, builds: list[str]
) -> None:
    """No token is trained on that was not written."""
    data = write(tmp_path / "a.jsonl", records(50))
    first = load(data)
    samples = ids_of(first)
    path = first.folder / SAMPLES
    path.write_bytes(flipped(path.read_bytes(), at % path.stat().st_size))
    damaged = load(data)  # nothing but the index is read here
    assert len(builds) == 1
    with pytest.raises(DataError) as caught:
        use(damaged)
    told = f"{first.folder}: these tokenized records are damaged; started again, a run tokenizes them anew"
    assert str(caught.value) == told
    assert ids_of(load(data)) == samples
    assert len(builds) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    build = sys.modules["data.tokenized.store"].build

    def slow(*arguments: Any) -> None:
        build(*arguments)
        write(data, records(4))

    monkeypatch.setattr("data.tokenized.store.build", slow)
    with pytest.raises(DataError, match="changed while"):
        load(data)
    assert not caches(tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = write(tmp_path / "a.jsonl", records(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache_dir: .*file.*: cannot be made: Not a directory; expected a folder"):
        load_dataset(data, tokenizer_folder, LIMIT, "plain", cache_dir=tmp_path / "file" / "cache")


def test_the_environment_says_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPETUNE_CACHE", "/scratch/tokens")
    assert default_folder() == Path("/scratch/tokens")
    monkeypatch.delenv("PIPETUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert default_folder() == Path("/scratch/pipetune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "pipetune"


def test_the_key_leaves_out_no_code_that_samples_depend_on_and_none_needs_torch(tokenizer_folder: Path) -> None:
    """What the builder loads counts, but for what is known to only carry and store."""
    script = (
        "import sys; sys.modules['torch'] = None; import data.tokenized.builder, data.tokenized.store; "
        f"data.tokenized.encoder.load_tokenizer({str(tokenizer_folder)!r}); print(*sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    modules = printed.stdout.split()
    assert not any(name.startswith("torch.") for name in modules)
    loaded = {name[5:].replace(".", "/") for name in modules if name.startswith("data.")}
    assert {"tokenized/tokenize", "tokenized/columns", "chat/prompts"} <= loaded
    assert not [name for name in loaded if name.startswith(tuple(recipe.LATER.split()))]
    assert set(recipe.CARRIERS.split()) <= loaded
    for name in f"{recipe.CARRIERS} {recipe.LATER}".split():
        assert (ROOT / "data" / name).is_dir() or (ROOT / "data" / f"{name}.py").exists()
