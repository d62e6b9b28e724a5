"""Read what meta.json says of a set of samples besides them, and count what became of records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.whole_files import read_regular

META = "meta.json"


@dataclass
class Tally:
    """Count what became of records."""

    records: int = 0  # how many were read
    samples: int = 0  # how many samples they became
    tokens: int = 0  # of the samples
    supervised: int = 0  # how many of them are trained
    cut: int = 0  # records that were cut to the limit
    cut_at_turn: int = 0  # how many of those end with a whole turn
    split: int = 0  # records that became several samples
    silent: int = 0  # records that were left out because nothing of them is trained
    equal: int = 0  # pairs that were left out because their answers are equal
    empty: int = 0  # records with an empty answer
    control: int = 0  # records with the name of a control token in somebody's words
    longest: int = 0  # the length of the longest record before it was cut
    largest_id: int = 0  # the largest token id of the samples

    def __add__(self, other: Tally) -> Tally:
        most = {name: max(getattr(self, name), getattr(other, name)) for name in ("longest", "largest_id")}
        return Tally(**{name: mine + getattr(other, name) for name, mine in vars(self).items()} | most)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read what the builder wrote about the samples."""
    meta: dict[str, Any] = json.loads(read_regular(folder / META))
    return meta


def meta_digest(meta: dict[str, Any]) -> str:
    """Digest all notes beside the samples, except the digest itself."""
    noted = {name: value for name, value in meta.items() if name != "own_digest"}
    return hashlib.sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest()
