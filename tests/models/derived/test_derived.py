"""Shows that architectures without a declaration are derived, proven once, and then converted and run as any other."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.families import config_of
from common.whole_files import read_checked
from models import CheckpointError, load_model
from models import derived as proven
from models.api import read_spec
from models.architectures import FAMILIES
from models.derived.derive import small_model
from models.derived.proof import BOUND, prove, roughen
from models.loss.micro_batch import token_loss
from tests.cases import tiered
from tests.closeness import assert_near
from tests.models.derived.cases import TRAITS, since, write_small
from tests.models.helpers import (
    LAYOUTS,
    assert_round_trip,
    change_config,
    change_weights,
    error_line,
    in_layout,
    random_ids,
    read_config,
    shifted_loss,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs of this test alone, on the disk and in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = dict(proven._families)
    proven._families.clear()
    yield
    proven._families.clear()
    proven._families.update(known)


LATER = ["biogpt", "cohere2", "deepseek_v3", "gpt_bigcode", "gpt_oss", "granite", "opt", "qwen3_5_moe_text"]


@pytest.fixture(scope="module", params=tiered(TRAITS, slow=LATER))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_small(folder, request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpoint", tiered(TRAITS, slow=[*LATER, "gpt_neo"]), indirect=True)
def test_logits_and_loss_equal_transformers(checkpoint: tuple[Path, Any], layout: str, tmp_path: Path) -> None:
    folder, model = checkpoint
    ids = random_ids(2, 40)
    ours = load_model(in_layout(folder, layout, tmp_path / "layers"))
    wanted = model(input_ids=ids, use_cache=False).logits
    assert_near(ours(ids), wanted)
    normalised = ours.head.norm(ours.activations(ids)[0])
    loss = token_loss(normalised, ids, ours.head) / (2 * 39)
    assert_near(loss, shifted_loss(wanted, ids), kind="means")


def test_a_checkpoint_comes_back_bit_for_bit(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    assert_round_trip(checkpoint[0], tmp_path)


def test_a_proof_is_logged_once_kept_for_the_next_start_and_made_again_where_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path / "model", "smollm3")
    with caplog.at_level(logging.INFO, "pipetune"):
        spec = read_spec(tmp_path / "model")
        proven._families.clear()  # as in another process
        with monkeypatch.context() as known:
            known.setattr(proven, "prove", None)
            again = read_spec(tmp_path / "model")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("smollm3: compared with transformers in 9 ways")
    assert again.family.proof == spec.family.proof
    assert again.family.proof.startswith("derived from transformers, compared with transformers in 9 ways")

    (kept,) = (tmp_path / "cache" / "pipetune" / "proofs").iterdir()
    figures = json.loads(read_checked(kept))["figures"]
    assert max(figures.values()) <= BOUND
    kept.write_bytes(kept.read_bytes()[:20])
    proven._families.clear()
    read_spec(tmp_path / "model")
    assert json.loads(read_checked(kept))["figures"] == figures
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "model" / "config.json"))  # nothing can be kept there
    proven._families.clear()
    assert read_spec(tmp_path / "model").family.proof == spec.family.proof


def test_a_random_number_that_is_0_hides_no_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten million is, and thousands are looked at."""
    write_small(tmp_path, "granite")
    derive: Any = sys.modules[small_model.__module__]
    make = derive.bare_model

    def with_a_zero(*arguments: Any, **named: Any) -> Any:
        model = make(*arguments, **named)
        with torch.no_grad():
            model.get_input_embeddings().weight[derive.SAMPLE[0], 0] = 0
        return model

    monkeypatch.setattr(derive, "bare_model", with_a_zero)
    assert read_spec(tmp_path).n_layers > 2


def test_another_trait_is_proven_anew(tmp_path: Path) -> None:
    differences: list[dict[str, Any]] = [{}, {"vocab_size": 1000}, {"attention_bias": True}]
    for number, changes in enumerate(differences):
        write_small(tmp_path / str(number), "smollm3", **changes)
        read_spec(tmp_path / str(number))
    assert len(list((tmp_path / "cache" / "pipetune" / "proofs").iterdir())) == 2  # a size is no trait


SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
LAYERS = {"num_hidden_layers": 2}
GEMMA3 = config_of("gemma3_text")[1]["rope_parameters"]
NEWER = since("5.23")


class Refused(NamedTuple):
    """A config.json and what its refusal says; `published` fields are those of a checkpoint of the family."""

    model_type: str
    changes: dict[str, Any]
    told: str
    published: bool = True
    marks: Any = ()


