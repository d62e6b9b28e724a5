"""Cut tokenized records to the limit and write them as columns of an Arrow batch.

A sample's labels are its own token ids or IGNORED, so a column of runs (begin and end of each trained stretch) says
as much as a second column of ids and takes next to no room.

Over-long texts are split into pieces of the limit. The config's `truncate` decides about a dialogue of more
tokens than `max_seq_len`: `turns` cuts after the last trained run that fits, which is the end of a turn, or at
the limit where none fits; `oldest` leaves out the oldest turns, so that the last answer stays, and the system message;
`refuse` refuses the record. What has one turn only is cut in any case but the last. Untrained samples are left out, and
what follows the last trained answer, such as a question that nobody answers, is no turn.

Cost: a few microseconds a sample, a tenth of what tokenizing takes; for a dialogue that loses its oldest turns a few
more encodings: as many as its number of turns has binary digits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, pairwise
from struct import pack
from typing import NamedTuple

import numpy
import pyarrow

from data.chat.prompts import Truncate
from data.chat.rendered import joined
from data.errors import DataError
from data.records.chat import Chat
from data.records.record import TYPES, ConverHasApi, Conversation, Pretrain, Record, RefQA
from data.tokenized.tokenize import Tokens

OLDEST = "the oldest turns were left out, so that the last one lies within max_seq_len (truncate: oldest)"
SPLIT_KIND = "pretrain"  # texts without turns: a piece of one is as good as the whole

# A row is a sample, in the order of the records:
SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("runs", pyarrow.list_(pyarrow.int32())),  # begin and end, in turn, counted from the sample's first token
        ("supervised", pyarrow.int32()),  # trained tokens
        ("kind", pyarrow.int8()),  # of the record, as a place in TYPES
        ("file", pyarrow.int32()),  # that the record is from
        ("record", pyarrow.int64()),  # its number in that file, from 1
        # Eight bytes of BLAKE2, of ids and runs: among a hundred million, two are alike by accident once in 4,000 sets.
        ("digest", pyarrow.uint64()),
    ]
)


@dataclass
class Tally:
    """Counts of what became of records."""

    records: int = 0  # how many were read
    samples: int = 0  # how many samples they became
    tokens: int = 0  # of the samples
    supervised: int = 0  # how many of them are trained
    cut: int = 0  # records that were cut to the limit
    cut_at_turn: int = 0  # how many of those end with a whole turn
    split: int = 0  # records that became several samples
    silent: int = 0  # records that were left out because nothing of them is trained
    empty: int = 0  # records with an empty answer
    control: int = 0  # records with the name of a control token in somebody's words
    longest: int = 0  # the length of the longest record before it was cut

    def __add__(self, other: Tally) -> Tally:
        both = {name: mine + getattr(other, name) for name, mine in vars(self).items()}
        return Tally(**both | {"longest": max(self.longest, other.longest)})


class Encoded(NamedTuple):
    """Hold a record's sample before it is cut."""

    file: int  # which file the record is from
    number: int  # its number there, from 1
    kind: str  # its type
    empty: bool  # whether an answer of it is empty
    control: bool  # whether the name of a control token stands in its words
    tokens: Tokens  # whole


Tallies = dict[tuple[int, str], Tally]  # what became of the records, by file and type


def fit(record: Record, tokens: Tokens, limit: int, how: Truncate, encode: Callable[[Record], Tokens]) -> Tokens:
    """Shorten a record that is too long, as `truncate` says; the result may still be too long.

    Args:
        tokens: of the whole record.
        encode: tokenizes a record.

    Raises:
        DataError: it is refused; or what `encode` raises.
    """
    if len(tokens.ids) <= limit or isinstance(record, Pretrain) or how == "turns":
        return tokens
    if how == "refuse":
        raise DataError(f"{len(tokens.ids):,} tokens; expected at most max_seq_len, {limit} (truncate: refuse)")
    begins = _turns(record)
    if len(begins) < 2:
        return tokens

    def fits(left_out: int) -> bool:
        return len(encode(_from(record, begins, left_out)).ids) <= limit

    # The last turn stays, whatever its length.
    left_out = 1 + bisect_left(range(1, len(begins) - 1), True, key=fits)
    kept = encode(_from(record, begins, left_out))
    return kept._replace(notes=kept.notes | {OLDEST: f"{left_out} of {len(begins)} turns"})


