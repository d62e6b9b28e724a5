"""Take the token ids of a record that has them ready made."""

from __future__ import annotations

from itertools import pairwise, takewhile

from transformers import PreTrainedTokenizerBase

from common.quantities import counted
from data.errors import DataError
from data.records.record import Tokenized

PADDED = "padding at an end, trained where labels do not leave it out; expected an attention_mask of 0, or none there"


def ready_made(
    record: Tokenized, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[tuple[int, int]], dict[str, str]]:
    """Return a record's ids, the ranges of trained ones, and notes; see `data.tokenized.tokenize.Tokens`.

    Raises:
        DataError: an id is none of the tokenizer's.
    """
    largest = max(record.input_ids)
    if largest >= len(tokenizer):
        place = record.input_ids.index(largest)
        raise DataError(
            f"field input_ids[{place}]: expected a token of this model's tokenizer, which has {len(tokenizer)}, found "
            f"{largest}"
        )

    borders = [False, *record.trained, False]
    changes = [place for place, (one, other) in enumerate(pairwise(borders)) if one != other]

    ids, pad = record.input_ids, tokenizer.pad_token_id
    padding = max(len(list(takewhile(lambda each: each == pad, side))) for side in (ids, reversed(ids)))
    most = 1 if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id) else 0  # where one belongs to the text
    notes = {PADDED: f"{counted(padding, 'token')} {tokenizer.pad_token!r}"} if padding > most else {}
    return ids, list(zip(changes[::2], changes[1::2], strict=True)), notes
