"""A dialogue with a model, turn by turn.

Each turn asks with the whole dialogue, as it would be rendered at once, so that an answer never depends on how the
turns came about. A turn in which the model calls tools goes on until it answers without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from data.chat.answer_form import RESULT_FOLLOWS, read_text_call
from data.chat.messages import JSON, Call, Said, as_record
from data.errors import DataError
from data.prompt_texts import API_RESULT
from training.demo.answer import Answer
from training.demo.speaker import Speaker, Wishes
from training.demo.tools import Tools

Tell = Callable[[str], None]
MOST_CALLS = 16  # in a turn; a model may go round in a circle
TOO_MANY = f"the model still calls tools after {MOST_CALLS} calls; expected an answer"
UNREADABLE = "the model's call cannot be read: {reason}"


class Chat:
    """A dialogue; it remembers the turns so far, of which the oldest go where the context is full.

    Args:
        opening: what stands before the first question, such as a system message.
        tell: gets what the user has to know, a line each.
        tools: what the model may call.

    Attributes:
        said: the opening and the turns.
    """

    def __init__(
        self, speaker: Speaker, wishes: Wishes, tell: Tell, opening: Sequence[Said] = (), tools: Tools | None = None
    ) -> None:
        self._speaker = speaker
        self._wishes = wishes
        self._tell = tell
        self._opening = tuple(opening)
        self._tools = tools
        self._schemas = tools.schemas if tools else []
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
        if self._tools and not self._tools.form:
            self.said = yield from self._answered_with_text_calls(said, self._tools)
            return
        for _ in range(MOST_CALLS):
            answer = Answer(self._speaker.tokenizer, self._wishes.stop)
            said, prompt = self._fitted(said)
            yield from self._speaker.written(prompt, self._wishes, answer)
            text, calls = self._calls_in(answer.text, sum(len(each.calls) for each in said))
            said = (*said, self._answer(text)._replace(calls=calls))
            if not self._tools or not calls:
                break
            results = [Said("tool", self._result(call, self._tools), call_id=call.id, name=call.name) for call in calls]
            said = (*said, *results)
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
        if self._schemas:
            record["tools"] = self._schemas
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be written: {error}") from None

    def _answered_with_text_calls(self, said: tuple[Said, ...], tools: Tools) -> Generator[str, None, tuple[Said, ...]]:
        """Calls and results are all part of one answer; gives the dialogue with it."""
        answer = Answer(self._speaker.tokenizer, (*self._wishes.stop, RESULT_FOLLOWS))
        said, prompt = self._fitted(said)
        for _ in range(MOST_CALLS):
            begin = len(answer.raw)
            yield from self._speaker.written(prompt, self._wishes, answer)
            if answer.stopped != RESULT_FOLLOWS:
                return (*said, self._answer(answer.text))
            answer.insert(RESULT_FOLLOWS)
            yield RESULT_FOLLOWS
            try:
                call = read_text_call(answer.raw[begin:])
            except ValueError as error:
                raise DataError(UNREADABLE.format(reason=error)) from None
            result = API_RESULT.format(result=self._result(call, tools))
            answer.insert(result)
            yield result
            prompt = self._speaker.encode(said, begun=answer.raw)
        raise DataError(TOO_MANY)

    def _answer(self, text: str) -> Said:
        """An answer, its thoughts apart from its words: templates leave them out of later questions, or refuse them."""
        form = self._speaker.answer_form
        thought, words = form.read(text) if form else ("", text)
        return Said("assistant", words, thought, supervised=True)

    def _calls_in(self, text: str, made: int) -> tuple[str, tuple[Call, ...]]:
        """The words of an answer, and the calls behind them, with ids that were not used yet."""
        if not self._tools or not self._tools.form:
            return text, ()
        try:
            return self._tools.form.read(text, made + 1)
        except ValueError as error:
            raise DataError(UNREADABLE.format(reason=error)) from None

    def _result(self, call: Call, tools: Tools) -> str:
        """Make a call, and show it."""
        self._tell(f"call: {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
        result = tools.result(call)
        self._tell(f"result: {result}")
        return result

    def _fitted(self, said: tuple[Said, ...]) -> tuple[tuple[Said, ...], list[int]]:
        """As many of the last rounds as fit into the context with an answer, and their prompt."""
        context, dropped = self._speaker.context, 0
        prompt = self._speaker.encode(said, self._schemas)
        while context is not None and len(prompt) + self._wishes.max_new_tokens > context:
            asked = [place for place, each in enumerate(said) if each.role == "user"]
            if len(asked) == 1:
                if (room := context - len(prompt)) > 0:
                    self._tell(f"the context of {context} tokens has room for {room} tokens of the answer")
                break
            said = said[: asked[0]] + said[asked[1] :]
            dropped += 1
            prompt = self._speaker.encode(said, self._schemas)
        if dropped:
            self._tell(f"{dropped} of the oldest questions and answers are left out: the context has {context} tokens")
        return said, prompt
