"""A dialogue with a model, turn by turn.

Each turn renders the whole dialogue anew, so an answer never depends on how the turns came about. Where the model calls
a tool, the call is shown and the user types its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from data.chat.messages import JSON, Call, Said, as_record
from data.errors import DataError
from data.images.image import Image
from data.paths import read_small
from data.records.chat import Chat as ChatRecord
from data.records.chat import Message
from data.records.record import explain
from options.demo.chat_model import Answer, AnswerOptions, ChatModel
from options.demo.pictures import illustrated, shown


class ChatSession:
    """A dialogue. It remembers its turns, and drops the oldest ones when the context is full.

    Args:
        notify: prints a line that is no part of an answer.
        opening: messages before the first question, such as a system message.
        tools: schemas of the tools that the model may call.
        pictures: paths of images that the first question is about.

    Attributes:
        said: the opening and the turns.
        images: that marks in these are numbers of.
    """

    def __init__(
        self,
        model: ChatModel,
        options: AnswerOptions,
        notify: Callable[[str], None],
        opening: Sequence[Said] = (),
        tools: Sequence[JSON] = (),
        pictures: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._options = options
        self._notify = notify
        self._opening = tuple(opening)
        self._tools = list(tools)
        self._call_form = model.call_form() if tools else None
        self.said: tuple[Said, ...] = self._opening
        self._paths, self.images = pictures, tuple[Image, ...]()
        self._illustrated("?")  # a file that is no image ends the chat before it begins

    def reset(self) -> None:
        """Forget all turns."""
        self.said = self._opening

    def ask(self, text: str, about: str | None = None) -> Iterator[str]:
        """Yield the answer in pieces as it is written, and remember it.

        Args:
            about: the `input` of a record of type instruct.
        """
        said = (*self.said, Said("user", self._illustrated(text), input=about))
        results: list[Said | None] = [None]
        while results:
            answer = Answer(self._model.tokenizer, self._options.stop)
            said, prompt = self._fit_context(said)
            yield from self._model.write(prompt, self._options, answer, shown(said, self.images))
            message = self._read_answer(answer.text, sum(len(each.calls) for each in said))
            results = [self._ask_result(call) for call in message.calls]
            said = (*said, message)
            if None in results:
                break
            said = (*said, *filter(None, results))
        self.said = said

    def save(self, path: Path) -> None:
        """Append the dialogue to a file of records that can be trained on.

        Raises:
            DataError: there is no answer yet, or the file cannot be written.
        """
        if self.said == self._opening:
            raise DataError("nothing was said yet; expected a question first")
        record: JSON = {"messages": as_record(self.said)} | ({"tools": self._tools} if self._tools else {})
        if images := shown(self.said, self.images):
            record["images"] = [image.path for image in images]
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be written: {error}") from None

    def _illustrated(self, text: str) -> str:
        """Put the images into the first question."""
        if self._paths and self._model.pictures and self.said == self._opening:
            text, self.images = illustrated(text, self._paths, self._model.pictures.looking_from(Path()))
        return text

    def _read_answer(self, text: str, calls_before: int) -> Said:
        """Split an answer into thoughts, words and calls, as templates render them in later turns."""
        calls: tuple[Call, ...] = ()
        if self._call_form:
            try:
                text, calls = self._call_form.read(text, calls_before + 1)
            except ValueError as error:
                raise DataError(f"the model's call cannot be read: {error}") from None
        form = self._model.answer_form
        thought, words = form.read(text) if form else ("", text)
        return Said("assistant", words, thought, calls, supervised=True)

    def _ask_result(self, call: Call) -> Said | None:
        """Show a call and let the user type its result; None at the end of the input."""
        self._notify(f"call: {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
        try:
            return Said("tool", input(f"\nresult of {call.name}> ").strip(), call_id=call.id, name=call.name)
        except EOFError:
            return None

    def _fit_context(self, said: tuple[Said, ...]) -> tuple[tuple[Said, ...], list[int]]:
        """Drop the oldest rounds until prompt and answer fit the context; return the rest and its prompt."""
        context, dropped = self._model.context, 0
        prompt = self._model.encode(said, self._tools, self.images)
        while context is not None and len(prompt) + self._options.max_new_tokens > context:
            asked = [place for place, each in enumerate(said) if each.role == "user"]
            if len(asked) == 1:
                if (room := context - len(prompt)) > 0:
                    self._notify(f"the context of {context} tokens has room for {room} tokens of the answer")
                break
            said = said[: asked[0]] + said[asked[1] :]
            dropped += 1
            prompt = self._model.encode(said, self._tools, self.images)
        if dropped:
            self._notify(
                f"{dropped} of the oldest questions and answers are left out: the context has {context} tokens"
            )
        return said, prompt


def read_text(path: str) -> str:
    """Read a text file without the white space around it."""
    try:
        text = read_small(path).decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise DataError(f"{path}: expected a text, found none")
    return text


def read_tools(path: str) -> list[JSON]:
    """Read a file's list of tools, in the form that records of type chat have."""
    text, answered = read_text(path), Message(role="assistant", content="?")
    try:
        tools = ChatRecord(messages=[answered], tools=from_json(text, allow_inf_nan=False)).tools
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error)}") from None
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}") from None
    functions = [tool.get("function") for tool in tools]
    if not tools or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise DataError(f"{path}: expected a list of tools, each with a function that has a name")
    return tools
