"""Twenty steps on real records, packed and unpacked: the same loss and gradient at every step, with less padding.

The mixture is worked maths problems, questions on English and Chinese articles, dialogues with tools in both languages,
and Chinese instructions; where `../shared/data` is absent, the shipped records. Both runs have two stages, and both
take their own steps: an error of the first one would grow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import FAQ, SHARED
from tests.launching import metrics, topology, write_config
from tests.ranks import Ranks

pytestmark = [pytest.mark.launched, pytest.mark.slow]

STEPS, BATCH = 20, 8
REAL = SHARED / "data"
MIXTURE: list[dict[str, Any]] = [
    {"path": str(REAL / "gsm8k" / "train.jsonl"), "repeat": 0.008},
    {"path": str(REAL / "xquad" / "*.json"), "repeat": 0.02},
    {"path": str(REAL / "toolcall" / "*.json"), "repeat": 0.1},
    {"path": str(REAL / "belle_zh_seed_tasks.json"), "repeat": 0.3},
]


@pytest.fixture(scope="module")
def logs() -> dict[str, str]:
    """What the runs printed."""
    return {}


@pytest.fixture(scope="module")
def runs(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, logs: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The metrics of both runs."""
    folder = tmp_path_factory.mktemp("mixture")
    model = make_checkpoint("llama", max_position_embeddings=512)
    found = {}
    for name, packing in (("packed", "batch"), ("unpacked", False)):
        path = write_config(
            folder / f"{name}.yml",
            model_path=str(model),
            data_path=MIXTURE if REAL.is_dir() else [{"path": str(FAQ), "repeat": 2.0}],
            template_fallback="rewrite",  # the template knows no tools
            packing=packing,
            max_seq_len=512,
            train_batch_size=BATCH,
            train_micro_batch_size_per_gpu=2,
            dataloader_drop_last=True,
            scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}},
            model_topo=topology([2, 1]),
        )
        outcome = ranks.train(2, path)
        assert outcome["error"] is None
        logs[name] = outcome["printed"]
        found[name] = metrics(path.with_suffix(""))
    return found


def test_a_packed_run_follows_the_unpacked_one(runs: dict[str, list[dict[str, Any]]]) -> None:
    packed, unpacked = runs["packed"], runs["unpacked"]
    assert len(packed) == len(unpacked) >= STEPS
    for key in ("samples", "tokens", "supervised", "lr"):
        assert [line[key] for line in packed] == [line[key] for line in unpacked]
    for key in ("loss", "grad_norm"):
        values = [torch.tensor([line[key] for line in lines], dtype=torch.float64) for lines in (packed, unpacked)]
        torch.testing.assert_close(*values, atol=0, rtol=1e-5)
    assert min(line["samples"] for line in packed) == BATCH
    assert packed[-1]["loss"] < packed[0]["loss"]


def test_packing_leaves_less_padding(runs: dict[str, Any], logs: dict[str, str]) -> None:
    kept = {name: float(re.findall(r"([\d.]+)% of the tokens are no padding", logs[name])[0]) for name in runs}
    assert kept["packed"] > max(90, kept["unpacked"])


def test_every_file_of_the_mixture_is_trained_on(shared: Path, runs: dict[str, Any], logs: dict[str, str]) -> None:
    del shared, runs  # the first skips, the second has run
    for file in ("train.jsonl", "xquad.en.json", "xquad.zh.json", "glaive_toolcall_en", "belle_zh_seed_tasks.json"):
        assert re.search(rf"{re.escape(file)}\S*  +\w+  +[1-9]", logs["packed"]), file
