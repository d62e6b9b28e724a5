"""Kinds of models with their own processors: what is read from records is what transformers itself makes and sees."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from transformers.core_model_loading import revert_weight_conversion

from data.errors import DataError
from data.images.pictures import Pictures
from data.images.processor import load_processor
from data.tokenized.loading import load_dataset
from models import CausalLM
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.adapter_settings import adapted_paths
from models.checkpoint.source import HuggingFaceSource, same_bytes
from models.derived.proof import CPU, gradients_of
from models.images import reached, seeing
from tests.golden_vision import needs_golden
from tests.models.derived.cases import since
from tests.options.images.kinds import KINDS, SIZES, UNPLACED, made

pytestmark = needs_golden
BOUND = 2e-5  # of the largest number
# Older releases of transformers import torchvision with their processors.
LATER = dict.fromkeys(("idefics3", "smolvlm", "gemma4"), since("5.23"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER.get(name, ())) for name in KINDS if name != UNPLACED])
def test_a_record_is_seen_as_transformers_sees_it(name: str, tmp_path: Path) -> None:
    """Its ids, logits, loss and every gradient, of several images where the model takes them; weights bit for bit."""
    whole, kind = made(name, tmp_path), KINDS[name]
    paths = [tmp_path / f"{number}.png" for number in range(min(kind.most, len(SIZES)))]
    pictures, processor = Pictures(tmp_path), load_processor(tmp_path)
    assert pictures.one_only == (kind.most == 1)
    text = "".join(f"{pictures.placeholder} what is it? " for _ in paths) + "A red box."
    opened = [PIL.Image.open(path) for path in paths]
    given: dict[str, Any] = processor(images=[opened], text=[text], return_tensors="pt")

    images = [pictures.look(path, tmp_path) for path in paths]
    first, *rest = text.split(pictures.placeholder)
    put_out = first + "".join(pictures.expanded(image) + words for image, words in zip(images, rest, strict=True))
    ids = torch.tensor([processor.tokenizer(put_out)["input_ids"]])
    assert torch.equal(ids, given["input_ids"])
    assert int((ids == pictures.image_token).sum()) == sum(image.tokens for image in images)

    spec = seeing(read_spec(tmp_path))
    sees = spec.family.sees
    assert sees is not None and sees.both_ways == kind.both_ways
    source = HuggingFaceSource(tmp_path, spec)
    ours = CausalLM(spec, source, torch.float32, CPU)
    made_of = pictures.tensors(images)
    found = ours(ids, images=[made_of[tensor] for tensor in sees.inputs])
    known = inspect.signature(type(whole).forward).parameters
    wanted = whole(**{key: value for key, value in given.items() if key in known}, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND * float(wanted.abs().max()))

    for logits in (found, wanted):
        F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    parameters = {key: value.grad for key, value in whole.named_parameters() if value.grad is not None}
    gradients, own = revert_weight_conversion(whole, parameters), dict(gradients_of(ours, source.weight_map))
    assert own.keys() == gradients.keys()
    for key, gradient in own.items():
        atol = 5 * BOUND * max(float(gradients[key].abs().max()), 1e-3)
        torch.testing.assert_close(gradient, gradients[key], rtol=0, atol=atol, msg=key)

    for layer in range(spec.n_layers):
        for key, tensor in source.weight_map.on_disk(layer, source.read_layer(layer)).items():
            assert (spec.tied and key == source.weight_map.tied_head) or same_bytes(tensor, source.read(key)), key


def test_several_images_that_a_model_sees_otherwise_than_each_alone_are_refused(tmp_path: Path) -> None:
    made("llava_onevision", tmp_path)
    turns = [{"from": "human", "value": "<image><image>Which?"}, {"from": "gpt", "value": "The first."}]
    (tmp_path / "records.json").write_text(json.dumps([{"images": ["0.png", "1.png"], "conversations": turns}]))
    with pytest.raises(DataError, match="2, which the model's processor cuts up otherwise than each alone; expected 1"):
        load_dataset(str(tmp_path / "records.json"), tmp_path, 512, "chat_template", cache_dir=tmp_path / "cache")


def test_a_processor_that_changes_the_words_beside_an_image_is_refused(tmp_path: Path) -> None:
    made(UNPLACED, tmp_path)
    with pytest.raises(DataError, match="Idefics2Processor does not say which text stands for one image; expected"):
        Pictures(tmp_path)


def test_positions_and_tokens_of_a_tower_get_no_adapters(tmp_path: Path) -> None:
    """They have three dimensions, as weights of experts have."""
    made("internvl", tmp_path)
    spec = seeing(read_spec(tmp_path))
    adapted = spec.training(Trained(Lora(r=1, alpha=2, targets="all-linear", beside=reached(spec, "all"))))
    names = [name for name in adapted.trained_names(0) if name.startswith("eyes.")]
    assert names and all(name.endswith((".lora_A", ".lora_B")) for name in names)
    assert adapted_paths(adapted)[1] == []
