"""Ask a model with the prompts that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.chat.answer_form import AnswerForm, CallForm
from data.chat.chat_template import chat_template
from data.chat.messages import JSON, Said
from data.chat.native.kinds import end_tokens
from data.chat.prompts import PLAIN, AnyPrompts, as_prompts, check_prompt_format, format_of
from data.errors import DataError
from data.tokenized.answer_end import answer_end
from data.tokenized.tokenize import encode_beginning, encode_question, load_tokenizer
from models import load_model
from models.checkpoint.layout import RECORD, resolve
from models.config_json import stop_ids
from models.generation import Passes, Request, Sampling, generate_many
from training.checkpoint.exporting import EXPORTED
from training.metrics.run_info import RUN_FILE

INCOMPLETE = "\ufffd"  # the end of a text that stops in the middle of a character of several tokens
BEFORE = "a"  # some decoders drop a blank at the beginning, so that something has to stand before it


@dataclass(frozen=True)
class Wishes:
    """How answers are sampled, and where they end."""

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

    def encode(self, said: Sequence[Said], tools: list[JSON] | None = None) -> list[int]:
        """Encode the prompt for what follows these messages."""
        return encode_question(said, self.tokenizer, self.prompts, tools)

    def encode_beginning(self, text: str) -> list[int]:
        """Encode the prompt for what follows a text."""
        return encode_beginning(text, self.tokenizer)

    def call_form(self) -> CallForm:
        """Learn how the model writes calls of tools.

        Raises:
            DataError: its prompts take no tools, or its calls cannot be read back.
        """
        form = None
        if format_of(self.prompts, self.tokenizer) != PLAIN:
            form = chat_template(self.tokenizer, self.prompts, tools=True).call_form()
        if form is None:
            raise DataError("--tools: expected a model whose chat template takes tools")
        return form

    @cached_property
    def answer_form(self) -> AnswerForm | None:
        """Learn how the model writes thoughts; None where it writes none."""
        if format_of(self.prompts, self.tokenizer) == PLAIN:
            return None
        return chat_template(self.tokenizer, self.prompts).answer_form()

    def request(self, prompt: list[int], wishes: Wishes, seed: int | None = None) -> Request:
        """Make the request for an answer, which ends where the context does.

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
        """Yield the answer to a prompt in pieces."""
        for request, token in generate_many(self.model, [self.request(prompt, wishes)]):
            if token is not None:
                yield answer.add(token)
                request.done = request.done or answer.stopped is not None
        yield answer.end()

    def continued(self, text: str, wishes: Wishes) -> Iterator[str]:
        """Yield what follows a text in pieces."""
        answer = Answer(self.tokenizer, wishes.stop, goes_on=True)
        yield from self.written(self.encode_beginning(text), wishes, answer)


class Answer:
    """The text of one answer while its tokens come.

    What may still become part of a character, or of a stop text, is held back until it is known.

    Args:
        stop: the first of these texts that is whole ends the answer, and is no part of it.
        goes_on: the answer goes on with a text, so its leading white space counts.

    Attributes:
        raw: the text with its leading white space.
        stopped: the stop text that ended it, if one did.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], goes_on: bool = False) -> None:
        self.raw = ""
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._opening: list[int] = tokenizer(BEFORE, add_special_tokens=False)["input_ids"] if goes_on else []
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        """Return the text without leading white space."""
        return self.raw if self._opening else self.raw.lstrip()

    def add(self, token: int) -> str:
        """Take a token; return the piece of text that is certain now."""
        self._tokens.append(token)
        written = self._tokenizer.decode(self._opening + self._tokens)[len(BEFORE) if self._opening else 0 :]
        known = written.rstrip(INCOMPLETE)
        if len(known) <= len(self.raw):  # some decoders take back what stands before half a character
            return ""
        self.raw = known
        found = ((self.raw.find(each), each) for each in self._stop)
        # The one that is whole first, as if each character were a token: that cannot depend on where tokens end.
        whole = [(place + len(each), place, each) for place, each in found if place >= 0]
        if whole:
            _, place, self.stopped = min(whole)
            self.raw = self.raw[:place]
        return self._piece(0 if whole else self._uncertain())

    def end(self) -> str:
        """Return the piece that was held back."""
        return self._piece(0)

    def _uncertain(self) -> int:
        """Count the characters at the end that a stop text may begin with."""
        lengths = (length for each in self._stop for length in range(1, len(each)) if self.raw.endswith(each[:length]))
        return max(lengths, default=0)

    def _piece(self, held_back: int) -> str:
        text = self.text
        begin, self._shown = self._shown, max(self._shown, len(text) - held_back)
        return text[begin : self._shown]


def as_trained(model: str, names: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Find the prompt keys of the run that wrote the folder, if one did.

    Raises:
        CheckpointError: there is no such folder.
        DataError: the run's template is not there any more.
    """
    folder = resolve(model).resolve()
    path = folder.parent / RUN_FILE
    if not path.is_file() or not ((folder / RECORD).is_file() or folder.name == EXPORTED):
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        known = {name: config[name] for name in names if config.get(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # torn by a power cut
        return {}
    if known:
        tell(f"asked as the run was trained, {', '.join(f'{name}: {known[name]}' for name in known)} ({path})")
    check_prompt_format(known.get("prompt_format", PLAIN))
    return known
