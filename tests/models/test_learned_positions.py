"""Shows what learned positions bring along: their table's end, dropout of embeddings, weights [in, out], older names.

Logits, gradients, packed rows and generation are compared for all families alike (`tests/models/cases.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.attention.kernels import WITHOUT_DROPOUT
from models.checkpoint.adapter_settings import read_settings
from models.checkpoint.layout import ADAPTER
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.quantized_base import NF4
from tests.closeness import assert_near
from tests.models.adapters import save_run
from tests.models.helpers import assert_round_trip, error_line, oracle, random_ids, spec_of
from training.config.deepspeed_config import check_length
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.trained import with_trained

TABLE = 48  # rows

Make = Callable[..., Path]


def config(**keys: Any) -> TrainConfig:
    needed = {"model_path": "model", "data_path": "data", "save_path": "run", "train_batch_size": 1}
    return TrainConfig.model_validate(needed | keys)


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def short(request: pytest.FixtureRequest, make_case: Make) -> Path:
    return make_case(request.param, max_position_embeddings=TABLE)


def test_the_context_is_the_table(short: Path) -> None:
    """OPT's has two rows more."""
    spec = read_spec(short)
    assert spec.context == TABLE
    assert spec.shapes(0)["embed_positions.weight"][0] == TABLE + (2 if spec.family.name == "opt" else 0)
    check_length(config(max_seq_len=TABLE), spec)
    check_length(config(max_seq_len=10 * TABLE), spec_of("bloom"))
    with pytest.raises(ConfigError, match=f"max_seq_len: {TABLE + 1}, but {spec.family.name} has learned {TABLE}"):
        check_length(config(max_seq_len=TABLE + 1), spec)


@torch.inference_mode()
def test_rows_may_be_longer_than_the_table_and_padding_lie_behind_it(short: Path) -> None:
    model, theirs, ids = load_model(short), oracle(short), random_ids(2, 3 * TABLE)
    lengths = [TABLE, 7, TABLE - 1]
    packed = torch.cat([torch.arange(length) for length in lengths])
    padding = -1 - torch.arange(len(packed), 3 * TABLE)
    padded = torch.cat([torch.arange(TABLE), -1 - torch.arange(TABLE, 3 * TABLE)])
    found = model(ids, torch.stack([torch.cat([packed, padding]), padded]))
    for row, documents in enumerate([lengths, [TABLE]]):
        begin = 0
        for length in documents:
            alone = theirs(ids[row : row + 1, begin : begin + length]).logits[0]
            torch.testing.assert_close(found[row, begin : begin + length], alone, atol=1e-5, rtol=0)
            begin += length


DROPPED = [
    ("gpt2", {"embd_pdrop": 0.3, "attn_pdrop": 0.0, "resid_pdrop": 0.2}, "embd_pdrop"),
    ("biogpt", {"hidden_dropout_prob": 0.3}, "hidden_dropout_prob"),
    ("starcoder2", {"embedding_dropout": 0.3}, "embedding_dropout"),
    ("gpt_neox", {"hidden_dropout": 0.3}, "hidden_dropout"),
    ("opt", {"dropout": 0.3, "ffn_dim": 96, "word_embed_proj_dim": 64}, ""),  # inside of blocks alone
]


@pytest.mark.parametrize(
    ("model_type", "changes", "field"),
    [pytest.param(*each, marks=pytest.mark.slow if n else ()) for n, each in enumerate(DROPPED)],
)
def test_embeddings_are_dropped_as_in_transformers(
    model_type: str, changes: dict[str, Any], field: str, make_checkpoint: Make
) -> None:
    """The same random numbers give the same hidden states before the first block."""
    folder, ids = make_checkpoint(model_type, num_key_value_heads=4, **changes), random_ids(2, 16)
    model, theirs, seen = load_model(folder).train(), oracle(folder).train(), list[torch.Tensor]()
    assert model.spec.family.embedding_dropout == field
    base = theirs.base_model
    blocks = next(each for each in base.modules() if isinstance(each, torch.nn.ModuleList))
    blocks[0].register_forward_pre_hook(
        lambda _, inputs, named: seen.append(inputs[0] if inputs else named["hidden_states"]), with_kwargs=True
    )
    torch.manual_seed(0)
    theirs(input_ids=ids, use_cache=False)
    torch.manual_seed(0)
    hidden, _ = model.embedding((ids, torch.arange(16).repeat(2, 1)))
    torch.testing.assert_close(hidden, seen[0], atol=0, rtol=0)
    assert bool((hidden == 0).any()) == bool(field)


def test_kernels_that_cannot_drop_attention_weights_are_left_out() -> None:
    """Whatever the family calls the rate."""
    for model_type, name in (("gpt2", "attn_pdrop"), ("biogpt", "attention_probs_dropout_prob")):
        heads = {"num_key_value_heads": 4}
        assert not set(spec_of(model_type, **{name: 0.1}, **heads).attention) & {*WITHOUT_DROPOUT}
        assert {*WITHOUT_DROPOUT} < set(spec_of(model_type, **{name: 0.0}, **heads).attention)


def test_blocks_that_would_be_left_out_at_random_are_refused() -> None:
    told = "layerdrop: 0.1, but blocks are not left out at random; expected 0.0 in config.json"
    assert told in error_line(lambda: spec_of("opt", layerdrop=0.1))


def test_names_of_the_first_gpt2_are_read_and_come_back(make_case: Make, tmp_path: Path) -> None:
    """Without a prefix, and with the masks of every block."""
    folder = make_case("gpt2")
    expected = oracle(folder)(random_ids(1, 9)).logits
    tensors = {
        name.removeprefix("transformer."): each for name, each in load_file(folder / "model.safetensors").items()
    }
    tensors |= {f"h.{block}.attn.bias": torch.ones(1, 1, 256, 256).tril() for block in range(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(load_model(folder)(random_ids(1, 9)), expected, atol=1e-5, rtol=0)
    assert_round_trip(folder, tmp_path)


def test_adapters_of_weights_in_out_are_pefts_merged_and_apart(make_case: Make, tmp_path: Path) -> None:
    folder, ids = make_case("gpt2"), random_ids(1, 12)
    spec = read_spec(folder).training(Trained(Lora(r=2, alpha=6)))
    run = save_run(spec, folder)
    pp_to_hg(run, tmp_path / "peft")
    pp_to_hg(run, tmp_path / "merged", options=ExportOptions(merge=True))
    settings = json.loads((tmp_path / "peft" / ADAPTER).read_text())
    assert settings["fan_in_fan_out"] is True and sorted(settings["target_modules"]) == ["c_attn", "c_fc", "c_proj"]
    assert read_settings(tmp_path / "peft").lora.r == 2
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        expected = load_model(run)(ids)
        assert_near(load_model(tmp_path / "merged")(ids), expected)
        assert_near(load_model(folder, adapter=tmp_path / "peft")(ids), expected)
        assert_near(PeftModel.from_pretrained(base, tmp_path / "peft").eval()(ids).logits, expected)
        assert (expected - load_model(folder)(ids)).abs().max() > 1e-3


def test_weights_in_out_are_not_held_in_4_bits(make_case: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"lora\.base: gpt2 has none of torch's linear layers, which it packs; expected"
    ):
        with_trained(read_spec(make_case("gpt2")), config(lora={"base": NF4}))
