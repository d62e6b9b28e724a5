"""Turn records into prompts, token ids and labels, and global batches. `data.encode` makes one of a record."""

from __future__ import annotations

from typing import Any

__all__ = ["encode"]


def __getattr__(name: str) -> Any:
    if name == "encode":
        from data.tokenized.tokenize import (
            encode,  # brings transformers along, which a reader of configs can do without
        )

        return encode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
