"""Lead a dialogue with a model, turn by turn.

Each turn asks with the whole dialogue, as it would be rendered at once, so that an answer never depends on how the
turns came about. Where the model calls a tool, the call is shown and its result is typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from data.chat.messages import JSON, Call, Said, as_record
from data.errors import DataError
from data.paths import read_small
from data.records.chat import Chat as ChatRecord
from data.records.chat import Message
from data.records.record import explain
from training.demo.speaker import Answer, Speaker, Wishes

Tell = Callable[[str], None]
MOST_CALLS = 16  # in a turn; a model may go round in a circle
TOO_MANY = f"the model still calls tools after {MOST_CALLS} calls; expected an answer"


class Chat:
    """A dialogue; it remembers the turns so far, of which the oldest go where the context is full.

    Args:
        tell: gets what the user has to know, a line each.
        opening: what stands before the first question, such as a system message.
        tools: schemas of the tools that the model may call.

    Attributes:
        said: the opening and the turns.
    """

    def __init__(
        self, speaker: Speaker, wishes: Wishes, tell: Tell, opening: Sequence[Said] = (), tools: Sequence[JSON] = ()
    ) -> None:
        self._speaker = speaker
        self._wishes = wishes
        self._tell = tell
        self._opening = tuple(opening)
        self._tools = list(tools)
        self._form = speaker.call_form() if tools else None
        self.said: tuple[Said, ...] = self._opening

    def reset(self) -> None:
        """Forget all turns."""
        self.said = self._opening

    def ask(self, text: str, about: str = "") -> Iterator[str]:
        """Yield the answer in pieces as it is written, and remember it.

        Args:
            about: the input of a record of instruct.
        """
        said = (*self.said, Said("user", text, input=about))
        for _ in range(MOST_CALLS):
            answer = Answer(self._speaker.tokenizer, self._wishes.stop)
            said, prompt = self._fitted(said)
            yield from self._speaker.written(prompt, self._wishes, answer)
            text, calls = self._calls_in(answer.text, sum(len(each.calls) for each in said))
            said = (*said, self._answer(text)._replace(calls=calls))
            results = [self._result(call) for call in calls]
            if not calls or None in results:
                break
            said = (*said, *filter(None, results))
        else:
            raise DataError(TOO_MANY)
        self.said = said

    def save(self, path: Path) -> None:
        """Append the dialogue to a file of records, which can be trained on.

        Raises:
            DataError: there is no answer yet, or the file cannot be written.
        """
        if self.said == self._opening:
            raise DataError("nothing was said yet; expected a question first")
        record: JSON = {"messages": as_record(self.said)}
        if self._tools:
            record["tools"] = self._tools
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be written: {error}") from None

    def _answer(self, text: str) -> Said:
        """Keep thoughts apart from words, as templates do in later questions."""
        form = self._speaker.answer_form
        thought, words = form.read(text) if form else ("", text)
        return Said("assistant", words, thought, supervised=True)

    def _calls_in(self, text: str, made: int) -> tuple[str, tuple[Call, ...]]:
        """Split an answer into its words and its calls, with unused ids."""
        try:
            return self._form.read(text, made + 1) if self._form else (text, ())
        except ValueError as error:
            raise DataError(f"the model's call cannot be read: {error}") from None

    def _result(self, call: Call) -> Said | None:
        """Show a call and ask for its result; None where the input has ended."""
        self._tell(f"call: {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
        try:
            return Said("tool", input(f"\nresult of {call.name}> ").strip(), call_id=call.id, name=call.name)
        except EOFError:
            return None

    def _fitted(self, said: tuple[Said, ...]) -> tuple[tuple[Said, ...], list[int]]:
        """Drop the oldest rounds until dialogue and answer fit the context."""
        context, dropped = self._speaker.context, 0
        prompt = self._speaker.encode(said, self._tools)
        while context is not None and len(prompt) + self._wishes.max_new_tokens > context:
            asked = [place for place, each in enumerate(said) if each.role == "user"]
            if len(asked) == 1:
                if (room := context - len(prompt)) > 0:
                    self._tell(f"the context of {context} tokens has room for {room} tokens of the answer")
                break
            said = said[: asked[0]] + said[asked[1] :]
            dropped += 1
            prompt = self._speaker.encode(said, self._tools)
        if dropped:
            self._tell(f"{dropped} of the oldest questions and answers are left out: the context has {context} tokens")
        return said, prompt


def text_of(path: str) -> str:
    """Read a text file without the white space around it.

    Raises:
        DataError: it cannot be read, is empty or no UTF-8.
    """
    try:
        text = read_small(path).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: not UTF-8; expected a text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise DataError(f"{path}: expected a text, found none")
    return text


def schemas_in(path: str) -> list[JSON]:
    """Read the tools of a file, as a record of type chat has them.

    Raises:
        DataError: the file holds no list of tools with names.
    """
    asked = Message(role="assistant", content="?")
    try:
        tools = ChatRecord(messages=[asked], tools=from_json(text_of(path), allow_inf_nan=False)).tools
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error)}") from None
    except ValueError as error:
        raise error if isinstance(error, DataError) else DataError(f"{path}: no JSON: {error}") from None
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{path}: tool {number}: expected an object with a function that has a name")
    if not tools:
        raise DataError(f"{path}: expected at least one tool, found none")
    return tools
