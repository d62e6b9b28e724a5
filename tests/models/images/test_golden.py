"""Models with eyes against what transformers computed of the golden folders, and what goes wrong most easily."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.packed import Documents
from tests.models.images.conftest import golden_of
from tests.models.images.golden import LAST, Golden

SEEN = 0.2  # what a wrong way moves logits by, at least; the folders' README has 0.26
SAMPLES = range(4)


def assert_logits(golden: Golden, found: Tensor, sample: int) -> None:
    wanted = golden.tensors[f"s{sample}.logits_last8"]
    torch.testing.assert_close(found[-LAST:], wanted, rtol=0, atol=golden.bound("logits"))


@torch.no_grad()
def test_logits_are_those_of_transformers(golden: Golden) -> None:
    for sample in SAMPLES:
        assert_logits(golden, golden.logits(sample), sample)


def test_loss_and_gradients_are_those_of_transformers(golden: Golden) -> None:
    found = golden.gradients()
    assert float(golden.loss().detach()) == pytest.approx(golden.expected["loss"], abs=golden.bound("loss"))
    norms = golden.expected["grad_norms"]
    assert found.keys() == {name for name, norm in norms.items() if norm}
    rounding = torch.finfo(torch.float32).eps * golden.expected["global_grad_norm"]  # all there is to biases of keys
    for name, gradient in found.items():
        wanted = pytest.approx(norms[name], rel=golden.bound("gradients"), abs=rounding)
        assert float(gradient.norm()) == wanted, name
    stored = {name.removeprefix("grad."): each for name, each in golden.tensors.items() if name.startswith("grad.")}
    for name, each in stored.items():
        assert float((found[name] - each).norm()) <= golden.bound("gradients") * float(each.norm()), name


@torch.no_grad()
def test_a_packed_row_is_its_documents_alone(golden: Golden) -> None:
    ids, positions = golden.packed(0, 1)
    found = golden.model(ids, positions, images=golden.images(0, 1))[0]
    first = len(golden.ids(0))
    assert_logits(golden, found[:first], 0)
    assert_logits(golden, found, 1)


@torch.no_grad()
def test_rows_of_a_micro_batch_have_unequal_numbers_of_images(golden: Golden) -> None:
    """Two, none and two, in rows of which the shorter ones have padding behind."""
    rows = [golden.packed(0, 1), golden.packed(2), golden.packed(3)]
    length = rows[0][0].shape[1]
    ids = torch.cat([F.pad(each, (0, length - each.shape[1])) for each, _ in rows])
    positions = torch.cat([padded(each, length) for _, each in rows])
    found = golden.model(ids, positions, images=golden.images(0, 1, 3))
    assert_logits(golden, found[0], 1)
    assert_logits(golden, found[1, : len(golden.ids(2))], 2)
    assert_logits(golden, found[2, : len(golden.ids(3))], 3)


def padded(positions: Tensor, length: int) -> Tensor:
    """Position ids with padding that goes on counting, marked."""
    begin = positions.shape[1]
    return torch.cat([positions, -1 - torch.arange(begin, length)[None]], dim=1)


@pytest.mark.parametrize("name", ["qwen2_5_vl-tiny", "qwen3_vl-tiny", "qwen3_5-tiny"])
def test_positions_have_three_axes(name: str, shared: Path) -> None:
    golden = golden_of(shared, name)
    assert golden.sees.axes == 3
    for sample in SAMPLES:
        images = dict(zip(golden.sees.inputs, golden.images(sample), strict=False))
        torch.testing.assert_close(
            golden.sees.axes_of(golden.ids(sample), images), golden.tensors[f"s{sample}.position_ids"]
        )
    wanted = golden.tensors["packed01.position_ids"]
    found = golden.documents(0, 1).axes
    assert found is not None
    torch.testing.assert_close(found[:, 0], wanted[1:])
    torch.testing.assert_close(golden.packed(0, 1)[1][0], wanted[0])


@pytest.mark.parametrize("name", ["llava-tiny", "gemma3-tiny", "mistral3-tiny"])
def test_other_models_have_positions_along_one_axis(name: str, shared: Path) -> None:
    golden = golden_of(shared, name)
    assert golden.sees.axes == 0
    assert golden.documents(0, 1).axes is None


@torch.no_grad()
def test_other_pixels_are_seen(golden: Golden) -> None:
    images = golden.images(0)
    dark = [torch.zeros_like(images[0]), *images[1:]]
    assert moved(golden.logits(0), golden.logits(0, dark)) > SEEN


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava-tiny", "gemma3-tiny"])
def test_two_images_in_the_other_order_are_seen(name: str, shared: Path) -> None:
    """Where all images have one size; else the numbers of features need not fit."""
    golden = golden_of(shared, name)
    swapped = golden.tensors_of(*reversed(golden.expected["samples"][3]["images"]))
    assert moved(golden.logits(3), golden.logits(3, swapped)) > SEEN


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_5_vl-tiny", "qwen3_vl-tiny", "qwen3_5-tiny"])
def test_positions_along_one_axis_are_seen(name: str, shared: Path) -> None:
    golden = golden_of(shared, name)
    plain = torch.arange(len(golden.ids(0))).expand(3, 1, -1)
    assert moved(golden.logits(0), with_documents(golden, golden.documents(0).seeing(plain, None))) > SEEN


@torch.no_grad()
def test_image_tokens_that_see_backwards_alone_are_seen(shared: Path) -> None:
    golden = golden_of(shared, "gemma3-tiny")
    apart = golden.documents(0)
    assert apart.together is not None
    nowhere = apart.seeing(None, torch.full_like(apart.together, -1))
    assert moved(golden.logits(0), with_documents(golden, nowhere)) > SEEN


@torch.no_grad()
def test_missing_deep_features_are_seen(shared: Path) -> None:
    golden = golden_of(shared, "qwen3_vl-tiny")
    assert golden.sees.deep == 2
    wanted, model = golden.logits(0), golden.load()
    for name, weight in model.named_parameters():
        if "deepstack" in name:
            weight.zero_()
    assert moved(wanted, model(golden.ids(0)[None], images=golden.images(0))[0]) > SEEN


def moved(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def with_documents(golden: Golden, documents: Documents) -> Tensor:
    """Logits of sample 0 with documents of the caller's."""
    ids, positions = golden.packed(0)
    golden.model.positions.expect([documents])
    found: Tensor = golden.model(ids, positions, images=golden.images(0))[0]
    return found
