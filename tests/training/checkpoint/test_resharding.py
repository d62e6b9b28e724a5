"""A checkpoint resumes on other stages, parts, replicas and ZeRO stages: same state to the bit, same losses.

The processes of a launch serve all cases of their number (tests/workers/topology.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.api import read_spec
from models.errors import CheckpointError
from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from tests.cases import tiered
from tests.conftest import write_records
from tests.launching import OFFLOAD, metrics, topology, write_config
from tests.ranks import Ranks, write_random_samples
from tests.workers.topology import SAVED_AT, STEPS
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saved_slices import SavedOptimizer
from training.topology import Topology

pytestmark = pytest.mark.launched

MODELS = {"tied": True, "untied": False}
BF16 = {"bf16": {"enabled": True}}
FORGETFUL = "forgetful"


class Case(NamedTuple):
    """A run from the beginning, whose checkpoint others resume, or one that resumes another case's."""

    name: str
    dims: tuple[int, int]
    zero: int = 1
    parts: list[int] | None = None
    source: str | None = None
    keys: dict[str, Any] = {}
    kind: str = "pipeline"
    model: str = "tied"


LION = {"optimizer": {"type": "Lion", "params": {"lr": 2.0e-4, "weight_decay": 0.1}, "no_wd_kws": ["norm"]}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1.0e-2}}}
OTHER_RATES = {"optimizer": {"type": "AdamW", "params": {"lr": 5.0e-3, "weight_decay": 0.5}, "no_wd_kws": ["norm"]}}
SHARED = {"sequence": 2}  # replicas that share their rows
OTHER_DIMS = ((4, 1), (2, 1), (1, 2))
DUALPIPEV = {"schedule": "dualpipev"}
SOURCES = [
    Case("1x1", (1, 1)),
    Case("4x1", (4, 1)),
    Case("4x1-bf16", (4, 1), keys=BF16),
    Case("2x1", (2, 1), parts=[2, 3], model="untied"),
    Case("zero-3", (1, 2), 3, kind="zero"),
    Case("2x1-lion", (2, 1), keys=LION),
    Case("2x1-plain", (2, 1), 0),
    Case("dualpipev", (2, 1), keys=DUALPIPEV),
    Case("dualpipev-bf16", (2, 1), parts=[2, 1, 1, 1], keys=DUALPIPEV | BF16),
    Case("1x2-plain-bf16", (1, 2), 0, keys=BF16),
    Case("zero-0-bf16", (1, 2), 0, keys=BF16, kind="zero"),
    Case("2x2", (2, 2)),
    Case("shared-rows", (2, 2), keys={"model_topo": topology((2, 2)) | SHARED}),
    Case("2x1-sgd", (2, 1), keys=SGD),
    Case("2x1-adafactor", (2, 1), 0, keys=ADAFACTOR),
    Case("zero-2", (1, 2), 2, kind="zero"),
]
TAKEN_UP = [
    Case("4x1-to-2x1", (2, 1), source="4x1"),
    Case("4x1-to-2x2", (2, 2), parts=[3, 2], source="4x1"),
    Case("parts", (2, 1), parts=[4, 1], source="2x1", model="untied"),
    Case("1x1-to-2x1", (2, 1), source="1x1"),
    Case("4x1-to-1x2", (1, 2), source="4x1"),
    Case("4x1-to-zero-1", (1, 2), source="4x1", kind="zero"),
    Case("4x1-to-zero-3", (1, 2), 3, source="4x1", kind="zero"),
    Case("zero-3-to-2x1", (2, 1), source="zero-3"),
    Case("lion-to-1x2", (1, 2), source="2x1-lion", keys=LION),
    Case("plain-to-1x2", (1, 2), source="2x1-plain"),
    Case("4x1-to-dualpipev", (2, 1), source="4x1", keys=DUALPIPEV),
    Case("dualpipev-to-2x1", (2, 1), source="dualpipev"),
    Case("dualpipev-to-1x2", (1, 2), source="dualpipev"),
    Case("dualpipev-parts", (2, 1), parts=[1, 1, 2, 1], source="dualpipev", keys=DUALPIPEV),
    Case("2x2-to-dualpipev", (2, 1), source="2x2", keys=DUALPIPEV),
    Case("dualpipev-to-zero-3", (1, 2), 3, source="dualpipev", kind="zero"),
    Case("dualpipev-bf16-to-2x1", (2, 1), source="dualpipev-bf16", keys=BF16),
    Case("1x1-to-plain", (2, 1), 0, source="1x1"),
    Case("bf16-to-2x2", (2, 2), source="4x1-bf16", keys=BF16),
    Case("bf16-to-zero-3", (1, 2), 3, source="4x1-bf16", keys=BF16, kind="zero"),
    Case("bf16-to-plain", (1, 2), 0, source="4x1-bf16", keys=BF16),
    Case("bf16-to-zero-0", (1, 2), 0, source="4x1-bf16", keys=BF16, kind="zero"),
    Case("zero-0-bf16-to-2x1", (2, 1), source="zero-0-bf16", keys=BF16),
    Case("plain-bf16-to-2x1", (2, 1), source="1x2-plain-bf16", keys=BF16),
    Case("4x1-to-zero-0", (1, 2), 0, source="4x1", kind="zero"),
    Case("4x1-to-zero-2", (1, 2), 2, source="4x1", kind="zero"),
    Case("zero-2-to-2x1", (2, 1), source="zero-2"),
    Case("zero-3-to-zero-2", (1, 2), 2, source="zero-3", kind="zero"),
    Case("2x2-to-4x1", (4, 1), source="2x2"),
    Case("2x2-to-shared-rows", (1, 4), source="2x2", keys={"model_topo": topology((1, 4)) | SHARED}),
    Case("shared-rows-to-4x1", (4, 1), source="shared-rows"),
    Case("shared-rows-to-zero-3", (1, 2), 3, source="shared-rows", kind="zero"),
    Case("2x2-to-zero-3", (1, 2), 3, source="2x2", kind="zero"),
    Case("sgd-to-1x2", (1, 2), source="2x1-sgd", keys=SGD),
    Case("adafactor-parts", (2, 1), 0, [4, 1], source="2x1-adafactor", keys=ADAFACTOR),
    Case("4x1-to-offload", (1, 2), source="4x1", keys=OFFLOAD),
]
SLOW = "4x1-to-2x1 parts 4x1-to-zero-3 zero-3-to-2x1 plain-to-1x2 4x1-to-dualpipev dualpipev-to-2x1 bf16-to-2x2".split()
SLOW += ["2x2-to-shared-rows", "adafactor-parts"]


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {name: make_checkpoint("llama", tie_word_embeddings=tied) for name, tied in MODELS.items()}


