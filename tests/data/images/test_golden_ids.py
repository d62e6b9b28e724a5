"""Records with images become exactly the ids and labels that transformers' processors make of them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from data.tokenized.loading import load_dataset
from tests import golden_vision as golden


@golden.needs_golden
@pytest.mark.parametrize("name", golden.NAMES)
def test_ids_and_labels_of_the_golden_records(name: str, tmp_path: Path) -> None:
    folder, stored, known = golden.folder(name), golden.tensors(name), golden.expected(name)
    dataset = load_dataset(str(folder / "records.json"), folder, 512, "chat_template", cache_dir=tmp_path)
    config = json.loads((folder / "config.json").read_text())
    image_token = config.get("image_token_id", config.get("image_token_index"))

    assert len(dataset) == len(known["samples"])
    for number, (sample, expected) in enumerate(zip(dataset.samples, known["samples"], strict=True)):
        ids = sample["input_ids"]
        assert list(ids) == stored[f"s{number}.input_ids"].ravel().tolist()
        assert list(sample["labels"]) == stored[f"s{number}.labels"].ravel().tolist()

        images = sample.get("images", [])
        assert [image.path for image in images] == [str(folder / path) for path in expected["images"]]
        places = [place for place, token in enumerate(ids) if token == image_token]
        assert dataset.image_tokens[number] == len(places) == sum(image.tokens for image in images)
        for image in images:
            assert image.digest == sha256(Path(image.path).read_bytes()).hexdigest()[:16]
            assert image.begin == places[0]
            places = places[image.tokens :]
    assert dataset.has_images and dataset.image_tokens.dtype == "int32"
    assert dataset.supervised.sum() == known["n_trained"]
