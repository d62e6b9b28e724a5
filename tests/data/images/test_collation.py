"""What images add to micro-batches: pixels for the first stage in order, made ahead; positions and groups for all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.collation import Collation
from data.errors import DataError
from data.images.ahead import Decoders, PictureSettings, decoders
from data.images.collation import SeeingCollation
from data.images.image import Image
from data.loader import Loader
from data.sample_set import InMemory, Sample
from models.api import read_spec
from models.images import seeing
from tests import golden_vision as golden
from tests.data.images.conftest import LoadSeen
from tests.data.images.dialogues import TWO, A, C
from tests.golden_vision import needs_golden

pytestmark = needs_golden
INPUTS = ("pixel_values", "image_grid_thw")
SAMPLES = range(4)


@pytest.fixture(autouse=True)
def _own_decoders() -> Iterator[None]:
    """Give each test processes of its own, without what another has left."""
    decoders.cache_clear()
    yield
    decoders.cache_clear()


def sample(name: str, number: int) -> Sample:
    ids = golden.tensors(name)[f"s{number}.input_ids"].flatten().tolist()
    made: Sample = {"input_ids": ids, "labels": golden.tensors(name)[f"s{number}.labels"].flatten().tolist()}
    begin, images = 0, []
    for image in golden.looked_at(name, golden.expected(name)["samples"][number]["images"]):
        begin = ids.index(golden.pictures(name).image_token, begin)
        images.append(image._replace(begin=begin))
        seen = 0
        while seen < image.tokens:
            seen += ids[begin] == golden.pictures(name).image_token
            begin += 1
    return made | {"images": images} if images else made


def collation(name: str, data: InMemory, inputs: tuple[str, ...] = INPUTS, **options: Any) -> SeeingCollation:
    return SeeingCollation(Collation(data), PictureSettings(golden.folder(name)), inputs, **options)


def loader(name: str = "qwen2_5_vl", packing: Any = False, replicas: int = 1, **options: Any) -> Loader:
    data = InMemory([sample(name, number) for number in (*SAMPLES, *SAMPLES)])
    limit = int(data.lengths.max()) * 3
    seeing = collation(name, data, **options)
    return Loader(data, 4, 1, replicas, seed=3, packing=packing, row_length=limit, collation=seeing)


def images_of(cut: Loader, rows: list[list[int]]) -> list[Image]:
    return [image for row in rows for number in row for image in cut.data.samples[number].get("images", [])]


@pytest.mark.parametrize(("packing", "replicas"), [(False, 1), ("batch", 1), ("dataset", 2)])
def test_the_first_stage_gets_the_pixels_of_its_images_in_order(packing: Any, replicas: int) -> None:
    cut = loader(packing=packing, replicas=replicas)
    plain = Loader(cut.data, 4, 1, replicas, seed=3, packing=packing, row_length=cut.row_length)
    with_images = 0
    for step in range(2 * cut.steps_per_epoch + 1):
        batch = cut.batch(step)
        for replica in range(replicas):
            made = list(cut.tensors(batch, replica))
            known = plain.tensors(batch, replica)
            for rows, (inputs, labels), (ids, rest) in zip(batch.micro_batches[replica], made, known, strict=True):
                assert all(map(torch.equal, (*inputs[:2], *labels), (*ids, *rest)))
                expected = golden.pictures("qwen2_5_vl").tensors(images) if (images := images_of(cut, rows)) else {}
                assert len(inputs) == 2 + len(expected)
                assert all(map(torch.equal, inputs[2:], expected.values()))
                with_images += bool(expected)
    assert with_images > 4


def test_the_next_batch_is_asked_for_ahead_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = Decoders.ask

    def counted(self: Decoders, lists: Sequence[Sequence[Image]]) -> list[int]:
        asked.append(len(lists))
        return ask(self, lists)

    monkeypatch.setattr(Decoders, "ask", counted)
    cut = loader()
    counts = []
    for step in range(5):
        batch = cut.batch(step)
        counts.append(sum(bool(images_of(cut, rows)) for rows in batch.micro_batches[0]))
        list(cut.tensors(batch, 0))
        assert len(asked) == step + 2  # this one, and the next
    assert asked[:5] == counts

    asked.clear()
    list(cut.tensors(cut.batch(1), 0))  # not what was asked for
    assert len(asked) == 2
    evaluated = loader()
    evaluated.evaluates = True
    asked.clear()
    for position in range(evaluated.steps_per_epoch):
        list(evaluated.tensors(evaluated.batch(position), 0))
    assert len(asked) == evaluated.steps_per_epoch
    assert asked[0] == sum(bool(images_of(evaluated, rows)) for rows in evaluated.batch(0).micro_batches[0])


def test_a_batch_that_is_not_taken_as_a_whole_leaves_nothing() -> None:
    cut = loader()
    seeing = cut.collation
    assert isinstance(seeing, SeeingCollation)
    for _ in range(3):
        made = cut.tensors(cut.batch(0), 0)
        next(made)
        made.close()  # type: ignore[attr-defined]
    coming = [ticket for ticket in seeing._coming[1] if ticket is not None]  # type: ignore[index]
    seeing._decoders.take(coming[-1])  # all before it have come
    assert set(seeing._decoders._answers) <= set(coming)
    assert not seeing._decoders._unwanted


def test_other_stages_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoders, "ask", lambda self, lists: pytest.fail("decoded"))
    cut = loader()
    cut.feeds_embedding = False
    for step in range(3):
        assert all(len(inputs) == 2 for inputs, _ in cut.tensors(cut.batch(step), 0))


def marking(name: str) -> Any:
    """What says of a golden model's micro-batches what all stages have to know."""
    sees = seeing(read_spec(golden.folder(name))).family.sees
    assert sees is not None
    return sees.marks_of


