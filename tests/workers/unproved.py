"""Run train_ds.py with a fault in its ranks, or in a proof's exports, that raises no error: only a proof finds it.

usage: FAULT=<kind> unproved.py <arguments of train_ds.py>. The kinds are the functions below, and those of
`preference_faults.py` and `image_faults.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import train_ds


def ends_apart() -> None:
    """The ends of a tied model do not add up their gradients."""
    from deepspeed.runtime.pipe import schedule

    from training.engine.stage_engine import StageEngine

    StageEngine._INSTRUCTION_MAP = StageEngine._INSTRUCTION_MAP | {schedule.ReduceTiedGrads: lambda engine: None}


def no_decay() -> None:
    """Weight decay is forgotten."""
    from training.engine import building

    build = building.build_optimizer

    def forgetful(*arguments: Any) -> Any:
        optimizer = build(*arguments)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer

    building.build_optimizer = forgetful  # type: ignore[assignment]


def moments_lost() -> None:
    """A checkpoint gives back the weights but not what the optimizer kept."""
    from training.checkpoint import resume

    def lost(engine: Any, folder: Any, record: Any, spec: Any = None) -> None:
        engine.global_steps = record.step

    resume.load_optimizer_state = lost


def targets_near() -> None:
    """A layer ahead predicts the token before the one that it should."""
    from options.multi_token import collation

    right = collation.targets_ahead
    collation.targets_ahead = lambda labels, position_ids, k: right(labels, position_ids, k - 1)


def stale_embedding() -> None:
    """The last stage's copy of the embedding stays as it was."""
    from options.multi_token.drafting import EmbeddingCopy

    EmbeddingCopy.follow = lambda self: None  # type: ignore[method-assign]


def padding_counts() -> None:
    """The loss is divided by all tokens instead of the supervised ones."""
    from data.loader import Loader

    tensors = Loader.tensors

    def unfair(self: Loader, batch: Any, replica: int) -> Any:
        for inputs, (labels, scale, share) in tensors(self, batch, replica):
            yield inputs, (labels, scale * batch.supervised / batch.tokens, share)

    Loader.tensors = unfair  # type: ignore[method-assign]


def documents_meet() -> None:
    """The documents of a packed row see each other."""
    from data.loader import Loader

    collate = Loader._collate

    def joined(self: Loader, rows: Any) -> Any:
        input_ids, position_ids, labels = collate(self, rows)
        positions = position_ids.clone()
        for row in positions:
            real = row >= 0
            row[real] = real.cumsum(0)[real] - 1
        return input_ids, positions, labels

    def layouts(self: Loader, batch: Any, replica: int) -> Any:
        return [
            ([[sum(int(self.data.lengths[number]) for number in row)] for row in rows] or [[]], self.shape(rows)[1])
            for rows in batch.micro_batches[replica]
        ]

    Loader._collate, Loader.layouts = joined, layouts  # type: ignore[method-assign]


def parts_swapped() -> None:
    """Each of two processes that share a layer takes the part of the other."""
    from models.parallel.tensor import TensorShare

    cut = TensorShare.shard
    TensorShare.shard = lambda self, name: cut(  # type: ignore[method-assign]
        TensorShare(self._spec, replace(self.ranks, rank=1 - self.ranks.rank), self._spread), name
    )


def readers_alone() -> None:
    """The gradient of what the parts of a layer read is that of one part."""
    from models.parallel.tensor import TensorShare

    TensorShare._to_readers = lambda self, _, inputs, named: (inputs, named)  # type: ignore[method-assign]


def other_scale() -> None:
    """Adapters count alpha / sqrt(r) instead of alpha / r."""
    from models.adapters import Lora

    Lora.scale = property(lambda self: self.alpha / self.r**0.5)  # type: ignore[assignment]


def neighbours_adapter() -> None:
    """Each expert has another one's adapter."""
    from models.adapters import LowRankSum

    make = LowRankSum.__init__

    def roll(self: LowRankSum, base: Any, left: Any, right: Any, scale: float) -> None:
        make(self, base, left.roll(1, 0), right.roll(1, 0), scale)

    LowRankSum.__init__ = roll  # type: ignore[method-assign]


