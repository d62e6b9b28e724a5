"""What becomes of a dialogue of more tokens than `max_seq_len`.

`turns` cuts behind the last turns that fit, which `data.tokenized.columns` does; `oldest` leaves out the oldest turns,
so that the last answer stays, and the system message; `refuse` refuses the record. Texts and what has one turn only are
cut in any case but the last.

Cost: for a dialogue that is too long, a few more encodings: as many as its number of turns has binary digits.
"""

from __future__ import annotations

from collections.abc import Callable

from data.chat.prompts import Truncate
from data.errors import DataError
from data.records.chat import Chat
from data.records.record import ConverHasApi, Conversation, Pretrain, Record, RefQA
from data.tokenized.tokenize import Tokens

OLDEST = "the oldest turns were left out, so that the last one lies within max_seq_len (truncate: oldest)"


def fit(
    record: Record, tokens: Tokens, limit: int, how: Truncate, encode: Callable[[Record], Tokens | DataError]
) -> Tokens | DataError:
    """The tokens of a record that is too long, in the way that was asked for; they may still be too many.

    Args:
        tokens: of the whole record, more than `limit`.
        encode: tokenizes a record.
    """
    if isinstance(record, Pretrain) or how == "turns":
        return tokens
    if how == "refuse":
        return DataError(f"{len(tokens.ids):,} tokens; expected at most max_seq_len, {limit} (truncate: refuse)")
    begins = _turns(record)
    fewest, most = 1, len(begins)  # turns that are left out; with `most`, nothing would be left
    while fewest < most:
        middle = (fewest + most - 1) // 2
        found = encode(_from(record, begins, middle))
        if isinstance(found, DataError):
            return found
        if len(found.ids) <= limit:
            most = middle
        else:
            fewest = middle + 1
    left_out = min(most, len(begins) - 1)  # the last turn stays, whatever its length
    if left_out < 1:
        return tokens
    kept = encode(_from(record, begins, left_out))
    if isinstance(kept, DataError):
        return kept
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
