"""Runs of models with learned positions equal transformers' models trained by torch, in every topology.

Their rows are longer than the table of positions, which begins anew with each document of a row. The jobs run in the
processes of tests/workers/jobs.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from data.tokenized.sample_file import SampleFile
from models.conversion.to_huggingface import pp_to_hg
from tests.launching import metrics, topology
from tests.models.cases import GPT2, OPT
from tests.ranks import Ranks, job

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, LR, LONGEST = 6, 1e-4, 48
ADAMW: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.99], "eps": 1e-6}
MODELS = {"gpt2": GPT2, "opt": OPT}
DIMS = [(1, 1), (2, 1), (2, 2)]
# Four processes take longest.
CASES = [
    pytest.param(model, dims, marks=pytest.mark.longest if math.prod(dims) > 2 else ())
    for model in MODELS
    for dims in DIMS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned-positions")


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    few = {"max_position_embeddings": LONGEST, "num_hidden_layers": 3}
    return {name: make_checkpoint(name, **changes | few) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def run(ranks: Ranks, folder: Path, models: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """A function that trains a model in a topology; gives what its job printed."""
    records = [{"prompt": f"How many has {n}?", "completion": f" It has {n}." * (n % 3 + 1)} for n in range(8)]
    (folder / "records.json").write_text(json.dumps(records))

    def train(model: str, dims: tuple[int, int], **keys: Any) -> dict[str, Any]:
        name = f"{model}-{dims[0]}x{dims[1]}" + "".join(f"-{key}" for key in keys)
        own: dict[str, Any] = {
            "model_path": str(models[model]),
            "cache_dir": str(folder / f"cache-{model}"),
            "max_seq_len": LONGEST,
            "pack_len": 2 * LONGEST,
            "n_epoches": STEPS,
            "gradient_clipping": 0,
            "scheduler": None,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "model_topo": topology(dims),
        }
        ranks.run(math.prod(dims), "jobs", [job(folder, name, **own | keys)], folder)
        outcome: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return outcome | {"folder": folder / name}

    return train


@pytest.fixture(scope="module")
def by_transformers(folder: Path, models: dict[str, Path]) -> Callable[[str], Any]:
    """Losses and weights of transformers' model after as many steps of torch's optimizer, a text at a time."""
    made: dict[str, tuple[list[float], dict[str, torch.Tensor]]] = {}

    def get(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        if name not in made:
            made[name] = trained(models[name], folder / f"cache-{name}")
        return made[name]

    return get


def trained(model_folder: Path, cache: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    (file,) = (cache / "datasets").iterdir()
    samples = [
        {name: torch.tensor(sample[name]).long() for name in ("input_ids", "labels")} for sample in SampleFile(file)
    ]
    assert len(samples) == 8 and sum(len(each["input_ids"]) for each in samples) > 2 * LONGEST
    tokens = sum(int((each["labels"][1:] >= 0).sum()) for each in samples)
    losses = []
    for _ in range(STEPS):
        loss = torch.zeros(())
        for each in samples:
            logits = model(input_ids=each["input_ids"][None], use_cache=False).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, each["labels"][1:], reduction="sum") / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("model", "dims"), CASES)
def test_six_steps_over_packed_rows_equal_transformers(
    model: str, dims: tuple[int, int], run: Callable[..., dict[str, Any]], by_transformers: Callable[[str], Any]
) -> None:
    outcome = run(model, dims)
    assert outcome["error"] is None
    losses, weights = by_transformers(model)
    lines = metrics(outcome["folder"])
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=2e-5)
    pp_to_hg(outcome["folder"], outcome["folder"].with_suffix(".hf"))
    exported = AutoModelForCausalLM.from_pretrained(outcome["folder"].with_suffix(".hf"))
    # A step moves a weight by LR; the biases of keys have gradients of rounding alone.
    torch.testing.assert_close(dict(exported.state_dict()), dict(weights), atol=1e-2 * LR, rtol=1e-5)


def test_longer_texts_than_the_table_are_refused_in_a_line(run: Callable[..., dict[str, Any]]) -> None:
    told = f"max_seq_len: {LONGEST + 1}, but gpt2 has learned {LONGEST} positions"
    assert told in run("gpt2", (1, 1), max_seq_len=LONGEST + 1)["error"]
