"""Many tokenized samples as flat columns: cut to the limit, counted and digested.

A sample's labels are its own token ids or IGNORED, so a column of runs (begin and end of each supervised stretch) says
as much as a second column of ids and takes next to no room. Everything is done on whole columns, because a few
microseconds a sample are a tenth of what tokenizing takes.

Over-long texts are split into pieces of the limit. Over-long samples of other kinds are cut where the last supervised
run ends that fits, which is the end of a turn, or at the limit where none fits. What bears no loss is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate, chain
from typing import Any

import numpy
from numpy.typing import NDArray

from data.tokenized.tokenize import Tokens

SPLIT_KIND = "pretrain"  # texts without turns: a piece of one is as good as the whole

Ints = NDArray[numpy.int32]


@dataclass
class Tally:
    """Counts of what became of records.

    Attributes:
        records: how many were read.
        samples: how many samples they became.
        tokens: of the samples.
        supervised: how many of them bear loss.
        cut: records that were cut to the limit.
        cut_at_turn: how many of those end with a whole turn.
        split: records that became several samples.
        silent: records that were left out because nothing of them bears loss.
        empty: records with an empty answer.
        control: records with the name of a control token in somebody's words.
        longest: the length of the longest record before it was cut.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    cut: int = 0
    cut_at_turn: int = 0
    split: int = 0
    silent: int = 0
    empty: int = 0
    control: int = 0
    longest: int = 0

    def add(self, other: Tally) -> None:
        """Take in another tally's counts."""
        longest = max(self.longest, other.longest)
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.longest = longest

    def __bool__(self) -> bool:
        return any(astuple(self))


@dataclass
class Columns:
    """Samples, n of them, in the order of their records.

    Attributes:
        ids: token ids of all samples, one after the other.
        offsets: [n + 1], where each sample's ids begin.
        runs: begin and end, in turn, of each supervised stretch, counted from the sample's first token.
        run_offsets: [n + 1], where each sample's runs begin.
        supervised: [n], tokens that bear loss.
        kinds: [n], each sample's type of record, as a place in `names`.
        files: [n], which file its record is from.
        records: [n], the record's number in that file, from 1.
        digests: [n], of ids and runs.
        names: the types of record.
        tallies: what became of the records, by file and type.
    """

    ids: Ints
    offsets: Ints
    runs: Ints
    run_offsets: Ints
    supervised: Ints
    kinds: NDArray[numpy.int8]
    files: Ints
    records: NDArray[numpy.int64]
    digests: NDArray[numpy.uint64]
    names: list[str]
    tallies: dict[tuple[int, str], Tally]


@dataclass
class Encoded:
    """A record's sample before it is cut.

    Attributes:
        file: which file the record is from.
        number: its number there, from 1.
        kind: its type.
        empty: whether an answer of it is empty.
        control: whether the name of a control token stands in its words.
        tokens: whole.
    """

    file: int
    number: int
    kind: str
    empty: bool
    control: bool
    tokens: Tokens


@dataclass
class _Piece:
    record: int
    begin: int  # in the flat columns
    end: int


def as_columns(encoded: Sequence[Encoded], limit: int) -> Columns:
    """Cut whole samples to `limit` tokens and lay them out as columns."""
    lengths = [len(each.tokens.ids) for each in encoded]
    ends = list(accumulate(lengths))
    flat = numpy.fromiter(chain.from_iterable(each.tokens.ids for each in encoded), dtype=numpy.int32)
    bears = _bears_loss(encoded, ends)
    counted = _counted(bears)
    pieces: list[_Piece] = []
    tallies: dict[tuple[int, str], Tally] = {}
    for number, (each, length, end) in enumerate(zip(encoded, lengths, ends, strict=True)):
        tally = tallies.setdefault((each.file, each.kind), Tally())
        tally.records += 1
        tally.empty += each.empty
        tally.control += each.control
        tally.longest = max(tally.longest, length)
        begin = end - length
        if length <= limit:
            cuts = [(0, length)]
        elif each.kind == SPLIT_KIND:
            cuts = [(start, min(start + limit, length)) for start in range(0, length, limit)]
        else:
            place, at_turn = _cut(bears[begin : begin + limit + 1], limit)
            tally.cut += 1
            tally.cut_at_turn += at_turn
            cuts = [(0, place)]
        whole = [_Piece(number, begin + start, begin + stop) for start, stop in cuts if stop]
        # The first token of a sample has no predecessor that could predict it.
        loud = [piece for piece in whole if counted[piece.end] > counted[piece.begin + 1]]
        tally.split += len(loud) > 1
        tally.silent += not loud
        pieces += loud
    return _lay_out(encoded, pieces, flat, bears, tallies)