REFUSED = [
    Refused("t5", LAYERS, "transformers has no decoder of this name", published=False),
    Refused("no_such_model", LAYERS, "transformers has no decoder of this name", published=False),
    Refused("llava", {"text_config": {"model_type": "clip_text_model"}}, "expected a checkpoint for text alone", False),
    Refused("hrm_text", {}, "HrmTextModel has 0 lists of 4 blocks"),
    Refused("inkling_text", {}, "does more to embeddings than to multiply them", marks=NEWER),
    Refused("gemma4_text", {"hidden_size_per_layer_input": 16}, "is an embedding of something else than words and"),
    Refused("llama4_text", {}, "a mask of create_chunked_causal_mask, which is not known", marks=NEWER),
    # As transformers 5.17 does with MiniMax-M2's, whose heads have 128 numbers.
    Refused(
        "minimax_m2",
        {"rope_parameters": config_of("minimax_m2")[1]["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        f"rotary_dim is 64, but transformers {transformers.__version__} rotates 128 numbers of a head; expected a ",
        marks=pytest.mark.slow,
    ),
    Refused(
        "gemma3_text",
        {"rope_parameters": GEMMA3 | {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}}},
        "angles depend on a document's length and are of several kinds",
    ),
    # Latent attention has as many heads of keys as of queries, and no router sends a token to more experts than exist.
    *(
        Refused(each, SMALL | changes, f"config.json: {each}: deriving it failed at {where}", marks=NEWER)
        for each, changes, where in (
            ("minicpm3", {"num_key_value_heads": 2}, "MiniCPM3Attention: The size of tensor"),
            ("youtu", {"num_key_value_heads": 2}, "YoutuAttention: The size of tensor"),
            ("kimi_linear", {"num_key_value_heads": 4, "num_experts": 4}, ""),
            ("falcon", {"alibi": True}, ""),
        )
    ),
]


@pytest.mark.parametrize("case", [pytest.param(each, id=each.model_type, marks=each.marks) for each in REFUSED])
def test_what_does_not_fit_is_refused_in_one_line(case: Refused, tmp_path: Path) -> None:
    fields = {"model_type": case.model_type} | case.changes
    if case.published:
        fields = config_of(case.model_type, **case.changes)[1] | case.changes
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    assert case.told in error_line(lambda: read_spec(tmp_path))
    assert not (tmp_path / "cache").exists(), "a proof of what is refused is kept"


@pytest.mark.parametrize("model_type", tiered(["phi", "seed_oss"], slow=["phi"]))
def test_dropout_inside_of_blocks_is_kept_and_leaves_the_proof_exact(model_type: str, tmp_path: Path) -> None:
    """That of Seed-OSS is transformers' default, where config.json has none."""
    fields = {name: value for name, value in config_of(model_type)[1].items() if "drop" not in name}
    stated = {"attention_dropout": 0.1, "embd_pdrop": 0.0} if model_type == "phi" else {}
    (tmp_path / "config.json").write_text(json.dumps(fields | stated, default=str))
    assert read_spec(tmp_path).config.attention_dropout == 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096},
        {"multi_query": False, "parallel_attn": False, "bias": True},
    ],
    ids=["7b", "40b", "rw"],
)
def test_falcon_is_derived(changes: dict[str, Any]) -> None:
    """Its head_dim is a property, and its blocks ask for an alibi of None."""
    assert prove(*config_of("falcon", **changes)).figures["gradients"] < 1e-4


@since("5.23")
def test_what_generation_is_refused_for_is_true(tmp_path: Path) -> None:
    """Of angles by the length transformers keeps those of the keys that were there before a text became long."""
    folder = tmp_path / "model"
    write_small(folder, "internlm3", max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 6.0})
    spec = read_spec(folder)
    assert spec.family.proof.endswith("no generation here, as tokens one by one are not transformers'")


def add_weight(folder: Path, name: str) -> None:
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(8, 4)}))


def test_a_stray_text_config_makes_no_weight_one_to_carry(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("llama")
    change_config(folder, text_config={})
    add_weight(folder, "tower.weight")
    assert "unexpected weights for llama: tower.weight" in error_line(lambda: load_model(folder))


def save_under_names_of_modules(model: Any, folder: Path, prefix: str = "") -> None:
    tensors = {prefix + name: t for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def assert_computes_the_same(folder: Path, model: Any) -> None:
    ids = random_ids(1, 30)
    assert_near(load_model(folder)(ids), model(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", tiered(["qwen2_moe", "mixtral"], slow=["mixtral"]))
def test_names_of_modules_are_read_as_transformers_reads_them(model_type: str, tmp_path: Path) -> None:
    model = write_small(tmp_path / "model", model_type)
    save_under_names_of_modules(model, tmp_path / "model")
    assert_computes_the_same(tmp_path / "model", model)
    assert_round_trip(tmp_path / "model", tmp_path)


SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_attention_heads": 2}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {  # the part for text, and what the tower for images has of its own
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "patch_size": 4, "num_position_embeddings": 16}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"depth": 1, "patch_size": 4, "num_position_embeddings": 16}),
    "minimax_m3_vl": ("minimax_m3_vl_text", {"num_hidden_layers": 1, "patch_size": 4}),
    "qianfan_ocr": ("qwen3", {"num_hidden_layers": 1}),
}


