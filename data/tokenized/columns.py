"""Cut tokenized records to the limit and lay them out as `data.tokenized.sample_file` keeps them.

Over-long texts are split into pieces of the limit. The config's `truncate` decides about a longer dialogue: `turns`
cuts after the last trained run that fits, which is the end of a turn, or at the limit where none fits; `oldest` leaves
out the oldest turns, so that the last answer and the system message stay; `refuse` refuses the record. A single turn is
cut, but for `refuse`. Samples without a trained token are left out, but for those that are scored, and what follows the
last one is no turn.

A pair's documents are cut alike: `oldest` leaves out the same turns of both, and a longer answer is cut at the limit.
Where one of them then has no trained token, or both are equal, the pair is left out.

Cost: a few microseconds a sample, a tenth of what tokenizing takes; for `oldest` log2 of the turns more encodings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from struct import pack
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from data.chat.rendered import joined
from data.errors import DataError
from data.images.image import Image
from data.images.marks import Placed
from data.records.chat import Chat
from data.records.record import (
    SPLIT_KIND,
    TYPES,
    ConverHasApi,
    Conversation,
    Instruct,
    Pretrain,
    Record,
    RefQA,
    Segments,
    Tokenized,
)
from data.settings import Truncate
from data.tokenized.meta import Tally
from data.tokenized.sample_file import INDEX, sample_digest
from data.tokenized.tokenize import Tokens

OLDEST = "the oldest turns were left out, so that the last one lies within max_seq_len (truncate: oldest)"
WITHIN = "expected it within max_seq_len, {limit}, by a larger limit or by fewer pixels (max_pixels)"


class Encoded(NamedTuple):
    """Hold a record's sample before it is cut."""

    file: int  # which file the record is from
    number: int  # its number there, from 1
    kind: str  # its type
    empty: bool  # whether an answer of it is empty
    control: bool  # whether the name of a control token stands in its words
    documents: list[Tokens]  # whole; two for a pair
    value: float = 0.0  # see `data.sample_set.Preference`
    scored: bool = False  # each document as a whole, so that all its tokens count, whatever their labels


Tallies = dict[tuple[int, str], Tally]  # what became of the records, by file and type
# A sample: its ids, its runs, the tokens of the first of two documents or 0, and its images.
Cut = tuple[list[int], list[tuple[int, int]], int, list[Image]]


def has_empty_answer(record: Record) -> bool:
    """Test whether a record trains the model to say nothing."""
    if isinstance(record, (Pretrain, Segments, Tokenized)):
        return False
    if isinstance(record, Instruct):
        return not record.output.strip()
    if isinstance(record, Chat):
        spoken = [message for message in record.messages if message.role == "assistant" and message.weight]
        return any(not message.content.strip() and not message.tool_calls for message in spoken)
    answers = [content for role, content in record.rounds if role != "ask"]
    return any(not (answer if isinstance(answer, str) else answer.ans).strip() for answer in answers)


def fit(
    records: Sequence[Record], whole: list[Tokens], limit: int, how: Truncate, encode: Callable[[Record], Tokens]
) -> list[Tokens]:
    """Shorten a sample that is too long, as `truncate` says; the result may still be too long.

    Args:
        records: one, or the two of a pair.
        whole: their tokens.
        encode: tokenizes a record.

    Raises:
        DataError: it is refused; or what `encode` raises.
    """
    length = max(len(tokens.ids) for tokens in whole)
    if length <= limit or isinstance(records[0], Pretrain) or how == "turns":
        return whole
    if how == "refuse":
        raise DataError(f"{length:,} tokens; expected at most max_seq_len, {limit} (truncate: refuse)")
    begins = _turns(records[0], max if len(records) == 1 else min)  # of a pair those that both share
    if len(begins) < 2:
        return whole

    def fits(left_out: int) -> bool:
        return all(len(encode(_from(record, begins, left_out)).ids) <= limit for record in records)

    # The last turn stays, whatever its length.
    left_out = 1 + bisect_left(range(1, len(begins) - 1), True, key=fits)
    note = {OLDEST: f"{left_out} of {len(begins)} turns"}
    kept = [encode(_from(record, begins, left_out)) for record in records]
    return [tokens._replace(notes=tokens.notes | note) for tokens in kept]


