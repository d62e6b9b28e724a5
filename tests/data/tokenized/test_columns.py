"""Samples are cut and split as promised, counted, and kept as a plain loop would do it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenized.columns import Encoded, Tallies, pack_samples
from data.tokenized.sample_file import SampleFile, SampleWriter
from data.tokenized.tokenize import Tokens
from tests.data.helpers import as_lists


def make(length: int, runs: list[tuple[int, int]], kind: str = "conversation", first: int = 1) -> Encoded:
    return Encoded(0, 1, kind, False, False, [Tokens(list(range(first, first + length)), runs)])


def packed(
    encoded: list[Encoded], limit: int, folder: Path
) -> tuple[list[tuple[list[int], list[int]]], SampleFile, Tallies]:
    """Ids and labels, as they are read from a file; the file; and what became of the records."""
    numbers, index, tallies, _ = pack_samples(encoded, limit)
    with SampleWriter(folder) as writer:
        writer.write(numbers, index)
    samples = SampleFile(folder)
    return [tuple(as_lists(sample).values()) for sample in samples], samples, tallies  # type: ignore[misc]


@pytest.mark.parametrize(
    ("limit", "length", "at_turn"),
    [(13, 11, 1), (12, 11, 1), (11, 11, 1), (10, 6, 1), (5, 5, 0)],  # where no turn fits, the first one is cut
)
def test_an_over_long_dialogue_is_cut_after_the_last_turn_that_fits(
    limit: int, length: int, at_turn: int, tmp_path: Path
) -> None:
    ((ids, _),), _, tallies = packed([make(20, [(3, 6), (8, 11), (14, 19)])], limit, tmp_path)
    assert ids == list(range(1, length + 1))
    tally = tallies[0, "conversation"]
    assert (tally.cut, tally.cut_at_turn, tally.longest, tally.tokens) == (1, at_turn, 20, length)


def test_an_over_long_text_is_split(tmp_path: Path) -> None:
    texts = [make(21, [(0, 21)], "pretrain"), make(5, [(0, 5)], "pretrain")]
    pieces, samples, tallies = packed(texts, 10, tmp_path)
    assert [len(ids) for ids, _ in pieces] == [10, 10, 5]  # the 21st token alone has nothing to predict it
    assert [token for ids, _ in pieces[:2] for token in ids] == list(range(1, 21))
    assert samples.column("record").tolist() == [1, 1, 1]
    tally = tallies[0, "pretrain"]
    assert (tally.records, tally.samples, tally.split, tally.cut, tally.silent) == (2, 3, 1, 0, 0)
    pieces, _, tallies = packed([make(4, [(0, 1)]), make(0, [])], 10, tmp_path)  # nothing predicts a first token
    assert (pieces, tallies[0, "conversation"].silent) == ([], 2)


def test_equal_samples_have_equal_digests_and_others_do_not() -> None:
    pair = [make(6, [(2, 4)]), make(6, [(2, 4)])]
    others = [make(6, [(2, 5)]), make(6, [(2, 4)], first=2), make(5, [(2, 4)]), make(6, [(2, 3), (3, 4)], first=9)]
    digests = pack_samples(pair + others, 10)[1]["digest"].tolist()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["pretrain", "chat"]), st.lists(st.booleans(), max_size=25)), min_size=1, max_size=8
    ),
    st.integers(2, 12),
)
def test_a_file_holds_what_a_plain_loop_would_make(cases: list[tuple[str, list[bool]]], limit: int) -> None:
    encoded, wanted, first = [], [], 1
    for kind, bears in cases:
        ids = list(range(first, first + len(bears)))
        first += len(bears)
        labels = [token if loud else -100 for token, loud in zip(ids, bears, strict=True)]
        loss = [(place, place + 1) for place, loud in enumerate(bears) if loud]
        encoded.append(Encoded(0, 1, kind, False, False, [Tokens(ids, loss)]))
        if kind == "pretrain":
            cuts = [(start, start + limit) for start in range(0, len(ids), limit)]
        else:
            turns = [end for end in range(2, limit + 1) if end < len(ids) and bears[end - 1] and not bears[end]]
            cuts = [(0, turns[-1] if len(ids) > limit and turns else limit)]
        pieces = [(ids[begin:end], labels[begin:end]) for begin, end in cuts]
        wanted += [(its, own) for its, own in pieces if any(label != -100 for label in own[1:])]
    with TemporaryDirectory() as folder:
        found, samples, tallies = packed(encoded, limit, Path(folder))
        assert found == wanted
        counts = [sum(label != -100 for label in labels[1:]) for _, labels in wanted]
        assert samples.column("supervised").tolist() == counts
    total = sum(tally.tokens for tally in tallies.values())
    assert total == sum(len(ids) for ids, _ in wanted)