def _turns(record: Record) -> list[int]:
    """Find where turns begin: at each question after no question and before an answer."""
    asked: list[bool] = []
    loud: list[bool] = []
    if isinstance(record, Chat):
        asked = [message.role == "user" for message in record.messages]
        loud = [message.role == "assistant" and bool(message.weight) for message in record.messages]
    elif isinstance(record, (Conversation, ConverHasApi, RefQA)):
        asked = [role == "ask" for role, _ in record.rounds]
        loud = [not asks for asks in asked]
    last = max((place for place, bears in enumerate(loud) if bears), default=0)
    return [place for place, asks in enumerate(asked[:last]) if asks and (place == 0 or not asked[place - 1])]


def _from(record: Record, begins: list[int], turn: int) -> Record:
    """Return a dialogue from one of its turns on, with the system message before the first."""
    if isinstance(record, Chat):
        systems = [message for message in record.messages[: begins[0]] if message.role == "system"]
        return record.model_copy(update={"messages": systems + record.messages[begins[turn] :]})
    assert isinstance(record, (Conversation, ConverHasApi, RefQA))
    return record.model_copy(update={"rounds": record.rounds[begins[turn] :]})


def as_columns(encoded: Sequence[Encoded], limit: int) -> tuple[pyarrow.RecordBatch, Tallies]:
    """Cut whole samples to `limit` tokens and lay them out as `SCHEMA` says."""
    tallies: Tallies = {}
    samples = []
    for each in encoded:
        tally = tallies.get((each.file, each.kind)) or tallies.setdefault((each.file, each.kind), Tally())
        tally.records += 1
        tally.empty += each.empty
        tally.control += each.control
        tally.longest = max(tally.longest, len(each.tokens.ids))
        loud = 0
        for ids, runs in _cut(each, limit, tally):
            # The first token of a sample has no predecessor that could predict it.
            supervised = sum(end - max(begin, 1) for begin, end in runs)
            if supervised:
                loud += 1
                tally.tokens += len(ids)
                tally.supervised += supervised
                ends = list(chain.from_iterable(runs))
                # In half the time that an array takes.
                id_bytes, run_bytes = pack(f"{len(ids)}i", *ids), pack(f"{len(ends)}i", *ends)
                digest = blake2b(id_bytes + run_bytes, digest_size=8).digest()
                origin = TYPES.index(each.kind), each.file, each.number
                samples.append((id_bytes, run_bytes, supervised, *origin, digest))
        tally.samples += loud
        tally.split += loud > 1
        tally.silent += not loud
    tokens, borders, *numbers, digests = zip(*samples, strict=True) if samples else [()] * len(SCHEMA)
    columns = [_lists(tokens), _lists(borders), *numbers, numpy.frombuffer(b"".join(digests), dtype=numpy.uint64)]
    return pyarrow.record_batch(columns, schema=SCHEMA), tallies


def _cut(each: Encoded, limit: int, tally: Tally) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Return the ids and the runs of a record's samples."""
    ids, loss = each.tokens.ids, joined(each.tokens.loss)
    if len(ids) <= limit:
        yield ids, loss
        return
    if each.kind == SPLIT_KIND:
        borders = [*range(0, len(ids), limit), len(ids)]
    else:
        turns = [end for _, end in loss if 1 < end <= limit]
        tally.cut += 1
        tally.cut_at_turn += bool(turns)
        borders = [0, turns[-1] if turns else limit]
    for start, stop in pairwise(borders):
        inside = ((max(begin, start), min(end, stop)) for begin, end in loss)
        yield ids[start:stop], [(begin - start, end - start) for begin, end in inside if begin < end]


def _lists(rows: Sequence[bytes]) -> pyarrow.ListArray:
    """Make a column of lists from the bytes of each row's numbers."""
    offsets = [0, *accumulate(len(row) // 4 for row in rows)]
    return pyarrow.ListArray.from_arrays(offsets, numpy.frombuffer(b"".join(rows), dtype=numpy.int32))