@pytest.mark.parametrize("model_type", tiered(WHOLE, slow=["qwen3_5_moe", "minimax_m3_vl"]))
def test_the_part_for_text_is_trained_and_the_rest_comes_back(model_type: str, tmp_path: Path) -> None:
    """Also where the saver renames its blocks, with the tower's or for themselves."""
    part, own = WHOLE[model_type]
    text = small_model(*config_of(part)).config
    vision = SIGHT | own | {"out_hidden_size": text.hidden_size}
    config = CONFIG_MAPPING[model_type](text_config=text.to_dict(), vision_config=vision)
    for name in ("projector_hidden_size", "merged_hidden_size"):
        if hasattr(config, name):
            setattr(config, name, 32)
    model = AutoModelForImageTextToText.from_config(config).eval()
    roughen(model)
    model.save_pretrained(tmp_path / "model")
    if model_type == "qwen3_5_moe":  # which is published with the experts in one tensor
        save_under_names_of_modules(model, tmp_path / "model")
    assert_computes_the_same(tmp_path / "model", model)
    assert read_spec(tmp_path / "model").is_part
    assert_round_trip(tmp_path / "model", tmp_path)


def test_names_of_a_part_that_the_saver_leaves_alone_are_read_too(tmp_path: Path) -> None:
    """As `qianfan_ocr` is published; its saver puts the blocks where the tower's are."""
    model = write_small(tmp_path / "model", "qwen3")
    text = read_config(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qianfan_ocr", "text_config": text}))
    save_under_names_of_modules(model, tmp_path / "model", "language_model.")
    assert_computes_the_same(tmp_path / "model", model)


def test_what_is_not_trained_keeps_its_precision(tmp_path: Path) -> None:
    write_small(tmp_path / "model", "deepseek_v3")
    model = load_model(tmp_path / "model", dtype=torch.bfloat16)
    biases = {name: each.dtype for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert set(biases.values()) == {torch.float32} and len(biases) == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_no_gradient_reaches_is_left_alone(tmp_path: Path) -> None:
    """Weights that choose keys: the decay of an optimizer would shrink them, step by step."""
    write_small(tmp_path / "model", "glm_moe_dsa")
    model = load_model(tmp_path / "model", dtype=torch.bfloat16)
    names = {f"layers.1.block.{name}" for name in model.spec.family.frozen}
    assert names and all(".indexer." in name for name in names) and not names & dict(model.named_parameters()).keys()
    assert {model.get_buffer(name).dtype for name in names} == {torch.bfloat16}
    ids = random_ids(2, 40)
    shifted_loss(model(ids), ids).backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert_round_trip(tmp_path / "model", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "blocks", "spare"), [("deepseek_v3", 4, 61), ("glm4_moe", 48, 92)])
def test_layers_that_only_transformers_ignores_are_carried(
    model_type: str, blocks: int, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GLM-4.5 transformers ignores block 46 too, which is one of the small model and spare in a smaller one."""
    with monkeypatch.context() as deep:
        deep.setattr(sys.modules["models.derived.derive"], "BLOCKS", blocks)
        model = write_small(tmp_path / "model", model_type, num_hidden_layers=blocks)
    add_weight(tmp_path / "model", f"model.layers.{spare}.eh_proj.weight")
    assert_computes_the_same(tmp_path / "model", model)
    assert_round_trip(tmp_path / "model", tmp_path)


def test_layers_that_predict_further_ahead_are_carried_behind_any_number_of_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_small(folder, "glm4_moe")
    change_config(folder, num_nextn_predict_layers=1)
    add_weight(folder, "model.layers.4.mlp.gate.weight")
    assert_round_trip(folder, tmp_path)
    add_weight(folder, "model.layers.5.eh_proj.weight")
    unexpected = "unexpected weights for glm4_moe: model.layers.5.eh_proj.weight"
    assert unexpected in error_line(lambda: load_model(folder))


@pytest.mark.parametrize("model_type", tiered(sorted(FAMILIES.keys() & CONFIG_MAPPING.keys()), slow=["glm"]))
def test_declared_families_hold_too(model_type: str) -> None:
    config, fields = config_of(model_type)
    found = prove(config, fields, FAMILIES[model_type])
    assert max(found.figures.values()) <= BOUND and found.generates and found.routes


@since("5.23")
def test_kernels_for_gpus_are_not_asked_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention, where it is installed, computes on GPUs alone."""

    def chunk_gated_delta_rule(*_: Any, **__: Any) -> None:
        raise RuntimeError("expected a tensor on a GPU")

    package = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla", package)
    plain = modeling_qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
    kernel = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(plain)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    with monkeypatch.context() as without:
        without.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", plain)
        write_small(tmp_path / "model", "qwen3_5_text")
    assert read_spec(tmp_path / "model").family.generates
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is kernel


def test_a_declaration_that_does_not_hold_is_refused(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers may compute something else than the file that declares a family says."""
    folder = make_checkpoint("gemma2")
    uncapped = replace(FAMILIES["gemma2"], projection=None)
    monkeypatch.setitem(FAMILIES, "gemma2", uncapped)
    with pytest.raises(CheckpointError, match=r"gemma2 is not what transformers has: .* differ by"):
        read_spec(folder)
