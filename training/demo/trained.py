"""The prompts that a model was trained with, for those who ask it and do not say them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from data.chat.prompts import PLAIN, check_prompt_format
from models.checkpoint.layout import RECORD, resolve
from training.checkpoint.exporting import EXPORTED
from training.metrics.run_info import RUN_FILE


def as_trained(model: str, names: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """What the run that wrote the folder, if one did, was given as these keys for prompts; what it was not is absent.

    Raises:
        CheckpointError: there is no such folder.
        DataError: the run's template is not there any more.
    """
    folder = resolve(model).resolve()
    path = folder.parent / RUN_FILE
    if not path.is_file() or not ((folder / RECORD).is_file() or folder.name == EXPORTED):
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        known = {name: config[name] for name in names if config.get(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # torn by a power cut
        return {}
    if known:
        tell(f"asked as the run was trained, {', '.join(f'{name}: {known[name]}' for name in known)} ({path})")
    check_prompt_format(known.get("prompt_format", PLAIN))
    return known
