"""A family for a `model_type` that no file declares, made from transformers' own model.

transformers' class is made small and watched (`models.derived.outline`); what has a size is taken from a model of the
real width without blocks. What does not fit the three kinds of layer is refused in one line.
Whether the family computes what transformers computes is for `models.derived.proof` to say.

Everywhere here `fields` are those of the config.json that `config` was read from.

Cost: about a second, once a process.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from models.attention.kernels import ALL, EAGER
from models.attention.positions import LINEAR, attention_kind
from models.attention.rope import several_depend_on_length
from models.config_json import whole_of
from models.derived.inside import decoder_of
from models.derived.names import tables_of
from models.derived.outline import FIRST, LENGTH, ArgumentSource, Outline, Underivable, outline_of
from models.derived.positions import DerivedPositions, by_document
from models.derived.shrink import WORD_WIDTH, is_dropout, shrunk_fields
from models.family import EMBEDDING_WEIGHT, Family, Rule
from models.layers import Head, make_buffer

BLOCKS = 4  # of a small model: one of every kind, most often
FEW_WORDS = 16
SAMPLE = [3, 4]  # tokens that show what is done to embeddings
CAP = "final_logit_softcapping"  # what the families that have one call it
AUXILIARY = "router_aux_loss_coef"  # what those call it that have a loss for their router
NEVER_LEARNED = r"rotary_emb\.inv_freq$"  # computed, but older checkpoints hold it


def small_model(config: PreTrainedConfig, fields: dict[str, Any]) -> Any:
    """Build transformers' model of a config, small, in fp32, with eager attention."""
    small = type(config).from_dict(shrunk_fields(config, fields, BLOCKS))
    small._experts_implementation = "eager"
    return decoder_of(small).eval()


def bare_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Build transformers' model at real width, without blocks and with few words."""
    bare = copy.deepcopy(config)
    bare.num_hidden_layers, bare.vocab_size, bare.pad_token_id = 0, FEW_WORDS, None
    bare._experts_implementation = "eager"  # what a run takes may be refused where there are no experts
    return decoder_of(bare, dtype)


