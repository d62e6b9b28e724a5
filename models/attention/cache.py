"""A key-value cache for several texts of different lengths at once.

A text is a row, and the key of its token p is at index p: what each token sees, and how far away it is, follows from
position ids alone, as it does without a cache. Shorter rows end in zeros, which no token sees.

Cost: each block's buffers grow by half when they are full, so that a new token is written in place. They keep what a
sliding window no longer sees. Removing or adding rows copies the others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from models.attention.packed import AXES

LEAST = 128  # tokens that fit at first


class KeyValueCache:
    """Keys and values of the tokens so far; transformers' layers call `update`."""

    # By which blocks of linear attention add to what `layers` holds of them.
    update_conv_state, update_recurrent_state = Cache.update_conv_state, Cache.update_recurrent_state

    def __init__(self, rows: int = 1) -> None:
        self.lengths = [0] * rows  # how many tokens each row holds
        self.shifts = [0] * rows  # what is added to the places of tokens behind images, in models with axes
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}  # [rows, heads, room, width] each
        self.layers: defaultdict[int, LinearAttentionLayer] = defaultdict(LinearAttentionLayer)  # of linear attention
        self._positions: Tensor | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def level(self) -> bool:
        """Return whether all rows are equally long."""
        return len(set(self.lengths)) <= 1

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Give the position ids of the next `count` tokens of each row, [rows, count]."""
        if self._positions is None or self._positions.shape[1] != count:
            begins = torch.tensor(self.lengths, device=device)
            self._positions = begins[:, None] + torch.arange(count, device=device)
        return self._positions

    def along_axes(self, positions: Tensor) -> Tensor | None:
        """Give positions [rows, count] behind images along three axes, [3, rows, count]; None where they are plain."""
        if not any(self.shifts):
            return None
        return (positions + torch.tensor(self.shifts, device=positions.device)[:, None]).expand(AXES, -1, -1)

    def update(self, keys: Tensor, values: Tensor, block: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Add the next tokens' keys and values [rows, heads, count, width]; return all.

        Rows of different lengths take one token at a time.
        """
        count, longest = keys.shape[2], self.longest
        held = self._blocks.get(block, (keys[:, :, :0], values[:, :, :0]))
        room = held[0].shape[2]
        if room < longest + count:
            room = max(LEAST, longest + count, room * 3 // 2)
            self._blocks[block] = held = _with_room(held[0], room), _with_room(held[1], room)
        for buffer, new in zip(held, (keys, values), strict=True):
            if self.level:
                buffer[:, :, longest : longest + count] = new
            else:
                places = self.positions(1, keys.device)[:, 0]
                buffer[torch.arange(len(places), device=keys.device), :, places] = new.squeeze(2)
        return held[0][:, :, : longest + count], held[1][:, :, : longest + count]

    def get_conv_state(self, block: int, state_idx: int = 0) -> Tensor | None:
        """Get the convolution state of a linear-attention block; None at first."""
        return self.layers[block].conv_states[state_idx]

    def get_recurrent_state(self, block: int, state_idx: int = 0) -> Tensor | None:
        """Get the recurrent state of a linear-attention block; None at first."""
        return self.layers[block].recurrent_states[state_idx]

    def is_recording_past(self, block: int) -> bool:
        """Say no to transformers' assisted generation, which takes tokens back."""
        return False

    def advance(self, count: int) -> None:
        """Count the next `count` tokens, once all blocks have seen them."""
        self.lengths = [length + count for length in self.lengths]
        self._positions = None

    def crop(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of each row; `layers` have to be brought back otherwise."""
        self.lengths = [min(length, each) for each in self.lengths]
        self._positions = None

    def select(self, rows: list[int]) -> None:
        """Keep these rows alone, in this order."""
        if rows == list(range(len(self.lengths))):
            return
        self.lengths, self.shifts = ([each[row] for row in rows] for each in (self.lengths, self.shifts))
        self._blocks = {block: (held[0][rows], held[1][rows]) for block, held in self._blocks.items() if rows}
        if not rows:
            self.layers.clear()
        for layer in self.layers.values():
            layer.reorder_cache(torch.tensor(rows))
        self._positions = None

    def append(self, other: KeyValueCache) -> None:
        """Take in the rows of another cache of the same model."""
        for block, theirs in other._blocks.items():
            mine = self._blocks.get(block, tuple(each[:0] for each in theirs))
            room = max(mine[0].shape[2], theirs[0].shape[2])
            keys, values = (
                torch.cat([_with_room(old, room), _with_room(new, room)]) for old, new in zip(mine, theirs, strict=True)
            )
            self._blocks[block] = keys, values
        for block, layer in other.layers.items():
            if block not in self.layers:
                self.layers[block] = layer
                continue
            for held in ("conv_states", "recurrent_states"):
                old, new = getattr(self.layers[block], held), getattr(layer, held)
                old |= {number: torch.cat([old[number], new[number]]) for number in old if new[number] is not None}
        self.lengths, self.shifts = self.lengths + other.lengths, self.shifts + other.shifts
        self._positions = None


def _with_room(held: Tensor, room: int) -> Tensor:
    return F.pad(held, (0, 0, 0, room - held.shape[2]))
