"""States that linear attention and convolutions carry from one chunk of a row to the next.

A mixer of such a block asks a cache of transformers' kind for the state behind the tokens before its own, and gives it
the state behind them. Here the cache is that of one document's tokens in one chunk (`States`). What it is given at the
chunk's end stays for the document's next chunk (`HandedOn`), whose backward pass, which comes first, leaves there the
gradient that the state has. The chunk that made the state takes it in its own backward pass. One chunk reads a state,
so its gradient is no sum, and stays in the state's dtype: fp32 for recurrent ones, as kernels give them.

Mixers have another way for a single token behind a state, by kernels without a backward pass. So a single token is
computed beside a copy of itself, whose output is dropped, and waits: the next chunk takes it in front of its own.

Cost: of each mixer, state and tail of every document that crosses a chunk's end, until the row is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

CONVOLUTION, RECURRENT = "convolution", "recurrent"
WAITING = ("waiting", 0)  # tokens that the state does not know of yet, [B, 1, H]

Slot = tuple[str, int]  # the kind of a state, and its number where a mixer has several of them
Held = dict[Slot, Tensor]
Mixer = Callable[..., Tensor]  # the forward pass of a module that mixes tokens: hidden states [B, S, H] -> [B, S, H]


class States:
    """The states of one mixer before and behind some tokens, asked and given as transformers' caches are.

    Attributes:
        left: behind them.
    """

    def __init__(self, before: Mapping[Slot, Tensor]) -> None:
        self._before = before
        self.left: Held = {}

    def get_conv_state(self, block: int, state_idx: int = 0) -> None:
        """Say that there is none: with one, mixers take it for a single token; others join it in the update."""

    def get_recurrent_state(self, block: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get((RECURRENT, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, block: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Take a convolution's inputs [B, channels, S]; return them behind those before."""
        slot = (CONVOLUTION, state_idx)
        whole = torch.cat([self._before[slot], conv_states], dim=-1) if slot in self._before else conv_states
        self.left[slot] = whole[..., -conv_kernel_size:].clone()  # as a view it would keep the whole
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, block: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.left[RECURRENT, state_idx] = recurrent_states
        return recurrent_states


class HandedOn:
    """States between two chunks of a row, and the gradients that the later chunk finds for them."""

    def __init__(self, held: Held) -> None:
        # Also where nothing computes gradients yet: the pass that does may come later.
        self.held = {slot: each.detach().requires_grad_() for slot, each in held.items()}
        self.gradients: tuple[Tensor, ...] | None = None


class _Taken(torch.autograd.Function):
    """Give a chunk the states before it, tied to its hidden states, so that no backward pass misses them."""

    @staticmethod
    def forward(context: Any, carried: HandedOn, hidden: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        context.carried = carried
        return tuple(each.view_as(each) for each in (hidden, *held))

    @staticmethod
    def backward(context: Any, gradient: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context.carried.gradients = gradients
        return None, gradient, *[None] * len(gradients)


class _Given(torch.autograd.Function):
    """Pass on a mixer's output; its backward pass takes the gradients of the states that were left beside it."""

    @staticmethod
    def forward(context: Any, carried: HandedOn, output: Tensor, *held: Tensor) -> Tensor:
        context.carried = carried
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients, context.carried.gradients = context.carried.gradients, None
        if gradients is None:
            raise RuntimeError("a state without a gradient; expected the backward pass of the row's next chunk before")
        return None, gradient, *gradients


def mix(
    together: Mixer, cache: str, hidden: Tensor, before: HandedOn | None, keep: Callable[[Held], HandedOn] | None
) -> Tensor:
    """Mix the tokens of a document, [B, S, H], behind those of earlier chunks.

    Args:
        together: the mixer's own forward pass.
        cache: what it calls its cache.
        before: what the chunk before left; None where the document begins.
        keep: takes what is left for the next chunk; None where the document ends.
    """
    count, held = hidden.shape[1], Held()
    if before is not None:
        hidden, *taken = _Taken.apply(before, hidden, *before.held.values())
        held = dict(zip(before.held, taken, strict=True))
    tokens = torch.cat([held.pop(WAITING), hidden], dim=1) if WAITING in held else hidden

    waits = bool(held) and tokens.shape[1] == 1
    states = States(held)
    output = together(torch.cat([tokens, tokens], dim=1) if waits else tokens, **{cache: states})
    output = output[:, :1] if waits else output[:, -count:]
    if keep is None:
        return output

    left = held | {WAITING: tokens} if waits else states.left
    given: Tensor = _Given.apply(keep(left), output, *left.values())
    return given
