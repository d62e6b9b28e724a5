"""Shows that the proof finds what could really be wrong with a model that sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.api import read_spec
from models.derived.outline import Underivable
from models.derived.proof import BOUND, apart_from_callers, roughen, write_checkpoint
from models.family import Family
from models.images.embedding import SeeingEmbedding
from models.images.proof import ImageProof, Rows, compare, prove, small_spec
from models.images.small import small_whole
from models.images.traits import Traits, traits_of


class Fault(NamedTuple):
    """Something wrong, in a folder where it matters."""

    folder: str
    traits: Callable[[Traits], Traits] = lambda traits: traits
    family: Callable[[Family], Family] = lambda family: family
    seen: str = "logits"


class Reversed(SeeingEmbedding):
    """Features of images in another order."""

    def embedded(self, input_ids: Tensor, position_ids: Tensor, *images: Tensor) -> Tensor:
        hidden = super().embedded(input_ids, position_ids, *images)
        places = input_ids == self.sees.image_token
        return hidden.masked_scatter(places[..., None], hidden[places].flip(0)) if images else hidden


class Words(SeeingEmbedding):
    """Image tokens that stay words."""

    def embedded(self, input_ids: Tensor, position_ids: Tensor, *images: Tensor) -> Tensor:
        words: Tensor = self.embed_tokens(input_ids)
        return words


class Squinting(SeeingEmbedding):
    """A tower in half precision."""

    def embedded(self, input_ids: Tensor, position_ids: Tensor, *images: Tensor) -> Tensor:
        return super().embedded(input_ids, position_ids, *(each.bfloat16().to(each.dtype) for each in images))


def embedding(kind: type[SeeingEmbedding]) -> Callable[[Family], Family]:
    return lambda family: replace(family, embeds=kind)


def one_axis(family: Family) -> Family:
    """Positions of text for images."""
    assert family.sees

    class Flat(type(family.sees)):  # type: ignore[misc]
        def axes_of(self, input_ids: Tensor, images: Any) -> Tensor:
            return torch.arange(len(input_ids)).expand(3, -1)

    own = {each.name: getattr(family.sees, each.name) for each in fields(family.sees)}
    return replace(family, sees=Flat(**own))


def with_traits(**changes: Any) -> Callable[[Traits], Traits]:
    return lambda traits: traits.model_copy(update=changes)


FAULTS = {
    "features in another order": Fault("llava-tiny", family=embedding(Reversed)),
    "image tokens that stay words": Fault("mistral3-tiny", family=embedding(Words)),
    "rounded pixels": Fault("qwen2_5_vl-tiny", family=embedding(Squinting)),
    "positions along one axis": Fault("qwen3_5-tiny", family=one_axis),
    "images that see backwards alone": Fault("gemma3-tiny", traits=with_traits(both_ways=())),
    "images that see both ways": Fault("llava-tiny", traits=with_traits(both_ways=("full_attention",))),
    "no deep features": Fault("qwen3_vl-tiny", traits=with_traits(deep=0)),
}


def figures_of(shared: Path, fault: Fault, workspace: Path) -> dict[str, float]:
    folder = shared / "golden" / "vision" / fault.folder
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    spec = read_spec(folder)
    with apart_from_callers(spec.config):
        torch.manual_seed(0)
        whole = small_whole(spec.raw, spec.config, spec.fields)
        roughen(whole)
        traits = fault.traits(traits_of(whole))
        write_checkpoint(whole, workspace)
        small = small_spec(spec, whole, workspace, traits)
        small = replace(small, family=fault.family(small.family), _shapes={})
        return compare(small, whole, workspace, Rows(whole, traits))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, shared: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    assert figures_of(shared, fault, tmp_path)[fault.seen] > 10 * BOUND


def test_a_kept_proof_that_shows_nothing_is_not_taken_up() -> None:
    traits = Traits(inputs=("pixel_values",), both_ways=(), deep=0, parts=("visual",), projector=("merger",))
    for figures in ({}, {"logits": 1.0}, {"logits": float("nan")}):
        with pytest.raises(ValidationError, match="expected figures"):
            ImageProof(traits=traits, figures=figures, linear=False, seconds=1.0)


def test_what_does_not_hold_is_refused_with_figure_and_bound(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared / "golden" / "vision" / "llava-tiny"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    monkeypatch.setattr("models.images.model.SeeingEmbedding", Reversed)
    with pytest.raises(Underivable, match=r"logits differ by .* of their size; expected at most 2e-05"):
        prove(read_spec(folder))
