"""A small model with the traits of a large one: what a config.json says, with smaller numbers.

What decides which code runs stays: family, ties, biases, kinds of layers, experts a token, queries a key, how wide
heads are together beside the hidden states. Only sizes shrink. A size that config.json leaves out is written into it,
as the default is that of a large model. Of lists with an entry for each block one block of every kind stays.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from transformers import PreTrainedConfig

from models.errors import CheckpointError
from models.router import EXPERTS, n_experts, top_k

HEAD, WINDOW, VOCABULARY = 16, 16, 512
HEADS, MANY_HEADS = 4, 16  # at least, if the model has as many; from this many on heads are narrower still
LEAST_EXPERTS = 4
MULTIPLE = 8  # of widths, as kernels like them
# What the families call the same size, the name that transformers itself takes first.
DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "n_embed")
QUERIES = ("num_attention_heads", "n_head")
KEYS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads")
HEAD_WIDTH = ("head_dim", "kv_channels")
WORDS = ("vocab_size", "padded_vocab_size")
INNER = ("intermediate_size", "ffn_hidden_size", "mlp_dim", "ffn_dim", "n_inner")  # how widths of feed-forward end
WORD_WIDTH = "word_embed_proj_dim"  # of OPT's words, which are projected to hidden states where it is another
# Sizes that nothing else depends on, by name, and the most that a small model has of them.
MOST = {
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "window_size": WINDOW,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": MULTIPLE,
    "qk_head_dim": HEAD + MULTIPLE,
    "v_head_dim": HEAD,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_head_dim": HEAD,
    "linear_num_heads": HEADS,
    "index_head_dim": HEAD,
    "index_n_heads": 16,  # with few of them scores of keys are equal, and which are chosen is chance
    "index_topk": MULTIPLE,
    "hidden_size_per_layer_input": HEAD,
    "vocab_size_per_layer_input": VOCABULARY,
}
VISION_DEPTH = ("num_hidden_layers", "depth")
VISION_HEADS = ("num_attention_heads", "num_heads")
VISION_WIDTH = ("embed_dim", "hidden_size")
VISION_OUT = {"out_hidden_size", "projection_dim"}  # the text's width in those that have a projector of their own
VISION_BLOCKS, VISION_PATCHES = 3, 8  # of a small tower; patches along a side of an image
PER_BLOCK = "per_layer_config"  # what some blocks have otherwise than the others
WITH_DROPOUT = ("dropout", "pdrop", "jitter")  # in the names of what draws random numbers


def _get(config: PreTrainedConfig, name: str) -> Any:
    """Get a field, or None; where blocks differ, the common value."""
    value = vars(config).get(config.attribute_map.get(name, name), getattr(type(config), name, None))
    return getattr(config, name) if isinstance(value, property) else value  # as Falcon's head_dim


def shrunk_fields(config: PreTrainedConfig, raw: dict[str, Any], n_blocks: int) -> dict[str, Any]:
    """Shrink the config.json `raw` that `config` was read from to at most `n_blocks` blocks."""
    raw = dict(raw)
    depth = int(config.num_hidden_layers)
    n_blocks = min(n_blocks, depth)

    if not _get(config, "num_attention_heads"):
        raise CheckpointError(f"{config.model_type} has no num_attention_heads; expected a decoder with attention")
    queries, width = int(_get(config, "num_attention_heads")), int(config.hidden_size)
    keys = int(_get(config, "num_key_value_heads") or _get(config, "num_kv_heads") or queries)
    head = int(_get(config, "head_dim") or width // queries)

    # As many queries a key as before, and heads as wide beside the hidden states.
    ratio = queries // keys
    few_keys = min(keys, max(2, HEADS // ratio))
    few_queries = few_keys * ratio
    few_head = min(head, HEAD if few_queries <= MANY_HEADS else HEAD // 2)
    narrow = _multiple(few_queries * few_head * width / (queries * head))
    sizes: dict[tuple[str, ...], int] = {
        DEPTH: n_blocks,
        WIDTH: narrow,
        QUERIES: few_queries,
        KEYS: few_keys,
        HEAD_WIDTH: few_head,
        WORDS: min(int(config.vocab_size), VOCABULARY),
    }
    known = config.to_dict()
    for name, value in known.items():
        if (name.endswith(INNER) or name == WORD_WIDTH) and isinstance(value, int):
            sizes[(name,)] = _multiple(narrow * min(2, value / width))
        elif name in MOST and isinstance(value, int):
            sizes[(name,)] = min(value, MOST[name])
    if experts := n_experts(config):
        sizes[EXPERTS] = min(experts, max(LEAST_EXPERTS, 2 * top_k(config)))
    if values := getattr(config, "linear_num_value_heads", None):
        sizes[("linear_num_key_heads",)] = few = min(2, config.linear_num_key_heads)
        sizes[("linear_num_value_heads",)] = few * (values // config.linear_num_key_heads)

    # Defaults too: token ids of which the small vocabulary has no row, dropout that would make the proof random.
    raw = {name: value for name, value in known.items() if name.endswith("_token_id") or is_dropout(name)} | raw
    for names, size in sizes.items():
        raw |= dict.fromkeys(_stated(names, config, raw), size)
    if getattr(config, "query_pre_attn_scalar", None) == head:
        raw["query_pre_attn_scalar"] = few_head

    lists = {name: value for name, value in known.items() if isinstance(value, list) and len(value) == depth}
    kept = _of_every_kind(list(zip(*lists.values(), strict=True)), n_blocks)
    raw |= {name: list(map(value.__getitem__, kept)) for name, value in lists.items()}
    if kinds := raw.get("attention_layers"):  # GPT-Neo's, which it makes of the other
        raw["attention_types"] = [[kinds, 1]]
    if raw.get("mlp_only_layers"):
        raw["mlp_only_layers"] = [n_blocks - 1]
    if known.get(PER_BLOCK):
        shares = {
            "head_dim": few_head / head,
            "num_key_value_heads": few_keys / keys,
            "num_attention_heads": few_queries / queries,
        }
        raw[PER_BLOCK] = _overrides(known[PER_BLOCK], kept, shares)
    return {name: _small_value(name, value, sizes[WORDS], few_head / head) for name, value in raw.items()}


def shrunk_vision(vision: dict[str, Any], text_width: int, least: int = 0) -> dict[str, Any]:
    """Shrink the fields of a tower: fewer blocks and heads, no wider, images of few patches.

    Blocks that are named by number, as those with windows or whose features are used, stay as many as they were.

    Args:
        least: blocks that there have to be.
    """
    found = [list(filter(vision.__contains__, names)) for names in (VISION_DEPTH, VISION_HEADS, VISION_WIDTH)]
    if not all(found):
        raise CheckpointError("vision_config: no number of blocks, of heads or no width; expected a tower of blocks")

    depth_name, heads_name, width_name = (names[0] for names in found)
    depth, heads, width = vision[depth_name], vision[heads_name], vision[width_name]
    listed = {name: value for name, value in vision.items() if name.endswith("_indexes") and value}
    few = min(depth, max([VISION_BLOCKS, least, *(len(value) + 1 for value in listed.values())]))
    few_heads = min(heads, 2)
    narrow = width // heads * few_heads
    if narrow == text_width:  # what makes one width of the other could not be seen
        few_heads += 1
        narrow += width // heads
    small = {depth_name: few, heads_name: few_heads, width_name: narrow}
    for name, blocks in listed.items():
        small[name] = [block * few // depth for block in blocks]
    inner = narrow * (2 + (2 * narrow == text_width))
    small |= {name: inner for name in ("intermediate_size",) if name in vision}
    small |= {name: text_width for name in VISION_OUT if name in vision}
    if keys := vision.get("num_key_value_heads"):
        small["num_key_value_heads"] = few_heads if keys == heads else 1
    if width_name == "embed_dim":  # Qwen2-VL's, whose hidden_size is the width of the text
        small["hidden_size"] = text_width
    small |= {name: 0.0 for name, value in vision.items() if is_dropout(name) and value}

    patch, size = vision.get("patch_size"), vision.get("image_size")
    if patch and size:
        sides = [VISION_PATCHES * each for each in (patch if isinstance(patch, list) else [patch, patch])]
        small["image_size"] = sides if isinstance(size, list) else sides[0]
    of_blocks = {name: value for name, value in vision.items() if isinstance(value, list) and len(value) == depth}
    return vision | {name: value[:few] for name, value in of_blocks.items()} | small


def _stated(names: tuple[str, ...], config: PreTrainedConfig, raw: dict[str, Any]) -> list[str]:
    """Return the names under which config.json has a size, or has to have it as the default is that of a large model.

    Args:
        names: of one size, transformers' own first.
    """
    own = config.attribute_map.get(names[0], names[0])
    stated = [name for name in dict.fromkeys([*names, own]) if name in raw]
    if stated:
        return stated
    return [names[0]] if own in vars(config) else []


def _overrides(overrides: dict[Any, Any], kept: list[int], shares: dict[str, float]) -> dict[int, Any]:
    """Shrink what some blocks have otherwise than the others, for the blocks that are kept."""
    of_block = {int(block): its for block, its in overrides.items()}
    small = {}
    for place, block in enumerate(kept):
        if block in of_block:
            small[place] = {
                name: max(1, min(int(value * shares.get(name, 1)), MOST.get(name, value)))
                for name, value in of_block[block].items()
            }
    return small


def is_dropout(name: str) -> bool:
    """Return whether a field of config.json is a dropout rate."""
    return any(word in name for word in WITH_DROPOUT)


def _of_every_kind(kinds: list[tuple[Any, ...]], count: int) -> list[int]:
    """Choose `count` blocks in order, about as many of each kind."""
    by_kind: dict[str, list[int]] = {}
    for block, kind in enumerate(kinds):
        by_kind.setdefault(repr(kind), []).append(block)
    # A block of each kind in turn, until there are enough.
    rounds = chain.from_iterable(zip_longest(*by_kind.values()))
    in_turn = [block for block in rounds if block is not None]
    return sorted(in_turn[:count])


def _small_value(name: str, value: Any, words: int, share: float) -> Any:
    """Shrink what depends on a size: token ids, factors of a head; drop dropout."""
    if is_dropout(name) and value:
        return 0.0
    if name.endswith("_token_id"):
        return [each % words for each in value] if isinstance(value, list) else value and value % words
    if name == "rotary_dim" and value:
        return max(2, round(value * share / 2) * 2)
    if name == "linear_attn_config" and value:  # Kimi-Linear's, which counts before the fields above
        return value | {"head_dim": HEAD, "num_heads": HEADS}
    if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
        return {key: _thinned(key, entry, share) for key, entry in value.items()}
    return value


def _multiple(size: float) -> int:
    return max(1, round(size / MULTIPLE)) * MULTIPLE


def _thinned(key: str, entry: Any, share: float) -> Any:
    """Thin a list with a factor for each pair of a head's numbers, as longrope's."""
    if isinstance(entry, dict):
        return {inner: _thinned(inner, value, share) for inner, value in entry.items()}
    if not isinstance(entry, list):
        return entry
    if key.endswith("section"):  # how many pairs go by each of the positions of an image
        pairs = max(1, round(sum(entry) * share))
        return [pairs - 2 * (pairs // 3), *[pairs // 3] * (len(entry) - 1)]
    count = max(1, round(len(entry) * share))
    return [entry[number * len(entry) // count] for number in range(count)]
