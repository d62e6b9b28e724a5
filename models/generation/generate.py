"""Writing continuations, token by token, several at once, with a key-value cache.

Any model that `load_model` gives can be asked this way, in either layout and without a line of remote code. A prompt is
read by a forward pass of its own, exactly as if it stood alone; after that all texts under way take one token a pass,
for which the weights are read once. A text that is finished makes room for the next request.

Cost: on a CPU a pass of eight rows takes little more than a pass of one, as both wait for the weights.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from models.causal_lm import CausalLM
from models.errors import CheckpointError
from models.generation.cache import KeyValueCache
from models.generation.sampling import GREEDY, Sampling, choose
from models.rope import turning_length

ROWS = 8  # texts under way at once


class Request:
    """A prompt and what follows it.

    Args:
        prompt: at least one token.
        max_new_tokens: at least one.
        stop: tokens that end the answer.

    Attributes:
        text: the prompt and the answer so far.
        done: the answer is complete; whoever reads it may say so too.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Sampling = GREEDY) -> None:
        self.text = list(prompt)
        self.done = False
        self._most = len(prompt) + max_new_tokens
        self._stop = stop
        self._sampling = sampling
        self._generator: torch.Generator | None = None

    def take(self, logits: Tensor) -> int | None:
        """Choose the next token from logits [V]; None where it ends the answer."""
        if self._generator is None:
            self._generator = self._sampling.generator(logits.device)
        token = choose(logits, self._sampling, self.text, self._generator)
        if token in self._stop:
            self.done = True
            return None
        self.text.append(token)
        self.done = len(self.text) >= self._most
        return token


@torch.inference_mode()
def generate_many(
    model: CausalLM, requests: Iterable[Request], rows: int = ROWS
) -> Iterator[tuple[Request, int | None]]:
    """Yield tokens as they come, each with its request; None for a token that ends an answer.

    Args:
        requests: taken as there is room for them.
        rows: how many are under way at once.

    Raises:
        CheckpointError: the model does not know a token, or gives numbers that are not finite.
    """
    turn = turning_length(model.spec.config)
    waiting = iter(requests)
    going: list[Request] = []
    cache = KeyValueCache(rows=0)
    while True:
        left = [row for row, request in enumerate(going) if not request.done]
        turned = [row for row in left if turn is not None and len(going[row].text) == turn + 1]
        again = [going[row] for row in turned]  # what the cache holds of them is of no use any more
        left = [row for row in left if row not in turned]
        going = [going[row] for row in left]
        cache.select(left)
        logits = [*_next_logits(model, [[request.text[-1]] for request in going], cache)] if going else []
        for request in (*again, *islice(waiting, rows - len(going) - len(again))):
            own = KeyValueCache()
            logits += _next_logits(model, [request.text], own)
            cache.append(own)
            going.append(request)
        if not going:
            return
        for request, each in zip(going, logits, strict=True):
            yield request, request.take(each)


def generate(
    model: CausalLM, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Sampling = GREEDY
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to `max_new_tokens` or until one of `stop`, which is not yielded.

    Raises:
        CheckpointError: see `generate_many`.
    """
    for _, token in generate_many(model, [Request(prompt, max_new_tokens, stop, sampling)]):
        if token is not None:
            yield token


def _next_logits(model: CausalLM, texts: list[list[int]], cache: KeyValueCache) -> Tensor:
    """What follows each of these pieces of text, fp32 [rows, V]."""
    largest, known = max(map(max, texts)), model.spec.config.vocab_size
    if largest >= known:
        raise CheckpointError(
            f"vocab_size: the tokenizer gives token {largest}, but the model has {known}; "
            "expected the tokenizer of this model"
        )
    ids = torch.tensor(texts, device=model.embedding.embed_tokens.weight.device)
    hidden = model.stream(ids, cache=cache)[0][:, -1]
    logits: Tensor = model.head.project(model.head.norm(hidden)).float()
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise CheckpointError("the model's output is not finite: its weights hold NaN or infinity")
    return logits


def stop_ids(folder: Path) -> set[int]:
    """The ends of sequence that generation_config.json lists (Llama 3 has several).

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return set()
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found = {operator.index(each) for each in (ids if isinstance(ids, list) else [] if ids is None else [ids])}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged; expected a JSON object with numbers as eos_token_id") from None
    return found
