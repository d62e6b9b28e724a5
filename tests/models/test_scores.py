"""Models that score texts: transformers' own are read as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from models import load_model
from models.api import read_spec
from models.checkpoint.peft_names import peft_name, to_peft
from models.errors import CheckpointError
from tests.closeness import assert_near
from tests.conftest import TINY, save_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "bloom": {},
    "mistral": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt2": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def save_scoring(folder: Path, model_type: str, labels: int, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**(TINY | {"initializer_range": 0.05, "num_labels": labels} | changes))
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = save_scoring(tmp_path, name, 3, **FAMILIES[name])
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(3, 500, (1, 17), generator=torch.Generator().manual_seed(1))
    ours = load_model(folder)
    assert ours.spec.labels == ["LABEL_0", "LABEL_1", "LABEL_2"] and not ours.spec.tied
    with torch.no_grad():
        assert_near(ours(ids)[0, -1], theirs(ids).logits[0])


@pytest.mark.parametrize("base", ["scores", "words"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_adapter_of_pefts_has_its_scores_and_gradients(
    name: str, base: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """peft trains the head beside the factors, whatever model is under them."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {"tie_word_embeddings": True}
    folder = (
        save_scoring(tmp_path / "model", name, 3, **changes) if base == "scores" else make_checkpoint(name, **changes)
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, attn_implementation="eager")
    targets = "all-linear" if name == "llama" else ["q_proj"]
    experts = None if name == "llama" else ["experts.gate_up_proj"]
    theirs: Any = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=6, target_modules=targets, target_parameters=experts)
    )
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.requires_grad:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    theirs.save_pretrained(str(tmp_path / "adapter"))
    ours = load_model(folder, torch.float32, adapter=tmp_path / "adapter")
    assert ours.spec.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    ids = torch.randint(3, 500, (1, 17), generator=torch.Generator().manual_seed(1))
    found, expected = ours(ids)[0, -1], theirs.eval()(ids).logits[0]
    assert_near(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients, wanted = dict[str, Any](), dict[str, Any]()
    for layer, part in enumerate(ours.layers):
        for path, weight in part.named_parameters():
            if weight.grad is not None:
                gradients[peft_name(ours.spec, layer, path)] = to_peft(path, weight.grad)
    for path, weight in theirs.named_parameters():
        if weight.requires_grad:
            wanted[path.replace(".default", "").replace(".modules_to_save", "")] = weight.grad
    assert "base_model.model.score.weight" in wanted
    assert_near(gradients, wanted)


def test_a_language_model_becomes_one_with_other_rows(tmp_path: Path) -> None:
    """The shapes and the config.json are those that transformers would write."""
    torch.manual_seed(0)
    folder = save_scoring(tmp_path, "llama", 1, tie_word_embeddings=True)
    raw = json.loads((folder / "config.json").read_text())
    plain = {name: value for name, value in raw.items() if name not in ("id2label", "label2id")}
    language = read_spec(folder, plain | {"architectures": ["LlamaForCausalLM"]})
    assert language.tied and not language.labels
    spec = language.scoring(["reward"])
    assert spec.shapes(spec.n_layers - 1)["lm_head.weight"] == torch.Size((1, TINY["hidden_size"]))
    assert spec.labels == ["reward"] and not spec.tied and spec.language == language
    assert spec.raw["architectures"] == raw["architectures"] and spec.raw["id2label"] == {"0": "reward"}
    bindings = (spec.weight_map.bindings(layer, spec.shapes(layer)) for layer in range(spec.n_layers))
    names = {name for its in bindings for each in its for name in each.disk}
    assert names == set(load_file(folder / "model.safetensors"))
    assert read_spec(folder).scoring(["other"]) == read_spec(folder)
    with pytest.raises(CheckpointError, match=r"labels: \['a', 'b'\], but the model has \['LABEL_0'\]"):
        read_spec(folder).scoring(["a", "b"])


def name_labels(folder: Path, names: list[str], **fields: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"id2label": {str(number): name for number, name in enumerate(names)}} | fields
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        (["negative", "neutral", "positive"], False),
        (["positive", "neutral", "negative"], True),
        (["negative", "neutral", "good"], True),
        (["LABEL_0", "LABEL_1", "LABEL_2"], True),
        (["negative", "positive"], True),
        (["negative", "neutral", "positive", "mixed"], True),
    ],
)
def test_classes_go_on_under_their_names_and_numbers(labels: list[str], refused: bool, tmp_path: Path) -> None:
    names = ["negative", "neutral", "positive"]
    spec = read_spec(name_labels(save_scoring(tmp_path, "llama", 3), names))
    if not refused:
        assert spec.scoring(labels) == spec
        return
    with pytest.raises(CheckpointError) as error:
        spec.scoring(labels)
    assert str(error.value) == f"labels: {labels}, but the model has {names}; expected these, in this order"


@pytest.mark.parametrize("own", [["LABEL_0", "LABEL_1"], ["LABEL_0"], ["quality"]])
def test_numbers_without_names_may_be_called_anything(own: list[str], tmp_path: Path) -> None:
    """And a single number, which cannot be taken for another."""
    spec = read_spec(name_labels(save_scoring(tmp_path, "llama", len(own)), own))
    assert spec.scoring(["yes", "no"][: len(own)]) == spec


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_head_that_is_no_classifiers_is_not_trained_as_one(kind: str, tmp_path: Path) -> None:
    names = ["toxic", "obscene"]
    spec = read_spec(name_labels(save_scoring(tmp_path, "llama", 2), names, problem_type=kind))
    with pytest.raises(CheckpointError, match=f"problem_type: {kind}, but labels train one class a text"):
        spec.scoring(names)
    reward = read_spec(name_labels(save_scoring(tmp_path / "one", "llama", 1), ["quality"], problem_type="regression"))
    assert reward.scoring(["reward"]) == reward
