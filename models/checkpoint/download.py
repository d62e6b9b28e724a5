"""Fetching a model from the HuggingFace hub: weights, config and tokenizer, and nothing that could run."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from models.checkpoint.layout import TEMPLATES
from models.errors import CheckpointError

SIDE_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "README.md"]


def download(model_name: str, save_path: Path) -> None:
    """Download a repository's files into `save_path`; an interrupted download goes on where it stopped.

    Safetensors are preferred; .bin files are fetched only where a repository has nothing else.

    Raises:
        CheckpointError: no such model, no access, or no network.
    """
    try:
        names = HfApi().list_repo_files(model_name)
        has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
        weights = ["model*.safetensors"] if has_safetensors else ["pytorch_model*.bin"]
        # Other folders of a repository hold the same weights in other formats.
        near = [name for name in names if "/" not in name or name.startswith(f"{TEMPLATES}/")]
        wanted = [name for name in near if any(fnmatchcase(name, each) for each in (*SIDE_PATTERNS, *weights))]
        snapshot_download(model_name, local_dir=save_path, allow_patterns=wanted)
    except Exception as error:  # the hub's own errors, the HTTP library's, the file system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{model_name}: cannot be downloaded: {reason}") from None
