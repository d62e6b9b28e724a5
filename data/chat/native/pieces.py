"""Convert a sentencepiece BPE model to a `tokenizers` BPE with the same ids.

- sentencepiece merges the neighbours whose joint piece has the best score, so every way to cut a piece into two pieces
  becomes a merge, ranked by the score of the whole;
- what no piece covers falls back to bytes;
- user-defined pieces are cut out of the text first; those of one character are in no merge, and need nothing;
- some models put a blank (the dummy prefix) before every text. `tokenizers` looks for user-defined pieces under their
  names with what is done to a text, so that a text that is nothing but such a piece gets none.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made at run time
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from data.errors import DataError

# Piece types, as sentencepiece numbers them in the file.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
BPE_MODEL = 2
CONTROLS = ["<unk>", "<s>", "</s>"]  # the first three pieces of all these models
NAMED: dict[str, Any] = dict(zip(("unk_token", "bos_token", "eos_token"), CONTROLS, strict=True))

# Runs of spaces, indentation, tabs, line ends, CJK, emoji, digits, accents, and characters that fall back to bytes.
SAMPLES: tuple[str, ...] = (
    "The  end",
    "    def f():\n        return 1\n",
    "a\tb\r\n\n c   ",
    "天地玄黄，宇宙洪荒。",
    "🙂👩‍🚀",
    "1234.50 007",
)
SAMPLES += ("Café naïve, e\u0301", "𐍈 \u1abc \ue000", "ﬁ Ａ½", " hi", "|  a |     b |")


def expected_ids(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Give texts with sentencepiece's ids, to compare a tokenizer that was made of the model.

    transformers merges some pieces in another order, which one text in hundreds shows. So texts are made of all pieces.

    Raises:
        DataError: the file is no such model.
    """
    try:
        proto = ModelProto.FromString(path.read_bytes())
        model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        pieces = [piece.piece.replace("▁", " ") for piece in proto.pieces if piece.type == NORMAL]
    except (DecodeError, OSError, RuntimeError, ValueError):
        pieces = []
    if not pieces:
        raise DataError(f"{path}: sentencepiece cannot read it; fetch it again, or add the model's tokenizer.json")
    choose = random.Random(0).choices
    texts = (*SAMPLES, *("".join(choose(pieces, k=20)) for _ in range(2000)))
    return ((text, model.encode(text)) for text in texts)


def read_json(path: Path) -> dict[str, Any]:
    """Read a settings file's object; empty if there is no file.

    Raises:
        DataError: it is damaged.
    """
    if not path.is_file():  # from a pipe nothing would ever come
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise DataError(f"{path}: damaged; expected a JSON object")
    return settings


def stated_tokens(path: Path, settings: dict[str, Any], **changes: bool) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens_decoder by id; raise `DataError` where they are none."""
    stated = settings.get("added_tokens_decoder") or {}
    try:
        return {int(number): AddedToken(**token | changes) for number, token in stated.items()}
    except (AttributeError, TypeError, ValueError):
        file = path.with_name("tokenizer_config.json")
        raise DataError(f'{file}: added_tokens_decoder: expected {{"3": {{"content": "<name>"}}}}') from None


def read_model(path: Path) -> ModelProto:
    """Read the model; `DataError` where it is damaged or of another kind, `OSError` where the file cannot be read."""
    proto = ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        proto.Clear()

    # A file that was cut loses what stands at its end: the trainer's settings, which say that it is BPE. A damaged
    # name is no string any more, or stands there twice.
    names = [piece.piece for piece in proto.pieces]
    whole = (
        proto.trainer_spec.model_type == BPE_MODEL
        and sum(piece.type == BYTE for piece in proto.pieces) == 256
        and len(set(names)) == len(names)
        and all(name and isinstance(name, str) for name in names)
    )
    if not whole:
        raise DataError(f"{path}: damaged, or no sentencepiece BPE model with byte fallback; fetch the file again")

    if names[:3] != CONTROLS:
        found = f"begins with {', '.join(names[:3])}, and the class that the folder names with {', '.join(CONTROLS)}"
        raise DataError(f"{path}: {found}; expected the class of this vocabulary, or the vocabulary of this class")
    if proto.normalizer_spec.precompiled_charsmap or proto.normalizer_spec.remove_extra_whitespaces:
        raise DataError(f"{path}: replaces characters or leaves blanks out; expected one that takes a text as it is")
    return proto


def bpe(proto: ModelProto, names: list[str], bare: Sequence[str] = (), dropped: str = r"\A ") -> Tokenizer:
    """Make the BPE that sentencepiece computes, its mark for white space included.

    Args:
        names: by id; pieces that have other names in the model are not cut out.
        bare: user-defined pieces that no dummy prefix stands before.
        dropped: what decoding drops where there is a dummy prefix, a regular expression.
    """
    user_defined = {piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and len(piece.piece) > 1}
    cut = [name for name in names if name in user_defined]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=_merges(proto), byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        without = "|".join([*map(re.escape, bare), *(re.escape(name) + r"\z" for name in cut), "(?!)"])
        steps = [normalizers.Prepend("▁"), normalizers.Replace(Regex(rf"\A▁(?={without})"), ""), *steps]
        decoding.append(decoders.Replace(Regex(dropped), ""))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in cut])  # in a text, not between two
    return tokenizer


def _merges(proto: ModelProto) -> list[tuple[str, str]]:
    """List every cut of a piece into two pieces, best score of the whole first."""
    pieces = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = []
    for whole in sorted(pieces, key=lambda piece: -pieces[piece]):
        cuts = ((whole[:place], whole[place:]) for place in range(1, len(whole)))
        merges += [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    return merges
