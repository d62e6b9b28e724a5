"""The parts of a decoder of transformers, found by running a small one: embedding, blocks, norm, head, rotary angles.

Nothing is known of the architecture ahead. What the model calls before its blocks and after them, and what it hands to
each block, is watched in a forward pass whose blocks do nothing and whose masks are marks instead of numbers. So each
argument of a block is traced to where it comes from: a mask, the angles of a rotary module, the positions, the cache,
or a constant. Whatever else it may be is refused by name.

Cost: a model of a few small layers, some 0.1 s.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from models.errors import CheckpointError

ROWS, LENGTH = 2, 6
FIRST = 3  # positions begin here, so that nothing else is equal to them
HIDDEN, POSITIONS, MASK, ANGLES, CACHE = "hidden", "positions", "mask", "angles", "cache"
CONSTANT, EMPTY = "constant", "empty"
# What makes a model's masks, by the part of the name that says which.
MASKS = {
    "create_causal_mask": "full_attention",
    "create_sliding_window_causal_mask": "sliding_attention",
    "create_recurrent_attention_mask": "linear_attention",
}


class Underivable(CheckpointError):
    """An architecture has a part that cannot be derived."""


class ArgumentSource(NamedTuple):
    """Where an argument of a block comes from.

    Attributes:
        kind: one of the words above.
        value: the kind of mask; the number of the call of a rotary module; a constant; the class of something empty.
    """

    kind: str
    value: Any = None


class RotaryCall(NamedTuple):
    """How a module is called that turns positions into angles.

    Attributes:
        module: its path below the base model.
        arguments, keywords: in the place of hidden states and positions the words "hidden" and "positions".
        expanded: the dimensions in front of the positions, as those of images and text are.
    """

    module: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    expanded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The parts of a decoder.

    Attributes:
        model: transformers' class of the whole model.
        base: the attribute of it that holds everything but the head.
        embedding, blocks, norm: paths below the base model.
        table, projection: paths of a table of learned positions and, as in OPT-350m, of a linear layer behind the
            embedding; empty if none.
        first_row: that of position 0 in the table.
        head: path below the whole model.
        classes: of the blocks by number.
        calls: of the modules that make angles, each once a forward pass.
        arguments: of the blocks by number, each with its source.
        mixers: the child of each block, by number, in which tokens meet: the one that takes the mask.
    """

    model: type[PreTrainedModel]
    base: str
    embedding: str
    blocks: str
    norm: str
    head: str
    classes: tuple[type[nn.Module], ...]
    calls: tuple[RotaryCall, ...]
    arguments: tuple[dict[str, ArgumentSource], ...]
    mixers: tuple[str, ...]
    table: str = ""
    first_row: int | None = None
    projection: str = ""


class MaskStandIn(NamedTuple):
    """A stand-in for a mask of some kind."""

    kind: str


