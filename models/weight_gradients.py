"""Gradients of weights that are computed later than those of what flows: the half of a backward pass that can wait.

A pipeline's other stages wait for the gradient of a stage's input, and nobody waits for the gradient of its weights
(zero bubble, arXiv:2401.10241). So a linear layer's backward pass gives the first at once and remembers what the second
needs; `WeightGradients.compute` makes up for it, through autograd, so that gradients accumulate and hooks see them as
ever. The numbers are those of torch's own backward pass, bit for bit. A weight whose optimizer can add a product to its
fp32 sum (`weight.add_product(left, right)`, `training.engine.gradients`) gets it so, past autograd and its hooks.

Cost: the inputs of the linear layers and the gradients of their outputs stay in memory until then.
"""

from __future__ import annotations

from collections import deque
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Remembered = list[tuple[nn.Linear, Tensor, Tensor]]  # with the layer's input and the gradient of its output


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    """List the plain linear layers."""
    return [layer for layer in module.modules() if type(layer) is nn.Linear]


def trained_linear_layers(module: nn.Module) -> list[nn.Linear]:
    """List the plain linear layers whose weights get a gradient, which can wait."""
    return [layer for layer in linear_layers(module) if layer.weight.requires_grad]


class WeightGradients:
    """The unfinished backward passes through some layers, oldest first."""

    def __init__(self) -> None:
        self.collecting: Remembered = []  # what the backward pass under way has left
        self._waiting: deque[Remembered] = deque()

    def defer(self, module: nn.Module) -> None:
        """Make a module's linear layers defer their weight gradients; not under autocast.

        torch.compile leaves them out and fuses what lies between: what it took in would have a backward of its own.
        """
        for linear in trained_linear_layers(module):
            vars(linear)["forward"] = torch.compiler.disable(MethodType(self._forward, linear))

    def close(self) -> None:
        """End a backward pass; what it left is one piece of work."""
        self._waiting.append(self.collecting)
        self.collecting = []

    def __len__(self) -> int:
        return len(self._waiting)

    def compute(self) -> None:
        """Complete the oldest backward pass."""
        found: list[tuple[Tensor, Tensor]] = []  # weights and gradients
        for linear, inputs, gradient in self._waiting.popleft():
            rows, columns = gradient.flatten(0, -2), inputs.flatten(0, -2)
            if add_product := getattr(linear.weight, "add_product", None):
                add_product(rows.t(), columns)
            else:
                found.append((linear.weight, rows.t() @ columns))
            if linear.bias is not None and linear.bias.requires_grad:
                found.append((linear.bias, rows.sum(dim=0)))
        if found:
            weights, gradients = zip(*found, strict=True)
            torch.autograd.backward(weights, gradients)

    def _forward(self, linear: nn.Linear, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            return F.linear(inputs, linear.weight, linear.bias)
        outputs: Tensor = _Linear.apply(inputs, linear, self)
        return outputs


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass goes to its input alone."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, linear: nn.Linear, later: WeightGradients) -> Tensor:
        context.save_for_backward(inputs)
        context.linear, context.later = linear, later
        return F.linear(inputs, linear.weight, linear.bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        context.later.collecting.append((context.linear, context.saved_tensors[0], gradient))
        return gradient @ context.linear.weight, None, None
