"""Write answers with drafts by the model's own layers that predict further ahead (`models.ahead`).

A step drafts the next tokens, reads the last token and the drafts in one pass, and takes tokens from its logits as long
as each is the drafted one; the first that is not counts too, as what it follows is the answer. This is speculative
sampling (arXiv:2211.17192) with drafts that are certain: a draft x is accepted with the model's own probability of x,
else the token is one of the others, so that every token is chosen as without drafts, by the same random numbers.

What a pass over several tokens computes differs in its last bits from passes over one: in fp32 on a CPU logits of up to
8 differ by up to 6e-6 (five tiny models, passes over three tokens). So another token can be chosen only where two are
that close, which none of 960 were; in bf16, with its 8 bits, that is common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from common.quantities import counted
from models.ahead.layers import LayerAhead
from models.attention.cache import KeyValueCache
from models.attention.rope import depends_on_length
from models.causal_lm import CausalLM
from models.errors import CheckpointError
from options.demo.generation import Pass, Passes, Request, finite


@dataclass
class DraftTally:
    """What became of the drafts, in the steps after each prompt's own pass."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0  # steps with drafts, as the last one of a full answer has none
    accepted: int = 0  # of these, with the first draft accepted
    seconds: float = 0.0

    def add(self, drafts: int, taken: int, accepted: int, seconds: float) -> None:
        """Count a step in which so many tokens were drafted, taken, and both."""
        self.steps += 1
        self.tokens += taken
        self.drafted += min(drafts, 1)
        self.accepted += min(accepted, 1)
        self.seconds += seconds

    def describe(self) -> str:
        """Write it for the user."""
        if not self.drafted:
            return "none, as the answers were too short"
        first = f"{self.accepted / self.drafted:.0%} of first drafts accepted"
        speed = f"{self.tokens / self.seconds:,.1f} tokens/s"
        return f"{self.tokens / self.steps:.2f} tokens a step, {first} ({counted(self.steps, 'step')}), {speed}"


class LayerInUse:
    """The layer `k` (from 1) of those ahead, and what it has seen of a text.

    Its keys and values at position t are of h[k - 1][t] and the token t + k. Drafts stand in for tokens that are not
    chosen yet; what was computed with them is computed anew with those that were chosen.
    """

    def __init__(self, layer: LayerAhead, k: int) -> None:
        self.layer, self.k = layer, k
        self.cache = KeyValueCache()
        self._given: list[Tensor] = []  # h[k - 1] at the positions behind the cache, as far as it is the model's own
        self._begun = 0

    def catch_up(self, states: Tensor, words: Tensor) -> Tensor:
        """Compute h[k] at all positions that it has not seen, [1, S, H].

        Args:
            states: h[k - 1] at the last of these; it holds the first ones.
            words: [1, S, H], embeddings of the tokens k further on.
        """
        states = torch.cat([*self._given, states], dim=1)
        self._given, self._begun = [states], self.cache.longest
        return self.go_on(states, words)

    def go_on(self, states: Tensor, words: Tensor) -> Tensor:
        """Compute the next positions, [1, S, H]."""
        positions = self.cache.positions(states.shape[1], states.device)
        output: Tensor = self.layer(words, states, positions, self.cache)
        self.cache.advance(states.shape[1])
        return output

    def forget_drafts(self, length: int) -> None:
        """Go back to what the `length` tokens of the text say."""
        seen, given = max(length - self.k, 0), max(length - self.k + 1, 0)
        self.cache.crop(seen)
        # One state at most: of the position whose token k further on comes next.
        self._given = [states[:, seen - self._begun : given - self._begun] for states in self._given]


