"""Preferences with images in the prompts: what transformers learns of the same pairs, in one process and in several.

The jobs run one after the other in the same processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from data.sample_set import documents
from data.settings import Wanted
from data.tokenized.loading import load_dataset
from models.conversion.to_huggingface import pp_to_hg
from tests.launching import metrics, topology
from tests.options.images.test_runs import EPS, LR, VISION, inputs_of, layers, saved
from tests.ranks import Ranks, job
from tests.training.starts import STEPS, TAKEN_UP_AT, steps
from training.checkpoint.folder import step_folder

pytestmark = [
    pytest.mark.launched,
    pytest.mark.slow,
    pytest.mark.skipif(not VISION.is_dir(), reason="shared/golden/vision is not here"),
]

BETA = 0.2
PIPE: dict[str, Any] = {"dims": (2, 1), "vision": {"train": "all"}}
# Name: the model and keys.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", PIPE),
    "gemma3": ("gemma3", PIPE),
    "qwen2_5_vl": ("qwen2_5_vl", PIPE),
    "replicas": ("qwen2_5_vl", {**PIPE, "dims": (1, 2)}),
    "unpacked": ("gemma3", {**PIPE, "packing": False}),
    "kto": ("qwen2_5_vl", {**PIPE, "preference": {"loss": "kto", "beta": BETA}}),
    "apo": ("llava", {**PIPE, "preference": {"loss": "apo_zero_unpaired", "beta": BETA}}),
    "resumed": ("qwen2_5_vl", {**PIPE, "resume": "qwen2_5_vl"}),
}
OFTEN = ("qwen2_5_vl", "resumed")
LATER = {name: pytest.mark.longest for name in CASES if name not in OFTEN}
MARKED = ("kto", "apo")
EXACT = [name for name in CASES if name not in ("resumed", *MARKED)]


def cases(*names: str) -> list[Any]:
    return [pytest.param(name, marks=LATER.get(name, ())) for name in names]


def pairs(folder: Path) -> list[dict[str, Any]]:
    """Pairs in several layouts; the last one's answers are the same, and its prompts differ in the image."""
    a, b, c = (str(folder / "images" / f"{name}.png") for name in "abc")
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Name the colours."}]}
    seen = [[{"type": "image", "image": path}, {"type": "text", "text": "What is it?"}] for path in (b, c)]
    whole = [[{"role": "user", "content": each}, {"role": "assistant", "content": "A red box."}] for each in seen]
    return [
        {
            "images": [a],
            "conversations": [{"from": "human", "value": "<image>\nWhat shape is on the left?"}],
            "chosen": {"from": "gpt", "value": "A red box."},
            "rejected": {"from": "gpt", "value": "No idea at all, sorry."},
        },
        {"images": [b, c], "prompt": "Compare <image> with <image>, please.", "chosen": "Same.", "rejected": "Other."},
        {"images": [c], "prompt": [asked], "chosen": [answer("Green and blue.")], "rejected": [answer("Red.")]},
        {"prompt": "Who are you?", "chosen": "Nobody you know.", "rejected": "A box."},
        {"prompt": "How many are there?", "chosen": "Three.", "rejected": "None at all, I think."},
        {"chosen": whole[0], "rejected": whole[1]},
    ]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> Path:
    """Run the cases that are asked for."""
    folder = tmp_path_factory.mktemp("pairs")
    chosen = [name for name in CASES if name in asked or name not in LATER]
    ranks.run(2, "jobs", [describe(folder, name) for name in chosen], folder)
    return folder


