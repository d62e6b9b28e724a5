"""What processes that share rows or layers send each other for it, counted from the shapes.

With `model_topo.sequence: n` a process has 1/n of each row's tokens. Around attention heads are exchanged for tokens:
queries, keys, values and what attention gives, each of the local tensor's bytes but the own part; keys and values are
repeated until processes divide their heads. With T processes to a layer the two halves of a block,
attention and MLP, end in a sum over all tokens' hidden states, and begin with one in the backward pass. The embedding
is summed too, and so is the gradient of what the head is given; of the loss go round three numbers a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from models.process_groups import Peers
from models.spec import ModelSpec, key_heads
from models.tensor_parallel import plan_of
from training.config.deepspeed_config import training_dtype
from training.config.model_topo import ModelTopo
from training.plan.basis import Basis
from training.plan.roofline import Spent

GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"  # of a plan: in the forward, the backward pass
FP32 = 4
OF_LOSS = 3  # numbers of a token: the largest logit, the sum of exponentials, the logit of the word that comes


@dataclass(frozen=True)
class Messages:
    """Bytes of the local tensors, each for itself.

    Attributes:
        exchanged: of which each process sends each of those with the same rows a part.
        summed: over those with the same layers.
        gathered: of their parts, where a family's plan has what lies between two products whole.
    """

    exchanged: list[float] = field(default_factory=list)
    summed: list[float] = field(default_factory=list)
    gathered: list[float] = field(default_factory=list)

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.exchanged + other.exchanged, self.summed + other.summed, self.gathered + other.gathered)

    def sent(self, topo: ModelTopo) -> tuple[float, float]:
        """Bytes that a process sends: of what it exchanges all but its own part, of a sum in a ring that twice."""
        rounds = 2 * sum(self.summed) + sum(self.gathered)
        return (1 - 1 / topo.sequence) * sum(self.exchanged), (1 - 1 / topo.tensor) * rounds

    def spent(self, basis: Basis) -> Spent:
        """How long they take; nothing is computed meanwhile."""
        topo, fabric = basis.config.model_topo, basis.fabric
        rows, layers = fabric.sharing_rows(topo), fabric.sharing_layers(topo)
        joined = sum(map(layers.sum, self.summed)) + sum(map(layers.round, self.gathered))
        return Spent(exchanges=sum(map(rows.exchange, self.exchanged)), all_reduces=joined)


def messages(basis: Basis, layer: int) -> tuple[Messages, Messages]:
    """Of a layer's forward and backward pass for one micro-batch, without what is recomputed."""
    config, spec, topo = basis.config, basis.spec, basis.config.model_topo
    itemsize, tokens = training_dtype(config).itemsize, basis.share.micro_tokens
    hidden = tokens * spec.config.hidden_size * itemsize
    is_block = 0 < layer < spec.n_layers - 1
    forward, backward = Messages(), Messages()
    if topo.sequence > 1 and is_block:
        all_heads, all_keys = int(spec.config.num_attention_heads), key_heads(spec.config)
        own = len(range(all_keys)[Peers(topo.tensor).part(all_keys)])
        heads, keys = own * all_heads // all_keys, math.lcm(own, topo.sequence)
        width = vars(spec.config).get("head_dim") or spec.config.hidden_size // all_heads
        exchanged = Messages(exchanged=[tokens * width * itemsize * count for count in (heads, keys, keys, heads)])
        forward, backward = forward + exchanged, backward + exchanged
    if topo.tensor > 1:
        supervised = tokens * basis.workload.supervised
        of_ends = {0: [hidden], spec.n_layers - 1: [hidden * basis.workload.supervised, *OF_LOSS * [FP32 * supervised]]}
        whole = _whole_between(spec, layer, tokens * itemsize)
        forward += Messages(summed=of_ends.get(layer, [hidden, hidden]), gathered=whole[GATHERED])
        backward += Messages(summed=[hidden, hidden] if is_block else [], gathered=whole[SPLIT])
    return forward, backward


def _whole_between(spec: ModelSpec, layer: int, size: float) -> dict[str, list[float]]:
    """Bytes of what is whole on all processes that share a layer, between two of its products.

    Args:
        size: bytes of one number for each token.
    """
    plan = plan_of(spec)
    found: dict[str, list[float]] = {GATHERED: [], SPLIT: []}
    for name, shape in spec.shapes(layer).items():
        if (word := plan.get(name.removesuffix(".weight"))) in found:
            found[word].append(size * shape[0 if word == GATHERED else 1])
    return found


def of_step(basis: Basis, layers: Iterable[int]) -> Messages:
    """Of all passes of a micro-batch through these layers, with what is recomputed."""
    total = Messages()
    for layer in layers:
        forward, backward = messages(basis, layer)
        total += forward + backward + (forward if layer in basis.recomputed else Messages())
    return total
