"""Leave out the products that a turn need not compute again.

A backward turn computes a block again for what autograd saves of it, and not for its output. Where a block ends in a
linear layer and a sum, as most do, nothing depends on that layer's product, and zeros stand in its place: in a llama
that is two ninths to two sevenths of the pass, and no gradient changes. A block that normalises or scales what it ends
in, or that ends in experts, is computed whole.

Of its other products the largest may be kept in host memory, from a forward turn to the backward turn that would
compute them again; in a llama these are the two that its MLP begins with. They are the same numbers, so no bit of a
gradient changes. The plan says how many are kept.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from models.spec import ModelSpec
from models.weight_gradients import linear_layers
from options.planner.layer_costs import LayerCase, fake_layer

ROW = 64  # tokens; the answer does not depend on them


def last_product(spec: ModelSpec, layer: int) -> str | None:
    """Return the name of the linear layer that no gradient of a block needs the product of, if there is one."""
    last, saved_since = None, 0

    def end(linear: nn.Linear, *_: object) -> None:
        nonlocal last, saved_since
        last, saved_since = linear, 0

    def save(tensor: Tensor) -> Tensor:
        nonlocal saved_since
        saved_since += 1
        return tensor

    with fake_layer(spec, LayerCase(layer, 1, ROW, torch.float32)) as fake:
        for linear in linear_layers(fake.module):
            linear.register_forward_hook(end)
        with saved_tensors_hooks(save, lambda tensor: tensor):
            fake.run()
        names = {module: name for name, module in fake.module.named_modules()}
    return names[last] if last is not None and not saved_since else None


class Product(NamedTuple):
    """The product of a linear layer: name of the layer, and numbers of a token that it takes and makes."""

    name: str
    takes: int
    makes: int


def worth_keeping(spec: ModelSpec, layer: int) -> list[Product]:
    """List the products of all tokens that a backward turn needs, those with most work for each number kept first."""
    made = Counter[nn.Module]()

    def count(linear: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        made[linear] += inputs[0].shape[:-1].numel()

    with fake_layer(spec, LayerCase(layer, 1, ROW, torch.float32)) as fake:
        for linear in linear_layers(fake.module):
            linear.register_forward_hook(count)
        fake.run()
        names = {module: name for name, module in fake.module.named_modules()}
        once = [linear for linear in linear_layers(fake.module) if made[linear] == ROW]
    found = [Product(names[linear], linear.in_features, linear.out_features) for linear in once]
    last = last_product(spec, layer)
    lasting = [product for product in found if product.name != last]
    return sorted(lasting, key=lambda product: (-product.takes * product.makes, -product.takes))


def leave_out(linear: nn.Module) -> None:
    """Let a linear layer multiply in forward passes alone, and not where a block is computed again."""
    assert isinstance(linear, nn.Linear)
    linear.__class__ = EndingLinear


def keep(linear: nn.Module) -> None:
    """Let a linear layer leave its product in `kept` in a forward turn, and take it from there in a backward turn."""
    assert isinstance(linear, nn.Linear)
    linear.__class__ = KeptLinear


def nothing_like(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return zeros in the place of a product with a weight [out, in], which take no memory."""
    return inputs.new_zeros(()).expand(*inputs.shape[:-1], len(weight))


class EndingLinear(nn.Linear):
    """A linear layer that a block ends in; a class, as compiled blocks of a kind then have one program."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # as in backward turns alone
            left_out: Tensor = _Unfinished.apply(input, self.weight, self.bias)
            return left_out
        return super().forward(input)


class KeptLinear(nn.Linear):
    """A linear layer whose product is kept from a forward turn to a backward turn."""

    kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            assert self.kept is not None
            product: Tensor = _Unfinished.apply(input, self.weight, self.bias, shaped_as(self.kept, input))
            return product
        self.kept = super().forward(input)
        return self.kept


def shaped_as(kept: Tensor, inputs: Tensor) -> Tensor:
    """Return a kept product with the rows of what it was made of."""
    return kept.view(*inputs.shape[:-1], kept.shape[-1])


class _Unfinished(torch.autograd.Function):
    """A linear layer of which only the backward pass is computed, with the numbers of torch's own."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor | None = None
    ) -> Tensor:
        context.save_for_backward(inputs, weight)
        return nothing_like(inputs, weight) if kept is None else kept

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (inputs, weight) = gradients, context.saved_tensors
        rows = gradient.flatten(0, -2)
        to_inputs, to_weight, to_bias, *_ = context.needs_input_grad
        return (
            gradient @ weight if to_inputs else None,
            rows.t() @ inputs.flatten(0, -2) if to_weight else None,
            rows.sum(dim=0) if to_bias else None,
            None,
        )
