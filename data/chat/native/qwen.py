"""The first Qwen: byte pairs ranked by qwen.tiktoken, and control tokens numbered behind them.

transformers' own converter makes the tokenizer. As in the original, a control token's name is one in any text.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from data.chat.native import CHATML, CHATML_TOKENS
from data.errors import DataError

# How a text is cut before pairs are merged, and the names behind the ranks: both as published.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
SPECIALS = [END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)


def build(path: Path, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer, its special tokens and its template."""
    if more := settings.get("extra_vocab_file"):
        raise DataError(f"{path}: extra_vocab_file ({more}) is not read; expected a tokenizer.json")
    ranks = _read_ranks(path)
    converter = TikTokenConverter(pattern=PATTERN, extra_special_tokens=SPECIALS)
    converter.load_tiktoken_bpe = lambda _: ranks  # which would need another library
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    options = {"chat_template": SYSTEM + CHATML, "extra_special_tokens": CHATML_TOKENS}
    return tokenizer, options | {"eos_token": END, "pad_token": END}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """What the lines say: bytes in base 64, and the number of the line. Were one lost, others would have its id."""
    content = path.read_bytes()
    ranks: dict[bytes, int] = {}
    try:
        for token, rank in map(bytes.split, content.splitlines()):
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        ranks.clear()
    in_order = list(ranks.values()) == list(range(len(content.splitlines())))
    if not (in_order and content.endswith(b"\n") and all(bytes([byte]) in ranks for byte in range(256))):
        raise DataError(f"{path}: damaged, or not the ranks of byte pairs; fetch the file again")
    return ranks
