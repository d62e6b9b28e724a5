"""T5 cut into layers by the example is T5: its loss and gradients, and its weights back under its names."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration

from examples.encoder_decoder import CONFIG, cut, loss

ROWS, SOURCE, TARGET = 3, 9, 7


def untied(model: Any) -> Any:
    """A head of its own, as T5 1.1 has it."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    model.config.scale_decoder_outputs = False
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "first version": lambda: T5ForConditionalGeneration(T5Config(**CONFIG | {"feed_forward_proj": "relu"})),
    "uneven": lambda: T5ForConditionalGeneration(T5Config(**CONFIG, num_decoder_layers=3)),
    "1.1": lambda: untied(T5ForConditionalGeneration(T5Config(**CONFIG, tie_word_embeddings=False))),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**CONFIG)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return MODELS[request.param]()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source, which of it is no padding, target before and after; each row of the source has another length."""
    source, after = torch.randint(10, (ROWS, SOURCE)), torch.randint(10, (ROWS, TARGET))
    seen = torch.arange(SOURCE) < torch.tensor([[SOURCE], [4], [1]])
    after[:, -2:] = -100
    return source, seen, after.roll(1, 1).clamp(min=0), after


def logits_of(model: Any, stream: Any) -> Any:
    for layer in cut(model):
        stream = layer(stream)
    return stream


def test_loss_logits_and_gradients_are_those_of_transformers(model: Any) -> None:
    theirs = deepcopy(model)
    source, seen, before, after = batch()
    words = {"input_ids": source, "attention_mask": seen.long(), "decoder_input_ids": before}
    expected = theirs(**words, labels=after)
    expected.loss.backward()
    logits = logits_of(model, (source, seen, before))
    found = loss(logits, after)
    found.backward()
    torch.testing.assert_close(logits, expected.logits)
    torch.testing.assert_close(found, expected.loss)
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in model.named_parameters():
        assert wanted[name].abs().max() > 0, name
        torch.testing.assert_close(weight.grad, wanted[name])


def test_dropout_draws_what_transformers_draws() -> None:
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(T5Config(**CONFIG | {"dropout_rate": 0.3})).train()
    model.set_attn_implementation("eager")
    source, seen, before, after = batch()
    torch.manual_seed(5)
    expected = model(input_ids=source, attention_mask=seen.long(), decoder_input_ids=before, labels=after).logits
    torch.manual_seed(5)
    found = logits_of(model, (source, seen, before))
    torch.testing.assert_close(found, expected)


def test_every_weight_is_in_a_layer_and_goes_back_under_its_name(model: Any, tmp_path: Path) -> None:
    held = {id(weight) for layer in cut(model) for weight in layer.parameters()}
    assert held == {id(weight) for weight in model.parameters()}
    with torch.no_grad():
        for layer in cut(model):
            for weight in layer.parameters():
                weight.add_(0.01)  # a shared one several times
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path)
    for name, weight in model.named_parameters():
        assert torch.equal(back.get_parameter(name), weight), name
