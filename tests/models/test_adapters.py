"""Adapters compute what peft computes of them: logits, gradients, files; and what cannot be adapted is refused."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models import load_model
from models.adapters import Lora, Trained, fresh_factors
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates, LayerFiles
from models.checkpoint.adapter_settings import read_settings
from models.checkpoint.digest import DIGEST, model_digest
from models.checkpoint.layout import ADAPTER, layer_file
from models.checkpoint.peft_names import PEFT_WEIGHTS, peft_name, to_peft
from models.checkpoint.source import open_source
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from models.spec import ModelSpec
from tests.cases import tiered
from tests.closeness import assert_near
from tests.conftest import ORIGINALS
from tests.models.adapters import save_adapter, save_run
from tests.models.cases import CASES
from tests.models.helpers import random_ids, shifted_loss

Make = Callable[..., Path]

ENDLESS = r"(.|.|.)*(?<=zz)"  # 3 ** n ways to match n letters
# Of one trait each: tied, fused, all of a kind in 3 dimensions, two kinds of blocks; the other families by `test-all`.
OFTEN = ("llama-tied", "bloom", "phi3", "mixtral", "gemma3")
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}  # transposed experts with biases
DEEPSEEK = {  # latent attention, a dense block before those of experts
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2} | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "qwen3_next": ("qwen3_next", LINEAR),
}
# peft 0.21 takes gate_proj, up_proj and down_proj of a family with experts for those of the experts, whatever they are.
BESIDE = ("qwen3_moe-some-dense", "deepseek_v3", "qwen3_next")
ATTENTION = (
    "q_proj k_proj v_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj in_proj_qkvz in_proj_ba out_proj"
)
NOT_DENSE = {"targets": (*ATTENTION.split(), "experts.gate_up_proj", "experts.down_proj")}
ALL = {
    name: (case.model_type, case.changes) for name, case in CASES.items() if case.model_type not in ORIGINALS
} | OTHERS
UNDER_TEST = tiered(ALL, (*OFTEN, *OTHERS), slow=())


def adapted(folder: Path, **settings: Any) -> ModelSpec:
    return read_spec(folder).training(Trained(Lora(**({"r": 2, "alpha": 6} | settings))))


def trained(model: CausalLM) -> dict[str, tuple[str, torch.nn.Parameter]]:
    """Trained weights by peft's names, with ours."""
    named = ((layer, name, each) for layer, part in enumerate(model.layers) for name, each in part.named_parameters())
    return {peft_name(model.spec, layer, name): (name, each) for layer, name, each in named if each.requires_grad}


def gradients(model: CausalLM) -> dict[str, Tensor]:
    """Gradients by peft's names, in peft's shapes."""
    found = {}
    for name, (ours, weight) in trained(model).items():
        assert weight.grad is not None
        found[name] = to_peft(ours, weight.grad)
    return found


def of_peft(base: Path, adapter: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of missing or unknown keys
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)


