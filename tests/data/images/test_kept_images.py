"""Images are kept beside samples, wherever they and their records lie; samples without are what they were."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow
import pytest
from pyarrow import ipc, parquet

from data.chat.prompts import Prompts
from data.images.beside_samples import IMAGES
from data.records import raw_records
from data.sample_set import InMemory
from data.settings import Pixels
from data.tokenized.parallel import _chunks
from data.tokenized.recipe import DataFile, Recipe
from data.tokenized.sample_file import INDEX_FILE, SAMPLES
from tests.data.images.conftest import LoadSeen
from tests.data.images.dialogues import TEXT, TWO, A, C, talk


def test_samples_without_images_are_the_same_bytes_beside_some_with_images(load_seen: LoadSeen) -> None:
    alone = load_seen([TEXT, TEXT])
    assert not alone.has_images and alone.image_tokens.tolist() == [0, 0]
    assert not (alone.folder / IMAGES).exists()
    mixed = load_seen([TEXT, TWO, TEXT])
    assert mixed.image_tokens.tolist() == [0, sum(image.tokens for image in mixed.samples[1]["images"]), 0]
    assert alone.digests.tolist() == mixed.digests[[0, 2]].tolist()
    ids = (alone.folder / SAMPLES).read_bytes()
    assert (mixed.folder / SAMPLES).read_bytes().startswith(ids[: len(ids) // 2])
    assert (mixed.folder / INDEX_FILE).stat().st_size == (alone.folder / INDEX_FILE).stat().st_size // 2 * 3


def test_samples_are_chosen_and_sent_to_processes_with_their_images(load_seen: LoadSeen) -> None:
    dataset = load_seen([TEXT, TWO, talk(("<image>", "Red."), images=[C])])
    chosen = dataset.select([2, 0, 2, 1])
    names = [[Path(image.path).stem for image in sample.get("images", [])] for sample in chosen.samples]
    assert names == [["c"], [], ["c"], ["a", "b"]]
    assert chosen.image_tokens.tolist() == dataset.image_tokens[[2, 0, 2, 1]].tolist()
    again = pickle.loads(pickle.dumps(chosen.samples))
    assert [sample.get("images") for sample in again] == [sample.get("images") for sample in chosen.samples]
    assert dataset.samples[-2].get("images") == dataset.samples[1]["images"]
    memory = InMemory([dict(sample) for sample in chosen.samples])  # type: ignore[misc]
    assert memory.image_tokens.tolist() == chosen.image_tokens.tolist()


def test_another_image_of_the_same_size_is_another_sample(tmp_path: Path, load_seen: LoadSeen) -> None:
    record = talk(("<image>", "Red."), images=[A])
    before = load_seen([record])
    file = tmp_path / "data" / A
    with PIL.Image.open(file) as picture:
        PIL.Image.new("RGB", picture.size, "blue").save(file)
    shutil.rmtree(tmp_path / "cache" / "datasets")
    after = load_seen([record])
    assert list(before.samples[0]["input_ids"]) == list(after.samples[0]["input_ids"])
    assert before.fingerprint() != after.fingerprint()


def test_data_that_were_moved_have_their_images_where_they_are_now(tmp_path: Path, load_seen: LoadSeen) -> None:
    before = load_seen([TWO])
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    moved = load_seen([], name="../elsewhere/records.json")
    assert moved.folder == before.folder, "nothing was tokenized anew"
    paths = [Path(image.path) for image in moved.samples[0]["images"]]
    assert [path.parent.parent.name for path in paths] == ["elsewhere"] * 2
    assert all(path.is_file() for path in paths)


def test_images_in_records_are_kept_once_as_they_are(tmp_path: Path, vision: Path, load_seen: LoadSeen) -> None:
    content = {name: (vision / "qwen2_5_vl-tiny" / "images" / f"{name}.png").read_bytes() for name in "ab"}
    uri = f"data:image/png;base64,{base64.b64encode(content['a']).decode()}"
    part = {"type": "image_url", "image_url": {"url": uri}}
    answer = TEXT["messages"][1]
    rows = [
        {"messages": [{"role": "user", "content": "<image><image>?"}, answer], "images": list(content.values())},
        {"messages": [{"role": "user", "content": "Hello?"}, answer], "images": None},
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    dataset = load_seen([], name="a.parquet")
    other = load_seen([{"messages": [{"role": "user", "content": [part]}, answer]}])
    kept = [Path(image.path) for image in dataset.samples[0]["images"]]
    assert [path.read_bytes() for path in kept] == list(content.values())
    assert other.samples[0]["images"][0].path == str(kept[0])
    assert len([path for path in (tmp_path / "cache" / "images").rglob("*") if path.is_file()]) == 2
    assert dataset.image_tokens[1] == 0

    shutil.rmtree(tmp_path / "cache" / "images")
    again = load_seen([], name="a.parquet")
    assert [Path(image.path).read_bytes() for image in again.samples[0]["images"]] == list(content.values())
    assert again.folder == dataset.folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_few_rows_with_large_images_are_in_memory_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    rows_of = raw_records._rows_of

    def counted(batch: Any) -> Any:
        made.append(batch.num_rows)
        return rows_of(batch)

    monkeypatch.setattr(raw_records, "_rows_of", counted)
    monkeypatch.setattr(raw_records, "ROWS_BYTES", 100_000)
    rows = [{"text": f"<image> {n}", "images": [{"bytes": bytes([n]) * 10_000, "path": None}]} for n in range(50)]
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path, compression="none", use_dictionary=False)
    else:
        with ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    chunks = list(_chunks(Recipe((DataFile(str(path)),), "", Prompts("plain"), 10), lambda *_: None))
    assert sum(len(chunk.records) for chunk in chunks) == sum(made) == 50
    assert max(made) <= 10
    assert max(len(chunk.records) for chunk in chunks) == 27  # 2**18 bytes and one more


def test_a_data_set_of_the_hub_with_an_image_column(tmp_path: Path, vision: Path, load_seen: LoadSeen) -> None:
    content = (vision / "qwen2_5_vl-tiny" / "images" / "a.png").read_bytes()
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    row = {
        "images": [{"bytes": content, "path": "a.png"}],
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [parts[1]]}],
    }
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "a.parquet")
    (sample,) = load_seen([], name="a.parquet").samples
    assert Path(sample["images"][0].path).read_bytes() == content


def test_pixels_and_the_processors_settings_are_in_the_key(
    tmp_path: Path, vision: Path, load_seen: LoadSeen, builds: list[str]
) -> None:
    model = shutil.copytree(vision / "qwen2_5_vl-tiny", tmp_path / "model", copy_function=shutil.copyfile)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755)
    first = load_seen([TWO], tokenizer=model)
    fewer = load_seen([], tokenizer=model, pixels=Pixels(most=400))
    assert fewer.image_tokens[0] < first.image_tokens[0]
    assert len(builds) == 2
    load_seen([], tokenizer=model)
    load_seen([], tokenizer=model, pixels=Pixels(most=400))
    assert len(builds) == 2
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.5, 0.5, 0.5]}))
    load_seen([], tokenizer=model)
    assert len(builds) == 3


def test_several_processes_make_the_same_samples(
    tmp_path: Path, load_seen: LoadSeen, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [TEXT, TWO, talk(("<image>", "Red."), images=[C])] * 200
    alone = load_seen(records)
    monkeypatch.setattr("data.tokenized.store.SMALL", 0)
    monkeypatch.setattr("data.tokenized.parallel.CHUNK_RECORDS", 64)
    forked = load_seen(records, cache_dir=tmp_path / "other")
    assert forked.folder != alone.folder
    assert forked.fingerprint() == alone.fingerprint()
    assert forked.image_tokens.tolist() == alone.image_tokens.tolist()
    assert [sample.get("images") for sample in forked.samples] == [sample.get("images") for sample in alone.samples]