def another_prefix() -> None:
    """A chunk sees the earlier chunks of another row."""
    from models.attention.chunks import _Kept

    extend = _Kept.extend

    def exchanged(self: Any, begin: int, new: Any) -> Any:
        return [torch.cat([each[:, :, :begin].roll(1, 0), each[:, :, begin:]], 2) for each in extend(self, begin, new)]

    _Kept.extend = exchanged  # type: ignore[method-assign]


def keys_left_behind() -> None:
    """The keys of earlier chunks do not come along."""
    from models.attention.chunks import _Kept

    extend = _Kept.extend

    def forgotten(self: Any, begin: int, new: Any) -> Any:
        keys, values = extend(self, begin, new)
        return torch.cat([torch.zeros_like(keys[:, :, :begin]), keys[:, :, begin:]], 2), values

    _Kept.extend = forgotten  # type: ignore[method-assign]


def values_unlearnt() -> None:
    """The values of a chunk get no gradients from the chunks behind it."""
    from models.attention.chunks import _Kept

    collect = _Kept.collect

    def lost(self: Any, begin: int, gradients: Any) -> Any:
        keys, _ = collect(self, begin, gradients)
        return keys, gradients[1][:, :, begin:]

    _Kept.collect = lost  # type: ignore[method-assign]


def state_not_reset() -> None:
    """A document takes over the state of linear attention that the one before it in the row has left."""
    from models.attention.chunks import RowChunk
    from models.attention.packed import Documents

    mix = RowChunk.mix

    def joined(self: RowChunk, mixer: Any, together: Any, hidden: Any, _: Any, **options: Any) -> Any:
        one = Documents([[self._memory.length]] * len(hidden))
        return mix(self, mixer, together, hidden, one, **options)

    RowChunk.mix = joined  # type: ignore[method-assign, assignment]


def tail_short() -> None:
    """Of a convolution's inputs, a chunk gets a column less than it needs."""
    from models.attention.states import States

    update = States.update_conv_state

    def short(self: States, conv_states: Any, *place: Any, conv_kernel_size: int, **others: Any) -> Any:
        whole = update(self, conv_states, *place, conv_kernel_size=conv_kernel_size, **others)
        self.left = {slot: each[..., -(conv_kernel_size - 2) :] for slot, each in self.left.items()}
        return whole

    States.update_conv_state = short  # type: ignore[method-assign]


def left_out() -> None:
    """An export lacks one of the weights."""
    from models.conversion import to_huggingface

    plan = to_huggingface.original_infos
    to_huggingface.original_infos = lambda *words: {
        name: info for name, info in plan(*words).items() if not name.endswith("1.mlp.up_proj.weight")
    }


def other_alpha() -> None:
    """An exported adapter tells of another scale than it was trained with."""
    from models.conversion import to_peft

    write = to_peft.peft_config
    to_peft.peft_config = lambda *words: write(*words) | {"lora_alpha": 8}


EXPORTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (left_out, other_alpha)}
KINDS = (
    *(ends_apart, no_decay, moments_lost, padding_counts, documents_meet),
    *(parts_swapped, readers_alone, other_scale, neighbours_adapter),
    *(targets_near, stale_embedding),
    *(another_prefix, keys_left_behind, values_unlearnt, state_not_reset, tail_short),
)
FAULTS: dict[str, Callable[[], None]] = {each.__name__: each for each in KINDS}


if __name__ == "__main__":
    if "RANK" in os.environ:
        from tests.workers import image_faults, preference_faults

        fault = os.environ["FAULT"]
        if fault in preference_faults.FAULTS:
            preference_faults.FAULTS[fault]().__enter__()
        else:
            (FAULTS | image_faults.FAULTS).get(fault, str)()
    elif "--prove" in sys.argv:
        EXPORTS.get(os.environ["FAULT"], str)()
    train_ds.main()
