"""Runs that train a part of a model: whatever layer or stage has nothing to train, they resume and export.

The jobs run one after the other in the same two processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models import load_model
from models.checkpoint.layout import layer_file
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from tests.closeness import assert_near
from tests.conftest import write_records
from tests.launching import topology
from tests.models.helpers import assert_same_bits, random_ids
from tests.ranks import Ranks, job
from tests.training.starts import steps, weights
from training.checkpoint.folder import CheckpointRecord, file_record, step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS = 6
DATA: dict[str, Any] = {"model_topo": topology((1, 2))}
PIPE: dict[str, Any] = {"model_topo": topology((2, 1))}
STREAMED = PIPE | {"schedule": "weight_streaming"}
LORA = {"lora": {"r": 2, "alpha": 6}}
ZERO_3, PLAIN = ({"zero_optimization": {"stage": stage}} for stage in (3, 0))
FIRST = {"model_topo": topology((2, 1), [2, 3]), "freeze": ["embed_tokens", r"layers\.0\."]}
LAST = {"model_topo": topology((2, 1), [3, 2]), "freeze": [r"layers\.2\.", "model.norm", "lm_head"]}
FOLDED = PIPE | {"schedule": "dualpipev", "freeze": [r"layers\."]}
OLD = "-of-an-earlier-version"
# Name: engine, keys, and the checkpoint that it goes on from.
JOBS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pipe": ("pipeline", PIPE | LORA, ""),
    "zero": ("zero", DATA | LORA | ZERO_3, ""),
    "zero-again": ("zero", DATA | LORA | ZERO_3, "zero/2"),
    "zero-to-pipe": ("pipeline", PIPE | LORA, "zero/2"),
    "pipe-to-zero": ("zero", DATA | LORA, "pipe/2"),
    "and-back": ("pipeline", PIPE | LORA, "pipe-to-zero/4"),
    "first": ("pipeline", FIRST, ""),
    "first-again": ("pipeline", FIRST, "first/2"),
    "first-elsewhere": ("pipeline", FIRST | DATA, "first/2"),
    "first-streamed": ("pipeline", FIRST | STREAMED, "first/2"),
    "first-plain": ("pipeline", FIRST | PLAIN | {"bf16": {"enabled": True}}, ""),
    "first-plain-again": ("pipeline", FIRST | PLAIN | {"bf16": {"enabled": True}}, "first-plain/2"),
    "folded": ("pipeline", FOLDED, ""),
    "folded-again": ("pipeline", FOLDED, "folded/2"),
    "last": ("pipeline", LAST | PLAIN, ""),
    "last-again": ("pipeline", LAST | PLAIN, "last/2"),
    "last-elsewhere": ("pipeline", LAST | DATA, "last/2"),
}
LATER: dict[str, tuple[str, dict[str, Any], str]] = {
    "old-zero-again": ("zero", DATA | LORA | ZERO_3, f"zero{OLD}/2"),
    "old-first-again": ("pipeline", FIRST, f"first{OLD}/2"),
    "old-first-elsewhere": ("pipeline", FIRST | DATA, f"first{OLD}/2"),
}
STRAIGHT = {name: "pipe" if "zero" in name or name == "and-back" else name.split("-")[0] for name in JOBS}
STRAIGHT |= {"old-zero-again": "zero", "old-first-again": "first", "old-first-elsewhere": "first"}
STRAIGHT |= {"zero-again": "zero", "first-plain-again": "first-plain"}
GONE_ON = [name for name, (*_, source) in (JOBS | LATER).items() if source]


@pytest.fixture(scope="module")
def base(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partly-trained")


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, base: Path) -> dict[str, dict[str, Any]]:
    write_records(folder / "records.json", 24)
    found = ranks.jobs([describe(name, *its, folder, base) for name, its in JOBS.items()], folder)
    as_earlier_versions_did(folder)
    return found | ranks.jobs([describe(name, *its, folder, base) for name, its in LATER.items()], folder)


def describe(name: str, kind: str, keys: dict[str, Any], source: str, folder: Path, base: Path) -> dict[str, Any]:
    keys = {"model_path": str(base), "max_steps": STEPS, "save_interval": 2, "prompt_format": "plain"} | keys
    keys["optimizer"] = {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}}
    if source:
        run, _, step = source.partition("/")
        keys["resume"] = str(step_folder(folder / run, int(step)))
    return job(folder, name, kind, **keys)


def as_earlier_versions_did(folder: Path) -> None:
    """Copy checkpoints without the files of layers that train nothing, and with the weight that does nothing."""
    for run in ("zero", "first"):
        old = step_folder(folder / f"{run}{OLD}", 2)
        shutil.copytree(step_folder(folder / run, 2), old)
        if run == "zero":
            for layer in (0, 4):
                (old / layer_file(layer)).unlink(missing_ok=True)
        else:
            state = torch.load(old / layer_file(0), weights_only=True)
            torch.save(state | {"idle": torch.zeros(1)}, old / layer_file(0))
        record = CheckpointRecord.read(old)
        assert record is not None
        files = {name: file_record(old / name) for name in record.files if (old / name).exists()}
        record.model_copy(update={"files": files}).write(old)


@pytest.mark.parametrize("name", GONE_ON)
def test_a_run_goes_on_as_if_nobody_had_stopped_it(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    straight, bf16 = STRAIGHT[name], "plain" in name
    assert outcomes[straight]["error"] is None and outcomes[name]["error"] is None
    found, expected = (steps(folder / run) for run in (name, straight))
    for step, line in found.items():
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(expected[step][key], rel=1e-5), (step, key)
    assert max(found) == STEPS
    if bf16 or name in ("first-again", "last-again", "folded-again", "zero-again", "old-first-again", "old-zero-again"):
        assert_same_bits(weights(folder / name, STEPS), weights(folder / straight, STEPS))
    else:
        assert_near(weights(folder / name, STEPS), weights(folder / straight, STEPS))


@pytest.mark.parametrize("name", ["zero", "pipe-to-zero", f"zero{OLD}"])
def test_adapters_trained_with_zero_are_exported(
    name: str, outcomes: dict[str, Any], folder: Path, base: Path, tmp_path: Path
) -> None:
    run = step_folder(folder / name, 2) if OLD in name else folder / name
    pp_to_hg(run, tmp_path / "peft")
    pp_to_hg(run, tmp_path / "merged", options=ExportOptions(merge=True))
    ids = random_ids(2, 20)
    expected = load_model(run)(ids)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    served = PeftModel.from_pretrained(model, tmp_path / "peft")
    torch.testing.assert_close(served(ids).logits, expected, atol=1e-5, rtol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["first", "last", "folded", "first-streamed", f"first{OLD}"])
def test_a_model_with_a_frozen_stage_is_exported(
    name: str, outcomes: dict[str, Any], folder: Path, base: Path, tmp_path: Path
) -> None:
    step = 2 if OLD in name else STEPS
    pp_to_hg(step_folder(folder / name, step), tmp_path / "model")
    found, began = (load_file(each / "model.safetensors") for each in (tmp_path / "model", base))
    frozen = {"first": FIRST, "last": LAST, "folded": FOLDED}[name.partition("-")[0]]["freeze"]
    for weight, tensor in found.items():
        of_frozen = any(re.search(each, weight) for each in frozen)
        assert torch.equal(tensor, began[weight]) == of_frozen, weight
    assert found.keys() == began.keys()
