"""Reading a config.json that transformers does not know, of a model whose layers it has.

The original code has switches for other shapes of model than the published ones; a declaration knows the published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.errors import CheckpointError


@contextmanager
def published(raw: Mapping[str, Any], switches: Mapping[str, Any], family: str) -> Iterator[None]:
    """Translate `raw` in here.

    Args:
        switches: fields and the value that each has, where it stands, in all that was published.

    Raises:
        CheckpointError: one has another value, or a field is missing that the translation asks for.
    """
    for name, value in switches.items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{name} is {raw[name]}; Pipetune knows {family}'s layers, where it is {value}")
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"no {error.args[0]}, which {family} has; expected one of its configs") from None
