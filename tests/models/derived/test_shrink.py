"""Shows that what published config.json files say shrinks together: the small model runs, and is small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.derived.derive import BLOCKS, small_model
from models.derived.shrink import HEAD, shrunk_fields
from tests.models.derived.cases import since

PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"head_dim": 128, "rotary_dim": 64, "num_attention_heads": 48, "num_key_value_heads": 8},
    "phi3": {"vocab_size": 32064},  # without a pad_token_id, whose default is 32000
    "glm4": {"vocab_size": 151552},
    "kimi_linear": {
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 3,
        },
    },
}


def shrunk(model_type: str) -> tuple[dict[str, Any], Any]:
    """The small config.json of a published one, and the model that it makes."""
    fields = {"model_type": model_type} | PUBLISHED[model_type]
    config = CONFIG_MAPPING[model_type].from_dict(dict(fields))
    return shrunk_fields(config, fields, BLOCKS), small_model(config, fields)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_the_small_model_of_a_published_config_runs(model_type: str) -> None:
    _, model = shrunk(model_type)
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    with torch.inference_mode():
        assert model(torch.tensor([[3, 4, 5]]), use_cache=False).logits.isfinite().all()


@since("5.23")
def test_what_is_rotated_is_the_same_share_of_a_head() -> None:
    fields, model = shrunk("minimax_m2")
    assert (fields["head_dim"], fields["rotary_dim"]) == (HEAD, HEAD // 2)
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_kinds_of_layers_and_kernels_that_a_part_of_the_config_names_stay() -> None:
    _, model = shrunk("kimi_linear")
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert model.config.linear_conv_kernel_dim == 3
