"""Shows that every family is tested, and that config.json picks its parts, by the field names of any age."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import load_model
from models.api import read_spec
from models.architectures import FAMILIES
from models.attention.kernels import ALL, EAGER, FLASH, FLEX, TORCH
from tests.conftest import ORIGINALS
from tests.models.cases import CASES, LLAMA3_ROPE, LONG_ROPE
from tests.models.helpers import error_line, random_ids, read_config, spec_of

LENGTH = 40  # longer than the windows


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def test_every_family_has_a_case() -> None:
    assert {case.model_type for case in CASES.values()} >= set(FAMILIES)


@pytest.mark.parametrize(
    ("case", "name", "kernels"),
    [
        ("llama-tied", "llama", ALL),
        ("bloom", "bloom", (EAGER, FLEX)),
        ("gemma2", "gemma2", (EAGER, FLASH, FLEX)),
        ("gemma3", "gemma3_text", ALL),
        ("baichuan2-7b", "baichuan2-7b", ALL),
        ("baichuan2-13b", "baichuan2-13b", (TORCH, EAGER, FLEX)),
        ("baichuan-7b", "baichuan-7b", ALL),
        ("baichuan-13b", "baichuan-13b", (TORCH, EAGER, FLEX)),
        ("chatglm3", "chatglm3", ALL),
        ("internlm2", "internlm2", ALL),
        ("qwen", "qwen", ALL),
    ],
)
def test_config_json_picks_the_declaration_and_its_kernel(
    case: str, name: str, kernels: tuple[str, ...], make_case: Callable[..., Path]
) -> None:
    spec = read_spec(make_case(case))
    assert spec.family.name == name
    assert spec.family.attention == kernels
    assert spec.config._attn_implementation == kernels[0]


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("internlm2", {"bias": True}, "bias is True"),
    ("qwen", {"no_bias": False}, "no_bias is False"),
    ("qwen", {"kv_channels": 32}, "kv_channels is 32"),
    ("chatglm", {"rmsnorm": False}, "rmsnorm is False"),
    ("chatglm", {"multi_query_attention": False}, "multi_query_attention is False"),
    ("chatglm", {"add_bias_linear": True}, "add_bias_linear is True"),
    ("chatglm", {"post_layer_norm": False}, "post_layer_norm is False"),
    ("chatglm", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
    ("chatglm", {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 16}, "rope_ratio is 16"),
    # Taken out:
    ("chatglm", {"multi_query_group_num": ...}, "no multi_query_group_num, which ChatGLM3 has"),
    ("chatglm", {"padded_vocab_size": ...}, "no padded_vocab_size, which ChatGLM3 has"),
    ("chatglm", {"num_layers": ...}, "no num_layers, which ChatGLM3 has"),
    ("chatglm", {"layernorm_epsilon": ...}, "no layernorm_epsilon, which ChatGLM3 has"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED)
def test_relatives_with_other_layers_are_refused(
    model_type: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    fields = ORIGINALS[model_type][0] | changes
    (tmp_path / "config.json").write_text(json.dumps({n: each for n, each in fields.items() if each is not ...}))
    line = error_line(lambda: read_spec(tmp_path))
    assert str(tmp_path / "config.json") in line and reason in line


@pytest.mark.parametrize(("name", "ratio"), [("THUDM/chatglm2-6b", 1), ("THUDM/chatglm3-6b-32k", 50)])
def test_chatglms_whose_angles_are_known_are_read(name: str, ratio: int) -> None:
    spec = spec_of("chatglm", rope_ratio=ratio, _name_or_path=name)
    assert spec.config.rope_parameters["rope_theta"] == 10_000 * ratio


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 4000),
        ({"rope_type": "linear", "factor": 4.0}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}, 3200),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 250}, 1000),
    ],
)
def test_the_context_counts_how_angles_are_stretched(rope: dict[str, Any], context: int) -> None:
    rope = {"rope_theta": 10_000.0} | rope
    assert spec_of(max_position_embeddings=1000, rope_parameters=rope).context == context


OLDER_NAMES: dict[str, dict[str, object]] = {
    "llama-rope-scaling": {"rope_theta": 10000.0, "rope_scaling": without(LLAMA3_ROPE, "rope_theta")},
    "mixtral": {"rope_theta": 1e6},
    "phi3-long": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": without(LONG_ROPE["rope_parameters"], "rope_type", "rope_theta") | {"type": "longrope"},
    },
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
}


@pytest.mark.parametrize("case", OLDER_NAMES)
def test_field_names_of_older_transformers_mean_the_same(case: str, make_case: Callable[..., Path]) -> None:
    folder = make_case(case)
    ids = random_ids(1, LENGTH)
    with torch.inference_mode():
        expected = load_model(folder)(ids)
        fields = without(read_config(folder), "rope_parameters", "dtype", "layer_types")
        (folder / "config.json").write_text(json.dumps(fields | OLDER_NAMES[case] | {"torch_dtype": "float32"}))
        torch.testing.assert_close(load_model(folder)(ids), expected, atol=0, rtol=0)
