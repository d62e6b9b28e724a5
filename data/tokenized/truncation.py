"""What becomes of a dialogue of more tokens than `max_seq_len`.

`turns` cuts behind the last turns that fit, which `data.tokenized.columns` does; `oldest` leaves out the oldest turns,
so that the last answer stays, and the system message; `refuse` refuses the record. Texts and what has one turn only are
cut in any case but the last.

Cost: for a dialogue that is too long, a few more encodings: as many as its number of turns has binary digits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from data.chat.prompts import Truncate
from data.errors import DataError
from data.records.chat import Chat
from data.records.record import ConverHasApi, Conversation, Pretrain, Record, RefQA
from data.tokenized.tokenize import Tokens

OLDEST = "the oldest turns were left out, so that the last one lies within max_seq_len (truncate: oldest)"


def fit(record: Record, tokens: Tokens, limit: int, how: Truncate, encode: Callable[[Record], Tokens]) -> Tokens:
    """A record's tokens; where they are too many, in the way that was asked for, and they may still be too many.

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
    """Where the turns of a dialogue begin: at each question that follows no question."""
    asked: list[bool] = []
    if isinstance(record, Chat):
        asked = [message.role == "user" for message in record.messages]
    elif isinstance(record, (Conversation, ConverHasApi, RefQA)):
        asked = [role == "ask" for role, _ in record.rounds]
    return [place for place, asks in enumerate(asked) if asks and (place == 0 or not asked[place - 1])]


def _from(record: Record, begins: list[int], turn: int) -> Record:
    """A dialogue from one of its turns on, with what the system says before the first."""
    if isinstance(record, Chat):
        systems = [message for message in record.messages[: begins[0]] if message.role == "system"]
        return record.model_copy(update={"messages": systems + record.messages[begins[turn] :]})
    assert isinstance(record, (Conversation, ConverHasApi, RefQA))
    return record.model_copy(update={"rounds": record.rounds[begins[turn] :]})