def _turns(record: Record, which: Callable[..., int]) -> list[int]:
    """Find where turns begin: at each question after no question and before an answer.

    Args:
        which: of the trained answers; `min` or `max`.
    """
    asked: list[bool] = []
    trained: list[bool] = []
    if isinstance(record, Chat):
        asked = [message.role == "user" for message in record.messages]
        trained = [message.role == "assistant" and bool(message.weight) for message in record.messages]
    elif isinstance(record, (Conversation, ConverHasApi, RefQA)):
        asked = [role == "ask" for role, _ in record.rounds]
        trained = [not asks for asks in asked]
    last = which((place for place, each in enumerate(trained) if each), default=0)
    return [place for place, asks in enumerate(asked[:last]) if asks and (place == 0 or not asked[place - 1])]


def _from(record: Record, begins: list[int], turn: int) -> Record:
    """Return a dialogue from one of its turns on, with the system message before the first."""
    if isinstance(record, Chat):
        systems = [message for message in record.messages[: begins[0]] if message.role == "system"]
        return record.model_copy(update={"messages": systems + record.messages[begins[turn] :]})
    assert isinstance(record, (Conversation, ConverHasApi, RefQA))
    return record.model_copy(update={"rounds": record.rounds[begins[turn] :]})


def check_images(sample: Encoded, limit: int) -> None:
    """Refuse a sample whose images do not lie within the limit, where it cannot be cut before them.

    Raises:
        DataError: an image alone is too long, or belongs to a pair, to what is scored, or to the first answer.
    """
    images = list(chain.from_iterable(tokens.images for tokens in sample.documents))
    if longest := next((end - begin for _, begin, end in images if end - begin > limit), 0):
        raise DataError(f"an image of {longest:,} tokens; {WITHIN.format(limit=limit)}")
    if sample.kind == SPLIT_KIND or not (beyond := [end for *_, end in images if end > limit]):
        return
    (tokens, *others) = sample.documents
    last = _end(joined(tokens.loss), tokens.images, limit)
    if others or sample.scored or not _trained(tokens.loss, 0, last):
        where = f"an image before the end of the first answer ends at token {beyond[0]:,}"
        raise DataError(f"{where}; {WITHIN.format(limit=limit)}")


def pack_samples(
    encoded: Sequence[Encoded], limit: int
) -> tuple[bytes, NDArray[Any], Tallies, list[tuple[int, list[Image]]]]:
    """Cut whole samples to `limit` tokens.

    Returns:
        Their numbers, the rows of their index, what became of them, and the images of those that have some, with
        the numbers of their rows.
    """
    tallies: Tallies = {}
    pictured: list[tuple[int, list[Image]]] = []
    contents: list[bytes] = []
    rows: list[tuple[float, ...]] = []
    place = 0
    for record in encoded:
        kind = record.kind
        if kind == "marked":
            kind = "desirable" if record.value else "undesirable"
        tally = tallies.get((record.file, kind)) or tallies.setdefault((record.file, kind), Tally())
        tally.records += 1
        tally.empty += record.empty
        tally.control += record.control
        tally.longest = max(tally.longest, *(len(tokens.ids) for tokens in record.documents))

        samples_before, equal_before = tally.samples, tally.equal
        for ids, runs, first, images in _cut(record, limit, tally):
            # How many tokens count in the first of two documents, and in the other; of one document in the latter.
            counts = [_trained(runs, 0, first), _trained(runs, first, len(ids))]
            if record.scored:
                counts = [first, len(ids) - first]
            if not sum(counts) or (first and not all(counts)):
                continue

            tally.samples += 1
            tally.tokens += len(ids)
            tally.supervised += sum(counts)
            tally.largest_id = max(tally.largest_id, *ids)
            borders = list(chain.from_iterable(runs))
            content = pack(f"<{len(ids) + len(borders)}i", *ids, *borders)  # in half the time of an array
            origin = TYPES.index(record.kind), record.file, record.number
            digest = sample_digest(content, first, record.value, images)
            about = first, counts[0], record.value, digest
            if images:
                pictured.append((len(rows), images))
            rows.append((place, len(ids), len(borders), sum(counts), *origin, *about))
            contents.append(content)
            place += len(ids) + len(borders)

        made = tally.samples - samples_before
        tally.split += made > 1
        tally.silent += not made and equal_before == tally.equal
    return b"".join(contents), numpy.array(rows, dtype=INDEX), tallies, pictured


