"""Generate text token by token, for several prompts at once, with a key-value cache.

A prompt is read by a forward pass of its own; after that all texts get one token a pass. A finished text makes room for
the next request. Where several processes hold the layers, the texts are divided into as many groups: while tokens are
chosen for one, the others are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention.cache import KeyValueCache
from models.attention.rope import turning_length
from models.causal_lm import CausalLM
from models.errors import CheckpointError

ROWS = 8  # texts at once, for each group; on a CPU a pass of eight takes little more than a pass of one


@dataclass(frozen=True)
class Sampling:
    """How a request samples: penalty, temperature, top_k, top_p, in this order."""

    temperature: float = 0.7  # 0 takes the likeliest token each time (greedy)
    top_p: float = 0.9  # sample from the smallest set of tokens with this probability (arXiv:1904.09751)
    top_k: int | None = None  # sample from this many of the likeliest tokens; from all if absent
    # Divides the logits of tokens that the text has already, and multiplies those below zero (arXiv:1909.05858).
    repetition_penalty: float = 1.0
    seed: int | None = None  # of the request's own random numbers; torch's global ones if absent

    def generator(self, device: torch.device) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


GREEDY = Sampling(temperature=0.0)


def choose(
    logits: Tensor, sampling: Sampling, text: list[int] | None = None, generator: torch.Generator | None = None
) -> int:
    """Choose the next token from logits [V]; the penalty looks at `text`."""
    if sampling.repetition_penalty != 1.0 and text:
        known = {token for token in text if token < len(logits)}  # that of an image may lie outside
        used = torch.tensor(sorted(known), device=logits.device)
        scores = logits[used]
        penalty = sampling.repetition_penalty
        logits = logits.index_copy(0, used, torch.where(scores < 0, scores * penalty, scores / penalty))
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scores, tokens = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    # Minus the largest, or a small temperature would make infinities.
    probabilities = torch.softmax((scores - scores[0]) / sampling.temperature, dim=-1)
    outside = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
    outside[0] = False  # the likeliest token is always a choice
    probabilities[outside] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


class Request:
    """A prompt and its answer so far.

    Args:
        see: makes the tensors of the prompt's images, as the embedding takes them, each time that it is read.
    """

    def __init__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop: set[int],
        sampling: Sampling = GREEDY,
        see: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self.text = list(prompt)  # and the answer so far
        self.see = see
        self.done = False  # set when the answer is complete; whoever reads the answer may set it earlier
        self.chosen: int | None = None  # the last token, also one that ends the answer and is no part of it
        self._most = len(prompt) + max_new_tokens
        self._stop = stop
        self._sampling = sampling
        self._generator: torch.Generator | None = None

    @property
    def room(self) -> int:
        """How many tokens the answer may still get."""
        return self._most - len(self.text)

    def take(self, logits: Tensor) -> int | None:
        """Choose the next token from logits [V]; None if it ends the answer."""
        if self._generator is None:
            self._generator = self._sampling.generator(logits.device)
        self.chosen = token = choose(logits, self._sampling, self.text, self._generator)
        if token in self._stop:
            self.done = True
            return None
        self.text.append(token)
        self.done = len(self.text) >= self._most
        return token


@torch.inference_mode()
def generate_many(
    model: CausalLM | Passes, requests: Iterable[Request], rows: int | None = None
) -> Iterator[tuple[Request, int | None]]:
    """Yield tokens as they come, each with its request; None ends an answer.

    Args:
        requests: `rows` of them are taken before the first token, and then one when an answer has ended, as a request
            may depend on the answers before it.
        rows: how many are generated at once; `ROWS` for each group if absent.

    Raises:
        CheckpointError: the model does not know a token, or gives numbers that are not finite.
    """
    passes = model if isinstance(model, Passes) else Passes(model)
    passes.forget()
    turn = turning_length(passes.spec.config)
    waiting = iter(requests)
    first = list(islice(waiting, rows or ROWS * passes.groups))
    waiting = chain(first, waiting)
    room = [len(first[group :: passes.groups]) for group in range(passes.groups)]
    groups: list[list[Request]] = [[] for _ in room]
    while True:
        for group in range(passes.groups):
            going, logits = groups[group], list[Tensor]()
            while len(logits) < len(going):
                logits += passes.take()
            for request, each in zip(going, logits, strict=True):
                yield request, request.take(each)
            left = [row for row, request in enumerate(going) if not request.done]
            kept = [row for row in left if len(going[row].text) - 1 != turn]
            again = [going[row] for row in left if row not in kept]  # all their angles change: to be read again
            new = [*again, *islice(waiting, room[group] - len(left))]
            going = groups[group] = [going[row] for row in kept]
            if going:
                passes.give(Pass(group, kept, [[request.text[-1]] for request in going], arriving=False))
            for request in new:
                passes.give(Pass(group, list(range(len(going))), [request.text], arriving=True, images=request.see()))
                going.append(request)
        if not any(groups):
            return


def generate(
    model: CausalLM, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Sampling = GREEDY
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that follow `prompt`, before one of `stop`."""
    for _, token in generate_many(model, [Request(prompt, max_new_tokens, stop, sampling)]):
        if token is not None:
            yield token


