"""Shows that every decoder of the installed transformers is proven or refused, as docs/models.md says.

Fresh weights of a derived family are those that transformers would make, and what published config.json files say
shrinks together: the small model runs, and is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.families import BEGIN, DOCUMENT, END, RELEASE, Verdict, candidates, config_of, read, verdict
from models.api import read_spec
from models.architectures import FAMILIES
from models.checkpoint.source import open_source
from models.derived.derive import BLOCKS, small_model
from models.derived.outline import Underivable
from models.derived.proof import bound
from models.derived.shrink import HEAD, shrunk_fields
from models.errors import CheckpointError
from models.loading import SeededStates
from tests.cases import tiered
from tests.models.derived.cases import since

AT_LEAST = 75 / 85  # of those with a pipeline plan
DOCUMENTED = "5.23"  # the release of transformers whose traits the table has
QUICK = {"kimi_linear", "gemma4_text"}  # learned decays, own norms
SLOW = {"gpt_oss", "qwen3_next"}  # sinks, linear attention
ENOUGH = 200  # numbers whose spread says something
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


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {}


@pytest.mark.longest
@pytest.mark.parametrize("model_type", candidates())
def test_a_decoder_is_proven_or_refused_for_a_reason(model_type: str, verdicts: dict[str, Verdict]) -> None:
    found = verdicts[model_type] = verdict(model_type)
    if found.proof is None:
        assert found.reason and "\n" not in found.reason
        return
    for name, figure in found.proof.figures.items():
        assert figure <= bound(name, found.proof.linear), name


@pytest.mark.longest
def test_most_of_them_hold_and_the_document_says_what_came_out(verdicts: dict[str, Verdict]) -> None:
    if len(verdicts) < len(candidates()):
        pytest.skip("not all of them were asked")
    assert sum(each.proof is not None for each in verdicts.values()) >= AT_LEAST * len(verdicts)
    summaries, known = read(DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])
    if RELEASE not in summaries:
        pytest.skip("the document does not name this release of transformers")
    assert {name for name, (_, releases) in known.items() if RELEASE in releases} == {
        name for name, found in verdicts.items() if found.proof
    }
    if RELEASE == DOCUMENTED:
        assert {name: known[name][0] for name in verdicts} == {name: each.traits for name, each in verdicts.items()}


@pytest.fixture
def nan_where_nothing_was_written() -> Iterator[None]:
    """torch fills new memory so when it is asked to be deterministic; else it holds whatever was there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


DERIVED = [each for each in candidates() if each not in FAMILIES]  # older releases of transformers have fewer


@pytest.mark.usefixtures("nan_where_nothing_was_written")
@pytest.mark.parametrize("model_type", tiered(DERIVED, QUICK.intersection(DERIVED), SLOW.intersection(DERIVED)))
def test_fresh_weights_are_as_transformers_makes_them(model_type: str, tmp_path: Path) -> None:
    """The same constants, the same spread."""
    try:
        small_model(*config_of(model_type)).save_pretrained(tmp_path)
        spec = read_spec(tmp_path)
    except (CheckpointError, Underivable, ValueError, RuntimeError, StrictDataclassError) as error:
        pytest.skip(f"there is no such model: {error}".splitlines()[0])
    source, fresh = open_source(tmp_path, spec), SeededStates(spec, 0)
    for layer in range(spec.n_layers):
        made = fresh.read_layer(layer)
        again = SeededStates(spec, 0).read_layer(layer)
        for name, theirs in source.read_layer(layer).items():
            ours = made[name]
            assert ours.isfinite().all() and torch.equal(ours, again[name]), name
            if theirs.numel() > 1 and theirs.unique().numel() == 1:
                torch.testing.assert_close(ours, theirs, msg=name)
            elif theirs.numel() >= ENOUGH and theirs.is_floating_point():
                assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.3), name


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
    if model_type == "kimi_linear":  # whose kinds of layers and kernels stand in a part of the config
        assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
        assert model.config.linear_conv_kernel_dim == 3


@since("5.23")
def test_what_is_rotated_is_the_same_share_of_a_head() -> None:
    fields, model = shrunk("minimax_m2")
    assert (fields["head_dim"], fields["rotary_dim"]) == (HEAD, HEAD // 2)
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5
