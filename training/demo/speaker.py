"""A model that is asked with the prompts that it was trained with.

A prompt has to leave some of the model's context to its answer; one that does not is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from data.chat.calls import CallForm
from data.chat.chat_template import chat_template
from data.chat.messages import JSON, Said
from data.chat.native.kinds import end_tokens
from data.chat.prompts import PLAIN, AnyPrompts, as_prompts, format_of
from data.chat.thoughts import AnswerForm
from data.errors import DataError
from data.tokenized.answer_end import answer_end
from data.tokenized.tokenize import encode_beginning, encode_question, load_tokenizer
from models import load_model
from models.checkpoint.layout import resolve
from models.generation import Passes, Request, Sampling, generate_many, stop_ids
from training.demo.answer import Answer


@dataclass(frozen=True)
class Wishes:
    """How answers are to be.

    Attributes:
        stop: texts that end an answer, and are no part of it.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()


class Speaker:
    """A model with its tokenizer.

    Args:
        model: that of the folder, where it is loaded already.

    Raises:
        CheckpointError: the folder holds no whole model.
        DataError: it has no usable tokenizer.
    """

    def __init__(
        self,
        folder: str | Path,
        prompts: AnyPrompts = None,
        dtype: torch.dtype | None = None,
        model: Passes | None = None,
    ) -> None:
        resolved = resolve(folder)
        # What a template does not take was trained rewritten or not at all.
        self.prompts = replace(as_prompts(prompts), template_fallback="rewrite")
        self.tokenizer = load_tokenizer(resolved)
        # A base model learns its template's end of an answer, which none of its files names.
        self._stop = stop_ids(resolved) | end_tokens(self.tokenizer) | answer_end(self.tokenizer, self.prompts)
        self.model = model or load_model(resolved, dtype, "cuda" if torch.cuda.is_available() else "cpu")
        self.context = self.model.spec.context

    def encode(self, said: Sequence[Said], tools: list[JSON] | None = None, begun: str = "") -> list[int]:
        """The prompt for what follows these messages; see `encode_question`."""
        return encode_question(said, self.tokenizer, self.prompts, tools, begun)

    def encode_beginning(self, text: str) -> list[int]:
        """The prompt for what follows a text; see `encode_beginning`."""
        return encode_beginning(text, self.tokenizer)

    def call_form(self) -> CallForm | None:
        """How the model writes calls of tools; None where they are text.

        Raises:
            DataError: its template writes them in a form that cannot be read back.
        """
        if format_of(self.prompts, self.tokenizer) == PLAIN:
            return None
        return chat_template(self.tokenizer, self.prompts, tools=True).call_form()

    @cached_property
    def answer_form(self) -> AnswerForm | None:
        """How the model writes thoughts and words; None where all that it writes is words."""
        if format_of(self.prompts, self.tokenizer) == PLAIN:
            return None
        return chat_template(self.tokenizer, self.prompts).answer_form()

    def request(self, prompt: list[int], wishes: Wishes, seed: int | None = None) -> Request:
        """What the model is to be asked; the answer ends where the context does.

        Args:
            seed: in place of the wishes' own.

        Raises:
            DataError: the prompt leaves no room for an answer.
        """
        room = wishes.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt))
            if room < 1:
                raise DataError(
                    f"the prompt has {len(prompt)} tokens, but the model's context is {self.context}; "
                    "expected a shorter one"
                )
        sampling = wishes.sampling if seed is None else replace(wishes.sampling, seed=seed)
        return Request(prompt, room, self._stop, sampling)

    def written(self, prompt: list[int], wishes: Wishes, answer: Answer) -> Iterator[str]:
        """Yield what is written after a prompt, in pieces, which `answer` makes of the tokens."""
        for request, token in generate_many(self.model, [self.request(prompt, wishes)]):
            if token is not None:
                yield answer.add(token)
                request.done = request.done or answer.stopped is not None
        yield answer.end()

    def continued(self, text: str, wishes: Wishes) -> Iterator[str]:
        """Yield what follows a text, in pieces."""
        answer = Answer(self.tokenizer, wishes.stop, goes_on=True)
        yield from self.written(self.encode_beginning(text), wishes, answer)
