"""One matrix for every objective: a training step, or a run, of a model, by topology, precision and schedule.

A step goes through the real launcher (tests/workers/gradients.py). Loss and every gradient must be those of one process
without Pipetune's engine, which each objective computes for itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.causal_lm import CausalLM
from tests.closeness import assert_near
from tests.launching import topology
from tests.ranks import Ranks

ROW = 64  # tokens: the samples of `write_samples` are packed into four rows
PARTS = {1: [5], 2: [3, 2], 4: [1, 2, 1, 1], 8: [1, 2, 1, 1, 1, 1, 2, 1]}  # by stages, or chunks
NO_BIAS = {"enable_bias": False}  # the gradient of a key's is rounding alone where nothing rotates
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-no-router-loss": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "few_key_heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "baichuan2-7b": ("baichuan", {"max_position_embeddings": 256}),
    "baichuan2-13b": ("baichuan", {"hidden_size": 80, "num_attention_heads": 5}),
    "baichuan2-13b-even": ("baichuan", {"hidden_size": 96, "num_attention_heads": 6}),
    "chatglm3": ("chatglm", {}),
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("opt", {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False} | NO_BIAS),
    "deep": ("llama", {"num_hidden_layers": 8, "tie_word_embeddings": True}),
}
# Whole runs that give the same numbers: processes, kind and keys.
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (1, "pipeline", {"model_topo": topology((1, 1))}),
    "stages": (2, "pipeline", {"model_topo": topology((2, 1)), "train_micro_batch_size_per_gpu": 2}),
    "replicas": (2, "pipeline", {"model_topo": topology((1, 2)), "packing": False}),
    "sequence": (2, "pipeline", {"model_topo": topology((1, 2)) | {"sequence": 2}}),
    "dualpipev": (2, "pipeline", {"model_topo": topology((2, 1)), "schedule": "dualpipev"}),
    "model": (2, "pipeline", {"model_topo": topology((1, 1, 2))}),
    "zero3": (2, "zero", {"model_topo": topology((1, 2)), "zero_optimization": {"stage": 3}}),
}

NOTHING = torch.empty(0)


class Outcome(NamedTuple):
    """
    Attributes:
        gradients: by <layer>.<name>; a stage may have those of a tied weight twice.
        norm: of them all.
        reference: the log-probabilities that preferences compare with.
    """

    loss: float
    gradients: dict[str, Tensor]
    norm: float
    reference: Tensor = NOTHING


def alone(loss: Tensor, model: CausalLM, reference: Tensor = NOTHING) -> Outcome:
    """Return what one process finds: the gradients of a loss."""
    loss.backward()
    gradients = {name.removeprefix("layers."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    return Outcome(loss.item(), gradients, norm, reference)


def step(
    name: str,
    dims: tuple[int, ...],
    model: Path,
    folder: Path,
    keys: dict[str, Any],
    parts: list[int] | None = None,
    kind: str = "pipeline",
    **more: Any,
) -> dict[str, Any]:
    """Describe a step to tests/workers/gradients.py.

    Args:
        dims: stages, replicas, and processes to a layer.
        folder: with samples.json, and for the outcome.
        keys: of the config, and `sequence` of its topology.
        more: what the worker takes besides.
    """
    keys = dict(keys)
    chunks = dims[0] * (2 if keys.get("schedule") == "dualpipev" else 1)
    places = topology(dims, None if kind == "zero" else parts or PARTS[chunks])
    places["sequence"] = sharing = keys.pop("sequence", 1)
    config = {
        "model_path": str(model),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 * sharing // dims[1],
        "pack_len": ROW,
        "gradient_clipping": 0.0,
        "model_topo": places,
    }
    return {"name": name, "kind": kind, "config": config | keys} | more


def take(ranks: Ranks, steps: Iterable[dict[str, Any]], folder: Path) -> dict[str, Outcome]:
    """Take the steps in as many processes as each has; return what they gave, by name."""
    steps = list(steps)
    ranks.run_all("gradients", steps, folder)
    return {each["name"]: _outcome(folder, each["name"], _dims(each)[0]) for each in steps}


def _dims(described: dict[str, Any]) -> list[int]:
    dims: list[int] = described["config"]["model_topo"]["process_topology"]["dims"]
    return dims


def _outcome(folder: Path, name: str, stages: int) -> Outcome:
    gradients: dict[str, Tensor] = {}
    for stage in range(stages):
        gradients |= load_file(folder / f"{name}.stage{stage}.safetensors")
    found = json.loads((folder / f"{name}.json").read_text())
    return Outcome(found["loss"], gradients, found["grad_norm"], torch.tensor(found["reference"]))


def assert_same(found: Outcome, expected: Outcome, dtype: torch.dtype, *, apart: bool) -> None:
    """Compare loss, norm and every gradient.

    Args:
        apart: whether the first and the last layer lie on different stages, where both copies of a tied weight have
            the whole gradient.
    """
    assert_near(found.loss, expected.loss, dtype, "means")
    assert_near(found.norm, expected.norm, dtype, "norms")
    embedding, head = "0.embed_tokens.weight", "4.lm_head.weight"
    twins: dict[str, str] = {}
    if apart and embedding in expected.gradients and head not in expected.gradients:
        twins = {head: embedding}
    assert found.gradients.keys() == expected.gradients.keys() | twins.keys()
    for name, gradient in found.gradients.items():
        assert_near(gradient, expected.gradients[twins.get(name, name)], dtype, name=name)
