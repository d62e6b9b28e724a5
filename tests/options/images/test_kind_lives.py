"""Whole lives of kinds of models that see: adapters in two stages, resumed, evaluated, exported, read and asked.

What an export computes is asked of transformers and peft, with the export's own processor.
"""

from __future__ import annotations

import inspect
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image
from transformers.utils import is_torchvision_available

from data.chat.messages import Said
from data.images.pictures import Pictures
from data.images.processor import load_processor
from data.settings import Pixels
from data.tokenized.loading import load_dataset
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.images.small import token_types
from options.demo.chat_model import ChatModel
from options.demo.generation import Request, generate_many
from options.demo.pictures import illustrated
from tests.golden_vision import needs_golden
from tests.launching import topology
from tests.models.derived.cases import since
from tests.options.images.kinds import KINDS, LIVING, made
from tests.options.images.test_kind_runs import RECORDS, loss_of
from tests.ranks import Ranks, job
from tests.training.starts import evaluations, steps
from training.checkpoint.folder import step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow, needs_golden]

OFTEN = ("gemma4", "smolvlm")
LATER = {name: [since("5.23")] for name in ("idefics3", "gemma4", "smolvlm")}
STEPS, SAVED = 4, 2
LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}, "vision": {"train": "all"}}
ROUNDED = 0.03  # of a loss in bf16
NEW = 8


class Life(NamedTuple):
    """The folder of runs of a kind, and of its model."""

    kind: str
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def last(self, run: str) -> Path:
        return step_folder(self.folder / run, STEPS)


def param(name: str) -> Any:
    return pytest.param(name, marks=[*LATER.get(name, []), *([] if name in OFTEN else [pytest.mark.longest])])


