"""A sheet shows the images of samples beside their text, what is trained in green."""

from __future__ import annotations

from pathlib import Path

import numpy
import PIL.Image
import pytest

from data.errors import DataError
from data.inspection.inspect import MARKS, coloured
from data.inspection.sheet import MARGIN, SIZE, TRAINED, WIDTH, draw_sheet
from data.sample_set import IGNORED, Sample
from data.tokenized.tokenizer import load_tokenizer
from tests import golden_vision as golden
from tests.golden_vision import needs_golden

pytestmark = needs_golden


def sample(number: int, name: str = "qwen2_5_vl") -> Sample:
    known = golden.tensors(name)
    return {
        "input_ids": known[f"s{number}.input_ids"].flatten().tolist(),
        "labels": known[f"s{number}.labels"].flatten().tolist(),
        "images": golden.looked_at(name, golden.expected(name)["samples"][number]["images"]),
    }


def green(sheet: numpy.ndarray) -> int:
    return int((sheet == TRAINED).all(axis=-1).sum())


def test_images_and_trained_words_are_on_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(golden.folder("qwen2_5_vl"))
    samples = [sample(0), sample(2), sample(3)]
    path = tmp_path / "sheet.png"
    assert draw_sheet(samples, tokenizer, path) == 2  # the second has no image
    sheet = numpy.asarray(PIL.Image.open(path))
    assert sheet.shape[1] == WIDTH

    shown = [PIL.Image.open(image.path).convert("RGB") for each in samples for image in each["images"]]
    for image in shown:
        pixels = numpy.asarray(image)
        columns = sheet[:, MARGIN : MARGIN + image.width]
        found = [top for top in range(len(sheet) - image.height) if (columns[top : top + image.height] == pixels).all()]
        assert found
    assert green(sheet) > 50

    untrained = [each | {"labels": [IGNORED] * len(each["labels"])} for each in samples]
    assert draw_sheet(untrained, tokenizer, path) == 2
    assert green(numpy.asarray(PIL.Image.open(path))) == 0


def test_an_images_many_tokens_are_one_word() -> None:
    tokenizer = load_tokenizer(golden.folder("qwen2_5_vl"))
    text = coloured(sample(0), tokenizer, marked=True).plain
    begin, end = MARKS
    assert text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|> x 6 <|vision_end|>\nWhat shape")
    assert f"{begin}A red box.<|im_end|>{end}" in text


def test_long_lines_stay_on_the_sheet(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(golden.folder("qwen2_5_vl"))
    words = tokenizer("形状" * 200 + "a" * 3000, add_special_tokens=False)["input_ids"]
    long: Sample = {"input_ids": words, "labels": words, "images": sample(0)["images"]}
    draw_sheet([long], tokenizer, tmp_path / "sheet.png")
    sheet = numpy.asarray(PIL.Image.open(tmp_path / "sheet.png"))
    assert (sheet[2:, WIDTH - MARGIN + SIZE :] == 255).all()
    assert (sheet[2:, WIDTH // 2 : WIDTH - MARGIN] != 255).any()


def test_a_sheet_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(golden.folder("qwen2_5_vl"))
    with pytest.raises(DataError, match=r"missing/sheet.png: cannot be written: No such file"):
        draw_sheet([sample(0)], tokenizer, tmp_path / "missing" / "sheet.png")
    assert draw_sheet([sample(2)], tokenizer, tmp_path / "sheet.png") == 0
    assert not (tmp_path / "sheet.png").exists()
