"""Render a dialogue with a chat template and find the characters to train.

A record is rendered twice: once as a server renders it, which is the text to train on, and once with marks around its
words (`data.chat.word_marks`), which tells where they are. From the marks follows which tokens are trained
(`data.chat.loss_mask`). One second rendering serves all simple dialogues of the same roles
(`data.chat.word_marks.Frame`). Where a template looks at the words of users or tools, only the assistant's get marks.
A record is refused if it cannot be masked exactly, or if the template drops words, calls or thoughts of the last
answer.

Features that a template does not support are rewritten or refused for all records alike (`data.chat.fitting`).

Cost: a rendering a record, 15 to 150 microseconds, and two and more where there are calls, thoughts or tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from data.chat.answer_form import KNOWN_ANSWER, KNOWN_CALLS, AnswerForm, CallForm, learn_answer, learn_calls
from data.chat.control_tokens import one_of
from data.chat.fallbacks import ANSWER, CALLING, EXAMPLE_TOOL, FEATURES, QUESTION
from data.chat.fitting import Fitting
from data.chat.loss_mask import MOST_KNOWN, TurnFinder, Unplaceable, Vocabulary, generated, trained_ranges
from data.chat.messages import JSON, Call, Said, in_questions
from data.chat.prompts import Prompts, end_of_sequence, template_in_file
from data.chat.rendered import RenderedText, joined
from data.chat.rendering import Rendering
from data.chat.template_check import EXAMPLE, agreement, check_order, check_survival
from data.chat.word_marks import Frame, Marked, Markers, Turn, frame_key, frame_of, turns_in
from data.errors import DataError
from data.images.marks import words_in
from data.settings import CHAT_TEMPLATE

IN_PIECES = (
    "the chat template writes {tokens}, no tokens of this tokenizer, so that they are trained in pieces; expected a "
    "tokenizer that has them (added_tokens), or the template of this one"
)
UNPLACED = (
    "the chat template changes the words of an answer, or what stands before it is not how a server's prompt ends; use "
    "prompt_format: plain"
)
NO_TOKEN = "the chat template ends an answer with {token}, which is no token of this tokenizer"
NO_FORM = "the chat template writes calls in a form that cannot be read back; expected names and JSON objects"
DATED = (
    "the chat template writes the date of the day on which they are tokenized: once the cache is gone they become "
    "other samples, and no stopped run goes on; expected a fixed date (by template_args, mostly date_string)"
)
IMAGES_FIRST = "the chat template writes the images of a message before its words, wherever they stand in it"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CONTROL = re.compile(r"\s*(<[|｜][^<>|｜]{1,40}[|｜]>|<\w*(?:end|eot|eos|eom|turn)\w*>|</s>)")
MARK = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[^<>|｜\s/]{1,40}[|｜]>")  # such as <|call>, <call|> and <|call|>
MOST_TEMPLATES = 100  # kept for a tokenizer: records may bring arguments of their own

_templates: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, ChatTemplate]] = WeakKeyDictionary()


def chat_template(tokenizer: PreTrainedTokenizerBase, prompts: Prompts, tools: bool = False) -> ChatTemplate:
    """Return the requested template, cached with all that was learnt of it.

    Args:
        prompts: of a format that is not plain.
        tools: some tokenizers have a template of its own for dialogues with tools.

    Raises:
        DataError: there is no such template.
    """
    if prompts.prompt_format not in (None, CHAT_TEMPLATE):
        text = template_in_file(str(prompts.prompt_format))
    elif tokenizer.chat_template:
        named = tokenizer.chat_template
        if isinstance(named, dict) and "default" not in named and not (tools and "tool_use" in named):
            raise DataError(
                f"the tokenizer has the chat templates {', '.join(sorted(named))} and no default; write the one to use "
                "to a Jinja file and set prompt_format: FILE"
            )
        text = tokenizer.get_chat_template(None, [{}] if tools else None)
    else:
        raise DataError("the tokenizer has no chat template; use prompt_format: plain")

    known = _templates.setdefault(tokenizer, {})
    settings = json.dumps(prompts.template_args, sort_keys=True, default=str), prompts.template_fallback
    key = (text, tokenizer.eos_token, len(tokenizer), *settings)
    if key not in known:
        if len(known) >= MOST_TEMPLATES:
            known.clear()
        known[key] = ChatTemplate(tokenizer, text, prompts)
    return known[key]


class ChatTemplate:
    """Write dialogues by one template.

    Args:
        text: the template in Jinja; it runs in transformers' sandbox.

    Raises:
        DataError: the tokenizer lacks the token that ends an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, prompts: Prompts) -> None:
        self._rendering = Rendering(tokenizer, text, prompts)
        self._fitting = Fitting(self._rendering, prompts.template_fallback)
        self._eos_token = tokenizer.eos_token
        self._tracks = bool(GENERATION.search(text))

        added = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._vocabulary = Vocabulary(one_of(special), one_of(special | {token.content for token in added}))
        self._finder = TurnFinder(self._vocabulary)
        self._frames: dict[tuple[str, ...] | None, Frame | None] = {}
        self._finder.end_of_turn = self._end_of_turn()

        vocabulary = set(tokenizer.get_vocab())
        if (lacking := self._lacking_end(vocabulary)) is not None:
            raise DataError(NO_TOKEN.format(token=lacking))
        self._in_pieces = self._marks() - vocabulary

    def write(self, said: Sequence[Said], tools: list[JSON] | None = None) -> RenderedText:
        """Write a dialogue's whole text and the spans of it that are trained.

        Raises:
            DataError: the template refuses the dialogue, leaves out some of it, or cannot be masked exactly.
        """
        notes: dict[str, str] = {}
        asked, tools = in_questions(said), tools or []
        said = self._rendering.in_place(asked)
        moved = next((each.text for each, before in zip(said, asked, strict=True) if each is not before), "")
        key = None if tools else frame_key(said)
        if key not in self._frames:  # else the template takes such dialogues as they are
            said, tools, notes = self._fitting.fit(said, tools)
            key = None if tools else frame_key(said)

        if moved:
            notes = notes | {IMAGES_FIRST: repr(" ".join(words_in(moved))[:EXAMPLE])}

        self._rendering.date = ""
        text = self._rendering.text(said, tools)
        if self._rendering.date and self._rendering.date in text:
            notes[DATED] = self._rendering.date
        if self._in_pieces and (pieces := [mark for mark in sorted(self._in_pieces) if mark in text]):
            notes[IN_PIECES.format(tokens=", ".join(pieces))] = pieces[0]

        frame = self._frames.get(key)
        turns, more = (frame and turns_in(frame, said, text)) or self._turns(said, tools, text, key)
        notes = notes | more
        loss = list(chain.from_iterable(trained_ranges(said[turn.message], turn) for turn in turns))

        # Nothing tells the model to stop where no token ends the last answer.
        last = turns[-1]
        if not last.ended and last.message == len(said) - 1 and said[-1].supervised:
            end = last.parts[-1][1]
            token = end_of_sequence(self._eos_token)
            text = text[:end] + token + text[end:]
            loss.append((end, end + len(token)))
        return RenderedText(text, joined(loss), notes)

    def ask(self, said: Sequence[Said], tools: list[JSON] | None = None, opened: bool = True) -> str:
        """Write the prompt that asks a model to continue these messages; if not `opened`, without an answer's begin.

        Raises:
            DataError: the template refuses the dialogue.
        """
        asked = self._rendering.in_place(in_questions(said))
        fitted, tools, _ = self._fitting.fit([*asked, ANSWER], tools or [])
        return self._rendering.text(fitted[:-1], tools, asking=opened)

    @property
    def picture(self) -> str:
        """Return what the template writes for an image; raise a DataError where it takes none."""
        return self._rendering.picture

    @property
    def end(self) -> str:
        """Return what ends an answer."""
        return self._finder.end_of_turn or self._eos_token or ""

    @cached_property
    def turn(self) -> str:
        """Return what stands between a question and its answer."""
        text = self._rendering.text([QUESTION, ANSWER, QUESTION, ANSWER], [])
        return text.partition(QUESTION.text)[2].partition(ANSWER.text)[0].strip()

    def call_form(self) -> CallForm | None:
        """Return how calls are written; None if the template does not support them, so that they are text.

        Raises:
            DataError: they are written in a form that cannot be read back.
        """
        if not all(self._fitting.takes(feature) for feature in FEATURES if feature.present(CALLING, [EXAMPLE_TOOL])):
            return None
        for words in (ANSWER.text, ""):  # words keep apart what stands before an answer; some templates take none there
            one, two = (self._called(words, KNOWN_CALLS[:count]) for count in (1, 2))
            if one and (form := learn_calls(one, two)):
                return form
        raise DataError(NO_FORM)

    def answer_form(self) -> AnswerForm:
        """Return how thoughts and words are written."""
        tools = [EXAMPLE_TOOL] if self._rendering.needs_tools else []
        return learn_answer(
            *(self._answer(said, tools) or "" for said in (KNOWN_ANSWER._replace(reasoning=""), KNOWN_ANSWER))
        )

    def _called(self, words: str, calls: tuple[Call, ...]) -> str | None:
        """Render what follows an answer's words with these calls; None if the template refuses."""
        answer = self._answer(Said("assistant", words, calls=calls), [EXAMPLE_TOOL])
        return answer.partition(words)[2] or None if answer and words else answer

    def _answer(self, said: Said, tools: list[JSON]) -> str | None:
        """Render what follows the prompt for this answer; None if the template refuses."""
        with suppress(DataError):
            text = self._rendering.text([QUESTION, said], tools)
            return text[agreement(self._rendering.text([QUESTION], tools, asking=True), text) :]
        return None

    def _turns(
        self, said: Sequence[Said], tools: list[JSON], text: str, key: tuple[str, ...] | None
    ) -> tuple[list[Turn], dict[str, str]]:
        """Find the turns by marks; dialogues with the same key share one result."""
        # A template may look at what others than the assistant say, or whether they say anything; marks there would
        # make another text of it. So marks stand around all words first, then around fewer.
        attempts = [(True, False), (False, False)]  # around everybody's words; around those of empty messages, too
        if any(not message.text.strip() and not message.calls for message in said):
            attempts.insert(0, (True, True))
        for everybody, empty in attempts:
            with suppress(Unplaceable):
                markers = Markers(said, text, everybody, empty)
                self._check_results(said, tools, text, markers)
                turns, notes, whole = self._turns_by_marks(said, tools, text, markers, everybody)
                if key and everybody:
                    if len(self._frames) >= MOST_KNOWN:
                        self._frames.clear()
                    self._frames[key] = frame_of(whole, turns, notes)
                return turns, notes
        raise DataError(UNPLACED)

    def _check_results(self, said: Sequence[Said], tools: list[JSON], text: str, markers: Markers) -> None:
        """Check where the template writes results that have no marks of their own, by plain ones in their place."""
        marked = {leaf.message for leaf in markers.leaves}
        if any(message.role == "tool" and number not in marked for number, message in enumerate(said)):
            found = [message._replace(text="Found.") if message.role == "tool" else message for message in said]
            plain = Markers(found, text)
            check_order(plain.read(self._rendering.text(plain.said, tools)).marks, said)

    def _turns_by_marks(
        self, said: Sequence[Said], tools: list[JSON], text: str, markers: Markers, everybody: bool
    ) -> tuple[list[Turn], dict[str, str], Marked]:
        def rendered(part: Sequence[Said], asking: bool = False) -> Marked | None:
            try:
                return markers.read(self._rendering.text(part, tools, asking))
            except DataError:  # not every beginning of a dialogue is one that the template takes
                return None

        whole = markers.read(self._rendering.text(markers.said, tools))
        if whole.text != text:
            raise Unplaceable
        check_order(whole.marks, said)
        context = bool(tools), said[0].role
        turns, notes = self._finder.find(whole, markers.said, rendered, context, strict=not everybody)
        notes |= check_survival(said, tools, whole, markers.leaves, turns)

        if self._tracks:
            spans = self._rendering.generated(said, tools)
            turns, marked = generated(turns, spans, text, self._vocabulary)
            notes |= marked
        return turns, notes, whole

    def _end_of_turn(self) -> str | None:
        """Find the tokens that end an answer in the middle of a dialogue."""
        said = [QUESTION, ANSWER, QUESTION]
        with suppress(Unplaceable, DataError):
            markers = Markers(said, "")
            (turn,), _, whole = self._turns_by_marks(said, [], self._rendering.text(said, []), markers, everybody=True)
            if turn.ended and turn.words:
                return whole.text[turn.words[1] : turn.parts[-1][1]].strip()
        return None

    def _marks(self) -> set[str]:
        """Find the control tokens that the template writes around words, thoughts, calls and tools."""
        marks: set[str] = set()
        for said, tools in (([QUESTION, KNOWN_ANSWER], []), (CALLING, [EXAMPLE_TOOL])):
            with suppress(DataError):
                marks.update(MARK.findall(self._rendering.text(said, tools)))
        return marks

    def _lacking_end(self, vocabulary: set[str]) -> str | None:
        """Return the end of an answer if this tokenizer would cut it into pieces."""
        markers = Markers([QUESTION, ANSWER], "")
        with suppress(DataError):
            text, marks = markers.read(self._rendering.text(markers.said, []))
            end = CONTROL.match(text, marks[-1].at) if marks else None
            if end and end[1] not in vocabulary and not self._vocabulary.any.match(end[1]):
                return str(end[1])
        return None
