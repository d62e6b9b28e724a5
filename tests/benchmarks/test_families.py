"""The table of docs/models.md keeps what it says of other releases of transformers."""

from __future__ import annotations

import pytest

from benchmarks import families
from benchmarks.families import HEADER, Verdict, verdict, written
from models.attention.kernels import ALL
from models.derived.proof import Proof
from tests.models.derived.cases import since

OLD, NEW = "5.17", "5.23"


def table(before: str, release: str, monkeypatch: pytest.MonkeyPatch, **verdicts: str) -> dict[str, str]:
    """The rows after these verdicts with a release, by model: the reason of a refusal, or nothing."""
    monkeypatch.setattr(families, "RELEASE", release)
    kinds = {"generates": True, "routes": False, "shares_rows": True, "linear": False}
    proof = Proof(attention=ALL, figures={"logits": 1e-6}, seconds=1.0, **kinds)
    made = [Verdict(name, None if reason else proof, reason) for name, reason in verdicts.items()]
    after = written(made, before)
    assert after.count(HEADER) == 1
    return {line.split("`")[1]: line for line in after.partition(HEADER)[2].splitlines()}


def test_of_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table("", NEW, monkeypatch, llama="", mistral="new reason", qwen3="", phi="only new")
    lines = "\n".join(["With transformers 5.23.0, some hold.", "", HEADER.strip(), *rows.values(), ""])
    after = table(lines, OLD, monkeypatch, llama="", mistral="old reason", qwen3="old reason", gemma="")
    assert after.keys() == {"llama", "mistral", "qwen3", "phi", "gemma"}
    assert after["llama"].endswith(f"| {OLD}, {NEW} |")
    assert "new reason" in after["mistral"] and after["mistral"].endswith(f"| {NEW} |")
    assert "refused" not in after["qwen3"] and after["qwen3"].endswith(f"| {NEW} |")
    assert after["phi"] == rows["phi"] and after["gemma"].endswith(f"| {OLD} |")
    again = table(
        "\n".join([HEADER.strip(), *after.values(), ""]), NEW, monkeypatch, mistral="better reason", qwen3="no"
    )
    assert "better reason" in again["mistral"] and "refused: no" in again["qwen3"]


@since("5.23")  # whose plans are other ones
@pytest.mark.parametrize(
    ("model_type", "divided"), [("qwen3", True), ("bloom", True), ("aria_text", False), ("minicpm3", False)]
)
def test_the_tensor_plan_is_what_a_run_would_take(model_type: str, divided: bool) -> None:
    found = verdict(model_type)
    assert found.proof and found.divided == divided
    assert found.row().split(" | ")[7] == ("yes" if divided else "no")