class Watched:
    """Records of one forward pass around the blocks."""

    def __init__(self, base: Any, blocks: nn.ModuleList, embedding: nn.Module) -> None:
        self.calls: list[RotaryCall] = []
        self.arguments: list[dict[str, ArgumentSource]] = []
        self.after: list[str] = []
        self.table, self.projection = "", ""
        self.first_row: int | None = None
        self.mixers = [""] * len(blocks)
        self._made: list[Any] = []
        self._length = 0  # of the tuple that a block gives, hidden states first; 0 where it gives them alone
        self._positions = torch.arange(FIRST, FIRST + LENGTH).repeat(ROWS, 1) + torch.arange(ROWS)[:, None]
        self._blocks = blocks
        self._names = {
            child: name
            for name, child in base.named_modules()
            if name and child is not embedding and not any(child is each for each in blocks.modules())
        }

    @torch.no_grad()
    def run(self, model: Any) -> None:
        blocks = self._blocks
        hooks = [blocks[0].register_forward_hook(self._note_length)]
        for number, block in enumerate(blocks):
            for name, child in block.named_children():
                noted = partial(self._note_mixer, number, name)
                hooks.append(child.register_forward_pre_hook(noted, with_kwargs=True))
        ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) + FIRST
        model(input_ids=ids, use_cache=False)

        # Once more with blocks that do nothing, and everything around them watched.
        hooks += [block.register_forward_pre_hook(self.before_block, with_kwargs=True) for block in blocks]
        for module in self._names:
            hooks.append(module.register_forward_pre_hook(self.before_other, with_kwargs=True))
            hooks.append(module.register_forward_hook(self.after_other, with_kwargs=True))
        for block in blocks:
            vars(block)["forward"] = self._pass_on
        try:
            with marked_masks(sys.modules[type(model).__module__]):
                model(input_ids=ids, position_ids=self._positions, use_cache=True)
        finally:
            for block in blocks:
                del vars(block)["forward"]
            for hook in hooks:
                hook.remove()

    def _note_length(self, block: nn.Module, arguments: Any, output: Any) -> None:
        self._length = len(output) if isinstance(output, tuple) else 0

    def _pass_on(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        """Return what a block is given, in the form of what it gives."""
        return (hidden, *[None] * (self._length - 1)) if self._length else hidden

    def _note_mixer(self, block: int, name: str, child: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if "attention_mask" in keywords:
            self.mixers[block] = name

    def before_block(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        parameters = inspect.signature(type(block).forward).parameters
        names = list(parameters)[1:]
        given = dict(zip(names, arguments, strict=False)) | keywords
        required = {name for name in names if parameters[name].default is inspect.Parameter.empty}
        self.arguments.append(
            {name: self._source(name, given[name], name in required) for name in given if name != names[0]}
        )

    def before_other(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.arguments:
            self.after.append(self._names[module])

    def after_other(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        if self.arguments or isinstance(module, nn.Dropout):
            return
        if isinstance(module, nn.Embedding):
            self._note_table(module, output)
            return
        if isinstance(module, nn.Linear):
            self.projection = self._names[module]
            return
        expanded: tuple[int, ...] = ()

        def placeholder(value: Any) -> Any:
            nonlocal expanded
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return HIDDEN
            expanded = tuple(value.shape[: -self._positions.dim()])
            if torch.equal(value, self._positions.expand_as(value)):
                return POSITIONS
            raise Underivable(f"{self._names[module]} is called with something else than positions")

        given = tuple(map(placeholder, arguments)), {name: placeholder(value) for name, value in keywords.items()}
        self.calls.append(RotaryCall(self._names[module], *given, expanded))
        self._made.append(output)

    def _note_table(self, module: nn.Embedding, output: Tensor) -> None:
        """Find which row position 0 takes of a table of positions: in some the first two are of nothing."""
        name, rows = self._names[module], (module.weight == output[0, 0]).all(dim=1).nonzero()
        first = int(rows[0]) - FIRST if len(rows) else 0
        taken = (self._positions + first).clamp(0, len(module.weight) - 1)
        if self.table or not torch.equal(output, module.weight[taken]):
            raise Underivable(f"{name} is an embedding of something else than words and positions")
        self.table, self.first_row = name, first

    def _source(self, name: str, value: Any, required: bool = False) -> ArgumentSource:
        if isinstance(value, MaskStandIn):
            if value.kind not in MASKS.values():
                raise Underivable(f"blocks are given {name}, a mask of {value.kind}, which is not known")
            return ArgumentSource(MASK, value.kind)
        if isinstance(value, Cache):
            return ArgumentSource(CACHE)
        for number, made in enumerate(self._made):
            if value is made or (isinstance(value, tuple) and isinstance(made, tuple) and same(value, made)):
                return ArgumentSource(ANGLES, number)
        if isinstance(value, Tensor) and torch.equal(value, self._positions):
            return ArgumentSource(POSITIONS)
        # What blocks leave to others, if they do; and a None that has to be given all the same, as Falcon's alibi.
        if (value is None and required) or (isinstance(value, Sized) and not len(value)):
            return ArgumentSource(EMPTY, type(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return ArgumentSource(CONSTANT, value)
        raise Underivable(f"blocks are given {name}, a {type(value).__name__} of unknown making")


def outline_of(model: Any) -> Outline:
    """Find the outline of a small model of transformers."""
    # Llama 4's prefix is that of the model with images around it.
    prefix = next((each for each in (model.base_model_prefix, "model") if hasattr(model, each)), "")
    base = getattr(model, prefix, None)
    if base is None or base is model:
        raise Underivable(f"{type(model).__name__} has no base model")
    embedding = model.get_input_embeddings()

    depth = model.config.get_text_config().num_hidden_layers
    lists = {name: each for name, each in base.named_modules() if isinstance(each, nn.ModuleList)}
    lists = {name: each for name, each in lists.items() if len(each) == depth}
    # Not those inside of blocks; the blocks of some lie one level deeper, as OPT's.
    lists = {name: each for name, each in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if len(lists) != 1:
        raise Underivable(f"{type(base).__name__} has {len(lists)} lists of {depth} blocks; expected one")
    name, blocks = next(iter(lists.items()))

    watched = Watched(base, blocks, embedding)
    watched.run(model)
    if len(watched.after) != 1:
        raise Underivable(f"{type(base).__name__} calls {watched.after or 'nothing'} after its blocks; expected a norm")
    return Outline(
        type(model),
        prefix,
        path_of(base, embedding, "embedding"),
        name,
        watched.after[0],
        path_of(model, model.get_output_embeddings(), "head"),
        tuple(type(block) for block in blocks),
        tuple(watched.calls),
        tuple(watched.arguments),
        tuple(watched.mixers),
        watched.table,
        watched.first_row,
        watched.projection,
    )


def path_of(root: nn.Module, module: nn.Module | None, what: str) -> str:
    found = [name for name, child in root.named_modules() if child is module]
    if module is None or not found:
        raise Underivable(f"{type(root).__name__} has no {what}")
    return found[0]


@contextmanager
def marked_masks(module: Any) -> Iterator[None]:
    """Make a module's mask functions return marks."""
    real = {name: getattr(module, name) for name in dir(module) if name.startswith("create_") and "mask" in name}
    for name in real:
        setattr(module, name, partial(lambda kind, *_, **__: MaskStandIn(kind), MASKS.get(name, name)))
    try:
        yield
    finally:
        vars(module).update(real)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
