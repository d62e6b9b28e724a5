"""Compiled blocks through the real launcher: every gradient is that of one process that compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.sample_set import Sample
from tests.ranks import Ranks
from tests.training.engine.test_gradients import Case, Outcome, config, folder, read, reference, samples  # noqa: F401

pytestmark = [pytest.mark.launched, pytest.mark.slow]

EVERYTHING = {"use_grad_ckpt": {"every": 2}, "offload_activations": True}
CASES: dict[Case, dict[str, Any]] = {
    Case("tied", "fp32", (2, 1)): {"compile": True},
    Case("tied", "recompute", (2, 1)): {"compile": True} | EVERYTHING,
    Case("tied", "dualpipev_fp32", (2, 1)): {"compile": True},
    Case("tied", "dualpipev_recompute", (2, 1)): {"compile": True} | EVERYTHING,
}


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def outcomes(folder: Path, model: Path, samples: list[Sample]) -> dict[Case, Outcome]:  # noqa: F811
    del samples  # already on disk
    described = [
        {"name": case.name, "kind": "pipeline", "config": config(case, model, folder) | keys}
        for case, keys in CASES.items()
    ]
    with Ranks(folder) as processes_of_their_own:  # what is compiled must not last
        processes_of_their_own.run(2, "gradients", described, folder)
    return {case: read(folder, case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_gradient_equals_one_process(
    case: Case,
    outcomes: dict[Case, Outcome],
    model: Path,
    samples: list[Sample],  # noqa: F811
) -> None:
    expected, found = reference(model, samples, micro_batch=2, row_length=None), outcomes[case]
    assert abs(found.loss - expected.loss) < 1e-5
    assert expected.gradients.keys() <= found.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (found.gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name} differs by {error:.2e}"
