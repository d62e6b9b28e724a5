"""Write records as texts, with the parts of them that are trained: by a chat template, or as an instruction prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial

from transformers import PreTrainedTokenizerBase

from data.chat.chat_template import ChatTemplate, chat_template
from data.chat.gdgpt import write_gdgpt
from data.chat.messages import JSON, Said, each_said_in, said_in, with_mask, without_end
from data.chat.plain import write_plain
from data.chat.prompts import Prompts, end_of_sequence, format_of, templated
from data.chat.rendered import RenderedText, Span, join
from data.chat.sandbox import SlowTemplate
from data.errors import DataError
from data.images.expansion import put_out
from data.images.image import Image
from data.images.marks import mark_of, numbers_in
from data.images.pictures import Pictures
from data.prompt_texts import PLAIN_ANSWER
from data.records.chat import Chat, Unanswered
from data.records.record import Passage, Pretrain, Record, Segments, Tokenized
from data.settings import GDGPT

NO_TEMPLATE = "chat_template_kwargs are not used, as this prompt_format has no template"
TWICE = "the token that ends an answer, or begins or ends a text, stands there already and is not written once more"
RENDERED = "a text is a dialogue that a chat template wrote, so that users' words are trained, too; expected messages"
SHOWN = 60  # characters of an example


class Writer:
    """Write records in one format.

    Args:
        pictures: the model's own of images, where a record has some.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, pictures: Pictures | None = None) -> None:
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._prompts = prompts
        self._format = format_of(prompts, tokenizer)
        self._templated = templated(prompts, tokenizer)
        self._template: Callable[[bool], ChatTemplate] = cache(partial(chat_template, tokenizer, prompts))

    def write(self, record: Record) -> tuple[RenderedText, list[int]]:
        """Write a record's text with its trained spans, and the ids that go before it.

        A chat template writes its own beginning of sequence; elsewhere the tokenizer's goes first, as in pretraining.

        Raises:
            DataError: the format cannot hold the record.
        """
        written, prefix = self._write(record)
        in_template = self._templated and not isinstance(record, (Pretrain, Segments))
        keys = _template_keys(record) if in_template else None
        return self._with_images(written, record.images, keys), prefix

    def _write(self, record: Record) -> tuple[RenderedText, list[int]]:
        if isinstance(record, Passage) or (isinstance(record, Pretrain) and self._format == GDGPT):  # which adds no end
            return RenderedText(record.text, [(0, len(record.text))]), self.beginning
        if isinstance(record, Pretrain):
            return self._continued(record.text)
        if isinstance(record, Segments):
            return join([Span(segment.text, segment.label) for segment in record.segments]), []
        assert not isinstance(record, Tokenized)  # which has no text

        tools, own = _template_keys(record)
        template = self._template_of(tools, own) if self._templated else None
        end = template.end if template else end_of_sequence(self._tokenizer.eos_token)
        notes = {NO_TEMPLATE: json.dumps(own)} if own and not template else {}

        if self._format == GDGPT:
            said = with_mask(each_said_in(record), self._prompts.mask)
            written = write_gdgpt(said, tools, end, isinstance(record, Unanswered))
            loss = [(0, len(written.text))] if self._prompts.mask == "all" else written.loss
            return written._replace(loss=loss, notes=notes), []

        said = with_mask(said_in(record), self._prompts.mask)
        bare = [without_end(message, end) for message in said]
        if twice := [one.text for one, other in zip(said, bare, strict=True) if one is not other]:
            notes[TWICE] = repr(twice[0][-SHOWN:])

        if isinstance(record, Unanswered):
            asked = template.ask(bare, tools, False) if template else write_plain(bare, tools, end, open_end=True).text
            written = RenderedText(asked.removesuffix(PLAIN_ANSWER), [])
        else:
            written = template.write(bare, tools) if template else write_plain(bare, tools, end)
        loss = [(0, len(written.text))] if self._prompts.mask == "all" else written.loss
        return RenderedText(written.text, loss, written.notes | notes), [] if template else self.beginning

    def ask(
        self, said: Sequence[Said], tools: list[JSON], images: Sequence[Image] = ()
    ) -> tuple[RenderedText, list[int]]:
        """Write the prompt for the answer to the last message, and the ids that go before it."""
        if self._templated:
            asked = RenderedText(self._template(bool(tools)).ask(said, tools), [])
            return self._with_images(asked, images, (tools, {})), []
        end = end_of_sequence(self._tokenizer.eos_token)
        write = write_gdgpt if self._format == GDGPT else write_plain
        return self._with_images(write(said, tools, end, open_end=True), images, None), self.beginning

    def _with_images(
        self, written: RenderedText, images: Sequence[Image], keys: tuple[list[JSON], JSON] | None
    ) -> RenderedText:
        """Put out the images of a text, which a template wrote where there are keys of it."""
        if not images:
            if numbers_in(written.text):
                raise DataError(f"a text has a mark for images, {mark_of(0)!a}; expected none of these characters")
            return written
        assert self._pictures is not None  # they were opened by it
        picture = self._template_of(*keys).picture if keys else self._pictures.placeholder
        return put_out(written, images, picture, self._pictures)

    def _template_of(self, tools: list[JSON], own: JSON) -> ChatTemplate:
        if not own:
            return self._template(bool(tools))
        prompts = replace(self._prompts, template_args=self._prompts.template_args | own)
        return chat_template(self._tokenizer, prompts, bool(tools))

    def _continued(self, text: str) -> tuple[RenderedText, list[int]]:
        """Write a text with the tokens before and behind it that it does not have by itself."""
        begin, end = self._tokenizer.bos_token, end_of_sequence(self._tokenizer.eos_token)
        begun = bool(begin and self.beginning) and text.startswith(begin)
        notes = {TWICE: repr(text[-SHOWN:])} if begun or text.endswith(end) else {}
        if self._turn and self._turn in text:
            notes[RENDERED] = repr(text[:SHOWN])
        text = text.removesuffix(end) + end
        return RenderedText(text, [(0, len(text))], notes), [] if begun else self.beginning

    @cached_property
    def _turn(self) -> str:
        """Return what a template writes between a question and its answer; empty where there is none."""
        with suppress(DataError, SlowTemplate):
            return self._template(False).turn if self._templated else ""
        return ""

    @cached_property
    def beginning(self) -> list[int]:
        """Return the ids that the tokenizer puts before a text, often one <s>, often none; gdGPT leaves them out."""
        if self._format == GDGPT:
            return []
        bare: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        dressed: list[int] = self._tokenizer("a")["input_ids"]
        starts = range(len(dressed) - len(bare) + 1)
        return next((dressed[:start] for start in starts if dressed[start : start + len(bare)] == bare), [])


def _template_keys(record: Record) -> tuple[list[JSON], JSON]:
    """Return a record's tools and its own arguments for a template."""
    return (record.tools, record.chat_template_kwargs) if isinstance(record, Chat) else ([], {})
