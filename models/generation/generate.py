"""Writing continuations, token by token, several at once, with a key-value cache.

Any model that `load_model` gives can be asked this way, in either layout and without a line of remote code. A prompt is
read by a forward pass of its own, exactly as if it stood alone; after that all texts under way take one token a pass,
for which the weights are read once. A text that is finished makes room for the next request. Where the layers lie in
several processes, the texts are dealt to as many groups: while tokens are chosen for one, the others are computed.

Cost: on a CPU a pass of eight rows takes little more than a pass of one, as both wait for the weights.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from models.attention.rope import turning_length
from models.causal_lm import CausalLM
from models.errors import CheckpointError
from models.generation.passes import Pass, Passes
from models.generation.sampling import GREEDY, Sampling, choose

ROWS = 8  # texts under way at once, for each group


class Request:
    """A prompt, of at least one token, and what follows it: at least one, up to one of `stop`."""

    def __init__(self, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Sampling = GREEDY) -> None:
        self.text = list(prompt)  # and the answer so far
        self.done = False  # or the answer is complete; whoever reads it may say so too
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
    model: CausalLM | Passes, requests: Iterable[Request], rows: int | None = None
) -> Iterator[tuple[Request, int | None]]:
    """Yield tokens as they come, each with its request; None for a token that ends an answer.

    Args:
        requests: as many as `rows` are taken before the first token, and from then on one for each answer that has
            ended, no sooner: a request may be made of the answers before it.
        rows: how many are under way at once; `ROWS` for each group where absent.

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
            again = [going[row] for row in left if row not in kept]  # what is remembered of them is of no use any more
            new = [*again, *islice(waiting, room[group] - len(left))]
            going = groups[group] = [going[row] for row in kept]
            if going:
                passes.give(Pass(group, kept, [[request.text[-1]] for request in going], arriving=False))
            for request in new:
                passes.give(Pass(group, list(range(len(going))), [request.text], arriving=True))
                going.append(request)
        if not any(groups):
            return


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


def stop_ids(folder: Path) -> set[int]:
    """The ends of sequence that generation_config.json lists (Llama 3 has several), or config.json where it is absent.

    Raises:
        CheckpointError: the file is damaged.
    """
    paths = (folder / "generation_config.json", folder / "config.json")
    if (path := next(filter(Path.is_file, paths), None)) is None:
        return set()
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return {operator.index(each) for each in (ids if isinstance(ids, list) else [] if ids is None else [ids])}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged; expected a JSON object with numbers as eos_token_id") from None
