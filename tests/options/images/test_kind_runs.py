"""Whole runs of other kinds of models through two stages: the first step's loss and gradient are transformers'."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.images.processor import load_processor
from data.tokenized.loading import load_dataset
from models.images.small import token_types
from models.loss.interface import IGNORED
from tests.golden_vision import needs_golden
from tests.launching import topology
from tests.models.derived.cases import since
from tests.options.images.kinds import made
from tests.ranks import Ranks, job
from tests.training.starts import steps

pytestmark = [pytest.mark.launched, pytest.mark.slow, needs_golden]

# Masks of one kind of attention; masks of pixels; images that are cut up.
CASES = [
    pytest.param("gemma4", marks=since("5.23")),
    pytest.param("idefics3", marks=[since("5.23"), pytest.mark.longest]),
    pytest.param("llava_next", marks=pytest.mark.longest),
]
TEXT = {"input_ids", "attention_mask"}  # what a processor gives besides
RECORDS: list[dict[str, Any]] = [
    {"images": ["0.png"], "conversations": [("human", "<image>What is it?"), ("gpt", "A red box.")]},
    {"images": [], "conversations": [("human", "Name a colour."), ("gpt", "Blue.")]},
    {"images": ["1.png", "0.png"], "conversations": [("human", "<image>or<image>?"), ("gpt", "The green one.")]},
]


def loss_of(whole: Any, folder: Path) -> Tensor:
    """Transformers' mean over all trained tokens, of each record alone."""
    dataset, processor = (
        load_dataset(str(folder / "records.json"), folder, 512, "chat_template"),
        load_processor(folder),
    )
    known = inspect.signature(type(whole).forward).parameters
    total, count = torch.zeros(()), 0
    for sample in dataset.samples:
        ids, labels = (torch.tensor(sample[name]).long()[None] for name in ("input_ids", "labels"))
        given = token_types(whole, ids)
        if opened := [PIL.Image.open(image.path) for image in sample.get("images", [])]:
            seen = processor(images=[opened], text=[processor.image_token * len(opened)], return_tensors="pt")
            given |= {name: value for name, value in seen.items() if name in known and name not in TEXT | given.keys()}
        logits = whole(input_ids=ids, **given, use_cache=False).logits
        total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction="sum")
        count += int((labels != IGNORED).sum())
    return total / count


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_is_that_of_transformers(name: str, ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    whole = made(name, folder)
    records = [
        each | {"conversations": [{"from": who, "value": words} for who, words in each["conversations"]]}
        for each in RECORDS
    ]
    (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")
    keys: dict[str, Any] = {
        "model_path": str(folder),
        "data_path": str(folder / "records.json"),
        "vision": {"train": "all"},
        "model_topo": topology((2, 1)),
        "train_batch_size": len(RECORDS),
        "train_micro_batch_size_per_gpu": 1,
        "max_steps": 1,
        "gradient_clipping": 0.0,
        "max_seq_len": 512,
    }
    ranks.run(2, "jobs", [job(tmp_path, "run", **keys)], tmp_path)
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["error"] is None

    wanted = loss_of(whole, folder)
    wanted.backward()
    norms = [weight.grad.norm() for weight in whole.parameters() if weight.grad is not None]
    first = steps(tmp_path / "run")[1]
    assert first["loss"] == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)