@pytest.mark.parametrize("packing", [False, "batch"])
def test_positions_along_axes_are_those_of_each_document(packing: Any) -> None:
    cut = loader(packing=packing, mark=marking("qwen2_5_vl"))
    cut.feeds_embedding = False  # the other stages need them too
    for step in range(2):
        batch = cut.batch(step)
        marks = list(cut.collation.marks(cut, batch, 0))
        for rows, found in zip(batch.micro_batches[0], marks, strict=True):
            assert found.together is None
            if not images_of(cut, rows):
                assert found.axes is None
                continue
            assert found.axes is not None
            assert found.axes.shape == (3, *cut.shape(rows))
            for row, numbers in enumerate(rows):
                begin = 0
                for number in numbers:
                    known = golden.tensors("qwen2_5_vl").get(f"s{number % 4}.position_ids")
                    assert known is not None
                    length = known.shape[-1]
                    assert torch.equal(found.axes[:, row, begin : begin + length], known.reshape(3, -1))
                    begin += length
                assert torch.equal(found.axes[:, row, begin:], torch.arange(begin, cut.shape(rows)[1]).expand(3, -1))


@pytest.mark.parametrize("packing", [False, "batch"])
def test_images_are_numbered_where_their_tokens_see_each_other(packing: Any) -> None:
    cut = loader("gemma3", packing, inputs=("pixel_values",), mark=marking("gemma3"))
    token = golden.pictures("gemma3").image_token
    packed = 0
    for step in range(2):
        batch = cut.batch(step)
        marks = cut.collation.marks(cut, batch, 0)
        for rows, found, (inputs, _) in zip(batch.micro_batches[0], marks, cut.tensors(batch, 0), strict=True):
            images = images_of(cut, rows)
            assert found.axes is None
            if not images:
                assert found.together is None
                continue
            assert found.together is not None
            assert torch.equal(found.together >= 0, inputs[0] == token)
            numbered = [number for number, image in enumerate(images) for _ in range(image.tokens)]
            assert found.together[found.together >= 0].tolist() == numbered
            packed += len(rows[0]) > 1
    assert bool(packed) == bool(packing)


def test_what_the_objective_needs_stays() -> None:
    class Own(Collation):
        def weight(self, batch: Any) -> int:
            return 7

        def to_last(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return (torch.ones(1),)

    data = InMemory([sample("llava", number) for number in SAMPLES])
    seeing = SeeingCollation(Own(data), PictureSettings(golden.folder("llava")), ("pixel_values",))
    cut = Loader(data, 4, 1, 1, seed=0, collation=seeing)
    ((_, (_, scale, _, own)), *_) = cut.tensors(cut.batch(0), 0)
    assert float(scale) == pytest.approx(4 / 7)
    assert torch.equal(own, torch.ones(1))


def test_an_image_that_was_changed_has_the_next_start_read_the_records_anew(
    load_seen: LoadSeen, tmp_path: Path
) -> None:
    data = load_seen([TWO])
    settings = PictureSettings(golden.folder("qwen2_5_vl"))
    seeing = SeeingCollation(Collation(data), settings, INPUTS, distrust=data.samples.distrust)
    cut = Loader(data, 1, 1, 1, seed=0, collation=seeing)
    shutil.copyfile(tmp_path / "data" / C, tmp_path / "data" / A)
    with pytest.raises(DataError, match=r"changed since the records were read; .*; started again, a run reads the rec"):
        list(cut.tensors(cut.batch(0), 0))
    again = load_seen([TWO])
    assert again.samples[0]["images"][0].digest != data.samples[0]["images"][0].digest
    cut = Loader(again, 1, 1, 1, seed=0, collation=SeeingCollation(Collation(again), settings, INPUTS))
    assert len(list(cut.tensors(cut.batch(0), 0))) == 1
