"""One chat template: what it can see, the form in which it takes messages, and what it makes of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import chain, product
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.quantities import counted
from data.chat.fallbacks import ANSWER, CALLING, EXAMPLE_TOOL, LONG_ID, QUESTION, TRIED_TOOL
from data.chat.messages import JSON, Form, Said, as_dicts
from data.chat.prompts import Prompts
from data.chat.sandbox import SlowTemplate, generated_spans, render
from data.chat.template_check import named_by_id
from data.chat.word_marks import NAME, TOOL, Markers
from data.errors import DataError
from data.images.marks import Range, mark_of, numbers_in, replaced, words_in

REFUSED = "the chat template refuses the record: {reason}"
NO_IMAGES = "the chat template takes no images; expected the model's own, or prompt_format: plain"
TYPED = (
    "the chat template writes {found} where {expected}, each as {picture!r}; expected these words nowhere in the texts "
    "of a record with images"
)
LEFT, RIGHT = "Zqleft", "Zqright"  # words that no template has by itself
FORMS = [Form(parts, text, none) for none, text, parts in product((False, True), repeat=3)]


class Rendering:
    """Render dialogues with one template, in the form in which it takes messages, which is tried.

    Args:
        text: the template in Jinja; it runs in transformers' sandbox.

    Attributes:
        date: of the day, as the template last asked for it; whoever wants to know whether it does empties it before.
        needs_tools: whether the template takes no dialogue without tools.
        short_ids: whether it takes calls with ids of nine letters and digits alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, prompts: Prompts) -> None:
        self._text, self.date = text, ""
        self._names = dict(tokenizer.special_tokens_map) | {"strftime_now": self._today} | prompts.template_args

        # Words alone are tried first, then calls.
        short = [QUESTION, ANSWER]
        plain = next((form for form in FORMS[:2] if self._writes_in(form, short)), FORMS[0])
        forms = [form for form in FORMS if form.parts == plain.parts]
        self._form = next((form for form in forms if self._writes_in(form, CALLING)), plain)

        self.needs_tools = not self.writes(short, []) and self.writes(short, [EXAMPLE_TOOL])
        self.short_ids = self._accepts(CALLING) and not self._accepts(LONG_ID)

    def text(self, said: Sequence[Said], tools: list[JSON], asking: bool = False) -> str:
        """Render a dialogue, or with `asking` the prompt for an answer to it.

        Raises:
            DataError: the template refuses it.
        """
        return self._with_marks(said, self._rendered(said, tools, asking), [])[0]

    def _rendered(self, said: Sequence[Said], tools: list[JSON], asking: bool = False) -> str:
        # What render_jinja_template does, without its copy of the messages, which takes longer than the rendering.
        try:
            return render(self._text, **self._given(said, tools), add_generation_prompt=asking)
        except SlowTemplate:
            raise
        except Exception as error:  # a template may raise anything
            raise DataError(REFUSED.format(reason=" ".join(str(error).split()))) from None

    def generated(self, said: Sequence[Said], tools: list[JSON]) -> list[Range]:
        """Find the ranges of characters that the template itself marks as generated."""
        spans = generated_spans(self._text, **self._given(said, tools), add_generation_prompt=False)
        return self._with_marks(said, self._rendered(said, tools), spans)[1] if _numbers(said) else spans

    @property
    def picture(self) -> str:
        """Return what the template writes for an image.

        Raises:
            DataError: it takes none.
        """
        return self._picture[0]

    def in_place(self, said: Sequence[Said]) -> Sequence[Said]:
        """Move images before the words of their messages, where the template writes them."""
        if not _numbers(said) or not self._picture[1]:
            return said
        moved = ["".join([*map(mark_of, numbers_in(each.text)), *words_in(each.text)]) for each in said]
        return [each if each.text == text else each._replace(text=text) for each, text in zip(said, moved, strict=True)]

    @cached_property
    def _picture(self) -> tuple[str, bool]:
        """Return what the template writes for an image, and whether it moves that before the words."""
        between = [Said("user", f"{LEFT}{mark_of(0)}{RIGHT}"), ANSWER]
        before = [[Said("user", "".join(map(mark_of, range(count))) + LEFT), ANSWER] for count in (1, 2)]
        for tools in ([], [EXAMPLE_TOOL]):
            with suppress(DataError):
                text = self._rendered(between, tools)
                written = text.partition(LEFT)[2].rpartition(RIGHT)[0]
                if written.strip():
                    return written, False

                # Some write all images of a message first (LLaVA): a second one tells what they write for each.
                one, two = (self._rendered(said, tools) for said in before)
                begin, end = one.find(LEFT), two.find(LEFT)
                written = two[begin:end]
                if written.strip() and one[:begin].endswith(written) and one[begin:] == two[end:]:
                    return written, True
        raise DataError(NO_IMAGES)

    def _with_marks(self, said: Sequence[Said], text: str, ranges: list[Range]) -> tuple[str, list[Range]]:
        """Put the marks of a dialogue's images where the template wrote something for these."""
        if not (numbers := _numbers(said)):
            return text, ranges
        places = [found.span() for found in re.finditer(re.escape(self.picture), text)]
        if len(places) != len(numbers):
            found, expected = counted(len(places), "image"), f"there are {len(numbers)}"
            raise DataError(TYPED.format(found=found, expected=expected, picture=self.picture))
        text, ranges, _ = replaced(text, ranges, places, [mark_of(number) for number in numbers])
        return text, ranges

    def writes(self, said: Sequence[Said], tools: list[JSON]) -> bool:
        """Test whether the template writes all words of a dialogue, and of its tools."""
        markers = Markers(said, "")
        with suppress(DataError):
            text, marks = markers.read(self.text(markers.said, tools))
            missing = set(markers.leaves) - {mark.leaf for mark in marks}
            return (not tools or TRIED_TOOL in text) and all(
                leaf.part == TOOL or (leaf.part == NAME and named_by_id(said[leaf.message].calls[leaf.call], text))
                for leaf in missing
            )
        return False

    def _writes_in(self, form: Form, said: Sequence[Said]) -> bool:
        self._form = form
        return self.writes(said, []) or self.writes(said, [EXAMPLE_TOOL])

    def _accepts(self, said: Sequence[Said]) -> bool:
        with suppress(DataError):
            self.text(said, [])
            return True
        return False

    def _today(self, form: str) -> str:
        """Return today's date as transformers gives it to templates."""
        self.date = datetime.now().strftime(form)
        return self.date

    def _given(self, said: Sequence[Said], tools: list[JSON]) -> dict[str, Any]:
        """Collect the variables that a template can see."""
        return {"messages": as_dicts(said, self._form), "tools": tools or None, "documents": None, **self._names}


def _numbers(said: Sequence[Said]) -> list[int]:
    """Return the numbers of a dialogue's images, in order; mostly none."""
    return list(chain.from_iterable(numbers_in(each.text) for each in said))
