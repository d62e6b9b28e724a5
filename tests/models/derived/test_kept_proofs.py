"""What the reader of kept proofs takes: figures within their bounds, kernels that there are, a regular file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from common.whole_files import read_checked, replace_checked
from models.derived.proof import BOUND, Proof

SOUND: dict[str, Any] = {
    "attention": ["eager"],
    "figures": {"logits": BOUND / 2, "gradients": 0.0},
    "generates": True,
    "routes": True,
    "shares_rows": True,
    "linear": False,
    "seconds": 1.0,
}
SPOILT: dict[str, dict[str, Any]] = {
    "over the bound": {"figures": {"logits": 2 * BOUND}},
    "no number": {"figures": {"logits": float("nan")}},
    "without end": {"figures": {"logits": float("inf")}},
    "nothing compared": {"figures": {}},
    "no kernel": {"attention": []},
    "an unknown kernel": {"attention": ["magic"]},
}


def read(path: Path) -> Proof:
    """As models.derived does."""
    return Proof.model_validate_json(read_checked(path))


def test_a_sound_proof_is_taken(tmp_path: Path) -> None:
    replace_checked(tmp_path / "proof", json.dumps(SOUND))
    assert read(tmp_path / "proof").figures == SOUND["figures"]


@pytest.mark.parametrize("name", SPOILT)
def test_a_proof_that_shows_nothing_is_not_taken(name: str, tmp_path: Path) -> None:
    """Though its checksum is right."""
    replace_checked(tmp_path / "proof", json.dumps(SOUND | SPOILT[name]))
    with pytest.raises(ValueError):
        read(tmp_path / "proof")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "proof")
    signal.alarm(20)  # which would end the tests, rather than let them hang
    with pytest.raises(OSError, match="regular file"):
        read(tmp_path / "proof")
    signal.alarm(0)
