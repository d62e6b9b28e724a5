"""Masks, rotary angles and ALiBi biases: what blocks need besides hidden states, made from position ids.

Position ids restart at 0 with each document of a packed row. Padding is on the right, where no real token attends
to it, and is treated like any token: its ids, -1 - p, become p for masks and biases, so that a padded row still needs
no mask.

To read from position ids where documents begin, the host waits for the device, unless the loader has set them ahead
(`Positions.expect`).

With sequence parallelism, position ids are those of whole rows, hidden states the process's own tokens only. So masks
are made for whole rows, and of what belongs to a token each process takes its own part. Rows in chunks
(`models.attention.chunks`) pass in the same way, a part after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.attention import flex
from models.attention.cache import KeyValueCache
from models.attention.chunks import RowChunk
from models.attention.flex import FLEX
from models.attention.kernels import BOTH_WAYS, CUDNN, EAGER, FLASH, FLASH_3, TORCH
from models.attention.packed import AXES, VARLEN, Documents, unmarked
from models.attention.rope import DocumentRotary, depends_on_length
from models.parallel.groups import NO_GROUPS, RankGroups
from models.parallel.sequence import Exchanged, PartOfRows, share_attention

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Arguments = dict[str, Any]  # keyword arguments of a decoder layer
Angles = tuple[Tensor, Tensor]  # cos and sin
Seen = tuple[Tensor, int | None]  # position ids, and their version at that time
Rotary = Callable[..., nn.Module] | None  # makes the module that turns position ids into angles


def attention_kind(config: PreTrainedConfig, index: int) -> str:
    """Name the kind of attention of block `index` (from 0)."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return str(layer_types[index])
    return SLIDING if getattr(config, "sliding_window", None) else FULL


def _same_memory(known: Tensor, other: Tensor) -> bool:
    """Return whether two living tensors are one; ZeRO's hooks pass views."""
    return known.data_ptr() == other.data_ptr() != 0 and known.shape == other.shape


def _is_known(known: Seen | None, other: Tensor) -> bool:
    """Return whether position ids are those that were seen, unchanged."""
    return known is not None and _same_memory(known[0], other) and known[1] == _version(other)


class Deep(NamedTuple):
    """What is added to hidden states behind the first blocks.

    Attributes:
        places: of the tokens, [T] int64, in rows laid end to end.
        features: for each of these blocks, [T, H].
    """

    places: Tensor
    features: Sequence[Tensor]


