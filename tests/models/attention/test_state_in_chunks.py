"""Linear attention over rows in chunks gives the losses and gradients of whole rows, as do losses that ask for sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.families import config_of
from models.attention import states
from models.attention.chunks import RowChunk, RowMemory, chunks_of
from models.attention.kernels import TORCH
from models.attention.packed import Documents, unmarked
from models.attention.states import Mixer
from models.causal_lm import CausalLM
from models.derived.derive import BLOCKS, derive
from models.derived.proof import LENGTH as PROVEN
from models.derived.proof import RECURRENT, roughen, rows_in_chunks, small_spec
from models.derived.shrink import shrunk_fields
from models.layers import Head
from models.loading import SeededStates
from models.loss.micro_batch import micro_batch_loss
from models.spec import ModelSpec
from tests.cases import tiered
from tests.models.attention import test_chunks
from tests.models.attention.test_chunks import (
    CUTS,
    PACKED,
    PLAIN,
    ROWS,
    gradients_of,
    loss_of,
    model_of,
    tokens_of,
    train_in_chunks,
)

NAMED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "bailing_hybrid")
FAMILIES = [name for name in NAMED if name in CONFIG_MAPPING]  # older releases of transformers have fewer
KINDS = [(family, rows) for family in FAMILIES for rows in ROWS]
QUICK = ["qwen3_5_text-packed", "qwen3_next-plain"]
SLOW = [f"{family}-packed" for family in FAMILIES if family != "qwen3_5_text"]
CPU = torch.device("cpu")
ROUTED = 0.5  # weight of the router loss: large, so that a mistake in it shows


def small(model_type: str, **changes: Any) -> ModelSpec:
    """A derived family's spec of a small model."""
    config, fields = config_of(model_type, **changes)
    raw = shrunk_fields(config, fields, BLOCKS)
    config = type(config).from_dict(raw)
    return small_spec(derive(config, raw), config, raw, TORCH)


def rough(spec: ModelSpec, recompute: bool = False) -> CausalLM:
    """A model with no two weights alike, whose states live long."""
    model = model_of(spec, recompute)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        roughen(model)
    return model


