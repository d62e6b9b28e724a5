"""Shows that cutting tensors into those of the other side and back keeps every bit, and rows in their order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.weight_map import Binding, reshape_rows
from tests.models.helpers import assert_same_bits


@st.composite
def bindings_with_shapes(draw: st.DrawFn) -> tuple[Binding, dict[str, torch.Size], dict[str, torch.Size]]:
    """A binding of any kind, the shapes of its tensors in the layer and, written out by kind, those on disk."""
    rest = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    kind = draw(st.sampled_from(["renamed", "split", "stacked"]))
    if kind == "stacked":
        n_experts, parts, rows = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
        disk = [f"{expert}.{part}" for expert in range(n_experts) for part in range(parts)]
        shapes = {"stacked": torch.Size((n_experts, parts * rows, *rest))}
        return Binding(tuple(disk), 1, ("stacked",), True), shapes, dict.fromkeys(disk, torch.Size((rows, *rest)))
    count = 1 if kind == "renamed" else draw(st.integers(2, 4))
    shapes = {str(number): torch.Size((draw(st.integers(1, 4)), *rest)) for number in range(count)}
    rows = sum(shape[0] for shape in shapes.values())
    return Binding(("fused",), 1, tuple(shapes)), shapes, {"fused": torch.Size((rows, *rest))}


@settings(max_examples=150, deadline=None)
@given(bindings_with_shapes(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_cut_there_and_back_gives_the_same_bits(
    drawn: tuple[Binding, dict[str, torch.Size], dict[str, torch.Size]], dtype: torch.dtype
) -> None:
    binding, shapes, expected = drawn
    assert binding.disk_shapes(shapes) == expected
    stored = [torch.randn(shape).to(dtype) for shape in expected.values()]
    stored[0].view(-1)[0] = float("nan")
    loaded = reshape_rows(stored, list(shapes.values()))
    assert [tensor.shape for tensor in loaded] == list(shapes.values())
    again = reshape_rows([tensor.clone() for tensor in loaded], list(expected.values()))
    assert [tensor.shape for tensor in again] == list(expected.values())
    assert_same_bits(dict(zip(expected, again, strict=True)), dict(zip(expected, stored, strict=True)))


def test_cut_keeps_rows_in_order() -> None:
    fused = torch.tensor([[0], [1], [2], [3]])
    query, key, value = reshape_rows([fused], [torch.Size((2, 1)), torch.Size((1, 1)), torch.Size((1, 1))])
    assert (query.tolist(), key.tolist(), value.tolist()) == ([[0], [1]], [[2]], [[3]])
    gate_0, up_0, gate_1, up_1 = (torch.full((2, 1), number) for number in (0, 10, 1, 11))
    (stacked,) = reshape_rows([gate_0, up_0, gate_1, up_1], [torch.Size((2, 4, 1))])
    assert stacked[:, :, 0].tolist() == [[0, 0, 10, 10], [1, 1, 11, 11]]