class Drafter(Passes):
    """Passes over one text at a time, with drafts.

    Args:
        model: with layers ahead.
        drafts: at most so many a step; as many as there are layers where 0. For more of them the last layer is asked
            again, with its own output in the place of hidden states, as servers do where a model has one layer.

    Attributes:
        tally: of all answers.

    Raises:
        CheckpointError: the angles of all tokens change as a text grows.
    """

    def __init__(self, model: CausalLM, drafts: int = 0) -> None:
        super().__init__(model)
        if depends_on_length(self.spec.config):
            kind = self.spec.config.rope_parameters["rope_type"]
            raise CheckpointError(f"rope_type: {kind}: angles change as a text grows; expected no --draft")
        self._ahead = [layer for layer in model.head.ahead or () if isinstance(layer, LayerAhead)]
        self._drafts = drafts or len(self._ahead)
        self._in_use: list[LayerInUse] = []
        self.tally = DraftTally()

    @torch.inference_mode()
    def generate(self, requests: Iterable[Request]) -> Iterator[tuple[Request, int | None]]:
        """Yield tokens as `generate_many` does, one request after the other."""
        for request in requests:
            yield from self._answer(request)

    def _answer(self, request: Request) -> Iterator[tuple[Request, int | None]]:
        self._in_use = [LayerInUse(layer, k) for k, layer in enumerate(self._ahead[: self._drafts], start=1)]
        hidden = self._read(request.text, arriving=True)
        yield from self._take(request, hidden, [])

        while not request.done:
            began, length = perf_counter(), len(request.text)
            drafts = self._draft(request.text, hidden, min(self._drafts, request.room - 1))
            states = deepcopy(self._caches[0].layers)
            hidden = self._read([request.text[-1], *drafts])

            taken, accepted = yield from self._take(request, hidden, drafts)
            if accepted < len(drafts) and not request.done:
                hidden = self._forget_drafts(request.text, length, hidden, states)
            self.tally.add(len(drafts), taken, accepted, perf_counter() - began)

    def _read(self, tokens: list[int], arriving: bool = False) -> Tensor:
        """Compute hidden states [1, S, H] in front of the final norm, of a new text or of one that goes on."""
        self.give(Pass(0, [] if arriving else [0], [tokens], arriving))
        return self.compute(self._queue.popleft())

    def _take(
        self, request: Request, hidden: Tensor, drafts: list[int]
    ) -> Generator[tuple[Request, int | None], None, tuple[int, int]]:
        """Yield the tokens that are certain now; return how many there are, and how many of them were drafted."""
        rows = hidden[0, -1 - len(drafts) :, None]
        accepted = taken = 0
        for logits, draft in zip(finite(self.logits(rows)), [*drafts, None], strict=True):
            yield request, request.take(logits)
            taken += 1
            if request.chosen != draft:
                break
            accepted += 1
            if request.done:
                break
        return taken, accepted

    def _draft(self, text: list[int], hidden: Tensor, count: int) -> list[int]:
        """Draft `count` tokens behind a text.

        Args:
            hidden: of the model itself, [1, T, H], at the last positions but that of the last token.
        """
        head, known = self._model.head, list(text)
        has_norms = self._ahead[0].norm is not None  # else they take what is in front of the model's own
        states = head.norm(hidden) if has_norms else hidden
        for k in range(count):
            layer = self._in_use[min(k, len(self._in_use) - 1)]
            ids = torch.tensor([known[layer.cache.longest + layer.k :]], device=hidden.device)
            words = self._model.embedding.embed_tokens(ids)
            again = k >= len(self._in_use)
            states = layer.go_on(states[:, -1:], words) if again else layer.catch_up(states, words)
            last = states[:, -1] if has_norms else head.norm(states[:, -1])
            known.append(int(head.project(last).argmax()))

        for layer in self._in_use[:count]:
            layer.forget_drafts(len(text))
        return known[len(text) :]

    def _forget_drafts(
        self, text: list[int], length: int, hidden: Tensor, states: defaultdict[int, LinearAttentionLayer]
    ) -> Tensor:
        """Go back to what the text says; return hidden states of what the step added to it.

        Args:
            length: of the text before this step.
            hidden: that were computed of the last token then, and the drafts.
            states: of linear attention before this step: none of the tokens can be taken out of them again, so that the
                accepted ones are read anew.
        """
        cache = self._caches[0]
        if not states:
            cache.crop(len(text) - 1)
            return hidden[:, : len(text) - length]
        cache.crop(length - 1)
        cache.layers = states
        return self._read(text[length - 1 : -1])
