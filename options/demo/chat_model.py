"""A model and its tokenizer, asked with the prompts that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.chat.answer_form import AnswerForm, CallForm
from data.chat.chat_template import chat_template
from data.chat.messages import JSON, Said
from data.chat.native.kinds import end_tokens
from data.chat.prompts import AnyPrompts, as_prompts, check_prompt_format, templated
from data.errors import DataError
from data.images.image import Image
from data.settings import PLAIN, Pixels
from data.tokenized.answer_end import answer_end
from data.tokenized.tokenize import encode_beginning, encode_question
from data.tokenized.tokenizer import load_tokenizer
from models.api import CausalLM, load_model
from models.checkpoint.adapter import base_folder
from models.checkpoint.hub import find_model
from models.checkpoint.layout import ADAPTER, RECORD, resolve
from models.config_json import stop_ids
from options.demo.drafts import Drafter
from options.demo.generation import Passes, Request, Sampling, generate_many
from options.demo.pictures import DemoPictures, check_places, shown
from training.checkpoint.exporting import EXPORTED
from training.errors import ConfigError
from training.metrics.run_info import RUN_FILE

INCOMPLETE = "\ufffd"  # the end of a text that stops in the middle of a character of several tokens
DEPTHS = ("", "*/", "*/*/", "*/*/*/")  # below the current folder, where a run's folder may lie
BEFORE = "a"  # some decoders drop a blank at the beginning, so that something has to stand before it

TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are sampled, and where they end."""

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()


class ChatModel:
    """A model with its tokenizer and prompt format.

    Args:
        model: to ask instead of loading the folder's.
        adapter: to use with the model of the folder; its tokenizer counts where it has one.
        drafts: how many tokens to draft a step, as of `Drafter`; None for none.
        pixels: between which images are resized; None for a model of text alone.

    Attributes:
        context: most tokens of prompt and answer together; None without a limit.
        drafter: what answers by drafts, where asked for.
        pictures: what looks at images, where asked for.

    Raises:
        CheckpointError: the folder holds no complete model, or none that sees.
        DataError: it has no usable tokenizer, or no processor of images.
    """

    def __init__(
        self,
        folder: str | Path,
        prompts: AnyPrompts = None,
        dtype: torch.dtype | None = None,
        model: Passes | None = None,
        adapter: str | Path | None = None,
        drafts: int | None = None,
        pixels: Pixels | None = None,
    ) -> None:
        resolved = find_model(folder, adapter=True)
        origin = base_folder(resolved) if (resolved / ADAPTER).is_file() else resolved
        if adapter and (own := resolve(adapter, adapter=True) / TOKENIZER).is_file():
            resolved = own.parent
        # What a template does not support was trained rewritten, or not at all.
        self.prompts = replace(as_prompts(prompts), template_fallback="rewrite")
        self.tokenizer = load_tokenizer(resolved)
        # A base model learns its template's end of an answer, which none of its files names.
        self._stop = stop_ids(resolved) | end_tokens(self.tokenizer) | answer_end(self.tokenizer, self.prompts)
        self.drafter: Drafter | None = None
        self.model: Passes | CausalLM
        if model:
            self.model = model
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            ahead, sees = drafts is not None, pixels is not None
            loaded = load_model(folder, dtype, device, adapter=adapter, ahead=ahead, sees=sees)
            self.drafter = None if drafts is None else Drafter(loaded, drafts)
            self.model = self.drafter or loaded
        self.context = self.model.spec.context
        self.pictures: DemoPictures | None = None
        if pixels is not None and (eyes := self.model.spec.family.sees):
            self.pictures = DemoPictures(origin, pixels, eyes)

    def encode(self, said: Sequence[Said], tools: list[JSON] | None = None, images: Sequence[Image] = ()) -> list[int]:
        """Return the prompt that asks for an answer to these messages.

        Args:
            images: that marks in the messages are numbers of.
        """
        pictures = self.pictures.own if self.pictures else None
        ids = encode_question(said, self.tokenizer, self.prompts, tools, images, pictures)
        return check_places(ids, self.model.spec.family.sees, shown(said, images))

    def encode_beginning(self, text: str) -> list[int]:
        """Return the prompt that asks to continue a text."""
        return check_places(encode_beginning(text, self.tokenizer, self.prompts), self.model.spec.family.sees)

    def call_form(self) -> CallForm:
        """Learn how the model writes tool calls.

        Raises:
            DataError: its prompts support no tools, or its calls cannot be read back.
        """
        form = None
        if templated(self.prompts, self.tokenizer):
            form = chat_template(self.tokenizer, self.prompts, tools=True).call_form()
        if form is None:
            raise DataError("--tools: expected a model whose chat template takes tools")
        return form

    @cached_property
    def answer_form(self) -> AnswerForm | None:
        """How the model writes thoughts; None if it writes none."""
        if not templated(self.prompts, self.tokenizer):
            return None
        return chat_template(self.tokenizer, self.prompts).answer_form()

    def request(
        self, prompt: list[int], options: AnswerOptions, seed: int | None = None, images: Sequence[Image] = ()
    ) -> Request:
        """Return the request for an answer, which ends at the end of the context.

        Args:
            seed: replaces that of the options.
            images: those in the prompt, in order.

        Raises:
            DataError: the prompt leaves no room for an answer.
        """
        room = options.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt))
            if room < 1:
                raise DataError(
                    f"the prompt has {len(prompt)} tokens, but the model's context is {self.context}; "
                    "expected a shorter one"
                )
        sampling = options.sampling if seed is None else replace(options.sampling, seed=seed)
        see = partial(self.pictures.tensors, images) if self.pictures else tuple
        return Request(prompt, room, self._stop, sampling, see)

    def generate(self, requests: Iterable[Request], rows: int | None = None) -> Iterator[tuple[Request, int | None]]:
        """Yield tokens as `generate_many` does; with drafts one request after the other."""
        if self.drafter:
            return self.drafter.generate(requests)
        return generate_many(self.model, requests, rows)

    def write(
        self, prompt: list[int], options: AnswerOptions, answer: Answer, images: Sequence[Image] = ()
    ) -> Iterator[str]:
        """Yield the answer to a prompt in pieces."""
        for request, token in self.generate([self.request(prompt, options, None, images)]):
            if token is not None:
                yield answer.add(token)
                request.done = request.done or answer.stopped
        yield answer.end()

    def continue_text(self, text: str, options: AnswerOptions) -> Iterator[str]:
        """Yield the continuation of a text in pieces."""
        answer = Answer(self.tokenizer, options.stop, continues=True)
        yield from self.write(self.encode_beginning(text), options, answer)


