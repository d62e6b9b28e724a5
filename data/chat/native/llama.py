"""LLaMA, Mistral and their fine-tunes that ship a sentencepiece model and no tokenizer.json.

transformers 5 merges runs of spaces in another order than sentencepiece for these folders, and leaves `<s>` out where
tokenizer_config.json does not ask for it. transformers 4, servers and the models' authors put it there. With
`"legacy": false` a text gets a dummy prefix, and what stands behind a control token gets none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from data.chat.native.pieces import CONTROLS, NAMED, bpe, read_json, read_model, stated_tokens
from data.errors import DataError


def build(path: Path, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer with the folder's added tokens, and its special tokens."""
    proto = read_model(path)
    prefix, stated = proto.normalizer_spec.add_dummy_prefix, settings.get("add_prefix_space")
    if stated not in (None, prefix):
        raise DataError(
            f"{path.with_name('tokenizer_config.json')}: add_prefix_space: {stated!r}, but {path.name} has {prefix}; "
            "take the key out, or fetch both again"
        )
    # `tokenizers` normalizes a text before it looks for such tokens, so that it has one beginning; else each part has.
    once: dict[str, bool] = {"normalized": True} if prefix and settings.get("legacy") is False else {}
    older = path.with_name("added_tokens.json")  # a token's id by its name
    added = {number: AddedToken(name, normalized=bool(once)) for name, number in read_json(older).items()}
    added |= stated_tokens(path, settings, **once)
    if once and (stripping := [each.content for each in added.values() if each.lstrip or each.rstrip]):
        raise DataError(
            f"{path}: with legacy: false, {stripping[0]!r} cannot take blanks in; expected a tokenizer.json"
        )
    names = [*CONTROLS, *(each.content for each in added.values())] if once else []
    tokenizer = bpe(proto, [piece.piece for piece in proto.pieces], bare=names)
    tokenizer.add_special_tokens([AddedToken(name, normalized=bool(once)) for name in CONTROLS])
    for number in sorted(added):
        tokenizer.add_tokens([added[number]])
        if tokenizer.token_to_id(added[number].content) != number:
            raise DataError(f"{path}: the added token {added[number].content!r} cannot get its id {number}")
    return tokenizer, NAMED | {"pad_token": None, "add_bos_token": True, "add_eos_token": False, "chat_template": None}
