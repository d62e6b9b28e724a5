"""How the next token is chosen.

A request that names a seed has random numbers of its own, so that its answer depends on its prompt and its seed alone,
and not on what else is asked at the same time.

Cost: sorting the vocabulary once a token, but for `top_k`, which sorts k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The wishes of a request, taken in this order: penalty, temperature, top_k, top_p."""

    temperature: float = 0.7  # 0 takes the likeliest token each time (greedy)
    top_p: float = (
        0.9  # sample from the smallest set of tokens that holds so much of the probability (arXiv:1904.09751)
    )
    top_k: int | None = None  # sample from the likeliest so many tokens; from all where absent
    # Divides the logits of tokens that the text has already, and multiplies those below zero (arXiv:1909.05858).
    repetition_penalty: float = 1.0
    seed: int | None = None  # of the request's own random numbers; torch's common ones where absent

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The random numbers of a request."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


GREEDY = Sampling(temperature=0.0)


def choose(
    logits: Tensor, sampling: Sampling, text: list[int] | None = None, generator: torch.Generator | None = None
) -> int:
    """The next token from logits [V]; `text` is the tokens so far, for the penalty."""
    if sampling.repetition_penalty != 1.0 and text:
        used = torch.tensor(sorted(set(text)), device=logits.device)
        scores = logits[used]
        penalty = sampling.repetition_penalty
        logits = logits.index_copy(0, used, torch.where(scores < 0, scores * penalty, scores / penalty))
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scores, tokens = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    probabilities = torch.softmax((scores - scores[0]) / sampling.temperature, dim=-1)  # however small it is
    outside = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
    outside[0] = False  # the likeliest token is always a choice
    probabilities[outside] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
