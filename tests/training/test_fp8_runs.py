"""Whole jobs in fp8, emulated on a CPU, beside the same in bf16: their losses, checkpoints and exports.

Two stages through the real launcher; a third run goes on from the checkpoint in fp8 with bf16 products, others under
weight streaming and back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.conftest import write_records
from tests.launching import metrics, topology
from tests.models.helpers import assert_same_bits, joined, read_weights
from tests.ranks import Ranks, job

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, SAVED = 8, 5
NEAR = 2e-3  # relative, of the losses of so few steps
STREAMED: dict[str, Any] = {"schedule": "weight_streaming", "fp8": {"enabled": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    records = folder / "records.json"
    write_records(records, 24)
    shared: dict[str, Any] = {
        "model_path": str(make_checkpoint("llama", tie_word_embeddings=True)),
        "max_steps": STEPS,
        "save_interval": SAVED,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "prompt_format": "plain",
        "export_hf": True,
        "model_topo": topology([2, 1]),
    }
    changes: dict[str, dict[str, Any]] = {
        "bf16": {},
        "fp8": {"fp8": {"enabled": True}},
        "back": {"resume": str(folder / "fp8" / f"step-{SAVED:06d}")},
        "there": {"resume": str(folder / "fp8" / f"step-{SAVED:06d}")} | STREAMED,
        "turns": STREAMED,
        "resumed": {"resume": str(folder / "turns" / f"step-{SAVED:06d}")} | STREAMED,
        "pipeline": {"resume": str(folder / "turns" / f"step-{SAVED:06d}"), "fp8": {"enabled": True}},
    }
    found = ranks.jobs([job(folder, name, **shared | keys) for name, keys in changes.items()], folder, "fp8")
    assert not any(outcome["error"] or outcome["code"] for outcome in found.values()), found
    return found


def losses(folder: Path, name: str) -> torch.Tensor:
    return torch.tensor([line["loss"] for line in metrics(folder / name) if "loss" in line], dtype=torch.float64)


def test_losses_stay_near_those_of_bf16(outcomes: dict[str, Any], folder: Path) -> None:
    bf16, fp8 = losses(folder, "bf16"), losses(folder, "fp8")
    assert len(bf16) == len(fp8) == STEPS
    assert not torch.equal(bf16, fp8)
    torch.testing.assert_close(fp8, bf16, atol=0, rtol=NEAR)
    assert fp8[-1] < 0.95 * fp8[0]


def test_checkpoints_and_exports_have_the_form_of_bf16(outcomes: dict[str, Any], folder: Path) -> None:
    """Files, names, shapes and dtypes, in the checkpoint and in the export; and both converters take them."""

    def form(path: Path) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in joined(read_weights(path)).items()}

    def files(path: Path) -> list[str]:
        return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())

    step = f"step-{STEPS:06d}"
    assert files(folder / "fp8" / step) == files(folder / "bf16" / step)
    exports = [folder / name / "hf" for name in ("fp8", "bf16")]
    assert form(exports[0]) == form(exports[1]) and files(exports[0]) == files(exports[1])
    pp_to_hg(folder / "fp8" / step, folder / "converted")
    assert form(folder / "converted") == form(exports[0])
    hg_to_pp(folder / "converted", folder / "back-again")


def test_a_run_goes_on_in_bf16_and_says_so(outcomes: dict[str, Any], folder: Path) -> None:
    printed = " ".join(outcomes["back"]["printed"].split())
    assert "fp8.enabled True -> False: the products of the blocks are rounded to other numbers" in printed
    assert torch.isfinite(losses(folder, "back")).all()
    torch.testing.assert_close(losses(folder, "back"), losses(folder, "fp8")[SAVED:], atol=0, rtol=NEAR)


def test_weight_streaming_goes_on_there_and_back(outcomes: dict[str, Any], folder: Path) -> None:
    """In turns losses are those of the pipeline, from its checkpoint or from the start, and the other way round."""
    expected = losses(folder, "fp8")
    for name, first in (("turns", 0), ("there", SAVED), ("pipeline", SAVED)):
        torch.testing.assert_close(losses(folder, name), expected[first:], atol=0, rtol=NEAR)
    torch.testing.assert_close(losses(folder, "turns")[0], expected[0], atol=0, rtol=1e-6, msg="the same roundings")


def test_a_run_in_turns_resumes_to_the_last_bit(outcomes: dict[str, Any], folder: Path) -> None:
    torch.testing.assert_close(losses(folder, "resumed"), losses(folder, "turns")[SAVED:], atol=0, rtol=0)
    assert_same_bits(*(joined(read_weights(folder / name / "hf")) for name in ("resumed", "turns")))