def describe(folder: Path, name: str) -> dict[str, Any]:
    model, keys = CASES[name]
    made = pairs(VISION / f"{model}-tiny")
    made = made[:-1] if name in MARKED else made  # of the last pair one prompt is both good and bad
    file = folder / f"{'marked' if name in MARKED else 'pairs'}-{model}.json"
    file.write_text(json.dumps(made), encoding="utf-8")
    own: dict[str, Any] = {
        "model_path": str(VISION / f"{model}-tiny"),
        "data_path": str(file),
        "eval_data_path": str(file),
        "eval_interval": TAKEN_UP_AT,
        "preference": {"loss": "dpo", "beta": BETA},
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "max_seq_len": 300,
        "max_steps": STEPS,
        "save_interval": TAKEN_UP_AT,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0}},
        **keys,
    }
    own["model_topo"] = topology(own.pop("dims"))
    if "resume" in own:
        own["resume"] = str(step_folder(folder / own["resume"], TAKEN_UP_AT))
    return job(folder, name, **own)


def told(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


class Learnt(NamedTuple):
    """What transformers' model learns of the pairs: losses and norms of gradients by step, the last loss, weights."""

    losses: list[float]
    norms: list[float]
    after: float
    weights: dict[str, Tensor]


@cache
def by_transformers(name: str, file: Path) -> Learnt:
    """Take six steps of AdamW with DPO (arXiv:2305.18290, equation 7), document by document."""
    folder = VISION / f"{name}-tiny"
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    cache_dir = file.parent / "of-transformers"
    data = load_dataset(str(file), folder, 300, "chat_template", preference=Wanted("pairs"), cache_dir=cache_dir)
    given = []
    for sample in data.samples:
        for document in documents(sample):
            ids, labels = (torch.tensor(list(map(int, document[key]))) for key in ("input_ids", "labels"))
            stored = {"s0.input_ids": ids, "s0.labels": labels}
            paths = [image.path for image in document.get("images", [])]
            given.append(inputs_of(model, processor, folder, stored, 0, paths))

    def sums() -> Tensor:
        return torch.stack([log_probability(model, *each) for each in given]).view(-1, 2)

    def loss() -> Tensor:
        gained = sums() - reference
        return -F.logsigmoid(BETA * (gained[:, 0] - gained[:, 1])).mean()

    with torch.no_grad():
        reference = sums()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean = loss()
        mean.backward()
        losses.append(float(mean.detach()))
        norms.append(float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])))
        optimizer.step()
    with torch.no_grad():
        return Learnt(losses, norms, float(loss()), saved(model))


def log_probability(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    logits = model(**inputs, use_cache=False).logits[0]
    return -F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("name", cases(*EXACT))
def test_six_steps_of_dpo_are_those_of_transformers(name: str, runs: Path, tmp_path: Path) -> None:
    assert told(runs, name)["error"] is None
    model = CASES[name][0]
    wanted = by_transformers(model, runs / f"pairs-{model}.json")
    for step, line in steps(runs / name).items():
        assert line["loss"] == pytest.approx(wanted.losses[step - 1], rel=1e-5), step
        assert line["grad_norm"] == pytest.approx(wanted.norms[step - 1], rel=1e-4), step
    (*_, evaluated) = [line for line in metrics(runs / name) if "eval_loss" in line]
    assert evaluated["eval_loss"] == pytest.approx(wanted.after, rel=1e-5)

    pp_to_hg(step_folder(runs / name, STEPS), tmp_path / "exported")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == wanted.weights.keys()
    for each, weight in wanted.weights.items():
        assert (found[each] - weight).norm() <= 1e-4 * weight.norm() + 1e-7, each


@pytest.mark.parametrize("name", cases(*MARKED))
def test_marked_answers_with_images_are_learnt(name: str, runs: Path) -> None:
    assert told(runs, name)["error"] is None
    done = steps(runs / name)
    assert done[1]["loss"] == pytest.approx(0.5, abs=1e-5)  # the model is its own reference
    assert done[STEPS]["rewards/margins"] > 0


@pytest.mark.parametrize("name", cases("resumed"))
def test_a_resumed_run_is_the_same_to_the_bit(name: str, runs: Path) -> None:
    assert told(runs, name)["error"] is None
    assert "reference: log-probabilities of the data are known" in told(runs, name)["printed"]
    torch.testing.assert_close(layers(runs / name), layers(runs / CASES[name][0]), rtol=0, atol=0)