@pytest.fixture(scope="module")
def folder(ranks: Ranks, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> Path:
    """The folder with the outcomes of all cases that this session asks for."""
    folder = tmp_path_factory.mktemp("topologies")
    write_random_samples(folder, 37, longest=89)  # 4 batches of 8 and one of 5
    taken_up = [case for case in TAKEN_UP if case.name in asked]
    needed = {case.source for case in taken_up} | {"4x1", "1x2-plain-bf16", "dualpipev"}
    taken_up.append(TAKEN_UP[0]._replace(name=FORGETFUL))
    taken_up.append(Case("plain-bf16-again", (1, 2), 0, source="1x2-plain-bf16", keys=BF16))
    taken_up.append(Case("dualpipev-again", (2, 1), source="dualpipev", keys=DUALPIPEV))
    taken_up += [Case(f"other-rates-{dims[0]}x{dims[1]}", dims, source="4x1", keys=OTHER_RATES) for dims in OTHER_DIMS]
    for runs in ([case for case in SOURCES if case.name in needed], taken_up):
        ranks.run_all("topology", [describe(case, models[case.model], folder) for case in runs], folder)
    return folder


def describe(case: Case, model_path: Path, folder: Path) -> dict[str, Any]:
    config = {
        "model_path": str(model_path),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder / case.name),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1.0e-3, "eps": 1.0e-6, "weight_decay": 0.1},
            "no_wd_kws": ["norm"],
        },
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": case.zero}
        | ({"stage3_param_persistence_threshold": 0} if case.zero == 3 else {}),
        "model_topo": topology(case.dims, case.parts),
    }
    return {
        "name": case.name,
        "kind": case.kind,
        "config": config | case.keys,
        "source": case.source,
        "forget": case.name == FORGETFUL,
    }


