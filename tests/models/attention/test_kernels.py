"""Every attention kernel that a run may take on a GPU gives the logits and gradients of the default one.

On a CPU, flex attention runs in torch's plain form, whose gradients torch has but does not offer: the test lifts that
ban. For cuDNN's kernel torch's others step in. varlen_attn and the flash-attn packages have no form for a CPU, so their
definition, written out, stands in; what transformers does on the way to flash-attn is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils

from models import CausalLM
from models.api import read_spec
from models.attention import packed
from models.attention.kernels import ALL, CUDNN, FLASH, FLASH_3, FLEX, VARLEN
from models.attention.packed import Documents, unmarked
from models.checkpoint.source import open_source
from tests.cases import tiered
from tests.closeness import assert_near
from tests.models.helpers import gradients, random_ids

NAMES = """llama-tied mistral-window mixtral-window qwen2-some-windows qwen3 qwen3_moe phi3 olmo2 glm glm4 gemma2 gemma3
    baichuan2-7b baichuan2-13b chatglm3 bloom""".split()
# They give a kernel nothing that the others do not give it.
ALIKE = "mixtral-window qwen2-some-windows qwen3_moe phi3 olmo2 glm glm4 baichuan2-7b chatglm3".split()
KERNELS = [(FLEX, True), (CUDNN, True), (VARLEN, True), (VARLEN, False), (FLASH, True), (FLASH_3, True)]
PACKED = [[5, 1, 22, 12], [24, 9, 3]]  # the last four tokens of the second row are padding
WHOLE = [[40], [33]]


def position_ids(rows: list[list[int]], length: int = 40) -> Tensor:
    made = -1 - torch.arange(length).repeat(len(rows), 1)
    for row, lengths in enumerate(rows):
        numbers = torch.cat([torch.arange(each) for each in lengths])
        made[row, : len(numbers)] = numbers
    return made


def outcome(folder: Path, kernel: str | None, rows: list[list[int]]) -> tuple[str, Tensor, dict[str, Tensor]]:
    """The kernel, the logits of real tokens, and the gradients of a sum that weighs them at random."""
    spec = read_spec(folder)
    if kernel:
        spec.set_attention(kernel)
    model = CausalLM(spec, open_source(folder, spec), torch.float32, torch.device("cpu")).train()
    positions = position_ids(rows)
    logits = model(random_ids(2, positions.shape[1]), positions)[positions >= 0]
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return spec.config._attn_implementation, logits.detach(), gradients(model)


def varlen_by_definition(*positional: Any, window_size: Any, scale: float | None, enable_gqa: bool = False) -> Tensor:
    """What varlen_attn of torch 2.13 computes for [T, heads, D], a document after the other."""
    query, key, value, *lengths = positional
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0
    return by_definition((query, key, value), lengths[:2], lengths[2:], scale, window_size[0])


def by_definition(
    packed: tuple[Tensor, Tensor, Tensor],
    ends_given: list[Tensor],
    longest: list[int],
    scale: float | None,
    left: int,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of documents end to end, each token `left` tokens back; all of them where that is negative."""
    query, key, value = packed
    assert all(each.dtype == torch.int32 for each in ends_given)
    spans, spans_of_keys = (list(pairwise(each.tolist())) for each in ends_given)
    assert spans[0][0] == spans_of_keys[0][0] == 0
    assert (spans[-1][1], spans_of_keys[-1][1]) == (len(query), len(key)) == (len(query), len(value))
    assert longest == [max(end - begin for begin, end in each) for each in (spans, spans_of_keys)]
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    outputs = []
    for (begin, end), (first, last) in zip(spans, spans_of_keys, strict=True):
        q, k, v = query[begin:end].transpose(0, 1), key[first:last].transpose(0, 1), value[first:last].transpose(0, 1)
        scores = q @ k.transpose(1, 2) * (query.shape[2] ** -0.5 if scale is None else scale)
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        # The last query sees the last key, where a document has more keys than queries.
        places = torch.arange(last - first)
        distance = places[begin - end :, None] - places
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn runs on a GPU only")
@pytest.mark.parametrize("window", [(-1, 0), (6, 0)])
@pytest.mark.parametrize("of_keys", [[0, 5, 6, 28, 40], [0, 30, 31, 53, 80]])
def test_varlen_attention_of_this_torch_is_what_the_tests_put_in_its_place(
    of_keys: list[int], window: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    sizes = 40, of_keys[-1], of_keys[-1]
    query, key, value = (torch.randn(size, 4, 64, device="cuda", dtype=torch.bfloat16) for size in sizes)
    ends = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 5, 6, 28, 40], of_keys)]
    longest = 22, max(end - begin for begin, end in pairwise(of_keys))
    kernel: Any = packed.varlen_attn
    found = kernel(query, key, value, *ends, *longest, scale=0.2, window_size=window)
    query, key, value, *ends = (tensor.cpu() for tensor in (query.float(), key.float(), value.float(), *ends))
    wanted = varlen_by_definition(query, key, value, *ends, *longest, scale=0.2, window_size=window)
    torch.testing.assert_close(found.float().cpu(), wanted, atol=2e-2, rtol=2e-2)


