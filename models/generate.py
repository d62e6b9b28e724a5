"""Writing a continuation, token by token, with a key-value cache.

Any model that `load_model` gives can be asked this way, in either layout and without a line of remote code.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from models.causal_lm import CausalLM
from models.errors import CheckpointError
from models.rope import turning_length


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token each time (greedy).
        top_p: sample from the smallest set of tokens that holds this much of the probability (arXiv:1904.09751).
    """

    temperature: float = 0.7
    top_p: float = 0.9


GREEDY = Sampling(temperature=0.0)


@torch.inference_mode()
def generate(
    model: CausalLM, prompt: list[int], max_new_tokens: int, stop: set[int], sampling: Sampling = GREEDY
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to `max_new_tokens` or until one of `stop`, which is not yielded.

    Raises:
        CheckpointError: the model does not know a token, or gives numbers that are not finite.
    """
    device = next(model.parameters()).device
    config = model.spec.config
    turn = turning_length(config)
    cache = DynamicCache(config=config)
    text = list(prompt)
    ids = torch.tensor([text], device=device)
    if max(text) >= config.vocab_size:
        raise CheckpointError(
            f"vocab_size: the tokenizer gives token {max(text)}, but the model has {config.vocab_size}; "
            "expected the tokenizer of this model"
        )
    for _ in range(max_new_tokens):
        hidden = model.stream(ids, cache=cache)[0]
        logits = model.head.project(model.head.norm(hidden[0, -1])).float()
        if not torch.isfinite(logits.max()):
            raise CheckpointError("the model's output is not finite: its weights hold NaN or infinity")
        token = choose(logits, sampling)
        if token in stop:
            return
        yield token
        text.append(token)
        if turn is not None and len(text) == turn + 1:
            cache = DynamicCache(config=config)
            ids = torch.tensor([text], device=device)
        else:
            ids = torch.tensor([[token]], device=device)


def choose(logits: Tensor, sampling: Sampling) -> int:
    """The next token from logits [V]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / sampling.temperature, dim=-1).sort(descending=True)
    outside = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
    outside[0] = False  # the likeliest token is always a choice
    probabilities[outside] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1)])


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
