"""How checkpoints name the layers that predict further ahead, and what each kind of name says of the formula.

A folder's own tensors tell which it is: some published config.json have no number of such layers (Qwen3-Next's).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from models.family import Family, Rule

if TYPE_CHECKING:
    from models.weight_map import WeightMap

MOST_AHEAD = 16  # layers whose copies are looked for
MODULE = "ahead"  # their place in the last layer


@dataclass(frozen=True)
class Naming:
    """The names of the layers ahead, without `.weight`; `{n}` counts on from the blocks, `{k}` from 0.

    `{blocks}` stands for how the family's blocks are called, and `{model}` for how all its names begin.

    Attributes:
        block: how the names of the decoder layer begin.
        embedding_norm, hidden_norm: of the two halves that are joined.
        joined: the projection of both halves to one hidden state.
        norm: behind the decoder layer; empty where the model's final norm is there, and the next layer gets what is
            in front of it.
        most: of these layers; None for any number.
        embedding_copy, head_copy: copies of the embedding and of the head, which some checkpoints hold.
        dense: whether the decoder layer has no experts, whatever the model's last block has.
    """

    block: str
    embedding_norm: str
    hidden_norm: str
    joined: str
    norm: str
    most: int | None = None
    embedding_copy: str = ""
    head_copy: str = ""
    dense: bool = False

    @property
    def before_norm(self) -> bool:
        """Whether these layers take hidden states as they are in front of the final norm."""
        return not self.norm

    def parts(self, family: Family, n_blocks: int, k: int) -> dict[str, str]:
        """Name the parts of the layer `k` (from 0): name in the module -> name on disk."""
        named = {
            "embedding_norm": self.embedding_norm,
            "hidden_norm": self.hidden_norm,
            "joined": self.joined,
            "norm": self.norm,
        }
        return {part: _filled(name, family, n_blocks, k) for part, name in named.items() if name}

    def begin(self, family: Family, n_blocks: int, k: int) -> list[str]:
        """List how the names on disk of all weights of the layer `k` begin."""
        return [*self.parts(family, n_blocks, k).values(), _filled(self.block, family, n_blocks, k)]

    def rules(self, family: Family, n_blocks: int, k: int) -> Iterator[Rule]:
        """Make the naming table of the layer `k`, as rules of the last layer.

        Args:
            family: whose block's rules are those that fit the checkpoint.
        """
        place = f"{MODULE}.{k}"
        for part, name in self.parts(family, n_blocks, k).items():
            yield Rule(f"{name}.*", f"{place}.{part}.*")

        begin, own = f"{blocks_of(family)}.{{i}}.", f"{_filled(self.block, family, n_blocks, k)}."
        for rule in family.block:
            disk = tuple(own + name.removeprefix(begin) for name in rule.disk_names)
            module = tuple(f"{place}.decoder.{name}" for name in rule.module_names)
            yield Rule(disk, module, rule.by_key_head)

    def copies(self, family: Family, n_blocks: int, k: int) -> list[str]:
        """Name the copies of embedding and head that a checkpoint may hold for the layer `k`."""
        named = filter(None, (self.embedding_copy, self.head_copy))
        return [f"{_filled(name, family, n_blocks, k)}.weight" for name in named]


# GLM-4.5 and later, DeepSeek-V3: transformers' conversion_mapping.py (`MtpModel`), vLLM's deepseek_mtp.py.
BEHIND_THE_BLOCKS = Naming(
    block="{blocks}.{n}",
    embedding_norm="{blocks}.{n}.enorm",
    hidden_norm="{blocks}.{n}.hnorm",
    joined="{blocks}.{n}.eh_proj",
    norm="{blocks}.{n}.shared_head.norm",
    embedding_copy="{blocks}.{n}.embed_tokens",
    head_copy="{blocks}.{n}.shared_head.head",
)
# Qwen3-Next and later: vLLM's qwen3_next_mtp.py, whose several layers would share all but the decoder layer.
APART = Naming(
    block="mtp.layers.{k}",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    joined="mtp.fc",
    norm="mtp.norm",
    most=1,
)
# ERNIE 4.5: ERNIE's own training code (`Ernie4_5_Model.forward`).
BY_PART = Naming(
    block="{model}mtp_block.{k}",
    embedding_norm="{model}mtp_emb_norm.{k}",
    hidden_norm="{model}mtp_hidden_norm.{k}",
    joined="{model}mtp_linear_proj.{k}",
    norm="",
    dense=True,
)
NAMINGS = (BEHIND_THE_BLOCKS, APART, BY_PART)


def naming_of(names: Iterable[str], family: Family, n_blocks: int) -> tuple[Naming, int] | None:
    """Find how the tensors of a checkpoint name such layers, and how many there are; None if it has none.

    Args:
        names: on disk, in the family's spelling.
    """
    known = set(names)
    for naming in NAMINGS:
        depth = 0
        while depth != naming.most and f"{naming.parts(family, n_blocks, depth)['joined']}.weight" in known:
            depth += 1
        if depth:
            return naming, depth
    return None


def copies_of(weight_map: WeightMap, names: Collection[str], tied: bool) -> dict[str, str]:
    """Find a checkpoint's copies of embedding and head for its layers ahead: name -> name of what each is a copy of.

    Args:
        weight_map: in the checkpoint's spelling.
        names: of its tensors.
        tied: whether embedding and head are one weight, of which a checkpoint may have one name alone.
    """
    ends = [weight_map.tied_embedding, weight_map.tied_head]
    if tied:
        ends = [next((end for end in ends if end in names), ends[0])] * 2
    found: dict[str, str] = {}
    for naming, k in product(NAMINGS, range(MOST_AHEAD)):
        for name, end in zip(naming.copies(weight_map.family, weight_map.n_blocks, k), ends, strict=False):
            if (copy := weight_map.spelled(name)) in names:
                found[copy] = end
    return found


def blocks_of(family: Family) -> str:
    """How a family's blocks are called on disk, without their number."""
    return family.block[0].disk_names[0].partition(".{i}")[0]


def _filled(name: str, family: Family, n_blocks: int, k: int) -> str:
    return name.format(blocks=blocks_of(family), model=family.prefix, n=n_blocks + k, k=k)
