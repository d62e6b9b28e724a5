"""Shows that processes which hold a model together write, to the token, what one process writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import load_model
from models.generation import Request, generate_many
from tests.launching import torchrun
from tests.models.cases import CASES, Case
from tests.models.helpers import change_weights, fill_biases, random_ids

Make = Callable[..., Path]

NEW = 16
PROMPTS = [random_ids(1, length, seed=length)[0].tolist() for length in (12, 5, 20)]
WIDE = {"initializer_range": 0.3, "tie_word_embeddings": False}  # so that a model does not repeat itself
SHARED = dict(CASES)
SHARED |= {"llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True})}
SHARED |= {"odd neurons": Case("llama", {"intermediate_size": 97})}
OFTEN = ("mixtral", "baichuan2-13b")  # experts, and heads with slopes that do not divide
REFUSED = {
    "one head": ("llama", {"num_key_value_heads": 1}, "1 heads of keys (num_key_value_heads) are not enough for 2")
}


@pytest.fixture(scope="module")
def outcomes(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> dict[str, Any]:
    """By name of a case, its folder and what each of two ranks did."""
    cases = {name: case for name, case in (SHARED | REFUSED).items() if name in asked}
    folders = {name: make_checkpoint(case[0], **case[1] | WIDE) for name, case in cases.items()}
    if "llama-biases" in folders:
        change_weights(folders["llama-biases"], fill_biases)
    path = tmp_path_factory.mktemp("together") / "cases.json"
    path.write_text(
        json.dumps([{"folder": str(folder), "prompts": PROMPTS, "count": NEW} for folder in folders.values()])
    )
    ended = torchrun(2, "tests/workers/tensor_parallel.py", path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads((path.parent / "outcomes.json").read_text())
    return {name: (folders[name], ranks) for name, ranks in zip(folders, found, strict=True)}


@pytest.mark.launched
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.longest) for name in SHARED]
)
def test_two_processes_write_what_one_writes(name: str, outcomes: dict[str, Any]) -> None:
    folder, ranks = outcomes[name]
    model = load_model(folder)
    requests = [Request(prompt, NEW, set()) for prompt in PROMPTS]
    for _ in generate_many(model, requests, rows=2):
        pass
    assert [rank["texts"] for rank in ranks] == [[request.text for request in requests]] * 2
    assert len(set(requests[0].text[-NEW:])) > NEW // 2, "too monotonous to show anything"
    whole = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    assert all(rank["held"] < 0.6 * whole for rank in ranks)


@pytest.mark.launched
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(name: str, outcomes: dict[str, Any]) -> None:
    told = {rank["refused"] for rank in outcomes[name][1]}
    assert len(told) == 1
    text = told.pop()
    assert REFUSED[name][2] in text
    assert len(text.splitlines()) == 1
