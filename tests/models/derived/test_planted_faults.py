"""Shows that a proof finds faults that a family could really have, and that one without figures is not taken up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import models.causal_lm
from models import CheckpointError
from models.attention.cache import KeyValueCache
from models.attention.kernels import EAGER
from models.attention.packed import Documents
from models.derived.derive import derive
from models.derived.positions import DerivedPositions
from models.derived.proof import BOUND, GENERATION, ROUTING, Proof, bound, compare_models, small_spec
from models.family import Family, Rule
from models.layers import Head
from tests.cases import tiered
from tests.models.derived.cases import write_small
from tests.models.helpers import change_weights, read_config


class Fault(NamedTuple):
    """A family with something wrong, on a kind of model where it matters.

    Attributes:
        seen: the first comparison that has to see it.
    """

    model_type: str
    planted: Callable[[Family], Family]
    seen: str


def scaled(family: Family) -> Family:
    assert family.embedding_scale is not None
    return replace(family, embedding_scale=lambda config: 1.001 * family.embedding_scale(config))  # type: ignore[misc]


def capless(family: Family) -> Family:
    return replace(family, projection=Head)


def with_positions(kind: type[DerivedPositions], family: Family) -> Family:
    def positions(config: Any, rotary: Any) -> Any:
        made: Any = family.positions(config, rotary)  # type: ignore[misc]
        made.__class__ = kind
        return made

    return replace(family, positions=positions)


class Leaking(DerivedPositions):
    """Attention that goes through the documents of a row, with positions that restart."""

    def documents(self, position_ids: Tensor) -> Documents:
        return Documents([[position_ids.shape[1]]] * len(position_ids))


class Restarting(DerivedPositions):
    """Positions that begin anew with each token that comes through the cache."""

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None) -> Any:
        return super().arguments(hidden, position_ids * (cache is None), cache)


def swapped_experts(family: Family) -> Family:
    """Of each expert the up projection where the gate belongs."""

    def swapped(rule: Rule) -> Rule:
        return replace(rule, disk=rule.disk[::-1]) if len(rule.disk_names) == 2 else rule

    assert family.block != tuple(map(swapped, family.block))
    return replace(family, block=tuple(map(swapped, family.block)))


def shrinking(family: Family) -> Family:
    """Gradients that are a little smaller than they should be."""

    def block(config: Any, index: int) -> Any:
        made: Any = family.decoder_layer(config, index)
        made.input_layernorm.register_full_backward_hook(lambda _, inputs, __: (0.999 * inputs[0],))
        return made

    return replace(family, decoder_layer=block)


FAULTS = {
    "scale": Fault("gemma4_text", scaled, "logits"),
    "cap": Fault("gemma4_text", capless, "logits"),
    "leak": Fault("qwen3", partial(with_positions, Leaking), "documents in a packed row"),
    "leak in linear attention": Fault("qwen3_5_text", partial(with_positions, Leaking), "documents in a packed row"),
    "order of experts": Fault("qwen3_moe", swapped_experts, "logits"),
    "cache": Fault("qwen3", partial(with_positions, Restarting), GENERATION),
    "gradient": Fault("qwen3", shrinking, "gradients"),
}


def small(folder: Path, model_type: str, **changes: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A small model of transformers whose checkpoint lies in `folder`, its config, and its config.json."""
    model = write_small(folder, model_type, **changes)
    raw = read_config(folder)
    return model, type(model.config).from_dict(raw), raw


@pytest.mark.parametrize("name", tiered(FAULTS, slow=["order of experts"]))
def test_a_fault_is_seen(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    model, config, raw = small(tmp_path, fault.model_type)
    family = derive(config, raw)
    kernel, linear = family.attention[0], "linear" in name
    sound = compare_models(small_spec(family, config, raw, kernel), model, tmp_path)
    figures = compare_models(small_spec(fault.planted(family), config, raw, kernel), model, tmp_path)
    assert sound[fault.seen] <= bound(fault.seen, linear) < figures[fault.seen]
    before = [each for each in list(figures)[: list(figures).index(fault.seen)] if each != ROUTING]
    assert all(figures[each] <= bound(each, linear) for each in before)


def test_a_head_that_is_not_tied_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, raw = small(tmp_path, "smollm3")
    assert config.tie_word_embeddings
    monkeypatch.setattr(models.causal_lm, "tie_weights", lambda *_: None)
    figures = compare_models(small_spec(derive(config, raw), config, raw, EAGER), model, tmp_path)
    assert figures["logits"] <= BOUND < figures["gradients"]


def test_a_dropped_tensor_is_seen(tmp_path: Path) -> None:
    model, config, raw = small(tmp_path, "qwen3")
    change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing weights: model\.layers\.1\.self_attn\.q_norm\.weight"):
        compare_models(small_spec(derive(config, raw), config, raw, EAGER), model, tmp_path)


def test_numbers_in_another_order_are_seen(tmp_path: Path) -> None:
    model, config, raw = small(tmp_path, "qwen3_moe")

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.flip(0) for name, tensor in tensors.items() if name.endswith("down_proj.weight")}

    change_weights(tmp_path, flip)
    figures = compare_models(small_spec(derive(config, raw), config, raw, EAGER), model, tmp_path)
    assert figures["logits"] > BOUND
    torch.testing.assert_close(figures["stages"], 0.0)


SOUND: dict[str, Any] = {"attention": ["eager"], "figures": {"logits": BOUND / 2}, "seconds": 1.0, "linear": False}
SOUND |= {"generates": True, "routes": True, "shares_rows": True, "chunks_rows": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"figures": {"logits": 2 * BOUND}},
        {"figures": {"logits": float("nan")}},
        {"figures": {"logits": float("inf")}},
        {"figures": {}},
        {"attention": []},
        {"attention": ["magic"]},
    ],
    ids=str,
)
def test_a_kept_proof_that_shows_nothing_is_refused(changes: dict[str, Any]) -> None:
    assert Proof.model_validate(SOUND).figures == SOUND["figures"]
    with pytest.raises(ValidationError):
        Proof.model_validate(SOUND | changes)
