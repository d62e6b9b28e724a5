"""Rows in chunks give the losses and gradients of whole rows; what a stage keeps of them is known."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from models.attention import chunks
from models.attention.chunks import RowChunk, RowMemory, chunks_of
from models.attention.flex import FLEX
from models.attention.kernels import CUDNN, FLASH, FLASH_3
from models.attention.packed import VARLEN, Documents, unmarked
from models.causal_lm import CausalLM
from models.loading import SeededStates
from models.loss.micro_batch import token_loss
from models.spec import ModelSpec
from tests.models.attention.test_kernels import stand_in
from tests.models.helpers import spec_of

LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
SPECS: dict[str, Callable[[], ModelSpec]] = {
    **{name: partial(spec_of, name) for name in ("llama", "bloom", "mixtral", "gemma2", "phi3", "chatglm", "olmo2")},
    "mistral": partial(spec_of, "mistral", sliding_window=8),
    "gemma3_text": partial(spec_of, "gemma3_text", sliding_window=8),
    "gpt_oss": partial(spec_of, "gpt_oss", num_local_experts=4, sliding_window=8),
    "deepseek_v3": partial(spec_of, "deepseek_v3", **LATENT),
    "gpt2": partial(spec_of, "gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "baichuan2-7b": partial(spec_of, "baichuan", max_position_embeddings=256),
    "baichuan2-13b": partial(spec_of, "baichuan"),
    "dynamic": partial(spec_of, max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
}
LENGTH = 48
PACKED = torch.tensor([[*range(20), *range(28)], [*range(9), *range(39)]])
PLAIN = torch.arange(LENGTH).repeat(2, 1)
PADDED = torch.where(torch.arange(LENGTH) < 40, PLAIN, -1 - PLAIN)
ROWS = {"packed": PACKED, "padded": PADDED, "plain": PLAIN}
CUTS = [[24, 24], [20, 15, 13], [1, 46, 1], [7, 7, 7, 7, 7, 7, 6]]


def model_of(spec: ModelSpec, recompute: bool = False) -> CausalLM:
    model = CausalLM(spec, SeededStates(spec, 0), torch.float32, torch.device("cpu"))
    for block in model.blocks:
        block.recompute = recompute
    return model.train()


def tokens_of(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Make ids and labels; a third of the tokens are not trained."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, int(spec.config.vocab_size), (2, LENGTH), generator=generator)
    return ids, torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)


def loss_of(model: CausalLM, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    hidden, *_ = model.activations(ids, positions)
    return token_loss(model.head.norm(hidden), labels, model.head)


def gradients_of(model: CausalLM) -> dict[str, Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def train_in_chunks(model: CausalLM, positions: Tensor, cuts: Sequence[int], labels: Tensor, ids: Tensor) -> Tensor:
    """Pass rows through in chunks, and back from the last one; return the sum of their losses."""
    documents = Documents.of(unmarked(positions))
    model.positions.expect([documents] * len(cuts), chunks_of(cuts))
    losses = []
    for first, last in pairwise(accumulate(cuts, initial=0)):
        losses.append(loss_of(model, ids[:, first:last], positions.clone(), labels[:, first : last + 1]))
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).sum().detach()


@pytest.mark.parametrize(
    ("family", "rows"),
    [(family, "packed") for family in SPECS]
    + [(family, "padded") for family in ("llama", "mistral", "baichuan2-13b")]
    + [(family, "plain") for family in ("llama", "mistral", "baichuan2-13b")],
)
def test_rows_in_chunks_learn_what_whole_rows_learn(family: str, rows: str) -> None:
    spec, positions = SPECS[family](), ROWS[rows]
    ids, labels = tokens_of(spec)
    for recompute in (False, True):
        model = model_of(spec, recompute)
        whole = loss_of(model, ids, positions, labels)
        whole.backward()
        wanted = gradients_of(model)
        for cuts in CUTS:
            torch.testing.assert_close(train_in_chunks(model, positions, cuts, labels, ids), whole.detach())
            found = gradients_of(model)
            assert found.keys() == wanted.keys()
            for name, expected in wanted.items():
                assert (found[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-7, (name, cuts)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("family", "kernel", "shares_keys"),
    [
        ("llama", FLASH, True),
        ("llama", VARLEN, True),
        ("mistral", VARLEN, False),
        ("mistral", FLASH_3, True),
        ("gemma2", FLEX, True),
        ("bloom", FLEX, True),
        ("llama", CUDNN, True),
    ],
)
def test_kernels_of_gpus_compute_the_same(
    family: str, kernel: str, shares_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their definitions, as none of them runs on a CPU."""
    stand_in(kernel, shares_keys, monkeypatch)
    for rows in (PACKED, PLAIN):
        spec = SPECS[family]()
        ids, labels = tokens_of(spec)
        model = model_of(spec)
        whole = loss_of(model, ids, rows, labels)
        whole.backward()
        wanted = gradients_of(model)
        spec.set_attention(kernel)
        model = model_of(spec)
        for cuts in CUTS[1:3]:
            torch.testing.assert_close(train_in_chunks(model, rows, cuts, labels, ids), whole.detach())
            for name, gradient in gradients_of(model).items():
                assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-7, (name, cuts)


