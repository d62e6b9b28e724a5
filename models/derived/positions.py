"""Make the arguments of a derived family's blocks, each from the source that the outline found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only
from transformers import PreTrainedConfig

from models.attention.cache import KeyValueCache
from models.attention.packed import Documents, unmarked
from models.attention.positions import Arguments, Positions, Rotary, fp32_products
from models.attention.rope import DocumentRotary, depends_on_length
from models.derived.outline import ANGLES, CACHE, CONSTANT, EMPTY, HIDDEN, MASK, POSITIONS, ArgumentSource, RotaryCall
from models.parallel.sequence import PartOfRows


class DerivedPositions(Positions):
    """Masks as in declared families; angles by transformers' own modules.

    Args:
        calls: of the modules that make angles.
        arguments: of a block of each kind of attention.
        modules: the modules that make angles, by name, for a config.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rotary: Rotary,
        calls: tuple[RotaryCall, ...],
        arguments: dict[str, dict[str, ArgumentSource]],
        modules: Callable[[PreTrainedConfig], dict[str, nn.Module]],
    ) -> None:
        super().__init__(config, rotary)
        self._calls = calls
        self._sources = {kind: arguments[kind] for kind in self.kinds}
        with torch.device("cpu"):  # the frequencies are computed, not loaded
            self._modules = modules(config)
        given = chain.from_iterable(sources.items() for sources in self._sources.values())
        names = (name for name, source in given if source.kind == CACHE)
        self.cache_argument = next(names, self.cache_argument)
        if depends_on_length(config):
            self._modules = {name: DocumentRotary(module, config) for name, module in self._modules.items()}

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None) -> dict[str, Arguments]:
        seen = cache.longest if cache is not None else 0
        positions = unmarked(position_ids)
        documents, longest = self.seen_at_once(position_ids, cache), seen + position_ids.shape[1]
        axes = documents.axes if documents else None
        if documents is None and cache is not None:
            axes = cache.along_axes(positions)
        with fp32_products():
            angles = [self._made_by(call, hidden, position_ids, longest, axes) for call in self._calls]

        made: dict[str, Arguments] = {}
        for kind, sources in self._sources.items():
            made[kind] = {}
            for name, source in sources.items():
                if source.kind == MASK:
                    made[kind] |= self.scope(source.value, hidden, positions, cache, documents)
                elif source.kind == ANGLES:
                    made[kind][name] = tree_map_only(Tensor, lambda each: self.own(each, -2), angles[source.value])
                elif source.kind == POSITIONS:
                    made[kind][name] = self.own(positions, -1)
                elif source.kind == CONSTANT and name != "use_cache" and source.value is not None:
                    made[kind][name] = source.value
                elif source.kind == EMPTY:
                    made[kind][name] = source.value()
        return made

    def _made_by(
        self, call: RotaryCall, hidden: Tensor, position_ids: Tensor, longest: int, axes: Tensor | None
    ) -> Any:
        module = self._modules[call.module]
        if isinstance(module, DocumentRotary):
            return module(hidden, position_ids, longest)
        positions = unmarked(position_ids)
        expanded = positions.expand(*call.expanded, *positions.shape)
        if axes is not None and call.expanded == axes.shape[:1]:
            expanded = axes.to(hidden.device)
        given = {HIDDEN: hidden, POSITIONS: expanded}

        def filled(value: Any) -> Any:
            return given.get(value, value) if isinstance(value, str) else value

        keywords = {name: filled(value) for name, value in call.keywords.items()}
        return module.to(hidden.device)(*map(filled, call.arguments), **keywords)


def by_document(mixer: Any) -> None:
    """Make a mixing module see each document of a packed row alone."""
    together = mixer.forward

    def forward(
        hidden_states: Tensor,
        documents: Documents | None = None,
        part_of_rows: PartOfRows | None = None,
        **options: Any,
    ) -> Any:
        if part_of_rows is not None:
            in_parts = torch.compiler.disable(part_of_rows.mix)
            return in_parts(mixer, together, hidden_states, documents, **options)
        if documents is None or not documents.packed:
            return together(hidden_states, **options)
        rows = []
        for row, lengths in enumerate(documents.rows):
            begins = accumulate(lengths, initial=0)
            parts = [_Part(row, slice(begin, begin + length)) for begin, length in zip(begins, lengths, strict=False)]
            found = [together(part.of(hidden_states), **tree_map(part.of, options)) for part in parts]
            rows.append(torch.cat([each[0] if isinstance(each, tuple) else each for each in found], dim=1))
        joined = torch.cat(rows)
        return (joined, *[None] * (len(found[0]) - 1)) if isinstance(found[0], tuple) else joined

    mixer.forward = forward


class _Part(NamedTuple):
    """Some tokens of a row."""

    row: int
    tokens: slice

    def of(self, value: Any) -> Any:
        """Slice hidden states, positions or angles [B, S, ...]."""
        if not isinstance(value, Tensor):
            return value
        row = value[self.row : self.row + 1] if len(value) > 1 else value
        return row[:, self.tokens]
