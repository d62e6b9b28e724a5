"""What a config trains: mistakes in `lora` and `freeze` are one line that names what there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.digest import DIGEST
from models.checkpoint.layout import ADAPTER
from models.errors import CheckpointError
from options import RunConfig
from tests.models.adapters import save_adapter, save_run
from tests.models.test_adapters import ENDLESS
from training.config.yaml_file import checked
from training.errors import ConfigError
from training.trained import describe_start, describe_trained, initial_states, with_trained

Make = Callable[..., Path]
GRID = {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}
PLAIN: dict[str, Any] = {
    "data_path": "records.json",
    "save_path": "run",
    "train_batch_size": 1,
    "optimizer": {"params": {"lr": 1e-4}},
}


def config(model: Path, **keys: Any) -> RunConfig:
    return checked(RunConfig, PLAIN | {"model_path": str(model)} | keys)


@pytest.mark.parametrize("tied", [False, True])
def test_the_log_counts_what_is_trained(tied: bool, make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    spec, whole = read_spec(folder), model.num_parameters()
    assert describe_trained(spec) == []
    (line,) = describe_trained(with_trained(spec, config(folder, freeze=["embed_tokens", "norm"])))
    frozen = sum(weight.numel() for name, weight in model.named_parameters() if "embed" in name or "norm" in name)
    assert line.startswith(f"trained: {whole - frozen:,} parameters") and line.endswith(f"{whole:,}")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear"))
    (line,) = describe_trained(with_trained(spec, config(folder, lora={"r": 3})))
    assert line.startswith(
        f"trained: {adapted.get_nb_trainable_parameters()[0]:,} parameters, adapters of rank 3 on 21 weights"
    )


def test_what_nf4_evaluates_is_not_what_is_exported(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    trained = read_spec(folder).training(Trained(Lora(r=2, base="nf4")))
    counted, line = describe_trained(trained)
    assert counted.startswith("trained: ")
    assert line == (
        "lora.base: nf4: the run trains and evaluates over the rounded base; an export over the base's own weights has "
        "another loss"
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora": {"targets": ["q_porj"]}}, ["lora.targets: 'q_porj'", "q_proj, k_proj"]),
        ({"lora": {"targets": ["q_proj", "w1"]}}, ["lora.targets: 'w1'"]),
        ({"lora": {"targets": r".*\.w1"}}, ["lora.targets: ", "w1", "gate_up_proj"]),
        ({"lora": {"modules_to_save": ["head"]}}, ["lora.modules_to_save", "'head'", "embed_tokens"]),
        ({"lora": {"r": 65}}, ["lora.r: 65", "64"]),
        ({"lora": {"dropout": 0.1}}, ["lora.dropout: 0.1", "experts"]),
        ({"lora": {"base": "nf4"}}, ["lora.base", "use_grad_ckpt: true"]),
        ({"lora": {"base": "fp8"}}, ["lora.base: fp8", "does not store its weights in fp8"]),
        ({"lora": {"targets": "(("}}, ["lora.targets: '(('", "regular expression"]),
        ({"lora": {"targets": ENDLESS}}, ["lora.targets", "does not end"]),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, ["lora.targets: lm_head", "modules_to_save"]),
        ({"lora": {"targets": r".*\.(q_proj|embed_tokens)"}}, ["lora.targets: model.embed_tokens", "modules_to_save"]),
        ({"lora": {"targets": ["lm_head"], "modules_to_save": ["lm_head"]}}, ["lora.targets: lm_head"]),
        ({"freeze": ["wte"]}, ["freeze: 'wte'", "model.embed_tokens.weight"]),
        ({"freeze": ["."]}, ["freeze: matches all weights"]),
    ],
)
def test_what_matches_nothing_is_named_with_what_there_is(
    keys: dict[str, Any], words: list[str], make_checkpoint: Make
) -> None:
    model = make_checkpoint("mixtral", num_local_experts=4)
    with pytest.raises((ConfigError, CheckpointError)) as refused:
        with_trained(read_spec(model), config(model, **keys))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(("family", "end"), [("llama", "embed_tokens"), ("llama", "lm_head"), ("bloom", "lm_head")])
def test_either_name_of_a_tied_end_is_refused_as_a_target(family: str, end: str, make_checkpoint: Make) -> None:
    model = make_checkpoint(family, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=rf"lora.targets: \S*{end}.*modules_to_save"):
        with_trained(read_spec(model), config(model, lora={"targets": ["q_proj", "query_key_value", end]}))


GIVEN: dict[str, Any] = {"r": 2, "alpha": 6, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("save", [save_adapter, save_run])
@pytest.mark.parametrize(
    ("of_adapter", "lora", "words"),
    [
        ({}, {"alpha": 8}, ["lora.alpha: 8", "has 6", "expected alpha: 6"]),
        ({}, {"r": 3}, ["lora.r: 3", "has 2", "expected r: 2"]),
        ({"rslora": True}, {}, ["lora.rslora: false", "expected rslora: true"]),
        ({}, {"targets": ["q_proj"]}, ["lora.targets", "v_proj", 'expected targets: ["q_proj", "v_proj"]']),
        ({}, {"targets": "all-linear"}, ['lora.targets: "all-linear"', 'has ["q_proj"']),
        ({"modules_to_save": ("lm_head",)}, {}, ["lora.modules_to_save", 'expected modules_to_save: ["lm_head"]']),
        ({}, {"modules_to_save": ["norm"]}, ['lora.modules_to_save: ["norm"]', "expected modules_to_save: []"]),
    ],
)
def test_an_adapter_to_start_from_means_the_same_in_the_config(
    save: Callable[..., Path], of_adapter: dict[str, Any], lora: dict[str, Any], words: list[str], make_checkpoint: Make
) -> None:
    model = make_checkpoint("llama", tie_word_embeddings=False)
    spec = read_spec(model)
    given: dict[str, Any] = {"r": 2, "alpha": 6, "targets": ("q_proj", "v_proj")} | of_adapter
    start = save(spec.training(Trained(Lora(**given))), model)
    own = config(model, lora=GIVEN | lora | {"start_from": str(start)})
    with pytest.raises(ConfigError) as refused:
        initial_states(own, with_trained(spec, own), model)
    assert all(word in str(refused.value) for word in [*words, str(start)]), refused.value
    same = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    own = config(model, lora=same | {"start_from": str(start), "dropout": 0.1, "lr_ratio": 2})
    states = initial_states(own, with_trained(spec, own), model)
    for layer in range(spec.n_layers):
        states.read_layer(layer)


def test_experts_of_an_adapter_to_start_from_are_compared(make_checkpoint: Make) -> None:
    model = make_checkpoint("mixtral", num_local_experts=4)
    spec = read_spec(model)
    start = save_adapter(spec.training(Trained(Lora(r=2, experts=False))), model)
    own = config(model, lora={"r": 2, "start_from": str(start)})
    with pytest.raises(ConfigError, match=r"lora.targets: .*expected targets: \[.q_proj.*, experts: false"):
        initial_states(own, with_trained(spec, own), model)
    own = config(model, lora={"r": 2, "start_from": str(start), "experts": False})
    initial_states(own, with_trained(spec, own), model).read_layer(1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora": {}, "freeze": ["layers"]}, ["freeze", "lora or freeze"]),
        ({"lora": {}, "from_scratch": True}, ["from_scratch", "no lora"]),
        ({"lora": {"base": "nf4"}, "zero_optimization": {"stage": 3}}, ["lora.base", "stage 3"]),
        ({"lora": {"base": "nf4"}, "compile": True}, ["lora.base", "compile"]),
        ({"lora": {"base": "fp8"}, "model_topo": GRID}, ["lora.base", "no model axis"]),
        ({"lora": {"base": "int8"}}, ["lora.base"]),
        ({"lora": {"r": 0}}, ["lora.r"]),
        ({"lora": {"targets": {"q": 1}}}, ["lora.targets", "all-linear"]),
        ({"lora": {"rank": 8}}, ["lora.rank"]),
        ({"lora_rank": 8}, ["did you mean lora.r?"]),
        ({"freeze": ["("]}, ["freeze"]),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(Path("model"), **keys)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ((1, 1), None),
        ((2, 2), "lora.base: nf4, 2 shares of a layer, each rounded by itself: another base"),
        ((1, 2), "lora.base: nf4, 2 shares of a layer, 1 at the checkpoint, each rounded by itself: another base"),
        ((4, 1), "lora.base: nf4, 1 share of a layer, 4 at the checkpoint, each rounded by itself: another base"),
    ],
)
@pytest.mark.parametrize("base", ["nf4", None])
def test_the_log_says_that_shares_of_a_base_are_rounded_by_themselves(
    base: str | None, shares: tuple[int, int], line: str | None, make_checkpoint: Make
) -> None:
    folder = make_checkpoint("llama")
    spec = with_trained(read_spec(folder), config(folder, lora={"r": 2, "base": base}))
    assert describe_trained(spec, *shares)[2:] == ([line] if base and line else [])


def test_an_adapter_without_a_digest_of_its_base_is_told(make_checkpoint: Make) -> None:
    folder = make_checkpoint("llama")
    spec = read_spec(folder).training(Trained(Lora(r=2)))
    theirs, own = save_adapter(spec, folder), save_run(spec, folder)
    (line,) = describe_start(config(folder, lora={"start_from": str(theirs)}))
    assert line.startswith(f"lora.start_from: {theirs} names {folder} and has no digest of it")
    settings = json.loads((own / ADAPTER).read_text())
    (own / ADAPTER).write_text(json.dumps(settings | {DIGEST: "1-2"}))
    assert describe_start(config(folder, lora={"start_from": str(own)})) == []
    assert describe_start(config(folder, lora={})) == []
