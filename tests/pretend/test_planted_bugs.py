"""The pretence sees bugs of every kind that it is there for: each is planted in a run that is right without it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.pretend.allowed import unexpected
from tests.pretend.conftest import MakeCase, Run

pytestmark = pytest.mark.launched


class Planted(NamedTuple):
    """
    Attributes:
        seen: the beginning of a line that says so.
    """

    model: str
    seen: str
    keys: dict[str, Any] = {}


PLANTED = {
    "slopes left on the host": Planted("bloom", "step: mismatch: aten.mul"),
    "slopes copied each time": Planted("bloom", "step: wait: copy from host to device, 4 times, models/"),
    "rotary left on the host": Planted("llama-tied", "step: "),
    "router sums on the host": Planted("mixtral", "step: mismatch: aten.add", {"aux_router_loss": {"weight": 0.5}}),
    "loss summed on the host": Planted("llama-tied", "step: mismatch"),
    "a number asked of each block": Planted("llama-tied", "step: wait: item"),
    "documents not told": Planted("llama-tied", "step: wait: tolist, 4 times, models/attention/packed.py"),
    "supervised positions not told": Planted("llama-tied", "step: wait: nonzero, 4 times, models/loss.py"),
    "tokens chosen by a mask": Planted("llama-tied", "step: wait: index by a mask"),
    "micro-batches not sent": Planted("llama-tied", "step: wait: copy from host to device, 24 times"),
    "copied without pinning": Planted(
        "llama-tied", "step: wait: copy from host to device of memory that is not pinned"
    ),
    "copied and waited for": Planted("llama-tied", "step: wait: copy from host to device"),
    "offload waits for the way back": Planted(
        "llama-tied", "step: wait: copy from pinned host to device", {"offload_activations": True}
    ),
    "an expert at a time": Planted("mixtral", "step: wait: "),
    "a host tensor in an all-reduce": Planted("llama-tied", "step: refused: allreduce_ of a CPU tensor"),
    "the timer is kept": Planted("llama-tied", "2 events"),
}


@pytest.fixture(scope="module")
def found(run_pretended: Run, make_case: MakeCase, asked: set[str]) -> dict[str, list[dict[str, Any]]]:
    """What each run with a bug found."""
    made = [
        make_case(name, planted.model, planted=name, **planted.keys)
        for name, planted in PLANTED.items()
        if name in asked
    ]
    return run_pretended(made, 1)


@pytest.mark.parametrize("name", [pytest.param(each, id=each) for each in PLANTED])
def test_a_planted_bug_is_seen(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    (phases,) = found[name]
    lines = [*unexpected(phases), f"{phases['events']} events"]
    assert any(line.startswith(PLANTED[name].seen) for line in lines), lines
