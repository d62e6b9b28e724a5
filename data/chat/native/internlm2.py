"""InternLM2 and 2.5: a sentencepiece model, some of whose spare pieces tokenizer_config.json makes control tokens.

`added_tokens_decoder` there names ids: `<|im_start|>` is what the model calls `[UNUSED_TOKEN_146]`, which then is text
like any other. Spare pieces without a name are cut out of a text, as sentencepiece does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.chat.native import CHATML, CHATML_TOKENS
from data.chat.native.pieces import CONTROLS, NAMED, bpe, read_model, stated_tokens
from data.errors import DataError


def build(path: Path, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer, its special tokens, and its template where it has ChatML's tokens."""
    proto = read_model(path)
    added = stated_tokens(path, settings)
    names = [added[number].content if number in added else piece.piece for number, piece in enumerate(proto.pieces)]
    tokenizer = bpe(proto, names)
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    if lost := [number for number in sorted(added) if tokenizer.token_to_id(added[number].content) != number]:
        raise DataError(f"{path}: has no room for the ids {lost} of added_tokens_decoder in tokenizer_config.json")
    options = NAMED | {"pad_token": "</s>", "add_bos_token": True, "chat_template": None}
    if tokenizer.token_to_id(CHATML_TOKENS["im_end_token"]) is not None:
        options |= {"chat_template": "{{ bos_token }}" + CHATML, "extra_special_tokens": CHATML_TOKENS}
    return tokenizer, options
