"""Fetch models from the HuggingFace hub: config, tokenizer and weights, and no code.

`find_model` takes a hub's name for a folder: the snapshot in the hub's cache, of safetensors alone. Where several
processes of a host ask for it, one fetches each file, and the others wait for the hub's lock.
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from common.hub import hub_name, other_ways
from common.terminal import reason_of
from models.checkpoint.layout import TEMPLATES, resolve
from models.errors import CheckpointError

SIDE_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "README.md"]
SAFE, PICKLED = "model*.safetensors", "pytorch_model*.bin"


def find_model(path: str | Path, weights: bool = True, adapter: bool = False) -> Path:
    """Find the folder of a model: a local one, a run's newest checkpoint, or the snapshot of a hub's model.

    Args:
        weights: fetch them too; a plan needs none.
        adapter: take a local folder with an adapter too.

    Raises:
        CheckpointError: there is none, or it cannot be fetched.
    """
    name = hub_name(str(path))
    return _snapshot(*name, weights) if name else resolve(path, adapter)


@cache
def _snapshot(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    text = f"{name}@{revision}" if revision else name
    problem: Exception | None = None
    try:
        wanted = wanted_files(name, revision, weights)
    except Exception as error:  # the hub's own errors, the HTTP library's; what is in the cache may do
        wanted, problem = ["config.json", *([SAFE] if weights else [])], error
    try:
        if weights and not any(fnmatchcase(file, SAFE) for file in wanted):
            raise LookupError("it has no safetensors; that command takes .bin files too")
        here = all(try_to_load_from_cache(name, file, revision=revision) for file in wanted)
        if problem or here or os.environ.get("LOCAL_RANK", "0") != "0":
            disable_progress_bars()
        else:
            print(f"fetching {text} from the HuggingFace hub", file=sys.stderr, flush=True)
        found = snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=bool(problem))
    except Exception as error:
        reason = problem or error
        raise CheckpointError(
            f"{text}: not found; expected a model folder, or first: python convert_model.py download --model-name "
            f"{text} --save-path DIR; it was not to be had from the HuggingFace hub: {reason_of(reason)}"
            f"{other_ways(reason, name)}"
        ) from None
    return Path(found)


def download(model_name: str, save_path: Path) -> None:
    """Download a model, `OWNER/NAME` or `OWNER/NAME@REVISION`, into a folder; resume where it stopped.

    Raises:
        CheckpointError: no such model, no access, or no network.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = model_name.partition("@")
    try:
        wanted = wanted_files(name, revision or None)
        snapshot_download(name, revision=revision or None, local_dir=save_path, allow_patterns=wanted)
    except Exception as error:  # the hub's own errors, the HTTP library's, the file system's
        ways = other_ways(error, name)
        raise CheckpointError(f"{model_name}: cannot be downloaded: {reason_of(error)}{ways}") from None


def wanted_files(name: str, revision: str | None, weights: bool = True) -> list[str]:
    """List a model's files on the hub that are wanted: safetensors, or .bin files where there are none."""
    from huggingface_hub import HfApi

    # Unlike a list of files it is asked for once, so that a machine without a network is soon known.
    names = [each.rfilename for each in HfApi().model_info(name, revision=revision).siblings or []]
    # Other folders of a repository hold the same weights in other formats.
    near = [file for file in names if "/" not in file or file.startswith(f"{TEMPLATES}/")]
    kind = SAFE if any(file.endswith(".safetensors") for file in near) else PICKLED
    patterns = [*SIDE_PATTERNS, kind] if weights else SIDE_PATTERNS
    return [file for file in near if any(fnmatchcase(file, each) for each in patterns)]