def check_rotation(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    """Refuse a `rotary_dim` that this release of transformers does not read: it would rotate another share."""
    wanted = fields.get("rotary_dim")
    for name, frequencies in bare_model(config).named_buffers() if wanted else ():
        if name.endswith("rotary_emb.inv_freq") and 2 * len(frequencies) != wanted:
            reason = f"transformers {transformers.__version__} rotates {2 * len(frequencies)} numbers of a head"
            raise Underivable(
                f"rotary_dim is {wanted}, but {reason}; expected a partial_rotary_factor that says the same"
            )


def derive(config: PreTrainedConfig, fields: dict[str, Any], whole: str | None = None) -> Family:
    """Derive the family of a config.

    Args:
        whole: the `model_type` of the model of images and text whose part for text it is.
    """
    if several_depend_on_length(config):
        raise Underivable("some angles depend on a document's length and are of several kinds; expected one kind")
    if rate := getattr(config, "layerdrop", 0.0):
        raise Underivable(f"layerdrop: {rate}, but blocks are not left out at random; expected 0.0 in config.json")

    model = small_model(config, fields)
    outline = outline_of(model)
    embedding, block, head = tables_of(model, outline)
    inside, in_whole = whole_of(config.model_type), tuple[Rule, ...]()
    with suppress(Exception):  # whatever a mapping for other modules beside these makes of them
        in_whole = tables_of(model, outline, whole)[1] if whole and not inside else ()

    made: dict[str, Made] = {}
    for number, block_made in enumerate(map(Made, outline.classes, outline.mixers, outline.arguments)):
        kind = attention_kind(model.config.get_text_config(), number)
        if made.setdefault(kind, block_made) != block_made:
            raise Underivable(f"blocks of {kind} are made or called in several ways")
    given = {kind: of_kind.arguments for kind, of_kind in made.items()}

    ends = Ends.measured(config, outline)
    ignored = getattr(outline.model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def part(path: str, config: PreTrainedConfig) -> nn.Module:
        found: nn.Module = getattr(bare_model(config), outline.base).get_submodule(path)
        return found

    def modules(config: PreTrainedConfig) -> dict[str, nn.Module]:
        return {call.module: part(call.module, config) for call in outline.calls}

    return Family(
        name=config.model_type,
        decoder_layer=partial(_block, made),
        norm=partial(part, outline.norm),
        rotary=(lambda config: next(iter(modules(config).values()))) if outline.calls else None,
        embedding=embedding,
        block=block,
        block_in_whole=tuple(rule for rule in in_whole if rule not in block),
        head=head,
        prefix=_beginning(embedding) if inside else f"{outline.base}.",
        carried=(*ignored, NEVER_LEARNED),
        positions=lambda config, rotary: DerivedPositions(config, rotary, outline.calls, given, modules),
        embedding_norm=partial(part, outline.projection) if outline.projection else None,
        word_width=WORD_WIDTH if outline.projection else "hidden_size",
        embedding_scale=None if ends.scale == 1 else lambda config: ends.scale,
        rounds_scale=ends.rounds_scale,
        pads_words=model.get_input_embeddings().padding_idx is not None,
        first_row=outline.first_row,
        embedding_dropout=_embedding_dropout(config, outline),
        head_bias=model.get_submodule(outline.head).bias is not None,
        projection=partial(_head, ends),
        attention=(*ALL, EAGER),
        initialise=_initialise,
        frozen=_unreached(model, outline),
        router=_router(model, outline),
    )


def _beginning(embedding: tuple[Rule, ...]) -> str:
    """Find how all names on disk begin, by that of the embedding."""
    disk = next(rule.disk_names[0] for rule in embedding if rule.module == EMBEDDING_WEIGHT)
    return disk.removesuffix(EMBEDDING_WEIGHT)


@torch.no_grad()
def _embedding_dropout(config: PreTrainedConfig, outline: Outline) -> str:
    """Find the field by which hidden states are dropped before the first block; refuse dropout behind the last."""
    fields, found = [name for name, value in config.to_dict().items() if is_dropout(name) and value], list[str]()
    for name in fields:
        alone = copy.deepcopy(config)
        for other in set(fields) - {name}:
            setattr(alone, other, 0.0)
        model, seen, drawn = bare_model(alone), list[Tensor](), list[Tensor]()
        norm = getattr(model, outline.base).get_submodule(outline.norm)
        norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        for training in (False, True):
            torch.manual_seed(0)
            model.train(training)(input_ids=torch.tensor([SAMPLE]), use_cache=False)
            drawn.append(torch.get_rng_state())
        if torch.equal(*drawn):  # it is of the blocks
            continue
        torch.manual_seed(0)
        dropped, found = F.dropout(seen[0], getattr(config, name)), [*found, name]
        if len(found) > 1 or not (torch.equal(dropped, seen[1]) and torch.equal(torch.get_rng_state(), drawn[1])):
            reason = f"{config.model_type} drops more than embeddings outside of its blocks"
            raise Underivable(f"{reason}; expected {name}: 0.0 in config.json, which trains without")
    return "".join(found)


class Made(NamedTuple):
    """How blocks of one kind are made: class, mixing child, arguments."""

    block: Any
    mixer: str
    arguments: dict[str, ArgumentSource]


class Ends(NamedTuple):
    """What happens to hidden states before the first block and after the norm.

    Attributes:
        scale: what embeddings are multiplied with.
        rounds_scale: whether it is rounded to the dtype of the weights first.
        logit_scale: what logits are multiplied with.
        cap: what squeezes them.
    """

    scale: float
    rounds_scale: bool
    logit_scale: float
    cap: float | None

    @classmethod
    @torch.no_grad()
    def measured(cls, config: PreTrainedConfig, outline: Outline) -> Ends:
        """Measure them on transformers' model of the real width."""
        words, hidden, plain, logits = _ends(config, outline, torch.float64)
        scale = _ratio(hidden, words)
        cap = getattr(config, CAP, None)
        logit_scale = _ratio(logits if cap is None else torch.atanh(logits / cap) * cap, plain)
        if scale is None or logit_scale is None:
            what = "embeddings" if scale is None else "logits"
            raise Underivable(f"{outline.model.__name__} does more to {what} than to multiply them")
        words, hidden, *_ = _ends(config, outline, torch.bfloat16)
        rounded = words * torch.tensor(scale, dtype=words.dtype).item()
        return cls(scale, torch.equal(rounded, hidden), logit_scale, cap)


def _ends(config: PreTrainedConfig, outline: Outline, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Get embeddings, hidden states before the norm, plain logits and the model's logits."""
    model = bare_model(config).to(dtype).eval()
    base = getattr(model, outline.base)
    if outline.table:
        nn.init.zeros_(base.get_submodule(outline.table).weight)
    seen: list[Tensor] = []
    norm = base.get_submodule(outline.norm)
    norm.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    head = model.get_submodule(outline.head)
    nn.init.normal_(head.weight, std=head.weight.shape[1] ** -0.5)
    words = base.get_submodule(outline.embedding).weight[SAMPLE]
    if outline.projection:
        words = base.get_submodule(outline.projection)(words)
    logits = model(input_ids=torch.tensor([SAMPLE]), use_cache=False).logits
    return words, seen[0][0], F.linear(seen[1], head.weight, head.bias), logits


def _ratio(one: Tensor, other: Tensor) -> float | None:
    """Find the constant ratio of two tensors; None if there is none."""
    ratio = (one / other).nanmedian()  # a random number may be 0
    return ratio.item() if torch.allclose(one, ratio * other, rtol=1e-6, atol=0.0) else None


def _block(made: dict[str, Made], config: PreTrainedConfig, index: int) -> nn.Module:
    kind = attention_kind(config, index)
    block: nn.Module = made[kind].block(config, index)
    for name, parameter in list(block.named_parameters()):
        if not parameter.requires_grad:  # not for the optimizer, and not rounded to the dtype to train in
            make_buffer(block, name)
    compute_buffers(block, partial(made[kind].block, config, index))
    if kind == LINEAR:
        by_document(block.get_submodule(made[kind].mixer))
    return block


def _initialise(config: PreTrainedConfig) -> Callable[[nn.Module], None]:
    model = bare_model(config)
    model.config = config  # GPT-2 divides by the number of blocks
    initialise: Callable[[nn.Module], None] = model._init_weights
    return initialise


def compute_buffers(block: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Compute what a module on the meta device has no numbers of and no checkpoint has, as masks and angles are."""
    names = [name for name, buffer in block.named_buffers() if buffer.is_meta and name not in block.state_dict()]
    if not names:
        return
    with torch.device("cpu"), no_init_weights():  # weights are allocated and never touched
        whole = make()
    for name in names:
        owner, _, leaf = name.rpartition(".")
        block.get_submodule(owner).register_buffer(leaf, whole.get_buffer(name), persistent=False)


def _unreached(model: Any, outline: Outline) -> tuple[str, ...]:
    """Find the weights of a block that no gradient reaches."""
    ids = torch.arange(FIRST, FIRST + LENGTH)[None]
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()

    # A weight that no gradient reaches in one block may have one in another of its kind.
    blocks = getattr(model, outline.base).get_submodule(outline.blocks)
    parameters = chain.from_iterable(block.named_parameters() for block in blocks)
    named = [(name, weight) for name, weight in parameters if weight.requires_grad]
    reached = {_general(name) for name, weight in named if weight.grad is not None}
    model.zero_grad()
    return tuple(dict.fromkeys(name for name, _ in named if _general(name) not in reached))


def _general(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _head(ends: Ends, family: Family, config: PreTrainedConfig) -> Head:
    head = Head(family, config)
    head.scale, head.cap = ends.logit_scale, ends.cap
    return head


def _router(model: Any, outline: Outline) -> str | None:
    """Find the submodule that transformers takes router losses from; None if none."""
    recorded = (getattr(outline.model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorded is None or not hasattr(model.config.get_text_config(), AUXILIARY):
        return None
    kind, index = getattr(recorded, "target_class", recorded), getattr(recorded, "index", 0)
    blocks = getattr(model, outline.base).get_submodule(outline.blocks)
    modules = chain.from_iterable(block.named_modules() for block in blocks)
    names = {name for name, child in modules if isinstance(child, kind)}
    return names.pop() if len(names) == 1 and index == 0 else None
