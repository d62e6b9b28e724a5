"""Replicas that read the weights together hold the bits that each would have read, and no tensor is read twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.conversion.to_pipeline import hg_to_pp
from tests.cases import tiered
from tests.conftest import save_tokenizer
from tests.launching import error_lines, supervised, topology, write_config
from tests.models.checkpoint.test_quantized import to_fp8
from tests.models.derived.cases import write_small
from tests.models.helpers import change_config
from tests.ranks import Ranks, write_samples

pytestmark = [pytest.mark.launched, pytest.mark.slow]

BF16 = {"bf16": {"enabled": True}}


class Case(NamedTuple):
    model: str
    dims: tuple[int, int]
    keys: dict[str, Any] = {}
    kind: str = "pipeline"


CASES = {
    "tied": Case("tied", (1, 2)),
    "bf16": Case("tied", (1, 2), BF16),
    "fp8-and-buffers": Case("fp8", (1, 2), BF16),
    "layers": Case("layers", (1, 2)),
    "zero-1": Case("tied", (1, 2), BF16, "zero"),
    "zero-3": Case("fp8", (1, 2), BF16 | {"zero_optimization": {"stage": 3}}, "zero"),
    "stages": Case("tied", (2, 2)),
    "dualpipev": Case("tied", (2, 2), {"schedule": "dualpipev"}),
}
FOUR = [name for name, case in CASES.items() if case.dims == (2, 2)]


@pytest.fixture(scope="module")
def noted(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> dict[str, list[dict[str, Any]]]:
    """What each rank read and holds, by case and whether replicas read together (`shared`) or each alone (`local`)."""
    folder = tmp_path_factory.mktemp("reading")
    write_samples(folder)
    tied = make_checkpoint("llama", tie_word_embeddings=True)
    models = {"tied": tied, "layers": folder / "layers", "fp8": folder / "fp8"}
    hg_to_pp(tied, models["layers"])
    write_small(models["fp8"], "deepseek_v3")
    to_fp8(models["fp8"])
    described = [
        {"name": f"{name}-{storage}", "kind": case.kind, "config": config(case, storage, folder, models)}
        for name, case in CASES.items()
        if name in asked
        for storage in ("shared", "local")
    ]
    ranks.run_all("reading", described, folder)
    return {
        str(each["name"]): [json.loads(path.read_text()) for path in sorted(folder.glob(f"{each['name']}.[0-9].json"))]
        for each in described
    }


def config(case: Case, storage: str, folder: Path, models: dict[str, Path]) -> dict[str, Any]:
    return {
        "model_path": str(models[case.model]),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "storage": storage,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "model_topo": topology(case.dims),
    } | case.keys


@pytest.mark.parametrize("name", tiered(CASES, quick=(), longest=FOUR))
def test_replicas_read_each_tensor_once_and_hold_the_same_bits(
    name: str, noted: dict[str, list[dict[str, Any]]]
) -> None:
    together, alone = noted[f"{name}-shared"], noted[f"{name}-local"]
    assert [rank["held"] for rank in together] == [rank["held"] for rank in alone]
    for first in range(0, len(alone), 2):  # the two replicas of a stage
        assert alone[first]["read"] == alone[first + 1]["read"]
        shares = [Counter(rank["read"]) for rank in together[first : first + 2]]
        assert sum(shares, Counter()) == Counter(alone[first]["read"])
        least, whole = min(share.total() for share in shares), shares[0].total() + shares[1].total()
        assert least > whole / 6, "one of them reads nearly everything"


def test_what_one_replica_cannot_read_ends_the_run_in_one_line(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Its layer is one that the other replica waits for, and looking at names and shapes does not show the fault."""
    model = make_checkpoint("llama", num_hidden_layers=2, tie_word_embeddings=False)
    change_config(model, tie_word_embeddings=True)
    save_tokenizer(model)
    (tmp_path / "records.json").write_text(json.dumps([{"question": "a", "answer": "b"}] * 8))
    path = write_config(
        tmp_path / "run.yml",
        model_path=str(model),
        data_path=str(tmp_path / "records.json"),
        save_path=str(tmp_path / "run"),
        model_topo=topology((1, 2)),
    )
    ended = supervised(2, "train_ds.py", "--config", path)
    assert ended.returncode != 0
    (line,) = error_lines(ended)
    assert "lm_head.weight is not the embedding" in line
    assert "Traceback" not in ended.stderr
