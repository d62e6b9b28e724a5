"""The small run keeps what decides which code runs: of every family, and of a config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.api import load_model, read_spec
from models.architectures import FAMILIES
from models.derived.shrink import WINDOW, shrunk_fields
from models.spec import ModelSpec
from options import RunConfig
from options.proof.comparison import is_flat
from options.proof.samples import LENGTH, fit_chunks, shorten
from options.proof.small_run import LR, small_config, small_depth, small_topology, write_model
from options.row_chunks.cuts import cuts_of
from tests.conftest import ORIGINALS
from tests.ranks import samples_of
from training.errors import ConfigError

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 64}
# What the large models of these families have and transformers' defaults do not.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
    "qwen2": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "tie_word_embeddings": True},
    "bloom": {"n_layer": 30, "n_head": 32, "hidden_size": 4096},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [3]},
    "phi3": {
        "head_dim": 96,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [1.0 + number for number in range(48)],
            "short_factor": [1.0] * 48,
        },
    },
    "baichuan": {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40, "vocab_size": 125696},
    "internlm2": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    "qwen": {"hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128, "num_hidden_layers": 32},
    "chatglm": {"hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128, "num_layers": 28},
}


def whole(model_type: str, folder: Path) -> ModelSpec:
    """A family at the size that its models have."""
    if model_type in ORIGINALS:
        raw = ORIGINALS[model_type][0] | PUBLISHED[model_type]
    else:
        raw = CONFIG_MAPPING[model_type](**PUBLISHED.get(model_type, {})).to_dict()
        raw = {name: value for name, value in raw.items() if value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    return read_spec(folder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_small_model_is_of_the_same_kind_and_every_weight_of_it_learns(model_type: str, tmp_path: Path) -> None:
    large = whole(model_type, tmp_path / "whole")
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shrunk_fields(large.config, large.raw, 4)))
    small = read_spec(folder)
    assert (small.family.name, small.tied, small.n_blocks) == (large.family.name, large.tied, 4)
    few, many = small.config, large.config
    for name in ("num_experts_per_tok", "hidden_act", "attention_bias", "partial_rotary_factor"):
        assert getattr(few, name, None) == getattr(many, name, None)
    keys = [getattr(each, "num_key_value_heads", each.num_attention_heads) for each in (few, many)]
    assert few.num_attention_heads * keys[1] == many.num_attention_heads * keys[0]
    assert set(getattr(few, "layer_types", None) or []) == set(getattr(many, "layer_types", None) or [])
    if getattr(many, "sliding_window", None):
        assert few.sliding_window == WINDOW
    # The same tensors, of the same kind, in the same places.
    assert [list(small.shapes(layer)) for layer in (0, 1, 5)] == [
        list(large.shapes(layer)) for layer in (0, 1, large.n_layers - 1)
    ]
    assert sum(shape.numel() for layer in range(6) for shape in small.shapes(layer).values()) < 5_000_000
    write_model(folder, small, seed=0)
    model = load_model(folder)
    ids = torch.randint(3, few.vocab_size, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    flat = [name for name, weight in model.named_parameters() if weight.grad is None or is_flat(weight.grad)]
    assert loss.isfinite() and flat == []


def test_experts_shrink_but_not_how_many_of_them_a_token_has(tmp_path: Path) -> None:
    large = whole("qwen3_moe", tmp_path / "whole")
    fields = shrunk_fields(large.config, large.raw, 4)
    assert (fields["num_local_experts"], fields["num_experts_per_tok"], fields["mlp_only_layers"]) == (16, 8, [3])


def test_dropout_goes_and_ids_stay_in_the_vocabulary(tmp_path: Path) -> None:
    large = whole("llama", tmp_path / "whole")
    large.raw.update(attention_dropout=0.1, eos_token_id=[1, 128_001], pad_token_id=128_004)
    fields = shrunk_fields(large.config, large.raw, 4)
    assert (fields["attention_dropout"], fields["eos_token_id"], fields["pad_token_id"]) == (0.0, [1, 1], 4)


def config_of(**keys: Any) -> RunConfig:
    return RunConfig.model_validate(KEYS | keys)


def grid(dims: list[int], parts: list[int] | None = None, axes: Sequence[str] = ("pipe", "data")) -> dict[str, Any]:
    return {"process_topology": {"axes": list(axes), "dims": dims}, "parts": parts}


@pytest.mark.parametrize(
    ("dims", "room", "expected"),
    [
        ([2, 2], 4, [2, 2]),
        ([8, 1], 4, [4, 1]),
        ([8, 2], 4, [2, 2]),
        ([1, 8], 4, [1, 4]),
        ([2, 16], 4, [2, 2]),
        ([8, 4], 8, [4, 2]),
        ([8, 2], 1, [1, 1]),
        ([3, 2], 4, [2, 2]),
        # At most two share layers.
        ([2, 2, 2], 8, [2, 2, 2]),
        ([8, 1, 8], 4, [2, 1, 2]),
        ([1, 1, 4], 8, [1, 1, 2]),
        ([4, 4, 2], 1, [1, 1, 1]),
    ],
)
def test_dims_shrink_to_what_there_is_room_for(dims: list[int], room: int, expected: list[int]) -> None:
    axes = ("pipe", "data", "model")[: len(dims)]
    assert small_topology(config_of(model_topo=grid(dims, axes=axes)), room).process_topology.dims == expected
    turned = config_of(model_topo=grid(dims[::-1], axes=axes[::-1]))
    assert small_topology(turned, room).process_topology.dims == expected[::-1]


@pytest.mark.parametrize(
    ("dims", "parts", "expected", "layers"),
    [
        ([2, 1], [17, 15], [3, 2], 5),
        ([4, 1], [5, 4, 4, 5], [3, 2, 2, 3], 10),
        ([4, 1], [1, 5, 5, 1], [1, 3, 3, 1], 8),
        ([1, 1], [34], [4], 4),
        ([8, 1], [5, 4, 4, 4, 4, 4, 4, 5], None, 9),
        ([2, 1], None, None, 5),
    ],
)
def test_uneven_parts_stay_uneven(
    dims: list[int], parts: list[int] | None, expected: list[int] | None, layers: int
) -> None:
    config = config_of(model_topo=grid(dims, parts))
    topo = small_topology(config, 4)
    assert topo.parts == expected
    assert small_depth(config, topo, 34) == layers


def test_what_is_proved_stays_as_the_user_has_it(tmp_path: Path) -> None:
    spec = whole("llama", tmp_path / "whole")
    config = config_of(
        bf16={"enabled": True},
        optimizer={"type": "Lion", "params": {"lr": 1e-5, "betas": [0.9, 0.99]}, "no_wd_kws": ["norm"]},
        scheduler={"type": "WSD", "params": {"warmup_num_steps": 100}},
        zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}},
        gradient_clipping=0.5,
        use_grad_ckpt={"every": 8},
        schedule="dualpipev",
        model_topo=grid([2, 1]),
        save_interval=100,
        max_restarts=3,
        ports={"meeting": 29500},
    )
    small, differs = small_config(config, spec, config.model_topo, tmp_path)
    same = "bf16 zero_optimization gradient_clipping schedule model_topo seed compile use_flash_attn".split()
    assert {name: getattr(small, name) for name in same} == {name: getattr(config, name) for name in same}
    assert small.optimizer.params == {"lr": LR, "betas": [0.9, 0.99]} and small.optimizer.type == "Lion"
    assert small.scheduler is not None and small.scheduler.params.warmup_num_steps == 2
    assert [line.split(":")[0] for line in differs] == ["lr"]
    # What it kills on purpose stays dead, and a run that has the ports goes on.
    assert small.max_restarts == 0 and small.ports.meeting is None


def test_what_keeps_no_fp32_weights_is_refused(tmp_path: Path) -> None:
    config = config_of(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    with pytest.raises(ConfigError, match=r"^--prove: bf16.bf16_master_weights_and_grads"):
        small_config(config, whole("llama", tmp_path / "whole"), config.model_topo, tmp_path)


@pytest.mark.parametrize(
    ("family", "keys", "on_gpu", "lines"),
    [
        ("mixtral", {"bf16": {"enabled": True}}, False, ["precision: fp32"]),
        ("llama", {}, False, []),
        ("llama", {"tf32": True}, True, ["deterministic: true", "tf32: false"]),
        ("llama", {"bf16": {"enabled": True}, "fp8": {"enabled": True}}, True, ["deterministic: true", "fp8: off"]),
    ],
)
def test_what_no_two_runs_would_agree_on_is_set_and_reported(
    family: str, keys: dict[str, Any], on_gpu: bool, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, spec = config_of(**keys), whole(family, tmp_path / "whole")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    small, differs = small_config(config, spec, config.model_topo, tmp_path)
    assert [line.partition(",")[0] for line in differs] == lines
    assert (small.deterministic, small.tf32, small.fp8.enabled) == (on_gpu, False, False)
    assert small.bf16.enabled == (config.bf16.enabled and family == "llama")


def test_a_sample_is_cut_to_where_its_loss_begins() -> None:
    ids = list(range(1000, 1200))
    sample = shorten({"input_ids": ids, "labels": [-100] * 150 + ids[150:]}, words=512)
    assert len(sample["input_ids"]) == len(sample["labels"]) == LENGTH
    assert sample["input_ids"][LENGTH // 4] == 1150 % 512 == sample["labels"][LENGTH // 4]
    assert sample["labels"][: LENGTH // 4] == [-100] * (LENGTH // 4)
    short = shorten({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, words=512)
    assert short == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


@pytest.mark.parametrize(
    ("given", "expected", "lines"),
    [
        (4096, 12, ["row_chunk: 4096 -> 12, so that short rows pass in several chunks"]),
        ("auto", 12, ["row_chunk: auto -> 12, so that short rows pass in several chunks"]),
        (5, 5, []),
        (None, None, []),
    ],
)
def test_chunks_shrink_with_the_rows(given: Any, expected: Any, lines: list[str], tmp_path: Path) -> None:
    samples = samples_of((30, LENGTH, 9))
    small, differs = fit_chunks(config_of(row_chunk=given, max_seq_len=LENGTH), samples)
    assert isinstance(small, RunConfig) and (small.row_chunk, differs) == (expected, lines)
    cut = cuts_of(small, whole("llama", tmp_path / "whole"))
    assert cut is None or len(cut([[LENGTH]], LENGTH)) >= 4