@pytest.mark.parametrize("case", UNDER_TEST)
def test_adapters_compute_what_peft_computes(case: str, make_checkpoint: Make) -> None:
    model_type, changes = ALL[case]
    folder = make_checkpoint(model_type, **changes)
    adapter = save_adapter(adapted(folder, **NOT_DENSE if case in BESIDE else {}), folder)
    model, theirs, ids = load_model(folder, torch.float32, adapter=adapter), of_peft(folder, adapter), random_ids(2, 20)
    found, expected = model(ids), theirs(input_ids=ids).logits
    assert_near(found, expected)
    shifted_loss(found, ids).backward()
    shifted_loss(expected, ids).backward()
    wanted = {
        name.replace(".default", ""): weight.grad for name, weight in theirs.named_parameters() if weight.requires_grad
    }
    assert_near(gradients(model), wanted)


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_a_grouped_product_takes_factors_one_after_the_other(
    case: str, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs experts are computed so; the sum of weight and adapter is never made."""
    folder = make_checkpoint(*ALL[case][:1], **ALL[case][1])
    adapter = save_adapter(adapted(folder, r=4), folder)  # 16 bytes in fp32, which the product asks for
    model, ids = load_model(folder, torch.float32, adapter=adapter), random_ids(2, 20)
    expected = model(ids)
    shifted_loss(expected, ids).backward()
    wanted = gradients(model)
    model.zero_grad()
    model.spec.config._experts_implementation = "grouped_mm"
    for part in model.layers.modules():
        if config := vars(part).get("config"):
            config._experts_implementation = "grouped_mm"

    def never(_: object) -> Tensor:
        raise AssertionError("a weight of experts and its adapter were added up")

    monkeypatch.setattr("models.adapters.LowRankSum.whole", never)
    found = model(ids)
    assert_near(found, expected)
    shifted_loss(found, ids).backward()
    assert_near(gradients(model), wanted)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_is_pefts(rslora: bool, make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    adapter = save_adapter(adapted(folder, rslora=rslora), folder)
    assert read_settings(adapter).lora.scale == 6 / (math.sqrt(2) if rslora else 2)
    ids = random_ids(1, 12)
    assert_near(load_model(folder, torch.float32, adapter=adapter)(ids), of_peft(folder, adapter)(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 3 * 7),
        (("q_proj", "v_proj"), 3 * 2),
        (("layers.1.self_attn.q_proj",), 1),
        (r".*\.layers\.[01]\.mlp\.(gate|up)_proj", 4),
    ],
)
def test_targets_take_what_peft_takes(targets: Any, count: int, make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    spec = adapted(folder, targets=targets)
    adapter = save_adapter(spec, folder)
    model = load_model(folder, torch.float32, adapter=adapter)
    weights = trained(model)
    assert len(weights) == 2 * count
    theirs = {
        name.replace(".default", "") for name, each in of_peft(folder, adapter).named_parameters() if each.requires_grad
    }
    assert weights.keys() == theirs


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone(make_checkpoint: Make) -> None:
    folder = make_checkpoint("mixtral", num_local_experts=4)
    spec, ids = adapted(folder), random_ids(1, 12)
    source = open_source(folder, spec.base)
    models = [
        CausalLM(spec, AdaptedStates(source, spec, None, seed), torch.float32, torch.device("cpu"))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(models[0](ids), load_model(folder, torch.float32)(ids))
    one, same, other = ([weight for _, weight in trained(each).values()] for each in models)
    assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_is_drawn_as_peft_draws_it() -> None:
    shapes = {"lora_A": torch.Size((64, 100)), "experts.up_lora_A": torch.Size((4, 64, 100))}
    for tensor in fresh_factors(shapes, 0).values():
        assert tensor.abs().max() <= 0.1  # 1 / sqrt(in)
        assert tensor.std() == pytest.approx(0.1 / math.sqrt(3), rel=0.05)


def test_dropout_is_drawn_again_where_a_block_recomputes(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    spec = adapted(folder, dropout=0.5)
    states = AdaptedStates(open_source(folder, spec.base), spec, None)
    model, ids = CausalLM(spec, states, torch.float32, torch.device("cpu")).train(), random_ids(1, 12)
    found = []
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        model.zero_grad()
        torch.manual_seed(0)
        shifted_loss(model(ids), ids).backward()
        found.append([weight.grad.clone() for _, weight in trained(model).values() if weight.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def transposed(saved: dict[str, Tensor]) -> None:
    """One expert has another's adapter."""
    name = next(name for name in saved if "experts" in name and name.endswith("lora_A.weight"))
    saved[name] = saved[name].roll(2, 0)


def test_another_order_of_experts_is_seen(make_checkpoint: Make) -> None:
    """A fault that the comparison with peft has to find."""
    folder = make_checkpoint("mixtral", num_local_experts=4)
    adapter = save_adapter(adapted(folder), folder)
    ids, expected = random_ids(1, 20), of_peft(folder, adapter)
    saved = load_file(adapter / PEFT_WEIGHTS)
    transposed(saved)
    save_file(saved, adapter / PEFT_WEIGHTS)
    with pytest.raises(AssertionError):
        assert_near(load_model(folder, torch.float32, adapter=adapter)(ids), expected(input_ids=ids).logits)


def other_r(adapter: Path) -> None:
    settings = json.loads((adapter / ADAPTER).read_text())
    (adapter / ADAPTER).write_text(json.dumps(settings | {"r": 3}))


def setting(**keys: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        settings = json.loads((adapter / ADAPTER).read_text())
        (adapter / ADAPTER).write_text(json.dumps(settings | keys))

    return change


def lose(adapter: Path) -> None:
    saved = load_file(adapter / PEFT_WEIGHTS)
    saved.popitem()
    save_file(saved, adapter / PEFT_WEIGHTS)


def spoil(number: float) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        saved = load_file(adapter / PEFT_WEIGHTS)
        saved[sorted(saved)[3]].view(-1)[5] = number
        save_file(saved, adapter / PEFT_WEIGHTS)

    return change


def pickle(adapter: Path) -> None:
    """As peft saved adapters before safetensors."""
    torch.save(load_file(adapter / PEFT_WEIGHTS), adapter / "adapter_model.bin")
    (adapter / PEFT_WEIGHTS).unlink()


def resize(adapter: Path) -> None:
    saved = load_file(adapter / PEFT_WEIGHTS)
    save_file(saved | {"base_model.model.lm_head.weight": torch.zeros(335, 64)}, adapter / PEFT_WEIGHTS)
    setting(modules_to_save=["lm_head"])(adapter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting(r=3), ["shape", "this r"]),
        (setting(use_dora=True), ["use_dora", "plain LoRA"]),
        (setting(bias="all"), ["bias", "all"]),
        (setting(target_modules=["q_proj"]), ["not a weight that adapter_config.json names", "target_modules"]),
        (lose, [PEFT_WEIGHTS, "expected all weights"]),
        (lambda adapter: (adapter / ADAPTER).write_text("{}"), [ADAPTER, "r: missing"]),
        (setting(target_modules="((("), [ADAPTER, "'((('", "regular expression"]),
        (setting(target_modules=ENDLESS), [ADAPTER, "does not end"]),
        (setting(r=65), [ADAPTER, "lora.r: 65"]),
        (spoil(math.nan), [PEFT_WEIGHTS, "NaN or infinite"]),
        (spoil(-math.inf), [PEFT_WEIGHTS, "NaN or infinite"]),
        (pickle, ["adapter_model.bin", PEFT_WEIGHTS]),
        (resize, ["lm_head.weight", "[335, 64]", "512", "vocabulary"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    change: Callable[[Path], object], words: list[str], make_checkpoint: Make
) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    adapter = save_adapter(adapted(folder), folder)
    change(adapter)
    with pytest.raises(CheckpointError) as refused:
        load_model(folder, adapter=adapter)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "phi3"])
def test_a_base_is_known_by_its_weights_in_any_layout(model_type: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(model_type)
    adapter = save_adapter(adapted(folder), folder)
    digest = model_digest(open_source(folder, read_spec(folder)))
    save_file(load_file(adapter / PEFT_WEIGHTS), adapter / PEFT_WEIGHTS, metadata={DIGEST: digest})
    hg_to_pp(folder, tmp_path / "layers")
    load_model(tmp_path / "layers", adapter=adapter)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    PeftModel.from_pretrained(merged, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    with pytest.raises(CheckpointError, match=f"not the weights that the adapter in {adapter} was trained on"):
        load_model(tmp_path / "merged", adapter=adapter)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 65}, ["lora.r", "65", "64"]),
        ({"dropout": 0.1}, ["lora.dropout", "experts"]),
    ],
)
def test_settings_that_no_layer_can_have_are_refused(
    settings: dict[str, Any], words: list[str], make_checkpoint: Make
) -> None:
    spec = adapted(make_checkpoint("mixtral", num_local_experts=4), **settings)
    with pytest.raises(CheckpointError) as refused:
        spec.shapes(1)
    assert all(word in str(refused.value) for word in words)


