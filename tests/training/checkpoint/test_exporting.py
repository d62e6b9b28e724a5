"""The ranks of a run write one HuggingFace folder together, or none if one of them fails.

All exports share one launch (tests/workers/exporting.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.checkpoint.publish import publish_folder
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from tests.launching import torchrun
from tests.models.helpers import assert_same_bits, contents, joined, read_weights, side_files
from training.checkpoint.exporting import layers_by_rank
from training.topology import Topology

# The layers that each rank's stage holds.
PIPELINE, DUALPIPEV, ZERO = [[0, 1, 2], [3, 4]], [[0, 3, 4], [1, 2]], [[0, 1, 2, 3, 4]] * 2


class Case(NamedTuple):
    """An export by two ranks, and what is found afterwards."""

    held: list[list[int]]
    read: list[list[int]]  # the layers that each rank reads
    full: int | None = None  # the rank whose disk takes nothing
    damaged: bool = False
    model: str = "../elsewhere"  # the folder that the run started from
    added: str | None = None  # a file of the user's beside those that Pipetune wrote
    refused: str | None = None


CASES = {
    "pipeline": Case(PIPELINE, [[0, 1, 2], [3, 4]]),
    "dualpipev": Case(DUALPIPEV, DUALPIPEV),
    "zero": Case(ZERO, [[0, 1], [2, 3, 4]]),
    "first-disk-full": Case(PIPELINE, [[], []], full=0, refused="cannot be written: File too large"),
    "second-disk-full": Case(PIPELINE, [[0, 1, 2], []], full=1, refused="cannot be written: File too large"),
    "model": Case(PIPELINE, [[], []], model="model", refused="is not replaced"),
    "model-below": Case(PIPELINE, [[], []], model="model-below/below", refused="is not replaced"),
    "added": Case(PIPELINE, [[], []], added="notes.txt", refused="Pipetune did not write notes.txt in it"),
    "damaged": Case(PIPELINE, [[], []], damaged=True, refused="layer_04-model_states.pt: cut short"),
}
WHOLE = [name for name, case in CASES.items() if case.refused is None]
REFUSED = [name for name, case in CASES.items() if case.refused is not None]


class Exported(NamedTuple):
    folder: Path
    layers: Path
    outcomes: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def exported(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What all cases left in `folder`, where every target was there before with another content."""
    folder = tmp_path_factory.mktemp("exported")
    layers, damaged = folder.with_name("layers"), folder.with_name("damaged")
    hg_to_pp(make_checkpoint("llama", tie_word_embeddings=True), layers)
    shutil.copytree(layers, damaged)
    os.truncate(damaged / "layer_04-model_states.pt", 1000)
    described = []
    (folder.parent / "elsewhere").mkdir(exist_ok=True)
    for name, case in CASES.items():
        with publish_folder(folder / name) as target:
            (target / "old.txt").write_text("still good")
            if case.model.endswith("below"):
                (target / "below").mkdir()
                (target / "below" / "old.txt").write_text("still good")
        if case.added:
            (folder / name / case.added).write_text("mine")
        checkpoint = damaged if case.damaged else layers
        described.append(
            {"checkpoint": str(checkpoint), "target": str(folder / name), "held": case.held, "full": case.full}
        )
        described[-1]["model"] = str(folder / case.model)
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "cases.json").write_text(json.dumps(described))
    result = torchrun(2, "tests/workers/exporting.py", workspace / "cases.json")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    outcomes = json.loads((workspace / "outcomes.json").read_text())
    return Exported(folder, layers, dict(zip(CASES, outcomes, strict=True)))


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_ranks_write_what_one_process_would(name: str, exported: Exported, tmp_path: Path) -> None:
    pp_to_hg(exported.layers, tmp_path / "expected")
    files = read_weights(exported.folder / name)
    assert len(files) == 2
    assert_same_bits(joined(files), joined(read_weights(tmp_path / "expected")))
    assert side_files(exported.folder / name) == side_files(tmp_path / "expected")


@pytest.mark.launched
@pytest.mark.parametrize("name", CASES)
def test_ranks_read_the_layers_of_their_stage_alone(name: str, exported: Exported) -> None:
    assert [outcome["read"] for outcome in exported.outcomes[name]] == CASES[name].read


@pytest.mark.launched
@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_on_one_rank_is_refused_by_all_and_changes_nothing(name: str, exported: Exported) -> None:
    (text,) = {outcome["refused"] for outcome in exported.outcomes[name]}
    assert CASES[name].refused in text
    assert len(text.splitlines()) == 1
    left = contents(exported.folder / name)
    assert left.pop("old.txt") == b"still good"
    assert left == {"added": {"notes.txt": b"mine"}, "model-below": {"below/old.txt": b"still good"}}.get(name, {})
    assert sorted(path.name for path in exported.folder.iterdir()) == sorted(CASES)


@pytest.mark.parametrize(
    ("stages", "parts", "expected"),
    [
        ([0, 1], [3, 2], [[0, 1, 2], [3, 4]]),
        ([0, 0, 1, 1], [3, 2], [[0], [1, 2], [3], [4]]),
        ([0, 1, 0, 1], [3, 2], [[0], [3], [1, 2], [4]]),  # axes: [data, pipe]
        ([0, 0, 0], [2], [[], [0], [1]]),
        ([0, 1], [1, 2, 1, 1], [[0, 4], [1, 2, 3]]),  # dualpipev
        ([0, 0, 1, 1], [1, 2, 1, 1], [[0], [4], [1], [2, 3]]),
    ],
    ids=str,
)
def test_replicas_divide_the_layers_of_their_stage(
    stages: list[int], parts: list[int], expected: list[list[int]]
) -> None:
    topology = Topology(stages=max(stages) + 1, replicas=1, zero_stage=1, parts=parts)
    assert layers_by_rank([topology.layers(stage, sum(parts)) for stage in stages]) == expected