class Answer:
    """The text of one answer while its tokens arrive.

    Text that may still become part of a character, or of a stop text, is held back.

    Args:
        stop: the first of these texts that is complete ends the answer, and is no part of it.
        continues: the answer continues a text, so its leading white space counts.

    Attributes:
        raw: the text with its leading white space.
        stopped: whether a stop text ended it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], continues: bool = False) -> None:
        self.raw = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._opening: list[int] = tokenizer(BEFORE, add_special_tokens=False)["input_ids"] if continues else []
        self._tokens: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        """The text without leading white space."""
        return self.raw if self._opening else self.raw.lstrip()

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        self._tokens.append(token)
        written = self._tokenizer.decode(self._opening + self._tokens)[len(BEFORE) if self._opening else 0 :]
        known = written.rstrip(INCOMPLETE)
        if len(known) <= len(self.raw):  # some decoders drop what stands before half a character
            return ""
        self.raw = known
        found = ((self.raw.find(each), each) for each in self._stop)
        # The stop text that ends first, as if each character were a token: independent of where tokens end.
        complete = [(place + len(each), place) for place, each in found if place >= 0]
        if complete:
            self.raw, self.stopped = self.raw[: min(complete)[1]], True
            return self.end()
        return self._next_piece(held_back=max(map(self._begun, self._stop), default=0))

    def end(self) -> str:
        """Return the text that was held back."""
        return self._next_piece(held_back=0)

    def _begun(self, stop: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        lengths = (length for length in range(1, len(stop)) if self.raw.endswith(stop[:length]))
        return max(lengths, default=0)

    def _next_piece(self, held_back: int) -> str:
        begin, self._shown = self._shown, max(self._shown, len(self.text) - held_back)
        return self.text[begin : self._shown]


def find_trained_prompts(model: str, names: Sequence[str], notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the prompt keys of the run that wrote a folder, if a run did.

    Raises:
        CheckpointError: there is no such folder.
        DataError: the run's template is gone.
    """
    path, known = keys_of_run(model, names)
    if known:
        notify(f"prompts as in training: {', '.join(f'{name}: {known[name]}' for name in known)} ({path})")
    check_prompt_format(known.get("prompt_format", PLAIN))
    return known


def keys_of_run(model: str, names: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Read some keys of the run that wrote a folder, as far as it has them; return their file, too."""
    folder = find_model(model, adapter=True).resolve()
    path = folder.parent / RUN_FILE
    if not path.is_file() or not ((folder / RECORD).is_file() or folder.name == EXPORTED):
        return path, {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        return path, {name: config[name] for name in names if config.get(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # torn by a power cut
        return path, {}


def find_newest_result() -> str:
    """Find the model that a run in the current folder wrote last: a checkpoint, or the export at its end.

    Raises:
        ConfigError: there is none.
    """
    runs = chain.from_iterable(Path().glob(f"{depth}{RUN_FILE}") for depth in DEPTHS)
    configs = chain.from_iterable(run.parent.glob("[!.]*/*config.json") for run in runs)  # an adapter has one too
    folders = (config.parent for config in configs)
    found = [each for each in folders if (each / RECORD).is_file() or each.name == EXPORTED]
    if not found:
        raise ConfigError("--model: no run in this folder has a checkpoint; expected --model DIR, such as a save_path")
    return str(max(found, key=lambda folder: folder.stat().st_mtime))