def test_settings_that_name_less_than_was_trained_are_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    """In a run's checkpoint as in a folder of peft's, and whoever reads it."""
    folder = make_checkpoint("llama", tie_word_embeddings=False)
    run = save_run(adapted(folder, modules_to_save=("lm_head",)), folder)
    load_model(run)
    for change in (setting(target_modules=["q_proj", "v_proj"]), setting(modules_to_save=None)):
        settings = (run / ADAPTER).read_text()
        change(run)
        for read in (load_model, lambda run: pp_to_hg(run, tmp_path / "out", options=ExportOptions(merge=True))):
            with pytest.raises(CheckpointError, match=r"layer_0\d-.*: not a weight that adapter_config.json names"):
                read(run)
        (run / ADAPTER).write_text(settings)


def test_an_idle_weight_of_a_stage_is_passed_over(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    spec = adapted(folder)
    run = save_run(spec, folder)
    torch.save({"idle": torch.zeros(1)}, run / layer_file(0))
    assert LayerFiles(run).read(0, []) == {}


@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("end", ["lm_head", "embed_tokens", ".*(q_proj|lm_head)"])
def test_an_adapter_of_pefts_on_an_end_of_the_model_is_refused(
    end: str, tied: bool, embeddings: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    """With the end's own weight beside it, as peft saves it, or without."""
    folder = make_checkpoint("llama", tie_word_embeddings=tied)
    targets: Any = end if "*" in end else ["q_proj", end]
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=targets)).save_pretrained(
        str(tmp_path), save_embedding_layers=embeddings
    )
    with pytest.raises(CheckpointError) as refused:
        load_model(folder, adapter=tmp_path)
    words = [ADAPTER, "lm_head" if "lm_head" in end else "embed_tokens", "expected", "modules_to_save"]
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("llama", ("embed_tokens", "lm_head")),
        ("llama", ("embed_tokens",)),
        ("llama", ("lm_head",)),
        ("llama", ("model.embed_tokens", "norm")),
        ("bloom", ("word_embeddings",)),
    ],
)
def test_a_tied_end_that_is_trained_is_the_same_model_everywhere(
    family: str, saved: tuple[str, ...], make_checkpoint: Make, tmp_path: Path
) -> None:
    """In the run, in both of its exports, in peft, in transformers, and in the export read again."""
    folder, ids = make_checkpoint(family, tie_word_embeddings=True), random_ids(2, 12)
    run = save_run(adapted(folder, modules_to_save=saved), folder)
    pp_to_hg(run, tmp_path / "peft")
    pp_to_hg(run, tmp_path / "merged", options=ExportOptions(merge=True))
    expected = load_model(run)(ids)
    assert not torch.allclose(load_model(folder)(ids), expected, atol=1e-2)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loaded.load_adapter(str(tmp_path / "peft"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    for model in (of_peft(folder, tmp_path / "peft"), loaded, merged):
        assert_near(model(input_ids=ids).logits, expected)
    assert_near(load_model(folder, adapter=tmp_path / "peft")(ids), expected)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (["embed_tokens"], ["lm_head.weight"]),
        (["lm_head"], ["embed_tokens.weight"]),
        (["embed_tokens", "lm_head"], ["equal numbers"]),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_ends_that_peft_trained_apart_are_refused_for_a_tied_model(
    saved: list[str], words: list[str], together: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    """With `ensure_weight_tying` they are one weight there too, and are read."""
    folder, ids = make_checkpoint("llama", tie_word_embeddings=True), random_ids(1, 8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=together)
    theirs = get_peft_model(model, settings)
    with torch.no_grad():
        for weight in filter(lambda weight: weight.requires_grad, theirs.parameters()):
            weight.add_(0.1 * torch.randn_like(weight))
    theirs.save_pretrained(str(tmp_path))
    if together:
        assert_near(load_model(folder, adapter=tmp_path)(ids), of_peft(folder, tmp_path)(input_ids=ids).logits)
        return
    with pytest.raises(CheckpointError) as refused:
        load_model(folder, adapter=tmp_path)
    assert all(word in str(refused.value) for word in [*words, PEFT_WEIGHTS, "tied"]), refused.value
