"""Shows that every decoder of the installed transformers is proven or refused, as docs/models.md says."""

from __future__ import annotations

import pytest

from benchmarks.families import BEGIN, DOCUMENT, END, RELEASE, Verdict, candidates, read, verdict
from models.derived.proof import bound

AT_LEAST = 75 / 85  # of those with a pipeline plan
DOCUMENTED = "5.23"  # the release of transformers whose traits the table has


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
    summaries, known = read(DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])
    if len(verdicts) < len(candidates()) or RELEASE not in summaries:
        pytest.skip("not all of them were asked, or with a release of transformers that the document does not name")
    assert {name for name, (_, releases) in known.items() if RELEASE in releases} == {
        name for name, found in verdicts.items() if found.proof
    }
    if RELEASE == DOCUMENTED:
        assert {name: known[name][0] for name in verdicts} == {name: each.traits for name, each in verdicts.items()}
