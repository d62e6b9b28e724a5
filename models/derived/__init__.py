"""Compare families with transformers, once, and keep the results.

A result is kept in the user's cache folder by what it depends on: the traits of the config, the versions of
transformers and torch, and Pipetune's own code. With another trait or version, the comparison is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from common.whole_files import kept, replace_checked
from models.derived.derive import BLOCKS, derive
from models.derived.outline import Underivable
from models.derived.proof import Compared, Proof, apart_from_callers, prove
from models.derived.shrink import shrunk_fields
from models.errors import CheckpointError
from models.family import Family

logger = logging.getLogger("pipetune")

ABOUT_FILES = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")
_families: dict[str, Family] = {}  # by config.json
Result = TypeVar("Result", bound=Compared)


def proven(config: PreTrainedConfig, fields: dict[str, Any], declared: Family | None, whole: str | None) -> Family:
    """Get the family of a config, proven against transformers now or before.

    Args:
        fields: of the config.json that `config` was read from.
        declared: what a file declares; derived where absent.
        whole: the `model_type` of the model of images and text whose part for text it is.

    Raises:
        Underivable: it does not hold, or is not understood.
    """
    key = json.dumps([fields, whole], sort_keys=True)
    if key not in _families:
        try:
            found = proof_of(config, fields, declared)
        except CheckpointError as error:
            named = str(error).startswith(config.model_type)
            raise Underivable(str(error) if named else f"{config.model_type}: {error}") from None
        except Exception as error:  # whatever torch makes of a small model
            if isinstance(error, KeyError) and json.dumps(str(error.args[0] if error.args else "")) in key:
                raise  # a word of config.json that transformers does not know; `reason_of` names its field
            reason = " ".join(str(error).split())
            raise Underivable(
                f"{config.model_type}: deriving it failed at {_part(error)}: {reason}; expected sizes in config.json "
                "that fit each other in this part (heads, heads of keys, experts, experts a token)"
            ) from None

        family = declared
        if family is None:
            with apart_from_callers(config):
                family = replace(derive(config, fields, whole), attention=found.attention)
        router = family.router if found.routes else None
        proof = f"{'declared' if declared else 'derived from transformers'}, {found}"
        if family.frozen:
            proof += f"; no gradient reaches {', '.join(family.frozen)}, which stay as they are"
        _families[key] = replace(
            family,
            generates=found.generates,
            shares_rows=found.shares_rows,
            chunks_rows=found.chunks_rows,
            router=router,
            proof=proof,
        )
    return _families[key]


def proof_of(config: PreTrainedConfig, fields: dict[str, Any], declared: Family | None = None) -> Proof:
    """Get the kept proof of a config's family, or prove it now."""
    small = shrunk_fields(config, fields, BLOCKS)
    return known_or_proven(config.model_type, small, Proof, lambda: prove(config, fields, declared))


def known_or_proven(name: str, fields: dict[str, Any], kind: type[Result], prove: Callable[[], Result]) -> Result:
    """Get the kept result of a comparison, or make it now and keep it.

    Args:
        name: of what is compared.
        fields: that the result depends on, beside the versions and the code; what is said of files does not count.
        kind: of the result; its text and its `seconds` are logged.
    """
    traits = {key: value for key, value in fields.items() if key not in ABOUT_FILES}
    known = json.dumps([traits, transformers.__version__, torch.__version__, code()], sort_keys=True)
    path = folder() / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
    if before := kept(path, kind.model_validate_json):
        return before
    found = prove()
    logger.info("%s: %s (%.1f s)", name, found, found.seconds)
    with suppress(OSError):  # without a place to keep it, it is proven again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_checked(path, found.model_dump_json(indent=1))
    return found


def _part(error: Exception) -> str:
    """Name the innermost module of transformers that an error passed through."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [type(each) for each in owners if isinstance(each, nn.Module)]
    return next(
        (module.__name__ for module in reversed(modules) if "transformers" in module.__module__), "its small model"
    )


def folder() -> Path:
    """Find the folder of kept proofs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetune" / "proofs"


@cache
def code() -> str:
    """Digest the code of models/, which changes with what is proven."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