class Positions:
    """Makes causal masks and rotary angles, as llama and most families take them.

    It remembers the last micro-batch only: the blocks of a stage run one after the other on the same position ids. It
    is no nn.Module on purpose: the rotary frequencies stay fp32 when the model is cast to bf16.
    """

    cache_argument = "past_key_values"
    slopes: Tensor | None = None  # of ALiBi, of all heads, [heads] fp32, on the device of the last micro-batch
    both_ways: tuple[str, ...] = ()  # kinds of attention in which an image's tokens see each other both ways
    groups: RankGroups = NO_GROUPS
    part: PartOfRows | None = None  # the tokens of hidden states, where they are not whole rows

    def __init__(self, config: PreTrainedConfig, rotary: Rotary = None) -> None:
        self.config = config
        # On the CPU even where the caller builds on the meta device: the frequencies are computed, not loaded.
        with torch.device("cpu"):
            angles = rotary(config=config) if rotary else None
        self.rotary = DocumentRotary(angles, config) if angles and depends_on_length(config) else angles
        self.kinds = {attention_kind(config, index) for index in range(config.num_hidden_layers)}
        self._last: tuple[Tensor, tuple[Any, ...], dict[str, Arguments]] | None = None
        self._expected: deque[Documents] = deque()
        self._chunks: deque[RowChunk | None] = deque()
        self._entered: Seen | None = None
        self._documents: tuple[Seen, Documents] | None = None
        self._deep: Deep | None = None

    def set_groups(self, groups: RankGroups) -> None:
        """Set the groups that share sequences and layers."""
        self.groups = groups
        if groups.sequence.size > 1:
            share_attention()
            self.part = Exchanged(groups.sequence)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Take this process's tokens of a tensor for whole rows; `dim`, negative, counts tokens."""
        return whole if self.part is None or whole.shape[dim] == 1 else self.part.own(whole, dim)

    def expect(self, documents: Iterable[Documents], chunks: Iterable[RowChunk | None] = ()) -> None:
        """Set the documents of the coming micro-batches, in the order of their forward passes.

        Args:
            chunks: which tokens of its rows each of them has, where not all: None for all.
        """
        self._expected, self._chunks = deque(documents), deque(chunks)
        self._last = self._documents = None  # other images may come with the same position ids
        if self.groups.sequence.size == 1:
            self.part = None
        if self._chunks:
            share_attention()

    def enter(self, position_ids: Tensor) -> None:
        """Go on to the chunk that comes with these position ids; the first layer of a stage calls it first."""
        # Without chunks nothing is asked of the tensor: those of an ONNX trace have no memory.
        if self._chunks and not _is_known(self._entered, position_ids):
            self._entered = position_ids, _version(position_ids)
            self.part = self._chunks.popleft()

    def __call__(
        self, kind: str, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None = None
    ) -> Arguments:
        """Make the arguments of a block for `hidden` [B, S, H] at `position_ids` [B, S]."""
        self.enter(position_ids)
        state = (_version(position_ids), hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
        if self._last is None or not _same_memory(self._last[0], position_ids) or self._last[1] != state:
            whole = hidden if self.part is None else hidden.new_empty(*position_ids.shape, 0)
            arguments = self.arguments(whole, position_ids, cache)
            if self.part is not None:
                for each in arguments.values():
                    each["part_of_rows"] = self.part
                if LINEAR in arguments:  # a block hands it on to its mixer, by the mixer's own name for a cache
                    arguments[LINEAR][self.cache_argument] = self.part
            if cache is not None:
                for each in arguments.values():
                    each |= {self.cache_argument: cache, "use_cache": True}
            self._last = (position_ids, state, arguments)
        return self._last[2][kind]

    def arguments(self, hidden: Tensor, position_ids: Tensor, cache: KeyValueCache | None) -> dict[str, Arguments]:
        """Make the arguments of every kind of attention in the model.

        Args:
            hidden: for its shape, dtype and device; with sequence parallelism it has whole rows and no numbers.
        """
        seen = cache.longest if cache is not None else 0
        with fp32_products():
            angles = self.angles(hidden, position_ids, seen + position_ids.shape[1])
        positions = unmarked(position_ids)
        documents = self.seen_at_once(position_ids, cache)

        arguments: dict[str, Arguments] = {}
        for kind in self.kinds:
            cosine_and_sine = tuple(self.own(each, -2) for each in angles[kind])
            scope = self.scope(kind, hidden, positions, cache, documents)
            arguments[kind] = {
                "position_ids": self.own(positions, -1),
                "position_embeddings": cosine_and_sine,
                **scope,
            }
        return arguments

    def documents(self, position_ids: Tensor) -> Documents:
        """Get the documents of a micro-batch: expected ones, else read from its position ids."""
        known = self._documents
        if known is None or not _is_known(known[0], position_ids):
            found = self._expected.popleft() if self._expected else Documents.of(unmarked(position_ids))
            if found.shape != tuple(position_ids.shape):
                raise ValueError(f"expected documents of {found.shape}, found position ids {tuple(position_ids.shape)}")
            for name, each, wanted in (
                ("axes", found.axes, (AXES, *found.shape)),
                ("together", found.together, found.shape),
            ):
                if each is not None and each.shape != wanted:
                    raise ValueError(f"{name} of images: expected {wanted}, found {tuple(each.shape)}")
            self._documents = known = ((position_ids, _version(position_ids)), found)
        return known[1]

    def seen_at_once(self, position_ids: Tensor, cache: KeyValueCache | None) -> Documents | None:
        """Get the documents of a micro-batch; of one with a cache only where it has images, and thus begins rows."""
        if cache is None or (self._documents is not None and _is_known(self._documents[0], position_ids)):
            return self.documents(position_ids)
        return None

    def scope(
        self, kind: str, hidden: Tensor, positions: Tensor, cache: KeyValueCache | None, documents: Documents | None
    ) -> Arguments:
        """Make the mask in the kernel's form; `documents` are None where a cache has more keys than these."""
        kernel, columns = self.config._attn_implementation, self.columns
        if kind == LINEAR:  # which lets no token see what follows
            return {"attention_mask": None} | ({} if cache is not None else {"documents": documents})
        window = self.config.sliding_window if kind == SLIDING else None
        if documents is None:
            assert cache is not None
            # Only these kernels are causal without a mask. Others always get one, as ONNX traces lengths.
            plain = kernel in (TORCH, CUDNN) and _is_causal(positions, cache, window)
            return {"attention_mask": None if plain else cached_mask(positions, cache, window, hidden.dtype)}
        if documents.together is not None and kernel not in BOTH_WAYS:
            raise ValueError(f"images whose tokens see each other both ways: {kernel} takes no masks of them")
        if kernel == FLEX:
            slopes = None if self.slopes is None else self.slopes_on(hidden.device)
            return {"attention_mask": flex.scope(positions, window, slopes, columns)}
        if kernel in (FLASH, FLASH_3, VARLEN):
            extra = {} if kernel != VARLEN else {"document_window": window}  # transformers tells flash-attn of windows
            if columns is not None:
                extra["documents"] = documents
            told = documents.flash_arguments(hidden.device, *((columns.start, columns.stop) if columns else ()))
            return {"attention_mask": None, **extra, **told}
        together = self._together(documents, hidden.device) if kind in self.both_ways else None
        if kernel in (TORCH, CUDNN) and together is None:
            return {"attention_mask": None, "documents": documents, "document_window": window}
        masked = kernel == EAGER or together is not None
        return {"attention_mask": causal_mask(positions, window, hidden.dtype, columns, together) if masked else None}

    def _together(self, documents: Documents, device: torch.device) -> Tensor | None:
        """Get the images whose tokens see each other both ways; refuse what has no mask for them."""
        if documents.together is None:
            return None
        if self.part is not None:
            raise ValueError("images whose tokens see each other both ways: expected whole rows in one process")
        return documents.together.to(device)

    @property
    def awaits(self) -> bool:
        """Return whether documents of micro-batches are expected."""
        return bool(self._expected)

    def set_deep(self, deep: Deep) -> None:
        """Set what the first blocks add to the micro-batch that is embedded.

        Raises:
            ValueError: what was set for the micro-batch before was not added, as these blocks are elsewhere.
        """
        if self._deep is not None:
            first = len(self._deep.features)
            raise ValueError(f"features of images for the first {first} blocks: expected these beside the embedding")
        self._deep = deep

    def deepened(self, block: int, hidden: Tensor) -> Tensor:
        """Add to hidden states behind `block` (from 0) what is set for it."""
        deep = self._deep
        if deep is None or block >= len(deep.features):
            return hidden
        if block + 1 == len(deep.features):
            self._deep = None
        added = hidden.flatten(0, 1).index_add(0, deep.places, deep.features[block].to(hidden.dtype))
        return added.view_as(hidden)

    @property
    def columns(self) -> slice | None:
        """Return the columns of the queries that masks are made for, with all keys up to their end; None for all."""
        return self.part.columns if isinstance(self.part, RowChunk) else None

    def slopes_on(self, device: torch.device) -> Tensor:
        """Get this process's slopes on `device`, where they stay: copying makes the host wait."""
        assert self.slopes is not None
        self.slopes = self.slopes.to(device)
        slopes = self.slopes[self.groups.tensor.part(len(self.slopes))]
        return slopes[self.groups.sequence.part(len(slopes))]

    def angles(self, hidden: Tensor, position_ids: Tensor, longest: int) -> dict[str, Angles]:
        """Compute the rotary angles (cos, sin) of every kind of attention.

        Args:
            longest: no document has more tokens, those in a cache among them.
        """
        assert self.rotary is not None
        if isinstance(self.rotary, DocumentRotary):
            return dict.fromkeys(self.kinds, self.rotary(hidden, position_ids, longest))
        return dict.fromkeys(self.kinds, self.rotary.to(hidden.device)(hidden, unmarked(position_ids)))


def causal_mask(
    position_ids: Tensor,
    window: int | None,
    dtype: torch.dtype,
    columns: slice | None = None,
    together: Tensor | None = None,
) -> Tensor:
    """Make the additive mask [B, 1, queries, keys] of causal attention within documents.

    It is transformers', which waits for the device to see whether rows are packed.

    Args:
        position_ids: [B, S].
        columns: of the queries, where not all; keys are those up to there.
        together: as in `Documents`, where all columns are asked for. transformers, too, lets these tokens see each
            other ahead in a window as well, and keeps the window behind (`create_masks_for_vision_model`).
    """
    own = columns or slice(0, position_ids.shape[1])
    number = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(dim=1)[:, : own.stop]
    order = torch.arange(own.stop, device=position_ids.device)
    seen: Tensor = order[own, None] >= order
    if together is not None:
        seen = seen | ((together[:, :, None] == together[:, None, :]) & (together[:, None, :] >= 0))
    seen = seen & (number[:, own, None] == number[:, None, :])
    return _numbers(seen if window is None else seen & (order > order[own, None] - window), dtype)


def cached_mask(positions: Tensor, cache: KeyValueCache, window: int | None, dtype: torch.dtype) -> Tensor:
    """Make the mask [B, 1, S, keys] of new tokens over a cache's keys and their own."""
    keys = torch.arange(cache.longest + positions.shape[1], device=positions.device)
    queries = positions[..., None]
    return _numbers(keys <= queries if window is None else (keys <= queries) & (keys > queries - window), dtype)


def _is_causal(positions: Tensor, cache: KeyValueCache, window: int | None) -> bool:
    """Return whether plain causal attention equals `cached_mask`."""
    length = positions.shape[1]
    return cache.level and (length == 1 or not cache.longest) and (window is None or cache.longest + length <= window)


def _numbers(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a mask that is added to scores, [B, 1, queries, keys]."""
    return torch.where(seen, torch.zeros((), dtype=dtype, device=seen.device), torch.finfo(dtype).min)[:, None]


@contextmanager
def fp32_products() -> Iterator[None]:
    """Turn TF32 off: transformers 5.17 makes angles by a product, in which it leaves 10 bits of a position."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
