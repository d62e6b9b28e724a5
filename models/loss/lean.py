"""Cross-entropy of a projection to the vocabulary, without ever holding the logits of all tokens.

With a vocabulary of 128k words a token has half a megabyte of logits, and the plain form holds them several times over.
Here a chunk of tokens is projected, its loss is added to the sum, and its logits become, in place, their own gradient,
which is multiplied at once with the weight and with the hidden states. So the gradients are there when the forward pass
ends, and the backward pass only scales them.

Rounding: logits, softmax and all sums over tokens and chunks are fp32, also where weights and hidden states have 16
bits; a gradient is rounded once, at the end. The plain 16-bit form rounds the logits and their gradient as well.

Where several processes have some words each, they agree on the largest logit of a token, on the sum of the exponentials
and on the logit of its target, and add up what each finds of the gradient of the hidden states.

Cost: the three products of the plain form and fewer passes over the logits. Memory: one chunk and the weight's gradient
in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from models.attention.kernels import AMPERE
from models.parallel.groups import ONE_RANK, RankGroup, add_up

CPU_CHUNK, GPU_CHUNK = 2**28, 2**29  # bytes of fp32 logits held at a time; a GPU is fast only with large products
HALF_SCALE = 2.0**10  # what fp16 gradients of logits are multiplied with: fp16 has no numbers below 6e-8
HALF_ROOM = 2.0**3  # what their products, free of that again, are divided by: fp16 has none above 65,504 either
CPU_CACHE = 2**22  # bytes of logits that a CPU takes through softmax and gradient at a time
WORDS = 2**13  # words at a time where products of 16-bit matrices have to be widened

Weigh = Callable[[Tensor], Tensor]  # [T] fp32 -> [T] fp32


class MixedPart(Protocol):
    """Some tokens of a `Mixed` loss, whose logits are at hand."""

    def loss(self, cross_entropy: Tensor, log_total: Tensor) -> Tensor:
        """Return the loss of each token, all [T, 1]; `log_total` is the logarithm of its exponentials' sum."""

    def differentiate(self, slopes: Tensor) -> None:
        """Add to slopes [T, V] what the loss has besides the softmax and the label."""


class Mixed(Protocol):
    """A loss of each token that mixes its cross-entropy with something else that knows its logits.

    Attributes:
        plain, hard: weights of the softmax and of the label in the gradient by the logits; 1 for the cross-entropy.
    """

    @property
    def plain(self) -> float: ...

    @property
    def hard(self) -> float: ...

    def part(self, rows: slice, logits: Tensor, own: slice, ranks: RankGroup) -> MixedPart:
        """Prepare some tokens.

        Args:
            rows: their numbers.
            logits: [T, V] minus the largest of each token, or of this rank's words, `own`.
        """


