"""Under NCCL a run hangs in the GPUs' queues: the rank is named whose GPU holds up the others, not all that wait.

The host goes on and gives its GPU the whole step, then waits for a number, as on a real one; gloo carries the messages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FAQ
from tests.pretend.conftest import MakeCase, Run, end_together

pytestmark = [pytest.mark.launched, pytest.mark.slow]

WAITS = {"ForwardPass": False, "BackwardPass": False, "ReduceGrads": True, "OptimizerStep": True}


@pytest.mark.longest
def test_a_gpu_in_a_computation_waits_for_nobody(run_pretended: Run, make_case: MakeCase) -> None:
    found = run_pretended([make_case(name, "llama-tied", "hang", hang=name) for name in WAITS], 1)
    places = {name: ranks[0]["place"] for name, ranks in found.items()}
    assert {name: place["waiting"] for name, place in places.items()} == WAITS
    for name, place in places.items():
        assert place["text"].endswith(f"its GPU in {name}")


@pytest.mark.longest
def test_a_gpu_that_shares_rows_may_wait_for_its_peer(run_pretended: Run, make_case: MakeCase) -> None:
    rows = {"model_topo": {"process_topology": {"axes": ["pipe", "data"], "dims": [1, 2]}, "sequence": 2}}
    found = run_pretended([make_case("shared", "llama-tied", "hang", hang="ForwardPass", **rows)], 2)
    assert [rank["place"]["waiting"] for rank in found["shared"]] == [True, True]


@pytest.mark.parametrize(
    ("hang", "named"),
    [
        pytest.param(["RecvGrad", "ForwardPass"], [1], id="the last stage", marks=pytest.mark.slow),
        pytest.param(["BackwardPass", "RecvActivation"], [0], id="the first stage", marks=pytest.mark.longest),
        pytest.param(["RecvGrad", "SendGrad"], [0, 1], id="a message that never comes", marks=pytest.mark.longest),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(
    hang: list[str], named: list[int], make_case: MakeCase, tmp_path: Path
) -> None:
    keys = {"timeout_minutes": 0.25, "data_path": str(FAQ), "max_seq_len": 256, "pack_len": None}
    results = end_together([make_case("hang", "llama-tied", "job", hang=hang, **keys)], 2, tmp_path)
    assert [result.returncode for result in results] == [1, 1]
    (line,) = [line for result in results for line in result.stderr.splitlines() if line.startswith("error: ")]
    for rank in (0, 1):
        assert (f"rank {rank} (stage {rank}" in line) == (rank in named), line
        assert (f"its GPU in {hang[rank]}" in line) == (rank in named), line
    assert ("hangs; nothing moved" in line) == (len(named) == 1)
