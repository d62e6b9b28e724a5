"""What a config trains: mistakes in `lora` and `freeze` are one line that names what there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from models.adapters import Lora, Trained
from models.api import read_spec
from models.errors import CheckpointError
from training.config.keys import TrainConfig
from training.config.yaml_file import checked
from training.errors import ConfigError
from training.trained import describe_trained, with_trained

Make = Callable[..., Path]
GRID = {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}
PLAIN: dict[str, Any] = {
    "data_path": "records.json",
    "save_path": "run",
    "train_batch_size": 1,
    "optimizer": {"params": {"lr": 1e-4}},
}


def config(model: Path, **keys: Any) -> TrainConfig:
    return checked(TrainConfig, PLAIN | {"model_path": str(model)} | keys)


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
    assert line.startswith(f"trained: {adapted.get_nb_trainable_parameters()[0]:,} parameters, adapters of rank 3")


@pytest.mark.parametrize(
    ("pad", "end", "words"),
    [
        (None, 2, "no pad_token_id, so transformers scores one text at a time"),
        (2, 2, "pad_token_id 2 also ends texts"),
        (7, [2, 7], "pad_token_id 7 also ends texts"),
        (0, [2, 7], None),
        (0, None, None),
    ],
)
def test_a_model_that_scores_needs_a_token_to_pad_with(
    pad: int | None, end: Any, words: str | None, make_checkpoint: Make
) -> None:
    folder = make_checkpoint("llama", pad_token_id=pad, eos_token_id=end)
    spec = read_spec(folder)
    assert describe_trained(spec) == []
    lines = describe_trained(with_trained(spec, config(folder, labels=["a", "b"])))
    assert len(lines) == (words is not None) and all(str(words) in line for line in lines)


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