ORDERED: list[bool] = []  # what stood-in kernels got for `deterministic`


def flash_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """What flash_attn_varlen_func computes; transformers reads the names. The mask hides a window's right side."""
    assert causal
    ORDERED.append(deterministic)
    ends, longest = [cu_seqlens_q, cu_seqlens_k], [max_seqlen_q, max_seqlen_k]
    return by_definition((q, k, v), ends, longest, softmax_scale, window_size[0], softcap)


def stand_in(kernel: str, shares_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a kernel run on a CPU: torch's other form of it, or its definition; transformers finds flash's packages."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(packed, "varlen_attn", varlen_by_definition)
    monkeypatch.setattr(packed, "_SHARES_KEYS", shares_keys)
    second = kernel == FLASH
    name = "flash_attn" if second else "flash_attn_interface"
    package: Any = ModuleType(name)
    package.flash_attn_varlen_func = flash_by_definition
    package.flash_attn_func = package.flash_attn_with_kvcache = None
    padding: Any = ModuleType("flash_attn.bert_padding")
    padding.pad_input = padding.unpad_input = None
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: second)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    ORDERED.clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "kernel", "shares_keys"),
    tiered(
        [(name, *kernel) for name, kernel in product(NAMES, KERNELS)],
        quick=["llama-tied-*", "gemma2-*", "bloom-*"],
        longest=map("-".join, product(ALIKE, (f"{CUDNN}-True", f"{VARLEN}-False", f"{FLASH_3}-True"))),
    ),
)
def test_a_kernel_equals_the_default(
    name: str, kernel: str, shares_keys: bool, make_case: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(kernel, shares_keys, monkeypatch)
    folder = make_case(name)
    if kernel not in read_spec(folder).attention:
        pytest.skip(f"{kernel} does not compute the attention of {name}")
    for rows in (PACKED, WHOLE):
        _, expected, expected_gradients = outcome(folder, None, rows)
        taken, found, found_gradients = outcome(folder, kernel, rows)
        assert taken == kernel
        assert_near(found, expected)
        assert_near(found_gradients, expected_gradients)
    assert not any(ORDERED) and bool(ORDERED) == (kernel in (FLASH, FLASH_3))


@pytest.mark.parametrize("kernel", [FLASH, FLASH_3])
def test_flash_attention_sums_in_order_where_asked(
    kernel: str, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable that `training.engine.numerics` sets."""
    stand_in(kernel, True, monkeypatch)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    outcome(make_checkpoint("llama"), kernel, PACKED)
    assert ORDERED and all(ORDERED)


def test_kernels_without_dropout_are_not_taken_where_attention_drops(make_checkpoint: Callable[..., Path]) -> None:
    assert read_spec(make_checkpoint("llama")).attention == ALL
    dropping = read_spec(make_checkpoint("llama", attention_dropout=0.1))
    assert set(dropping.attention) == set(ALL) - {FLASH_3, VARLEN, FLEX}


def test_documents_set_ahead_are_those_that_are_read(make_checkpoint: Callable[..., Path]) -> None:
    """What is read from position ids and what the loader says may not differ; a wrong shape is refused."""
    spec = read_spec(make_checkpoint("llama"))
    positions = spec.positions()
    ids = position_ids(PACKED)
    read = positions.documents(ids)
    assert read.rows == ((5, 1, 22, 12), (24, 9, 3, 4))
    ahead = [Documents.laid_out(PACKED, 40), Documents.laid_out(WHOLE, 40)]
    positions.expect(ahead)
    first, second = ids.clone(), position_ids(WHOLE)
    assert positions.documents(first) is positions.documents(first.view_as(first)) is ahead[0]
    assert positions.documents(second) is ahead[1]
    assert positions.documents(unmarked(ids)).rows == read.rows  # none is set any more
    positions.expect([Documents([[8]])])
    with pytest.raises(ValueError, match="expected documents of"):
        positions.documents(ids)
