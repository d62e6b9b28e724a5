"""Processes that share each layer write the tokens that one process writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import load_model
from options.demo.generation import Request, generate_many
from tests.cases import tiered
from tests.models.cases import CASES
from tests.models.helpers import random_ids
from tests.models.parallel.test_tensor import WHOLE, Shared, run_shared

PROMPTS, NEW = [random_ids(1, length, seed=length)[0].tolist() for length in (12, 5, 20)], 16
WIDE = {"initializer_range": 0.3, "tie_word_embeddings": False}  # so that a model does not repeat itself
TEXTS = {name: Shared(name, changes=WIDE) for name in CASES if not name.startswith(WHOLE)}
TEXTS |= {"odd-neurons": Shared("llama-untied", changes=WIDE | {"intermediate_size": 97})}
TEXTS |= {"biases": Shared("llama-untied", changes=WIDE | {"attention_bias": True, "mlp_bias": True})}
TEXTS = {f"text-{name}": case._replace(asked={"prompts": PROMPTS, "count": NEW}) for name, case in TEXTS.items()}
TEXTS["one-head"] = Shared("llama-untied", {"prompts": PROMPTS, "count": NEW}, changes={"num_key_value_heads": 1})
SLOW = ("text-mixtral", "text-baichuan2-13b")  # experts, and heads with slopes that do not divide


@pytest.fixture(scope="module")
def outcomes(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> dict[str, Any]:
    """By name of a case."""
    return run_shared(TEXTS, make_checkpoint, tmp_path_factory, asked)


@pytest.mark.launched
@pytest.mark.parametrize("name", tiered(list(TEXTS)[:-1], quick=(), slow=SLOW))
def test_two_processes_write_what_one_writes(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    model = load_model(outcome["folder"])
    requests = [Request(prompt, NEW, set()) for prompt in PROMPTS]
    for _ in generate_many(model, requests, rows=2):
        pass
    assert [rank["texts"] for rank in outcome["ranks"]] == [[request.text for request in requests]] * 2
    assert len(set(requests[0].text[-NEW:])) > NEW // 2, "too monotonous to show anything"
    whole = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    assert all(rank["held"] < 0.6 * whole for rank in outcome["ranks"])


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one-head"])
def test_what_cannot_be_shared_is_refused_by_every_rank(name: str, outcomes: dict[str, Any]) -> None:
    (line,) = {rank["refused"] for rank in outcomes[name]["ranks"]}
    assert line.startswith(f"{outcomes[name]['folder']}: tensor parallelism: 1 heads of keys")