def test_the_heads_gradient_is_held_once_for_all_chunks() -> None:
    """The loss makes it in the forward pass; one for each chunk on its way would be the largest thing of all."""
    spec = spec_of()
    model, (ids, labels) = model_of(spec), tokens_of(spec)
    loss_of(model, ids, PLAIN, labels).backward()
    weight = model.head.lm_head.weight
    assert weight.grad is not None
    wanted = weight.grad.clone()
    model.zero_grad()

    documents, chunks = Documents.of(PLAIN), chunks_of([20, 20, 8])
    assert chunks[0] is not None
    model.positions.expect([documents] * 3, chunks)
    losses, totals = [], []
    for first, last in pairwise((0, 20, 40, LENGTH)):
        losses.append(loss_of(model, ids[:, first:last], PLAIN.clone(), labels[:, first : last + 1]))
        totals.append(chunks[0].head_gradient.total)
    assert totals[0] is totals[1] is totals[2] is not None

    losses.pop().backward()
    assert chunks[0].head_gradient.total is None
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, wanted)


def test_whole_rows_are_one_chunk() -> None:
    assert chunks_of([LENGTH]) == [None]


@pytest.mark.parametrize("fault", ["another row's keys", "a lost gradient"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of()
    model, (ids, labels) = model_of(spec), tokens_of(spec)
    loss_of(model, ids, PLAIN, labels).backward()
    wanted = gradients_of(model)
    if fault == "a lost gradient":

        def collect(kept: object, begin: int, gradients: Sequence[Tensor]) -> list[Tensor]:
            return [each[:, :, begin:] for each in gradients]

        monkeypatch.setattr(chunks._Kept, "collect", collect)
    else:
        extend = chunks._Kept.extend

        def exchanged(kept: chunks._Kept, begin: int, new: Sequence[Tensor]) -> list[Tensor]:
            return [torch.cat([each[:, :, :begin].flip(0), each[:, :, begin:]], 2) for each in extend(kept, begin, new)]

        monkeypatch.setattr(chunks._Kept, "extend", exchanged)
    train_in_chunks(model, PLAIN, [24, 24], labels, ids)
    found = gradients_of(model)
    assert max(float((found[name] - each).norm() / each.norm()) for name, each in wanted.items()) > 1e-3


def test_a_stage_keeps_keys_and_values_once() -> None:
    """Chunks add to one buffer, whatever their number, and each sees it without a copy."""
    memory, module = RowMemory(8), torch.nn.Identity()
    seen = []
    for chunk in (RowChunk(slice(0, 3), memory), RowChunk(slice(3, 8), memory)):
        begin, end = chunk.columns.start, chunk.columns.stop
        new = torch.randn(1, 2, end - begin, 4, requires_grad=True)
        seen.append(memory.extend(module, new, new, begin)[0])
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr()
    torch.testing.assert_close(seen[1][:, :, :3], seen[0])


def test_keys_and_values_go_when_their_row_is_back() -> None:
    """The graphs of its chunks may live on in buffers of a pipeline."""
    memory, module, losses = RowMemory(8), torch.nn.Identity(), []
    for chunk in (RowChunk(slice(0, 3), memory), RowChunk(slice(3, 8), memory)):
        begin, end = chunk.columns.start, chunk.columns.stop
        new = torch.randn(1, 2, end - begin, 4, requires_grad=True)
        losses.append(torch.cat(memory.extend(module, new, new, begin)).sum())
    held = [weakref.ref(each) for each in memory._layers[module]._held]

    losses[1].backward()
    sums = [weakref.ref(each) for each in memory._layers[module]._sums]
    assert len(held) == len(sums) == 2 and all(each() is not None for each in (*held, *sums))
    losses[0].backward()
    assert all(each() is None for each in (*held, *sums)) and len(losses) == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_a_chunk_keeps_no_more_than_its_own_tokens(rows: int) -> None:
    """Of a single row, what lies together would be a view, and keep the whole."""
    whole = torch.randn(rows, 8, 4)
    own = RowChunk(slice(2, 5), RowMemory(8)).own(whole, -2)
    torch.testing.assert_close(own, whole[:, 2:5])
    assert own.untyped_storage().nbytes() == own.nbytes
