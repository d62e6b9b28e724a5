"""Tensor parallelism: each process of a group holds a shard of every layer, and all compute the layer together.

transformers' configuration of a family (`base_model_tp_plan`), or the family's declaration, says how each matrix is
sharded, after Megatron-LM (arXiv:1909.08053): what reads the hidden states by its outputs, so that a head or a neuron
lies whole on one process, and what writes them by its inputs, so that its results are summed. Heads that share a key
stay together; shards need not be of one size. Embedding and head are sharded by words. Norms and routers lie whole on
every process; their inputs are the same everywhere, and so are their gradients.

Experts are sharded by columns as any matrix, or spread: each process has whole ones. Every process has every token, so
either way one sum joins the results. Weights are sharded as they are loaded, and stay plain tensors under their names.

Cost: a sum of [B, S, H] after attention and one after the feed-forward network, forward and backward; the embedding
one, the head three numbers a token and the gradient of its input.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from models.adapters import Adapted, base_of, is_factor
from models.layers import Embedding, Head
from models.parallel.groups import ONE_RANK, RankGroup, add_up, copied, gathered, summed, take_shard
from models.parallel.shard import Shard
from models.quantized_base import product
from models.router import n_experts
from models.spec import ModelSpec, key_heads

# transformers' names of the ways to shard a linear layer, or a matrix [..., out, in].
BY_OUTPUT, BY_INPUT = ("colwise", "colwise_gather_output", "packed_colwise"), ("rowwise", "rowwise_split_input")
EXPERTS, REPLICATED = "moe_tp_experts", "replicated_with_grad_allreduce"
SUPPORTED = {*BY_OUTPUT, *BY_INPUT, EXPERTS, REPLICATED}
BY_HEADS = ("colwise", "rowwise")  # in attention; what is gathered there is not
ENDS = {"embed_tokens": "colwise", "lm_head": "colwise"}
ALIGNED = 8  # numbers; a grouped product wants rows of a multiple of 16 bytes
HEAD_NORMS = ("q_norm", "k_norm")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")  # attributes of blocks


class RowwiseLinear(nn.Linear):
    """A linear layer with some inputs on each process; the bias counts once."""

    ranks: RankGroup = ONE_RANK

    def forward(self, inputs: Tensor) -> Tensor:
        return summed(self.partial(inputs), self.ranks) + self.bias

    def partial(self, inputs: Tensor) -> Tensor:
        return product(self, inputs)


class RowwiseAdapted(RowwiseLinear, Adapted):
    """The same with an adapter."""

    def partial(self, inputs: Tensor) -> Tensor:
        return product(self, inputs) + self.low_rank(inputs)


class TensorShare:
    """One process's shards of each layer, and how it computes with them.

    Args:
        ranks: the processes that share the layers; without a group only shapes are known.
        spread: whether experts are spread; else they are sharded.
    """

    def __init__(self, spec: ModelSpec, ranks: RankGroup, spread: bool = False) -> None:
        self.ranks = ranks
        self._spec, self._spread = spec, spread
        self._plan = plan_of(spec)
        self._key_heads = key_heads(spec.config)
        self._own_heads = len(range(self._key_heads)[ranks.part(self._key_heads)])

    def shard(self, name: str) -> Shard | None:
        """Get the shard of a weight `<layer>.<name>`; None if it is whole here."""
        if self.ranks.size == 1:
            return None
        layer, _, inner = name.partition(".")
        shape = self._spec.shapes(int(layer)).get(inner)
        if shape is not None and is_factor(inner):
            return self._factor_shard(inner, shape, self.shard(f"{layer}.{base_of(inner)}"))

        owner = inner.rpartition(".")[0]
        way = self._plan.get(inner) or self._plan.get(owner)
        if shape is None or way is None:
            return None
        if self._spread and self._plan.get(owner) == EXPERTS:
            experts = self.ranks.part(shape[0])
            return Shard(tuple(shape), 0, (range(experts.start, experts.stop),))
        if way not in (*BY_OUTPUT, *BY_INPUT) or (way in BY_INPUT and len(shape) == 1):
            return None

        # Rows or columns, in attention those of whole heads; of matrices above each other the same of each.
        side = len(shape) - 1 if way in BY_INPUT or len(shape) == 1 else len(shape) - 2
        width = shape[side] // 2 if way == "packed_colwise" else shape[side]
        units = self._key_heads if way in BY_HEADS and "att" in owner else width
        part, unit = self.ranks.part(units), width // units
        ranges = (range(top + part.start * unit, top + part.stop * unit) for top in range(0, shape[side], width))
        return Shard(tuple(shape), side, tuple(ranges))

    def _factor_shard(self, name: str, shape: torch.Size, of_base: Shard | None) -> Shard | None:
        """Get the shard of an adapter's factor: of A the columns, and of B the rows, that the process has of W."""
        if of_base is None:
            return None
        begin = len(shape) - 2  # experts are sharded as in W
        side = begin + 1 if name.endswith("A") else begin
        if of_base.side not in (*range(begin), side):
            return None
        return replace(of_base, shape=tuple(shape))

    def narrow(self, layer: int, module: nn.Module) -> None:
        """Shrink a layer without weights to the process's shards."""
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if shard := self.shard(f"{layer}.{name}"):
                tensor.data = shard.of(tensor.data)

    def connect(self, layer: int, module: nn.Module) -> None:
        """Make a layer of shards compute what the whole one would."""
        if self.ranks.size == 1:
            return
        for name, weight in module.named_parameters():
            is_part: Any = weight
            is_part.model_parallel = self.shard(f"{layer}.{name}") is not None  # for DeepSpeed's norm of the gradient
            if is_factor(name) and not is_part.model_parallel and self.shard(f"{layer}.{base_of(name)}"):
                self._sum_gradient(weight)  # what it meets is of this process's rows or columns
        if isinstance(module, Head):
            if not self._spec.labels:
                module.ranks, module.words = self.ranks, self._spec.config.vocab_size
        elif isinstance(module, Embedding):
            words = module.embed_tokens
            vars(words)["forward"] = partial(self._look_up, words)
        else:
            self._connect_block(layer, dict(module.named_modules()))

    @torch.no_grad()
    def whole(self, layer: int, module: nn.Module, keep: bool) -> dict[str, Tensor]:
        """Join a layer's state dict in main memory, on processes that `keep` it."""
        state = {}
        for name, tensor in module.state_dict().items():
            shard = self.shard(f"{layer}.{name}")
            if keep:
                state[name] = (
                    tensor.to("cpu", copy=True) if shard is None else tensor.new_empty(shard.shape, device="cpu")
                )
            for rank in range(self.ranks.size if shard else 0):
                its = TensorShare(self._spec, replace(self.ranks, rank=rank), self._spread).shard(f"{layer}.{name}")
                assert its
                part = tensor.contiguous() if rank == self.ranks.rank else tensor.new_empty(its.part_shape)
                distributed.broadcast(part, group=self.ranks.group, group_src=rank)
                if keep:
                    its.put(part, state[name])
        return state

    def _connect_block(self, layer: int, modules: dict[str, Any]) -> None:
        readers = []
        for name, module in modules.items():
            way = self._plan.get(name)
            if way in BY_OUTPUT:
                readers.append(name)
            if way == "rowwise_split_input":
                module.register_forward_pre_hook(lambda _, inputs: take_shard(inputs[0], self.ranks))
            if way == "colwise_gather_output":
                width = self._spec.shapes(layer)[f"{name}.weight"][0]
                module.register_forward_hook(lambda _, inputs, output, width=width: gathered(output, self.ranks, width))
            if way in BY_INPUT and module.bias is not None:
                module.__class__ = RowwiseAdapted if isinstance(module, Adapted) else RowwiseLinear
                module.ranks = self.ranks
            elif way in BY_INPUT:
                module.register_forward_hook(lambda _, inputs, output: summed(output, self.ranks))
            if way == EXPERTS:
                self._connect_experts(module)
            if way == REPLICATED:  # its inputs are of this process's heads
                for weight in module.parameters():
                    self._sum_gradient(weight)

        for owner in dict.fromkeys(name.rpartition(".")[0] for name in readers):
            self._connect_owner(owner, modules, [name for name in readers if name.rpartition(".")[0] == owner])

    def _sum_gradient(self, weight: nn.Parameter) -> None:
        """Sum the gradient of a weight that lies whole on every process."""
        if weight.requires_grad:
            weight.register_hook(lambda gradient: add_up(gradient.contiguous().clone(), self.ranks))

    def _connect_experts(self, module: Any) -> None:
        module.register_forward_hook(_with_gradients_of_zero)
        module.register_forward_hook(lambda _, inputs, output: summed(output, self.ranks))
        if any(weight.shape[-1] % ALIGNED for weight in module.parameters() if weight.dim() == 3):
            module.config = copy(module.config)
            module.config._experts_implementation = "eager"  # the grouped product does not take such parts
        unrouted = 0
        if self._spread:
            module.num_experts = own = len(range(module.num_experts)[self.ranks.part(module.num_experts)])
            # Without transformers' number for tokens of other processes' experts, one expert computes them for nothing.
            has_number = hasattr(module, "_is_expert_parallel") or module.config._experts_implementation != "eager"
            unrouted = own if has_number else 0
            module._is_expert_parallel = True
        module.register_forward_pre_hook(partial(self._to_experts, unrouted))

    def _connect_owner(self, owner: str, modules: dict[str, Any], readers: list[str]) -> None:
        """Sum the gradient of what a module's linear layers read, once if possible."""
        module = modules[owner]
        weights = {name.rpartition(".")[0] or name for name, _ in module.named_parameters()}
        alone = all(f"{owner}.{name}" in self._plan for name in weights)
        for reader in [module] if alone else [modules[name] for name in readers]:
            reader.register_forward_pre_hook(self._to_readers, with_kwargs=True)
        if "att" not in owner or not any(self._plan[name] in BY_HEADS for name in readers):
            return

        for name in HEAD_COUNTS:
            if (whole := getattr(module, name, None)) is not None:
                setattr(module, name, whole * self._own_heads // self._key_heads)
        if hasattr(module, "slow_but_exact"):  # Bloom's, which would bypass the layer whose results are summed
            module.slow_but_exact = False
        dropout: Any = getattr(module, "attention_dropout", 0.0)
        drops = dropout if isinstance(dropout, nn.Module) else module
        if getattr(dropout, "p", dropout):
            vars(drops)["forward"] = torch.compiler.disable(partial(self._with_own_dropout, drops, drops.forward))

    def _to_readers(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (copied(inputs[0], self.ranks), *inputs[1:]), named
        return inputs, named | {"hidden_states": copied(named["hidden_states"], self.ranks)}

    def _to_experts(
        self, unrouted: int, _: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens [T, H] to this process's experts [T, K] with weights [T, K]; others go to `unrouted`."""
        hidden, experts, weights = inputs
        hidden, weights = copied(hidden, self.ranks), copied(weights, self.ranks)
        if not self._spread:
            return hidden, experts, weights
        own = self.ranks.part(n_experts(self._spec.config))
        inside = (experts >= own.start) & (experts < own.stop)
        return hidden, torch.where(inside, experts - own.start, unrouted), weights.masked_fill(~inside, 0)

    def _look_up(self, words: nn.Embedding, ids: Tensor) -> Tensor:
        own, padding = self.ranks.part(self._spec.config.vocab_size), words.padding_idx
        padding = padding - own.start if padding is not None and own.start <= padding < own.stop else None
        return self.look_up(words.weight, ids, padding)

    def look_up(self, weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
        """Look up embeddings whose words are spread over the processes.

        Args:
            weight: those of this one, as many as its shard of the head has.
            padding: which of them gets no gradient.
        """
        own = self.ranks.part(self._spec.config.vocab_size)
        outside = (ids < own.start) | (ids >= own.stop)
        found = F.embedding((ids - own.start).masked_fill(outside, 0), weight, padding)
        return summed(found.masked_fill(outside[..., None], 0), self.ranks)

    def _with_own_dropout(self, module: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
        """Run with this process's own random numbers; afterwards all processes draw the same again."""
        if not module.training or self.ranks.group is None:  # without a group only shapes count
            return forward(*inputs, **named)
        seed = int(torch.randint(2**62, (), device="cpu")) + self.ranks.rank
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed(seed)
            return forward(*inputs, **named)


def _with_gradients_of_zero(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor:
    """Give unused experts a gradient of zeros: without one, other processes would wait in their sums."""
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    return output + sum(tensor[:0].sum() for tensor in (inputs[0], inputs[2], *module.parameters()))


def part_shapes(spec: ModelSpec, layer: int, size: int) -> dict[str, torch.Size]:
    """Get the shapes of the largest shards of a layer over `size` processes."""
    share = TensorShare(spec, RankGroup(size))
    shards = {name: (shape, share.shard(f"{layer}.{name}")) for name, shape in spec.shapes(layer).items()}
    return {name: torch.Size(shard.part_shape) if shard else shape for name, (shape, shard) in shards.items()}


def plan_of(spec: ModelSpec) -> dict[str, str]:
    """Get how weights are sharded, by the name of a module or a weight."""
    plan = spec.family.tensor_plan
    if plan is None:
        found: dict[str, str] = getattr(spec.config, "base_model_tp_plan", None) or {}
        start = "layers.*."
        plan = {name.removeprefix(start): way for name, way in found.items() if name.startswith(start)}
    plan = {f"block.{name}": way for name, way in plan.items()}

    # The plans of some families forget norms of a head.
    head = vars(spec.config).get("head_dim")
    for name, shape in spec.shapes(1).items() if plan else ():
        owner, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in HEAD_NORMS and f"{owner}.q_proj" in plan and tuple(shape) == (head,):
            plan.setdefault(f"{owner}.{kind}", REPLICATED)
    ends = {name: way for name, way in ENDS.items() if name != "lm_head" or not spec.labels}  # few rows lie whole
    return ends | plan


def obstacle(spec: ModelSpec, size: int, spread: bool = False) -> str | None:
    """Say why `size` processes cannot share each layer; None if they can."""
    if size == 1:
        return None
    plan, heads, experts = plan_of(spec), key_heads(spec.config), n_experts(spec.config)
    if plan.keys() <= ENDS.keys() or set(plan.values()) - SUPPORTED:
        return f"{spec.family.name} has no plan by which layers are cut; expected 1 process to a layer"
    if heads < size:
        too_few = f"{heads} heads of keys (num_key_value_heads) are not enough"
        return f"{too_few} for {size} processes to a layer; expected at most {heads}"
    if spread and experts < size:
        too_few = f"{experts} experts cannot be spread over {size} processes to a layer"
        return f"{too_few}; expected model_topo.experts: columns"

    for layer in range(1, spec.n_blocks + 1):
        shapes = {name: shape for name, shape in spec.shapes(layer).items() if not is_factor(name)}
        by_heads = [name for name in plan if "att" in name and plan[name] in BY_HEADS and f"{name}.weight" in shapes]
        modules = tuple(f"{name.rpartition('.')[0]}." for name in by_heads)
        for name, shape in shapes.items():
            owner = name.rpartition(".")[0]
            uneven = owner in by_heads and shape[-1 if plan[owner] == "rowwise" else 0] % heads
            unplanned = name.startswith(modules) and not {name, owner} & plan.keys()  # as a norm with rows by head
            if uneven or unplanned or (plan.get(owner) == EXPERTS and name not in plan):
                unknown = f"layer {layer}: it is not known how to cut {name} of {spec.family.name}"
                return f"{unknown}; expected 1 process to a layer (no axis model; more stages or replicas instead)"
    return None
