"""The timeline of a run whose rows pass in chunks: each pass is that of the chunk that it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from data.loader import PAD_MULTIPLE
from models.api import read_spec
from options.row_chunks.cuts import RowCuts
from options.timeline.recorder import CallReader
from tests.launching import topology
from tests.ranks import Ranks, job, samples_of
from training.schedule.instructions import InstructionReader

CHUNK, LENGTHS = 40, (200, 136, 48)  # tokens of a chunk, and of the rows, the longest first, as a batch has them
CLOCKS = 1000  # microseconds by which those of two processes may differ
CASES = {"stages": ("pipeline", (2, 1)), "zero": ("zero", (1, 2))}  # kind, and stages and replicas


@pytest.fixture(scope="module")
def counts(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with a model and records, and into how many chunks each row is cut."""
    folder = tmp_path_factory.mktemp("chunks")
    for name, (_, (_, replicas)) in CASES.items():  # each replica has a row of each length
        records = map(json.dumps, samples_of(LENGTHS * replicas))
        (folder / f"{name}.jsonl").write_text("\n".join(records), encoding="utf-8")
    model = make_checkpoint("llama", hidden_size=192, intermediate_size=512, head_dim=48)
    (folder / "model").symlink_to(model)
    cut = RowCuts(read_spec(model), CHUNK, max(LENGTHS))
    return folder, [len(cut([[length]], -(-length // PAD_MULTIPLE) * PAD_MULTIPLE)) for length in LENGTHS]


@pytest.fixture(scope="module")
def events(ranks: Ranks, counts: tuple[Path, list[int]]) -> dict[str, list[dict[str, Any]]]:
    """The spans of the second step by case, in order."""
    folder, _ = counts
    jobs = []
    for name, (kind, dims) in CASES.items():
        keys: dict[str, Any] = {
            "model_path": str(folder / "model"),
            "model_topo": topology(dims),
            "data_path": [{"path": str(folder / f"{name}.jsonl"), "format": "tokens"}],
            "packing": False,
            "train_batch_size": len(LENGTHS) * dims[1],
            "n_epoches": 2,
            "profile_steps": [2, 2],
            "row_chunk": CHUNK,
        }
        jobs.append(job(folder, name, kind, **keys))
    found = ranks.jobs(jobs, folder)
    assert {name: outcome["error"] for name, outcome in found.items()} == dict.fromkeys(CASES)
    traces = {}
    for name in CASES:
        spans = json.loads((folder / name / "timeline.json").read_text())["traceEvents"]
        traces[name] = sorted((span for span in spans if span["ph"] == "X"), key=lambda span: span["ts"])
        (folder / f"{name}.log").write_text(found[name]["printed"])
    return traces


def passes(spans: list[dict[str, Any]], rank: int, kind: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["pid"] == rank and span["cat"] == kind]


def numbers(spans: list[dict[str, Any]]) -> list[int]:
    return [span["args"]["micro_batch"] for span in spans]


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_chunks_go_in_order_and_back_from_the_last_of_a_row(
    case: str, counts: tuple[Path, list[int]], events: dict[str, list[dict[str, Any]]]
) -> None:
    _, chunks = counts
    assert chunks[0] > chunks[1] > chunks[2] >= 1
    expected: list[int] = []
    for first, behind in pairwise(accumulate(chunks, initial=0)):
        expected += range(behind - 1, first - 1, -1)
    for rank in (0, 1):
        assert numbers(passes(events[case], rank, "forward")) == list(range(sum(chunks)))
        assert numbers(passes(events[case], rank, "backward")) == expected


@pytest.mark.launched
@pytest.mark.slow
def test_a_chunk_goes_from_stage_to_stage_under_one_number(
    counts: tuple[Path, list[int]], events: dict[str, list[dict[str, Any]]]
) -> None:
    spans = events["stages"]
    for kind, first, second in (("forward", 0, 1), ("backward", 1, 0)):
        ends = {span["args"]["micro_batch"]: span["ts"] + span["dur"] for span in passes(spans, first, kind)}
        for span in passes(spans, second, kind):
            assert span["ts"] > ends[span["args"]["micro_batch"]] - CLOCKS, span
    for sender in (0, 1):  # of activations, and of gradients
        assert numbers(passes(spans, sender, "send")) == numbers(passes(spans, 1 - sender, "receive"))
    log = (counts[0] / "stages.log").read_text(encoding="utf-8")
    assert "is the slowest" in log and " a chunk, " in log


def test_calls_go_back_from_what_was_passed_last() -> None:
    read = CallReader()
    forward, backward = "ForwardPass", "BackwardPass"
    calls = [forward, forward, backward, backward, forward, backward, "OptimizerStep"]
    found = [meaning and (meaning.kind, meaning.micro_batch) for meaning in map(read, calls)]
    assert found == [
        *(("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)),
        *(("forward", 2), ("backward", 2), ("optimizer", None)),
    ]


def test_an_order_counts_from_when_it_is_known() -> None:
    read = InstructionReader(0, 2)
    assert read("ForwardPass")
    read.backward_order = [1, 0]
    for expected in (1, 0):
        meaning = read("BackwardPass")
        assert meaning and meaning.micro_batch == expected
