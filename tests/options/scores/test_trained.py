"""What is trained of a model that scores texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.api import read_spec
from models.checkpoint.adapter import AdaptedStates
from models.checkpoint.layout import ADAPTER, layer_file
from models.checkpoint.source import open_source
from models.checkpoint.tensor_files import save_state_dict
from models.conversion.to_huggingface import pp_to_hg
from models.errors import CheckpointError
from models.loading import NewScores
from tests.models.adapters import RandomFactors
from tests.training.test_trained import config
from training.errors import ConfigError
from training.trained import adapter_file, describe_trained, initial_states, with_trained

Make = Callable[..., Path]


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


@pytest.mark.parametrize("of", ["export", "run"])
@pytest.mark.parametrize("labels", [["no", "yes"], ["yes", "no"], ["no", "maybe"], ["no", "yes", "maybe"]])
def test_an_adapter_goes_on_with_the_classes_that_it_learnt(
    of: str, labels: list[str], make_checkpoint: Make, tmp_path: Path
) -> None:
    """Over a language model, which has no classes of its own."""
    base = make_checkpoint("llama")
    learnt = with_trained(read_spec(base), config(base, labels=["no", "yes"], lora={"r": 2}))
    states = AdaptedStates(NewScores(open_source(base, read_spec(base)), learnt.base, 0), learnt, RandomFactors(learnt))
    for layer in range(learnt.n_layers):
        state = states.read_layer(layer)
        save_state_dict({name: state[name] for name in learnt.trained_names(layer)}, tmp_path / layer_file(layer))
    (tmp_path / "config.json").write_text(json.dumps(learnt.raw))
    (tmp_path / ADAPTER).write_bytes(adapter_file(learnt, base)[ADAPTER])
    start = tmp_path
    if of == "export":
        pp_to_hg(tmp_path, start := tmp_path / "peft")
    asked = config(base, labels=labels, lora={"r": 2, "start_from": str(start)})
    spec = with_trained(read_spec(base), asked)
    if labels == ["no", "yes"]:
        initial_states(asked, spec, base)
        return
    with pytest.raises(CheckpointError) as error:
        initial_states(asked, spec, base)
    assert str(error.value).startswith(f"labels: {labels}, but {start} has ['no', 'yes']; expected these")


def test_an_adapter_of_a_head_that_is_trained_whole_is_refused(make_checkpoint: Make) -> None:
    asked = config(model := make_checkpoint("llama"), labels=["a", "b"], lora={"targets": ["q_proj", "score"]})
    with pytest.raises((ConfigError, CheckpointError)) as refused:
        with_trained(read_spec(model), asked)
    assert all(word in str(refused.value) for word in ("lora.targets: score", "modules_to_save"))
