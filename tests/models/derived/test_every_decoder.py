"""Shows that every decoder of the installed transformers is proven or refused, as docs/models.md says."""

from __future__ import annotations

import pytest

from benchmarks.families import BEGIN, DOCUMENT, REFUSED, RELEASE, Verdict, candidates, verdict
from models.derived.proof import bound

AT_LEAST = 75 / 85  # of those with a pipeline plan
DOCUMENTED = "5.23"  # the release of transformers whose figures the table has


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {}


@pytest.mark.longest
@pytest.mark.parametrize("model_type", candidates())
def test_a_decoder_is_proven_or_refused_for_a_reason(model_type: str, verdicts: dict[str, Verdict]) -> None:
    found = verdicts[model_type] = verdict(model_type)
    if found.proof is None:
        assert found.reason and "\n" not in found.reason
        return
    for name, figure in found.proof.figures.items():
        assert figure <= bound(name, found.proof.linear), name


@pytest.mark.longest
def test_most_of_them_hold(verdicts: dict[str, Verdict]) -> None:
    if len(verdicts) < len(candidates()):
        pytest.skip("not all of them were asked")
    assert sum(each.proof is not None for each in verdicts.values()) >= AT_LEAST * len(verdicts)


@pytest.mark.longest
def test_the_document_says_what_came_out(verdicts: dict[str, Verdict]) -> None:
    if len(verdicts) < len(candidates()) or RELEASE != DOCUMENTED:
        pytest.skip(f"all of them with transformers {DOCUMENTED}, or it is another table")
    table = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2]
    for model_type, found in verdicts.items():  # but for the figure, which is another one on another processor
        expected = found.row().rsplit(" | ", 2)[0] if found.proof else found.row()
        assert expected in table, model_type


@pytest.mark.longest
def test_the_document_names_the_release_where_it_holds(verdicts: dict[str, Verdict]) -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2]
    if len(verdicts) < len(candidates()) or f"transformers {RELEASE}." not in table:
        pytest.skip("all of them with a release of transformers that the table names, or nothing can be told of it")
    rows = [row for row in table.splitlines() if row.startswith("| `") and REFUSED not in row]
    told = {row.split("`")[1] for row in rows if RELEASE in row.rstrip(" |").rpartition("| ")[2]}
    assert told == {name for name, found in verdicts.items() if found.proof}