class GradientSum(Protocol):
    """The gradient of a weight, summed over several losses before the first one's backward pass.

    Without it each loss would hold one, as they are there when forward passes end.

    Attributes:
        total: [V, H] fp32; None before the first loss, and again when a backward pass has taken it.
    """

    total: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float | None = None,
    z_loss_weight: float = 0.0,
    ranks: RankGroup = ONE_RANK,
    words: int = 0,
    weigh: Weigh | None = None,
    mixed: Mixed | None = None,
    summed: GradientSum | None = None,
) -> Tensor:
    """Sum the cross-entropy of the logits `hidden @ weight.T` over tokens, in fp32.

    Args:
        hidden: [T, H]; T may be 0.
        weight: [V, H], of the same dtype; or this rank's shard of it.
        targets: [T] int64, each in [0, V).
        cap: squeezes the logits between -cap and cap first, by a tanh.
        z_loss_weight: weight of (max log-softmax)^2, summed likewise.
        ranks, words: the ranks that share the vocabulary, and V where there are several.
        weigh: gets the cross-entropy of each token and returns how often it counts; each once where absent.
        mixed: the loss of each token in place of the cross-entropy; not with `weigh`.
        summed: the weight's gradient with that of other losses, whose backward passes get the same gradient.

    Returns:
        A scalar, the same for all ranks. Its backward pass can run once.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(kind, enabled=False):  # it would round the sums
        if torch.is_grad_enabled():
            options = cap, z_loss_weight, ranks, words, weigh, mixed, summed
            loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, *options)
            return loss
        return _Sums(hidden, weight, targets, cap, z_loss_weight, ranks, words, weigh, mixed).loss


def chunk_tokens(words: int, on_cpu: bool) -> int:
    """Limit the tokens projected at a time to a vocabulary of `words`."""
    return max((CPU_CHUNK if on_cpu else GPU_CHUNK) // (4 * words), 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, *others: Any) -> Tensor:
        context.sums, context.summed = _Sums(hidden, *others, *context.needs_input_grad[:2]), others[-1]
        context.dtype = hidden.dtype
        return context.sums.loss

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums, context.sums = context.sums, None
        assert sums is not None, "the gradients were scaled in place by an earlier backward pass"
        factor = gradients[0] / sums.scale
        weight_gradient = sums.weight_gradient
        if context.summed is not None:  # of all losses, where this one goes back first; else of none
            weight_gradient, context.summed.total = context.summed.total, None
        found = (sums.hidden_gradient, weight_gradient)
        return *(each if each is None else each.mul_(factor).to(context.dtype) for each in found), *(8 * [None])


class _Softmax(NamedTuple):
    """Logits of some tokens, now exp(logit - largest), and what their gradient needs.

    Attributes:
        place: of the tokens in their chunk.
        logits: [T, V], a part of the chunk's; with a cap a copy.
        chunk_logits: [T, V], the chunk's, which become the gradient.
        targets: [T, 1], from this rank's first word; where `here` is false, of another rank.
        loss, log_total, total: [T, 1]; the cross-entropy and the sum of the exponentials.
        largest, shared: which words have the largest logit, and how many; only for a z-loss.
        mixed: what is mixed in, if anything; then `loss` has it, too.
    """

    place: slice
    logits: Tensor
    chunk_logits: Tensor
    targets: Tensor
    here: Tensor
    loss: Tensor
    log_total: Tensor
    total: Tensor
    largest: Tensor | None
    shared: Tensor
    mixed: MixedPart | None


class _Sums:
    """Sums over chunks in fp32: loss and wanted gradients, `scale` times too large."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        cap: float | None,
        z_loss_weight: float,
        ranks: RankGroup,
        words: int,
        weigh: Weigh | None = None,
        mixed: Mixed | None = None,
        summed: GradientSum | None = None,
        hidden_wanted: bool = False,
        weight_wanted: bool = False,
    ) -> None:
        self._hidden, self._weight, self._targets = hidden, weight, targets
        self._cap, self._z_loss_weight, self._ranks, self._mixed = cap, z_loss_weight, ranks, mixed
        self._own = ranks.part(words or len(weight))
        self._wanted = hidden_wanted or weight_wanted
        self.scale = HALF_SCALE if hidden.dtype == torch.float16 else 1.0
        self.loss = torch.zeros((), device=hidden.device)
        self.hidden_gradient = torch.empty_like(hidden, dtype=torch.float32) if hidden_wanted else None
        self.weight_gradient = summed.total if summed and weight_wanted else None
        self._empty = self.weight_gradient is None
        if weight_wanted and self.weight_gradient is None:
            self.weight_gradient = torch.empty_like(weight, dtype=torch.float32)
            if summed:
                summed.total = self.weight_gradient
        tokens = max(len(hidden), 1)  # without any, one empty chunk makes gradients of 0
        widest = math.ceil((words or len(weight)) / ranks.size)  # so that all ranks have the same chunks
        chunks = _slices(tokens, math.ceil(tokens / math.ceil(tokens / chunk_tokens(widest, hidden.is_cpu))))
        if weigh is None:
            for chunk in chunks:
                self._add(chunk, *self._open(chunk))
        else:
            self._add_weighed(chunks, weigh)
        if self.hidden_gradient is not None and ranks.size > 1:
            add_up(self.hidden_gradient, ranks)
        del self._hidden, self._weight, self._targets

    def _add_weighed(self, chunks: list[slice], weigh: Weigh) -> None:
        """Add all chunks once the cross-entropy of each token is known.

        Their logits are computed twice, but for the last chunk, which is still there. With a cap it is not kept, as it
        is held twice then.
        """
        each = torch.empty(len(self._hidden), device=self._hidden.device)
        kept: tuple[Tensor, list[_Softmax]] | None = None
        for chunk in chunks:
            kept = None  # before the next one takes its place
            logits, parts = self._open(chunk)
            kept = logits, list(parts)
            for part in kept[1]:
                each[chunk][part.place] = part.loss.squeeze(-1)
        counts = weigh(each)
        self.loss += (each * counts).sum()
        if self._cap is not None:
            kept = None
        for chunk in reversed(chunks) if self._wanted else ():
            opened: tuple[Tensor, Iterable[_Softmax]] = kept or self._open(chunk)
            kept = None
            self._add(chunk, *opened, counts[chunk, None])

    def _open(self, chunk: slice) -> tuple[Tensor, Iterator[_Softmax]]:
        """Compute the logits of a chunk, [T, V], and their softmax part by part."""
        logits, targets = fp32_logits(self._hidden[chunk], self._weight), self._targets[chunk, None]
        in_cache = logits.is_cpu and self._ranks.size == 1  # as ranks would wait for each other each time
        rows = max(CPU_CACHE // (4 * len(self._weight)), 1) if in_cache else len(logits)
        parts = _slices(len(logits), rows)
        return logits, (self._softmax(part, logits[part], targets[part], chunk.start) for part in parts)

    def _add(self, chunk: slice, logits: Tensor, parts: Iterable[_Softmax], counts: Tensor | None = None) -> None:
        """Add the gradients of a chunk and, without `counts` [T, 1], its loss."""
        weight = self._weight
        slopes = logits if weight.dtype == torch.float32 else torch.empty_like(logits, dtype=weight.dtype)
        for part in parts:
            if counts is None:
                self.loss += part.loss.sum() + self._z_loss_weight * part.log_total.square().sum()
            if self._wanted:
                self._differentiate(part, 1.0 if counts is None else counts[part.place])
                if slopes is not logits:
                    torch.mul(part.chunk_logits, self.scale, out=slopes[part.place])
        del logits
        if self.hidden_gradient is not None:
            self.hidden_gradient[chunk] = _product(slopes, weight, self.scale)
        if self.weight_gradient is not None:
            beta = 0.0 if self._empty else 1.0
            add_product(self.weight_gradient, slopes.T, self._hidden[chunk], self.scale, beta)
        self._empty = False

    def _softmax(self, place: slice, logits: Tensor, targets: Tensor, first: int) -> _Softmax:
        """Take logits [T, V] to their exponentials, in place; `first` is their chunk's first token."""
        uncapped = logits
        if self._cap is not None:
            logits = uncapped.div_(self._cap).tanh_() * self._cap
        top = logits.amax(dim=-1, keepdim=True)
        if self._ranks.size > 1:
            distributed.all_reduce(top, distributed.ReduceOp.MAX, self._ranks.group)
        logits.sub_(top)
        here = (targets >= self._own.start) & (targets < self._own.stop)
        targets = (targets - self._own.start).masked_fill(~here, 0)
        at_target = logits.gather(-1, targets) * here
        begin = first + place.start
        rows = slice(begin, begin + len(logits))
        mixed = self._mixed.part(rows, logits, self._own, self._ranks) if self._mixed else None
        largest = logits == 0 if self._z_loss_weight else None
        shared = top.new_zeros(()) if largest is None else largest.sum(dim=-1, keepdim=True)
        total = logits.exp_().sum(dim=-1, keepdim=True)
        if self._ranks.size > 1:
            at_target, total, shared = add_up(torch.stack([at_target, total, shared.expand_as(total)]), self._ranks)
        log_total = total.log()  # the largest logit is 0 now, so the largest log-softmax is minus this
        loss = log_total - at_target
        loss = mixed.loss(loss, log_total) if mixed else loss
        return _Softmax(place, logits, uncapped, targets, here, loss, log_total, total, largest, shared, mixed)

    def _differentiate(self, part: _Softmax, count: Tensor | float) -> None:
        """Make the chunk's logits the gradient of the loss, of which each token counts `count` times."""
        logits, pull = part.logits, 2 * self._z_loss_weight * part.log_total
        plain, hard = (self._mixed.plain, self._mixed.hard) if self._mixed else (count, count)
        logits.mul_((plain + pull) / part.total)
        logits.scatter_add_(-1, part.targets, -hard * part.here)
        if part.mixed:
            part.mixed.differentiate(logits)
        if part.largest is not None:  # equal ones share, as torch's amax has it
            logits.sub_(part.largest * (pull / part.shared))
        if self._cap is not None:
            part.chunk_logits.square_().neg_().add_(1).mul_(logits)


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute hidden @ weight.T in fp32; a CPU widens 16 bits a few words at a time."""
    if not hidden.is_cpu or hidden.dtype == torch.float32:
        return _product(hidden, weight.T)
    logits = torch.empty(len(hidden), len(weight))
    wide = hidden.float()
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.matmul.fp32_precision
    if hidden.dtype == torch.bfloat16:  # the widened numbers are exact in bf16, so a CPU's bf16 units may multiply them
        mkldnn.matmul.fp32_precision = "bf16"
    try:
        for words in _slices(len(weight), WORDS):
            torch.mm(wide, weight[words].float().T, out=logits[:, words])
    finally:
        mkldnn.matmul.fp32_precision = before
    return logits


def _product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Compute left @ right in fp32, dividing by `left`'s scale."""
    if left.dtype != torch.float32 and gives_fp32(left.device):
        return torch.mm(left, right, out_dtype=torch.float32)
    if scale == 1:
        return (left @ right).float()
    smaller = scale * HALF_ROOM  # by this before the fp32 sums inside of the product are rounded
    return torch.addmm(left.new_zeros(()), left, right, beta=0, alpha=1 / smaller).float().mul_(smaller)


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, beta: float = 1.0) -> None:
    """Set the fp32 `total` to total x beta + left @ right; a beta of 0 drops it."""
    if left.dtype == torch.float32:
        total.addmm_(left, right, beta=beta)
    elif gives_fp32(left.device):
        torch.addmm(total, left, right, beta=beta, out_dtype=torch.float32, out=total)
    else:
        for words in _slices(len(left), WORDS):
            part = _product(left[words], right, scale)
            if beta:
                total[words] += part
            else:
                total[words] = part


def gives_fp32(device: torch.device) -> bool:
    """Return whether torch multiplies 16-bit matrices into fp32 on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size or 1)]
