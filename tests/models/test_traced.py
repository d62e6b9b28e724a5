"""Shows that the function which exporters trace gives transformers' logits, token by token and with padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models import load_model
from models.conversion.to_onnx import Past, TracedModel
from tests.conftest import ORIGINALS
from tests.models.cases import CASES
from tests.models.helpers import oracle, random_ids

PROMPT, PADDING, LENGTH = 20, 6, 40  # more than the windows of 16

# What hg_to_onnx refuses is left out.
DENSE = [
    name
    for name, case in CASES.items()
    if case.model_type not in (*ORIGINALS, "mixtral", "qwen3_moe") and name not in ("llama-dynamic", "phi3-long")
]


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_passes_with_a_given_cache_equal_one_without(name: str, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(CASES[name].model_type, **CASES[name].changes)
    ids = random_ids(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    traced, passes = TracedModel(load_model(folder)), []
    past: Past = []
    for begin, end in ((0, PROMPT), *((each, each + 1) for each in range(PROMPT, LENGTH))):
        logits, past = traced(ids[:, begin:end], mask[:, :end], past)
        passes.append(logits)
    found, expected = torch.cat(passes, dim=1), oracle(folder)
    torch.testing.assert_close(found[0], expected(ids[:1]).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1, PADDING:], expected(ids[1:, PADDING:]).logits[0], atol=1e-4, rtol=1e-4)
    assert [tuple(keys.shape[::2]) for keys, _ in past] == [(2, LENGTH)] * load_model(folder).spec.n_blocks
