"""LLaMA, Mistral and their fine-tunes that ship a sentencepiece model and no tokenizer.json.

transformers 5 merges runs of spaces in another order than sentencepiece for these folders, and leaves `<s>` out where
tokenizer_config.json does not ask for it. transformers 4, servers and the models' authors put it there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from data.chat.native.pieces import CONTROLS, NAMED, bpe, read_model
from data.errors import DataError


def build(path: Path, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer with the folder's added tokens, and its special tokens."""
    proto = read_model(path)
    tokenizer = bpe(proto, [piece.piece for piece in proto.pieces])
    tokenizer.add_special_tokens(CONTROLS)
    older = path.with_name("added_tokens.json")  # a token's id by its name
    named = json.loads(older.read_text(encoding="utf-8")) if older.is_file() else {}
    added = {int(number): AddedToken(name, normalized=False) for name, number in named.items()}
    stated = settings.get("added_tokens_decoder") or {}
    added |= {int(number): AddedToken(**token) for number, token in stated.items()}
    for number in sorted(added):
        tokenizer.add_tokens([added[number]])
        if tokenizer.token_to_id(added[number].content) != number:
            raise DataError(f"{path}: the added token {added[number].content!r} cannot get its id {number}")
    return tokenizer, NAMED | {"pad_token": None, "add_bos_token": True, "add_eos_token": False, "chat_template": None}