class Pass(NamedTuple):
    """A forward pass of some rows of a group."""

    group: int
    kept: list[int]  # the rows of the group that stay, in this order, before anything else
    texts: list[list[int]]  # the next tokens of each row, equally many
    arriving: bool  # whether the text is a new row; else it continues the rows
    images: Sequence[Tensor] = ()  # of a new row


class Passes:
    """Forward passes for groups of rows; several may be under way."""

    def __init__(self, model: CausalLM, groups: int = 1) -> None:
        model.spec.check_writes(model.spec.family.name)
        if not model.spec.family.generates:
            problem = f"{model.spec.family.name}: tokens one by one are not transformers'"
            raise CheckpointError(f"{problem}; expected an export that transformers generates with")
        self.spec = model.spec
        self.groups = groups
        self._model = model
        self._weight = next(model.parameters())
        self._caches = [KeyValueCache(rows=0) for _ in range(groups)]
        self._queue: deque[Pass] = deque()

    def give(self, work: Pass) -> None:
        """Queue a pass; CheckpointError for a token that the model does not know."""
        words, known = set(chain(*work.texts)), self.spec.config.vocab_size
        largest = max(words - {self.spec.family.sees.image_token} if self.spec.family.sees else words)
        if largest >= known:
            problem = f"vocab_size: the tokenizer gives token {largest}, but the model has {known}"
            raise CheckpointError(f"{problem}; expected the tokenizer of this model")
        self._queue.append(work)

    def take(self) -> Tensor:
        """Compute the oldest queued pass: logits of each row's last token, fp32 [rows, V]; CheckpointError for NaN."""
        return finite(self.logits_of(self._queue.popleft()))

    def logits_of(self, work: Pass) -> Tensor:
        """Compute a pass to the logits of each row's last token, fp32 [rows, V]."""
        return self.logits(self.compute(work))

    def logits(self, hidden: Tensor) -> Tensor:
        """Project each row's last hidden state to logits, fp32 [rows, V]."""
        logits: Tensor = self._model.head.project(self._model.head.norm(hidden[:, -1])).float()
        return logits

    def forget(self) -> None:
        """Drop queued passes."""
        self._queue.clear()

    def compute(self, work: Pass) -> Tensor:
        """Compute hidden states [rows, length, H] behind the last block here."""
        inputs, cache = self.inputs(work), self._caches[work.group]
        cache.select(work.kept)
        if not work.arriving:
            return self._model.activations(inputs, cache=cache)[0]
        own = KeyValueCache()
        images = [each.to(inputs.device) for each in work.images]
        hidden = self._model.activations(inputs, cache=own, images=images)[0]
        cache.append(own)
        return hidden

    def inputs(self, work: Pass) -> Tensor:
        """Make the first layer's input: token ids [rows, length]."""
        return torch.tensor(work.texts, device=self._weight.device)


def finite(logits: Tensor) -> Tensor:
    """Refuse logits [rows, V] that have NaN or infinity."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise CheckpointError("the model's output is not finite: its weights hold NaN or infinity")
    return logits
