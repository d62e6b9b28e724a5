"""What a model family declares: how its config.json reads, its layers in transformers, its weights' names on disk.

The pipeline, the converters, the loader and the exporter read the same table, in both directions (`weight_map.py`).

Layers are numbered as everywhere in Pipetune: 0 is the embedding, 1..N the blocks, N+1 the final norm and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.attention.kernels import ALL
from models.attention.positions import Positions, Rotary
from models.errors import CheckpointError

if TYPE_CHECKING:
    from models.ahead.layers import Ahead
    from models.sees import Sees

# Names inside of the first and the last layer; one weight where config.json says `tie_word_embeddings`.
EMBEDDING_WEIGHT, HEAD_WEIGHT = "embed_tokens.weight", "lm_head.weight"
EYES = "eyes"  # the place of a tower of images in the first layer


@dataclass(frozen=True)
class Rule:
    """One line of the naming table: names on disk, names in the layer's module.

    A name stands for itself or for several, in order. Both sides hold the same numbers in the same order, row by row,
    and the shapes say where to cut: `Rule("a", "b")` renames, `Rule("qkv", ("q", "k", "v"))` splits a fused projection
    into its rows, and `Rule(("{e}.gate", "{e}.up"), "gate_up")` stacks the experts.

    `{i}` stands for the block's number (from 0, as on disk); `{e}` for each expert in turn; `*` for any rest, the same
    on both sides. The first rule that fits a name counts.

    Attributes:
        by_key_head: a fused projection has, for each key head in turn, its share of the rows of each module.
        beside: the names are those of parts beside the decoder, which keep theirs however those of the decoder begin.
    """

    disk: str | tuple[str, ...]
    module: str | tuple[str, ...]
    by_key_head: bool = False
    beside: bool = False

    @property
    def disk_names(self) -> tuple[str, ...]:
        return (self.disk,) if isinstance(self.disk, str) else self.disk

    @property
    def module_names(self) -> tuple[str, ...]:
        return (self.module,) if isinstance(self.module, str) else self.module


@dataclass(frozen=True)
class Native:
    """transformers' own layout of a model that came with code of its own.

    Attributes:
        family: the family whose names on disk the export takes; its blocks are the same modules.
        architecture: transformers' class of the whole model.
        changes: weights of the head that the other layout stores in another form, and what makes it.
    """

    family: Family
    architecture: str
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """The declaration of one architecture.

    Attributes:
        decoder_layer: transformers' class of one block, called as `decoder_layer(config, index)`.
        rotary: transformers' class that turns position ids into (cos, sin), or None for models without it.
        embedding, block, head: the naming table of each kind of layer.
        carried: regular expressions of names on disk that no module owns but that a round trip must give back
            (buffers that older releases of transformers stored).
        block_in_whole: rules for blocks that count first, each where its names are on disk: those of a model of images
            and text, of which this one is a part.
        prefix: how names on disk begin; some checkpoints leave it out, or have another one in its place.
        positions: the class that makes masks, angles and biases for the blocks; `Positions` where absent.
        rounds_scale: whether the embedding's scale is rounded to the dtype of the weights first.
        pads_words: whether the embedding of the padding token gets no gradient.
        first_row: the row of the table of learned positions that a document begins with; None without a table.
        word_width: the field of config.json with the width of words, which `embedding_norm` and `norm` may change.
        embedding_dropout: the field of config.json with the rate at which embeddings are dropped; empty if none.
        embeds: the class of the first layer, where more than words is embedded; `Embedding` where absent. It takes
            words alone, too, as plans and generation give it no more.
        projection: the class of the last layer, for heads that do more than multiply; `Head` where absent.
        attention: the kernels that compute this family's attention exactly, by transformers' names, the default first.
        initialise: makes the function that gives a module fresh weights; the usual ones where absent.
        proof: the result of the comparison with transformers, for the log; empty where transformers has no such family.
        frozen: weights of a block that no gradient reaches, such as those that choose keys; the optimizer, whose decay
            would shrink them, leaves them alone.
        generates: whether tokens can come one by one, through a cache.
        shares_rows: whether several processes can share packed sequences, as tokens meet in attention only.
        chunks_rows: whether rows can come in chunks, as all that joins tokens can be handed on.
        tensor_plan: how a block is sharded for tensor parallelism (`models.parallel.tensor`), where transformers has
            no plan or gathers what could stay sharded.
        router: the submodule of a block that sends tokens to experts, in families that have them.
        translate: turns the fields of a config.json that transformers does not know into those of one that it does.
        variant: picks another declaration by the fields of config.json, where one `model_type` names several
            architectures.
        native: the layout without remote code, for families that transformers loads only under another name.
        ahead: layers behind the norm that predict further ahead, where they are a part of the model (`models.ahead`).
        sees: the tower of images in the first layer, where it is a part of the model (`models.images`).
    """

    name: str
    decoder_layer: Callable[[PreTrainedConfig, int], nn.Module]
    norm: Callable[[PreTrainedConfig], nn.Module]
    rotary: Rotary
    embedding: tuple[Rule, ...]
    block: tuple[Rule, ...]
    head: tuple[Rule, ...]
    carried: tuple[str, ...] = ()
    block_in_whole: tuple[Rule, ...] = ()
    prefix: str = "model."
    positions: Callable[[PreTrainedConfig, Rotary], Positions] | None = None
    embedding_norm: Callable[[PreTrainedConfig], nn.Module] | None = None
    embedding_scale: Callable[[PreTrainedConfig], float] | None = None
    rounds_scale: bool = True
    pads_words: bool = True
    first_row: int | None = None
    word_width: str = "hidden_size"
    embedding_dropout: str = ""
    head_bias: bool = False
    embeds: Callable[[Family, PreTrainedConfig, Positions | None], Any] | None = None
    projection: Callable[[Family, PreTrainedConfig], Any] | None = None
    attention: tuple[str, ...] = ALL
    initialise: Callable[[PreTrainedConfig], Callable[[nn.Module], None]] | None = None
    proof: str = ""
    frozen: tuple[str, ...] = ()
    generates: bool = True
    shares_rows: bool = True
    chunks_rows: bool = True
    tensor_plan: Mapping[str, str] | None = None
    router: str | None = None
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    variant: Callable[[dict[str, Any]], Family] | None = None
    native: Native | None = None
    ahead: Ahead | None = None
    sees: Sees | None = None


@contextmanager
def published(raw: Mapping[str, Any], switches: Mapping[str, Any], family: str) -> Iterator[None]:
    """Translate inside; refuse switches that no published checkpoint has.

    Args:
        switches: fields and the value that each has, where it stands, in all that was published.

    Raises:
        CheckpointError: one has another value, or a field is missing that the translation asks for.
    """
    for name, value in switches.items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{name} is {raw[name]}; Pipetune knows {family}'s layers, where it is {value}")
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"no {error.args[0]}, which {family} has; expected one of its configs") from None
