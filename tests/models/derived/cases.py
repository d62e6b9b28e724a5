"""Architectures that no file declares, one of each kind of trait, and small checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from benchmarks.families import config_of
from models.derived.derive import small_model
from models.derived.proof import roughen

TRAITS = {
    "biogpt": "scaled embeddings, two unused rows in the table of positions",
    "cohere2": "a scale on logits, one norm for attention and feed-forward, positions in some blocks only",
    "deepseek_v3": "latent attention, experts in groups, a bias of the router that is not trained",
    "gemma4_text": "scaled embeddings, a cap on logits, heads of two widths, angles by kind",
    "gpt2": "a table of positions, weights [in, out]",
    "gpt_bigcode": "a table of positions, one key for all heads",
    "gpt_neo": "a table of positions, masks that blocks compute, windows in some blocks",
    "gpt_neox": "other names, feed-forward beside attention",
    "gpt_oss": "sinks, windows, experts with biases",
    "granite": "scales everywhere",
    "opt": "a table of positions, blocks one level deeper",
    "phi": "a bias of the head, angles for a part of each head",
    "qwen3_5_moe_text": "linear attention, experts, a shared expert",
    "smollm3": "tied, positions in some blocks only",
}


def since(release: str) -> pytest.MarkDecorator:
    """For tests of what only newer releases of transformers have."""
    older = Version(transformers.__version__) < Version(release)
    return pytest.mark.skipif(older, reason=f"transformers {transformers.__version__} is older than {release}")


def write_small(folder: Path, model_type: str, **changes: Any) -> Any:
    """Write a small checkpoint as transformers does, with no two weights alike; gives the model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_model(*config_of(model_type, **changes))
        roughen(model)
    model.save_pretrained(folder)
    return model