def _trained(runs: Sequence[tuple[int, int]], start: int, stop: int) -> int:
    """Count a document's trained tokens; its first has no predecessor that could predict it."""
    return sum(max(min(end, stop) - max(begin, start + 1), 0) for begin, end in runs)


def _cut(record: Encoded, limit: int, tally: Tally) -> Iterator[Cut]:
    """Return the samples of a record."""
    if len(record.documents) > 1:
        yield from _cut_alike(record, limit, tally)
        return
    (tokens,) = record.documents
    ids, loss = tokens.ids, joined(tokens.loss)
    if len(ids) <= limit:
        yield ids, loss, 0, [placed.image for placed in tokens.images]
        return

    if record.kind == SPLIT_KIND:
        borders = [0]
        while (border := borders[-1] + limit) < len(ids):
            borders.append(_before_image(border, tokens.images))
        borders.append(len(ids))
    else:
        borders = [0, _end(loss, tokens.images, limit)]
        tally.cut += 1
        tally.cut_at_turn += any(1 < end <= limit for _, end in loss)
    for start, stop in pairwise(borders):
        yield ids[start:stop], _inside(loss, start, stop), 0, _images_inside(tokens.images, start, stop)


def _end(loss: Sequence[tuple[int, int]], images: Sequence[Placed], limit: int) -> int:
    """Find where a dialogue is cut: after the last trained run that fits, which is the end of a turn."""
    turns = [end for _, end in loss if 1 < end <= limit]
    return turns[-1] if turns else _before_image(limit, images)


def _before_image(border: int, images: Sequence[Placed]) -> int:
    """Return a border, or where the image begins that it would split."""
    return next((begin for _, begin, end in images if begin < border < end), border)


def _cut_alike(record: Encoded, limit: int, tally: Tally) -> Iterator[Cut]:
    """Return a pair's sample, unless its documents are equal."""
    ids = [tokens.ids[:limit] for tokens in record.documents]
    chosen, rejected = (_inside(joined(tokens.loss), 0, limit) for tokens in record.documents)
    tally.cut += max(len(tokens.ids) for tokens in record.documents) > limit
    images = [_images_inside(tokens.images, 0, limit) for tokens in record.documents]
    chosen_images, rejected_images = (list(map(attrgetter("digest"), its)) for its in images)
    if (chosen or record.scored) and ids[0] == ids[1] and chosen_images == rejected_images:
        tally.equal += 1
        return
    first = len(ids[0])
    second = [image._replace(begin=image.begin + first) for image in images[1]]
    yield ids[0] + ids[1], chosen + [(begin + first, end + first) for begin, end in rejected], first, images[0] + second


def _inside(loss: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of runs within a stretch, counted from its beginning."""
    inside = ((max(begin, start), min(end, stop)) for begin, end in loss)
    return [(begin - start, end - start) for begin, end in inside if begin < end]


def _images_inside(images: Sequence[Placed], start: int, stop: int) -> list[Image]:
    """Return the images within a stretch, counted from its beginning; no border splits one."""
    inside = (image for image, begin, end in images if start <= begin and end <= stop)
    return [image._replace(begin=image.begin - start) for image in inside]
