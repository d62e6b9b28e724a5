"""Add to an embedding's gradient only the rows of the words that a micro-batch has.

torch makes a gradient of the whole table, mostly zeros, and adds that to the sum: for 49k words of 576 numbers 113 MB
are filled, read and added for every micro-batch, which on one core takes as long as a block's weight gradients. Only a
step's first micro-batch needs it. Later ones add their rows, each summed by torch's own kernel in its own order: the
sums are the same to the last bit. Not on a GPU, where finding the words would make the host wait for the device.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import Embedding


def add_rows_alone(model: nn.Module) -> None:
    """Make a language model's embeddings on the CPU do so, where gradients stay until the step ends (ZeRO 0 or 1).

    Each is called once in a micro-batch. A script's layers may be called twice, and a weight may be a head's too: then
    autograd adds both gradients first, which rounds otherwise, and calls the weight's hooks once.
    """
    owners = Counter(chain.from_iterable(vars(layer)["_parameters"].values() for layer in model.modules()))
    first = chain.from_iterable(layer.children() for layer in model.modules() if isinstance(layer, Embedding))
    for table in first:
        if type(table) is not nn.Embedding or "forward" in vars(table):  # a shard of the words looks up its own
            continue
        if table.weight.requires_grad and table.weight.is_cpu and owners[table.weight] == 1:
            vars(table)["forward"] = MethodType(_look_up, table)


def _look_up(layer: nn.Embedding, ids: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.embedding(ids, layer.weight)
    # The weight is no input: whether autograd calls its hooks without a gradient depends on torch's version.
    found: Tensor = _Rows.apply(torch.empty(0, requires_grad=True), ids, layer)
    return found


class _Rows(torch.autograd.Function):
    """Look words up; the backward pass adds to `weight.grad`, or to the optimizer's sum, if the step has begun one."""

    @staticmethod
    def forward(context: Any, _: Tensor, ids: Tensor, layer: nn.Embedding) -> Tensor:
        context.save_for_backward(ids)
        context.layer = layer
        return F.embedding(ids, layer.weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,), weight, gradient = context.saved_tensors, context.layer.weight, gradients[0]
        padding = -1 if context.layer.padding_idx is None else context.layer.padding_idx
        begun_sum = getattr(weight, "begun_sum", None)
        total = begun_sum() if begun_sum else weight.grad
        if total is None:
            weight.grad = _dense(gradient, ids, len(weight), padding)
        else:
            if padding >= 0:  # it gets no gradient
                is_word = ids != padding
                gradient, ids = gradient[is_word], ids[is_word]
            words, places = ids.unique(return_inverse=True)
            total.index_add_(0, words, _dense(gradient, places, len(words), -1).to(total.dtype))

        for hook in (weight._post_accumulate_grad_hooks or {}).values():  # autograd would call them
            hook(weight)
        return None, None, None


def _dense(gradient: Tensor, ids: Tensor, words: int, padding: int) -> Tensor:
    found: Tensor = torch.ops.aten.embedding_dense_backward(gradient, ids, words, padding, False)
    return found
