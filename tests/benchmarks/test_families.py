"""The table of docs/models.md keeps what it says of other releases of transformers."""

from __future__ import annotations

import pytest

from benchmarks import families
from benchmarks.families import REFUSED, USUAL, Verdict, read, verdict, written
from models.attention.kernels import ALL
from models.derived.proof import Proof
from tests.models.derived.cases import since

OLD, NEW = "5.17", "5.23"
KINDS = {"generates": True, "routes": False, "shares_rows": True, "chunks_rows": True, "linear": False}
HOLDS = Proof(attention=ALL, figures={"logits": 1e-6}, seconds=1.0, **KINDS)


def table(before: str, release: str, monkeypatch: pytest.MonkeyPatch, **held: bool) -> str:
    """The table after these verdicts with a release."""
    monkeypatch.setattr(families, "RELEASE", release)
    monkeypatch.setattr(families, "VERSION", f"{release}.0")
    return written([Verdict(name, HOLDS if holds else None, divided=True) for name, holds in held.items()], before)


def test_of_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    new = table("", NEW, monkeypatch, llama=True, mistral=False, qwen3=True, phi=False)
    both = table(new, OLD, monkeypatch, llama=True, mistral=False, qwen3=False, gemma=True)
    assert both == (
        f"With transformers {OLD}.0 and torch {families.torch.__version__.partition('+')[0]}, 2 of the 4 architectures "
        f"hold.\n{new.splitlines()[0]}\n\n{families.HEADER}"
        f"| {USUAL} | `gemma` ({OLD}), `llama`, `qwen3` ({NEW}) |\n| {REFUSED} | `mistral`, `phi` |\n"
    )
    again = read(table(both, NEW, monkeypatch, qwen3=False, mistral=True))[1]
    assert again["qwen3"] == (REFUSED, set()) and again["mistral"] == (USUAL, {NEW})
    assert again["gemma"] == (USUAL, {OLD}) and again["llama"] == (USUAL, {OLD, NEW})


@since("5.23")  # whose plans are other ones
@pytest.mark.parametrize(
    ("model_type", "divided"), [("qwen3", True), ("bloom", True), ("aria_text", False), ("minicpm3", False)]
)
def test_the_tensor_plan_is_what_a_run_would_take(model_type: str, divided: bool) -> None:
    found = verdict(model_type)
    assert found.proof and found.divided == divided
    assert ("no tensor parallelism" in found.traits) != divided
