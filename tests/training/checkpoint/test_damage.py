"""Shows that no damage to a checkpoint of a real run goes unnoticed, whichever file it hits and however."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FAQ
from tests.launching import deepspeed, topology, write_config
from tests.ranks import Ranks
from tests.training.checkpoint.test_folder import DAMAGES
from training.checkpoint.folder import RECORD

pytestmark = pytest.mark.launched

# One of each kind that DeepSpeed and Pipetune write.
KINDS = {
    "layer": "layer_01-model_states.pt",
    "state": "mp_rank_00_model_states.pt",
    "optimizer": "*optim_states.pt",
    "random": "random-001.pt",
    "config": "config.json",
    "tokenizer": "tokenizer.json",
    "record": RECORD,
}
CASES = [f"{kind}-{damage}" for kind in KINDS for damage in DAMAGES]
EACH_KIND = {f"{kind}-{list(DAMAGES)[number % len(DAMAGES)]}" for number, kind in enumerate(KINDS)}
UNDER_TEST = [pytest.param(case, marks=() if case in EACH_KIND else pytest.mark.longest) for case in CASES]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    asked: set[str],
) -> dict[str, dict[str, str]]:
    """What two ranks found in copies of a run's folder, each with one file of the newest checkpoint damaged."""
    chosen = [case for case in CASES if case in asked]
    folder = tmp_path_factory.mktemp("damage")
    records = folder / "records.json"
    records.write_text(json.dumps(json.loads(FAQ.read_text(encoding="utf-8"))[:16]), encoding="utf-8")
    keys = {
        "model_path": str(make_checkpoint("llama")),
        "data_path": str(records),
        "model_topo": topology((2, 1)),
        "save_interval": 1,
        "train_batch_size": 8,
    }
    done = deepspeed(2, "train_ds.py", "--config", write_config(folder / "run.yml", **keys))
    assert done.returncode == 0, done.stdout + done.stderr
    described = []
    for case in chosen:
        copy = folder / case
        shutil.copytree(folder / "run", copy)
        kind, damage = case.split("-")
        (path, *_) = sorted((copy / "step-000002").glob(KINDS[kind]))
        DAMAGES[damage][0](path)
        described.append({"name": case, "config": keys | {"save_path": str(copy)}})
    ranks.run(2, "finding", described, folder)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in chosen}


@pytest.mark.parametrize("case", UNDER_TEST)
def test_the_checkpoint_before_a_damaged_one_is_taken_and_the_reason_told(
    case: str, outcomes: dict[str, dict[str, str]]
) -> None:
    kind, damage = case.split("-")
    outcome = outcomes[case]
    assert outcome["found"] == "step-000001"
    assert outcome["told"].startswith("warning: step-000002 is passed over: ")
    assert outcome["told"].count("\n") == 1
    if kind != "record":
        assert re.search(DAMAGES[damage][1], outcome["told"])
        assert KINDS[kind].lstrip("*") in outcome["told"]