def _cut(bears: NDArray[numpy.bool_], limit: int) -> tuple[int, bool]:
    """Where to cut a sample, of which `limit` + 1 tokens are given, and whether a turn ends there."""
    ends = numpy.flatnonzero(bears[:-1] & ~bears[1:]) + 1
    ends = ends[ends > 1]
    return (int(ends[-1]), True) if len(ends) else (limit, False)


def _lay_out(
    encoded: Sequence[Encoded],
    pieces: list[_Piece],
    flat: Ints,
    bears: NDArray[numpy.bool_],
    tallies: dict[tuple[int, str], Tally],
) -> Columns:
    lengths = numpy.array([piece.end - piece.begin for piece in pieces], dtype=numpy.int32)
    offsets = _offsets(lengths)
    if len(flat) != offsets[-1]:
        chosen = [slice(piece.begin, piece.end) for piece in pieces]
        flat = numpy.concatenate([flat[each] for each in chosen]) if chosen else flat[:0]
        bears = numpy.concatenate([bears[each] for each in chosen]) if chosen else bears[:0]
    starts, ends = offsets[:-1], offsets[1:]
    # Every change between loss and none is the border of a run, and so is the border of a sample inside one.
    begins, stops = bears.copy(), bears.copy()
    begins[1:] &= ~bears[:-1]
    begins[starts] = bears[starts]
    stops[:-1] &= ~bears[1:]
    stops[ends - 1] = bears[ends - 1]
    run_begins, run_stops = numpy.flatnonzero(begins), numpy.flatnonzero(stops) + 1
    owner = numpy.searchsorted(ends, run_begins, side="right")
    runs = numpy.stack([run_begins - starts[owner], run_stops - starts[owner]], axis=1).astype(numpy.int32).ravel()
    run_offsets = _offsets(2 * numpy.bincount(owner, minlength=len(pieces)))
    # A sample's first token counts as no loss, whatever its label.
    counted = _counted(bears)
    supervised = (counted[ends] - counted[starts] - bears[starts]).astype(numpy.int32)
    names = sorted({each.kind for each in encoded})
    places = {name: place for place, name in enumerate(names)}
    sources = [encoded[piece.record] for piece in pieces]
    for source, length, loss in zip(sources, lengths.tolist(), supervised.tolist(), strict=True):
        tally = tallies[source.file, source.kind]
        tally.samples += 1
        tally.tokens += length
        tally.supervised += loss
    return Columns(
        ids=flat,
        offsets=offsets,
        runs=runs,
        run_offsets=run_offsets,
        supervised=supervised,
        kinds=numpy.array([places[source.kind] for source in sources], dtype=numpy.int8),
        files=numpy.array([source.file for source in sources], dtype=numpy.int32),
        records=numpy.array([source.number for source in sources], dtype=numpy.int64),
        digests=_digests(flat, offsets, runs, run_offsets),
        names=names,
        tallies=tallies,
    )


def _digests(ids: Ints, offsets: Ints, runs: Ints, run_offsets: Ints) -> NDArray[numpy.uint64]:
    """Eight bytes of BLAKE2 for each sample: among a hundred million, two are alike by accident once in 4,000 sets."""
    id_bytes, run_bytes = memoryview(ids.tobytes()), memoryview(runs.tobytes())
    borders, run_borders = [4 * place for place in offsets.tolist()], [4 * place for place in run_offsets.tolist()]
    made = bytearray()
    for number in range(len(borders) - 1):
        digest = hashlib.blake2b(id_bytes[borders[number] : borders[number + 1]], digest_size=8)
        digest.update(run_bytes[run_borders[number] : run_borders[number + 1]])
        made += digest.digest()
    return numpy.frombuffer(bytes(made), dtype=numpy.uint64)


def _bears_loss(encoded: Sequence[Encoded], ends: Sequence[int]) -> NDArray[numpy.bool_]:
    """For each token of all samples whether it bears loss: how many ranges began before it and have not ended."""
    origins = [0, *ends][: len(encoded)]
    ranges = [
        (begin + origin, end + origin)
        for each, origin in zip(encoded, origins, strict=True)
        for begin, end in each.tokens.loss
    ]
    borders = numpy.array(ranges, dtype=numpy.int64).reshape(-1, 2)
    change = numpy.zeros(ends[-1] + 1 if ends else 1, dtype=numpy.int32)
    numpy.add.at(change, borders[:, 0], 1)
    numpy.subtract.at(change, borders[:, 1], 1)
    bears: NDArray[numpy.bool_] = numpy.cumsum(change[:-1]) > 0
    return bears


def _counted(bears: NDArray[numpy.bool_]) -> NDArray[numpy.int64]:
    """[n + 1], how many of the first tokens bear loss."""
    return numpy.concatenate([[0], numpy.cumsum(bears, dtype=numpy.int64)])


def _offsets(lengths: NDArray[Any]) -> Ints:
    return numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32)