def outcome(name: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def state(name: str, folder: Path) -> dict[str, Tensor]:
    """Read the optimizer's states of all stages."""
    return {key: value for path in folder.glob(f"{name}.stage*") for key, value in load_file(path).items()}


@pytest.mark.parametrize("case", tiered(TAKEN_UP, quick=(), slow=SLOW))
def test_state_and_losses_continue(case: Case, folder: Path, models: dict[str, Path]) -> None:
    """The state to the bit, the losses to rounding."""
    before, after = state(str(case.source), folder), state(case.name, folder)
    spec = read_spec(models[case.model])
    if spec.tied:  # one weight or two, as one process holds both ends or not
        for found in (before, after):
            ends = f"0.{EMBEDDING_WEIGHT}:", f"{spec.n_layers - 1}.{HEAD_WEIGHT}:"
            found |= {name.replace(*ends): tensor for name, tensor in found.items() if name.startswith(ends[0])}
    assert before.keys() == after.keys()
    assert len(before) > 2 * spec.n_layers
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    straight, resumed = outcome(str(case.source), folder), outcome(case.name, folder)
    assert len(resumed["losses"]) == STEPS - SAVED_AT
    tolerance = 2e-3 if "bf16" in case.keys else 1e-5
    assert resumed["losses"] == pytest.approx(straight["losses"][SAVED_AT:], rel=tolerance)
    assert resumed["rates"] == straight["rates"][SAVED_AT:]


@pytest.mark.slow
def test_without_the_moments_the_losses_would_differ(folder: Path) -> None:
    before, after = (torch.tensor(outcome(name, folder)["losses"]) for name in ("4x1", FORGETFUL))
    assert ((after - before[SAVED_AT:]) / after).abs()[1:].min() > 1e-4


@pytest.mark.slow
def test_the_settings_of_the_optimizer_are_those_of_the_new_config(folder: Path) -> None:
    """On the same topology as on others; as of the first step."""
    before = outcome("4x1", folder)
    same, *others = (outcome(f"other-rates-{dims[0]}x{dims[1]}", folder) for dims in OTHER_DIMS)
    assert same["rates"] == [pytest.approx(5 * rate) for rate in before["rates"][SAVED_AT:]]
    for other in others:
        assert other["rates"] == same["rates"]
        torch.testing.assert_close(torch.tensor(other["losses"]), torch.tensor(same["losses"]), rtol=1e-5, atol=0)
    assert same["losses"][0] == before["losses"][SAVED_AT]
    assert abs(same["losses"][1] / before["losses"][SAVED_AT + 1] - 1) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("source", "name"), [("dualpipev", "dualpipev-again"), ("1x2-plain-bf16", "plain-bf16-again")])
def test_the_same_topology_resumes_to_the_last_bit(source: str, name: str, folder: Path) -> None:
    """Also bf16 without ZeRO, of which DeepSpeed cannot read a checkpoint."""
    assert outcome(name, folder)["losses"] == outcome(source, folder)["losses"][SAVED_AT:]


@pytest.mark.slow
def test_a_run_resumes_on_another_topology(ranks: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    """One line says what happens, and the next checkpoint is one of the new topology."""
    records = tmp_path / "records.json"
    write_records(records, 16)
    keys: dict[str, Any] = {"model_path": str(models["tied"]), "data_path": str(records), "from_scratch": True}
    keys |= {"n_epoches": 3, "save_interval": 2, "keep_last": 5}
    path = write_config(tmp_path / "run.yml", **keys, model_topo=topology((2, 1)))
    assert ranks.train(2, path)["error"] is None
    expected = [line["loss"] for line in metrics(path.with_suffix(""))]
    for step in (4, 6):
        shutil.rmtree(step_folder(path.with_suffix(""), step))
    again = ranks.train(1, write_config(path, **keys, model_topo=topology((1, 1))))
    assert again["error"] is None
    assert (
        "step-000002 was saved in 2 stages of [3, 2], ZeRO stage 1, 1 replica; dividing its weights and optimizer "
        "states anew: in 1 stage of [5], ZeRO stage 1, 1 replica; dropout, if any, draws other numbers"
    ) in again["printed"]
    losses = [line["loss"] for line in metrics(path.with_suffix(""))]
    assert losses == pytest.approx(expected, rel=1e-5)
    record = CheckpointRecord.read(step_folder(path.with_suffix(""), 6))
    assert record is not None
    assert record.topology == Topology(stages=1, replicas=1, zero_stage=1, parts=[5])


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"optimizer": Harmful(), "parameter_names": []}, r"mp_rank_00_model_states\.pt: refused, .* could run code"),
        ({"optimizer": {"state": {}}}, "the optimizer's files of stage 0 are not laid out as expected"),
    ],
)
def test_files_that_are_something_else_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    saved = SavedOptimizer(tmp_path, Topology(stages=1, replicas=1, zero_stage=0, parts=[5]))
    with pytest.raises(CheckpointError, match=message):
        list(saved.slices(0))