@pytest.fixture(scope="module", params=[param(name) for name in LIVING])
def life(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Run all jobs of a kind."""
    kind, folder = str(request.param), tmp_path_factory.mktemp("life")
    found = Life(kind, folder)
    made(kind, found.model)
    write_records(found.model, KINDS[kind].most)
    resumed = str(step_folder(folder / "adapted", SAVED))
    pairs = {"data_path": str(found.model / "pairs.json"), "eval_data_path": str(found.model / "pairs.json")}
    jobs = [
        job(folder, "adapted", **keys_of(found.model), **LORA, eval_at_start=True),
        job(folder, "resumed", **keys_of(found.model), **LORA, resume=resumed),
        job(folder, "rounded", **keys_of(found.model), **LORA, bf16={"enabled": True}),
        job(folder, "preferred", **keys_of(found.model) | pairs, vision={"train": "all"}, preference={"loss": "dpo"}),
    ]
    ranks.run(2, "jobs", jobs, folder)
    for each in jobs:
        assert json.loads((folder / f"{each['name']}.json").read_text(encoding="utf-8"))["error"] is None, each["name"]
    return found


def keys_of(model: Path) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "data_path": str(model / "records.json"),
        "eval_data_path": str(model / "records.json"),
        "eval_interval": STEPS,
        "model_topo": topology((2, 1)),
        "train_batch_size": len(RECORDS),
        "train_micro_batch_size_per_gpu": 1,
        "max_steps": STEPS,
        "save_interval": SAVED,
        "max_seq_len": 512,
        "pack_len": 1024,  # several samples in a row
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def write_records(folder: Path, most: int) -> None:
    """Write dialogues, and pairs of answers, with as many images as the model takes."""
    records, pairs = [], []
    for record in RECORDS:
        images = record["images"][:most]
        ((_, asked), (_, answered)) = record["conversations"]
        asked = asked if len(images) == len(record["images"]) else "<image>?"
        question, answer = {"from": "human", "value": asked}, {"from": "gpt", "value": answered}
        records.append({"images": images, "conversations": [question, answer]})
        other = {"from": "gpt", "value": "Nobody knows."}
        pairs.append({"images": images, "conversations": [question], "chosen": answer, "rejected": other})
    for name, content in (("records", records), ("pairs", pairs)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_resumed_run_has_the_same_bits(life: Life) -> None:
    straight, resumed = (layers(life.last(run)) for run in ("adapted", "resumed"))
    assert len(straight) == 4 and any(name.startswith("eyes.") for name in straight["layer_00-model_states.pt"])
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def layers(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in folder.glob("layer_*")}


def test_what_is_exported_has_the_loss_of_the_run(life: Life, tmp_path: Path) -> None:
    """By transformers with the merged model, and by peft with the adapter: of texts, and of one and two images."""
    pp_to_hg(life.last("adapted"), tmp_path / "merged", options=ExportOptions(merge=True))
    pp_to_hg(life.last("adapted"), tmp_path / "adapter")
    merged, adapted = whole(tmp_path / "merged"), PeftModel.from_pretrained(whole(life.model), tmp_path / "adapter")
    with torch.no_grad():
        found = float(loss_of(merged, tmp_path / "merged"))
        by_peft = float(loss_of(adapted.eval().get_base_model(), tmp_path / "merged"))
    losses = evaluations(life.folder / "adapted")
    assert losses[STEPS] == pytest.approx(found, rel=1e-5) == pytest.approx(by_peft, rel=1e-5)
    assert losses[STEPS] < losses[0] - 1e-2


def whole(folder: Path) -> Any:
    auto: Any = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def test_the_exported_processor_makes_the_ids_and_pixels_of_the_run(life: Life, tmp_path: Path) -> None:
    pp_to_hg(life.last("preferred"), tmp_path / "exported")
    processor = processor_of(tmp_path / "exported")
    (data := life.model / "records.json").read_text(encoding="utf-8")
    samples = load_dataset(str(data), life.model, 512, "chat_template", cache_dir=tmp_path / "cache").samples
    for record, sample in zip(json.loads(data.read_text(encoding="utf-8")), samples, strict=True):
        messages = [
            {"role": role, "content": parts_of(turn["value"])}
            for role, turn in zip(("user", "assistant"), record["conversations"], strict=True)
        ]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        opened = [Image.open(life.model / path) for path in record["images"]]
        given = processor(images=opened or None, text=[text], add_special_tokens=False, return_tensors="pt")
        assert given["input_ids"][0].tolist() == list(sample["input_ids"])
        for name, tensor in Pictures(life.model).tensors(sample.get("images", [])).items() if opened else ():
            assert torch.equal(tensor, given[name]), name


def processor_of(folder: Path) -> Any:
    """Transformers' own processor; without torchvision, which its parts for videos need, that of images alone."""
    if not is_torchvision_available():
        return load_processor(folder)
    return transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def parts_of(text: str) -> list[dict[str, Any]]:
    pieces = text.split("<image>")
    words = [[{"type": "text", "text": piece}] if piece else [] for piece in pieces]
    return [*words[0], *(part for each in words[1:] for part in ({"type": "image"}, *each))]


def test_pairs_are_learnt_and_bits_are_rounded(life: Life) -> None:
    preferred, rounded = steps(life.folder / "preferred"), steps(life.folder / "rounded")
    assert preferred[1]["loss"] == pytest.approx(math.log(2), rel=1e-5)  # the model is its own reference
    assert preferred[STEPS]["loss"] < preferred[1]["loss"] and preferred[STEPS]["rewards/margins"] > 0
    (evaluated,) = evaluations(life.folder / "preferred").values()
    assert evaluated < math.log(2)
    assert rounded[1]["loss"] == pytest.approx(steps(life.folder / "adapted")[1]["loss"], rel=ROUNDED)


def test_it_writes_what_transformers_writes_about_an_image(life: Life, tmp_path: Path) -> None:
    pp_to_hg(life.last("adapted"), tmp_path / "merged", options=ExportOptions(merge=True))
    asked = ChatModel(life.last("adapted"), pixels=Pixels())
    assert asked.pictures is not None
    text, images = illustrated("<image>What is it?", ["0.png"], asked.pictures.looking_from(life.model))
    ids = asked.encode([Said("user", text)], images=images)
    request = Request(ids, NEW, set(), see=partial(asked.pictures.tensors, images))
    for _ in generate_many(asked.model, [request]):
        pass

    merged, prompt = whole(tmp_path / "merged"), torch.tensor([ids])
    known = inspect.signature(type(merged).forward).parameters
    pixels = {name: tensor for name, tensor in asked.pictures.own.tensors(images).items() if name in known}
    greedy = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}
    found = merged.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), **pixels, **token_types(merged, prompt), **greedy
    )
    assert request.text == found[0].tolist()