def plain_loss(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    """The sum of `token_loss`, by all logits."""
    targets = F.pad(labels[:, 1:], (0, 1 + hidden.shape[1] - labels.shape[1]), value=-100)
    return F.cross_entropy(head.project(hidden).flatten(0, 1), targets.flatten(), reduction="sum")


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, as a share of it."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).norm() / (each.norm() + 1e-6)) for name, each in wanted.items())


@pytest.mark.parametrize(("family", "rows"), tiered(KINDS, QUICK, SLOW))
def test_states_in_chunks_learn_what_whole_rows_learn(family: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, also where transformers says fp32, as recurrence enlarges the rounding of fp32."""
    spec, positions = small(family), ROWS[rows]
    ids, labels = tokens_of(spec)
    models = [rough(spec, recompute).double() for recompute in (False, True)]
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(test_chunks, "token_loss", plain_loss)
    for model in models:
        whole = loss_of(model, ids, positions, labels)
        whole.backward()
        wanted = gradients_of(model)
        for cuts in CUTS:
            torch.testing.assert_close(train_in_chunks(model, positions, cuts, labels, ids), whole.detach())
            assert furthest(gradients_of(model), wanted) <= 1e-11, cuts


@pytest.fixture(scope="module")
def linear() -> CausalLM:
    return rough(small("qwen3_5_text"))


def another_rows(context: Any, carried: states.HandedOn, hidden: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
    context.carried = carried
    return hidden.view_as(hidden), *(each.flip(0) for each in held)


def never_reset(chunk: RowChunk, mixer: Any, together: Mixer, hidden: Tensor, _: Documents, **options: Any) -> Tensor:
    documents = Documents([[chunk._memory.length]] * len(hidden))
    return reset(chunk, mixer, together, hidden, documents, **options)


def short_tail(self: states.States, conv_states: Tensor, *place: Any, conv_kernel_size: int, **others: Any) -> Tensor:
    whole = whole_tail(self, conv_states, *place, conv_kernel_size=conv_kernel_size, **others)
    self.left = {slot: each[..., -(conv_kernel_size - 2) :] for slot, each in self.left.items()}
    return whole


reset, whole_tail = RowChunk.mix, states.States.update_conv_state


def lost(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return None, gradient, *(torch.zeros_like(each) for each in context.carried.gradients)


@pytest.mark.parametrize("fault", ["another row", "never reset", "short tail", "lost gradient"])
def test_planted_faults_are_seen(fault: str, linear: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and by the proof of a family."""
    positions = PLAIN if fault == "another row" else PACKED
    ids, labels = tokens_of(linear.spec)
    linear.positions.expect([])
    loss_of(linear, ids, positions, labels).backward()
    wanted = gradients_of(linear)
    assert rows_in_chunks(linear, ids[:, :PROVEN]) <= RECURRENT
    linear.zero_grad()
    linear.positions.expect([])

    if fault == "another row":
        monkeypatch.setattr(states._Taken, "forward", staticmethod(another_rows))
    elif fault == "never reset":
        monkeypatch.setattr(RowChunk, "mix", never_reset)
    elif fault == "short tail":
        monkeypatch.setattr(states.States, "update_conv_state", short_tail)
    else:
        monkeypatch.setattr(states._Given, "backward", staticmethod(lost))

    train_in_chunks(linear, positions, [20, 28], labels, ids)
    assert furthest(gradients_of(linear), wanted) > 1e-3
    if fault != "another row":  # the rows of a proof are packed, so none is beside another
        linear.positions.expect([])
        assert rows_in_chunks(linear, ids[:, :PROVEN]) > RECURRENT
        linear.zero_grad()


def test_backward_passes_in_another_order_are_refused(linear: CausalLM) -> None:
    ids, labels = tokens_of(linear.spec)
    linear.positions.expect([Documents.of(PLAIN)] * 2, chunks_of([24, 24]))
    first, _ = (loss_of(linear, ids[:, own], PLAIN.clone(), labels[:, own]) for own in (slice(0, 24), slice(24, 48)))
    with pytest.raises(RuntimeError, match="a state without a gradient; expected the backward pass of the row's next"):
        first.backward()
    linear.zero_grad()
    linear.positions.expect([])


def test_a_mixer_that_takes_no_cache_is_refused(linear: CausalLM) -> None:
    chunk = chunks_of([3, 5])[0]
    assert chunk is not None
    hidden = torch.zeros(1, 3, 4)
    with pytest.raises(TypeError, match="a mixer that is given no cache"):
        chunk.mix(linear, lambda hidden: hidden, hidden, Documents([[8]]))
    with pytest.raises(TypeError, match="more tensors than hidden states"):
        chunk.mix(linear, lambda hidden, cache, angles: hidden, hidden, Documents([[8]]), cache=chunk, angles=hidden)


def test_what_cannot_be_handed_on_is_not_proven() -> None:
    """MiniMax's linear attention has angles, and keeps its state in a cache of its own kind."""
    model = rough(small("minimax"))
    with pytest.raises(TypeError, match="more tensors than hidden states"):
        rows_in_chunks(model, tokens_of(model.spec)[0][:, :PROVEN])


def routed_loss(model: CausalLM, head: Any, hidden: Sequence[Tensor], labels: Tensor, share: float) -> Tensor:
    """The loss of a micro-batch as a stage computes it, with the head on a stage of its own or not."""
    one = torch.ones(())
    normalised = head((hidden[0], hidden[1], *hidden[2:]))
    return micro_batch_loss(head, normalised, (labels, one, one * share), router_loss_weight=ROUTED)


@pytest.mark.parametrize("apart", [False, True], ids=["one stage", "the head apart"])
@pytest.mark.parametrize("family", tiered(["mixtral", "qwen2_moe"], slow=["qwen2_moe"]))
def test_router_losses_are_of_whole_rows(family: str, apart: bool) -> None:
    spec = small(family)
    model, (ids, labels) = rough(spec), tokens_of(spec)
    head = model.head
    if apart:
        alone = CausalLM(spec, SeededStates(spec, 0), torch.float32, CPU, [spec.n_layers - 1]).train()
        alone.load_state_dict(
            {
                name.replace(f"{spec.n_layers - 1}.", "0.", 1): each
                for name, each in model.state_dict().items()
                if name.startswith(f"layers.{spec.n_layers - 1}.")
            }
        )
        head = alone.head
    head.project_in_loss = True

    whole = routed_loss(model, head, model.activations(ids, PACKED), labels, 1.0)
    plain = micro_batch_loss(head, head(model.activations(ids, PACKED)), (labels, torch.ones(()), torch.ones(())))
    assert float((whole - plain).detach().abs()) > 0.1, "a router loss that shows"
    whole.backward()
    wanted = gradients_of(model)
    for cuts in CUTS:
        for positions in {model.positions, head.positions}:
            assert positions is not None
            positions.expect([Documents.of(unmarked(PACKED))] * len(cuts), chunks_of(cuts))
        losses = []
        for first, last in pairwise(accumulate(cuts, initial=0)):
            hidden = model.activations(ids[:, first:last], PACKED.clone())
            share = float(last == ids.shape[1])
            losses.append(routed_loss(model, head, hidden, labels[:, first : last + 1], share))
        for loss in reversed(losses):
            loss.backward()
        torch.testing.assert_close(torch.stack(losses).sum(), whole)
        assert furthest(gradients_of(model), wanted) <= 1e-5, cuts


def test_sums_over_chunks() -> None:
    """Several in each chunk are told apart by their order; each chunk gets the gradients of all sums that it is in."""
    own = [torch.tensor([float(n), 10.0 * n], requires_grad=True) for n in (1, 2, 3)]
    parts = [chunk for chunk in chunks_of([2, 1, 4]) if chunk]
    totals = [(chunk.summed(each), chunk.summed(each.square())) for chunk, each in zip(parts, own, strict=True)]
    torch.testing.assert_close(totals[2][0], torch.tensor([6.0, 60.0]))
    torch.testing.assert_close(totals[2][1], torch.tensor([14.0, 1400.0]))
    torch.testing.assert_close(totals[1][0], torch.tensor([3.0, 30.0]))

    for number, (plain, squared) in reversed([*enumerate(totals)]):
        share = float(number == 2)
        (share * (plain.square().sum() + squared.sum())).backward()
    for each in own:
        torch.testing.assert_close(each.grad, 2 * torch.tensor([6.0, 60.0]) + 2 * each.detach())


def test_a_sum_whose_backward_pass_comes_too_early_is_refused() -> None:
    parts = [chunk for chunk in chunks_of([2, 1]) if chunk]
    first, _ = (chunk.summed(torch.ones(2, requires_grad=True)) for chunk in parts)
    with pytest.raises(RuntimeError, match="expected the backward pass of the row's next chunk before"):
        first.sum().backward()


def test_a_tail_is_kept_without_the_tokens_before() -> None:
    found = states.States({})
    given = torch.randn(1, 2, 100)
    found.update_conv_state(given, 0, conv_kernel_size=4)
    (tail,) = found.left.values()
    torch.testing.assert_close(tail, given[..., -4:])
    assert tail.untyped_storage().nbytes() == 4 * 2 * 4


def test_a_block_that_recomputes_leaves_its_state_once() -> None:
    memory, module = RowMemory(8), torch.nn.Identity()
    held = {("recurrent", 0): torch.ones(2)}
    first = memory.keep((module, 0, 4), held)
    assert memory.keep((module, 0, 4), {("recurrent", 0): torch.zeros(2)}) is first


def test_states_of_a_model_in_16_bits_are_handed_on_as_kernels_give_them() -> None:
    """In fp32, with gradients in fp32; losses and gradients differ by the rounding of 16 bits."""
    spec = small("qwen3_5_text")
    model = CausalLM(spec, SeededStates(spec, 0), torch.bfloat16, CPU).train()
    ids, labels = tokens_of(spec)
    loss_of(model, ids, PACKED, labels).backward()
    wanted = gradients_of(model)

    parts = chunks_of([20, 28])
    assert parts[0] is not None
    model.positions.expect([Documents.of(PACKED)] * 2, parts)
    first = loss_of(model, ids[:, :20], PACKED.clone(), labels[:, :21])
    second = loss_of(model, ids[:, 20:], PACKED.clone(), labels[:, 20:])
    second.backward()
    carried = parts[0]._memory.states.values()
    assert carried  # of the row whose document goes on
    for each in carried:
        assert each.held["recurrent", 0].dtype == torch.float32
        assert each.gradients is not None
        assert [gradient.dtype for gradient in each.gradients] == [held.dtype for held in each.held.values()]
    first.backward()
    assert furthest(gradients_of(model), wanted) < 0.05
