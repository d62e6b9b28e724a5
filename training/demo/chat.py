"""A dialogue with a model, turn by turn.

Each turn asks with the whole dialogue, as it would be rendered at once, so that an answer never depends on how the
turns came about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data.chat.messages import Form, Said, as_dicts, in_questions
from data.errors import DataError
from models.generation.generate import generate_many
from training.demo.answer import Answer
from training.demo.speaker import Speaker, Wishes

Tell = Callable[[str], None]


class Chat:
    """A dialogue; it remembers the turns so far.

    Args:
        opening: what stands before the first question, such as a system message.
        tell: gets what the user has to know, a line each.

    Attributes:
        said: the opening and the turns.
    """

    def __init__(self, speaker: Speaker, wishes: Wishes, tell: Tell, opening: Sequence[Said] = ()) -> None:
        self._speaker = speaker
        self._wishes = wishes
        self._tell = tell
        self._opening = tuple(opening)
        self.said: tuple[Said, ...] = self._opening

    def reset(self) -> None:
        """Forget all turns."""
        self.said = self._opening

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces as it is written, and remember it."""
        said = (*self.said, Said("user", text))
        answer = Answer(self._speaker.tokenizer, self._wishes.stop)
        said, prompt = self._fitted(said)
        yield from self._written(prompt, answer)
        self.said = (*said, Said("assistant", answer.text, supervised=True))

    def save(self, path: Path) -> None:
        """Append the dialogue to a file of records, which can be trained on.

        Raises:
            DataError: there is no answer yet, or the file cannot be written.
        """
        if self.said == self._opening:
            raise DataError("nothing was said yet; expected a question first")
        record = {"messages": as_dicts(in_questions(self.said), Form())}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be written: {error}") from None

    def _written(self, prompt: list[int], answer: Answer) -> Iterator[str]:
        """The pieces of an answer to a prompt."""
        for request, token in generate_many(self._speaker.model, [self._speaker.request(prompt, self._wishes)]):
            if token is not None:
                yield answer.add(token)
                request.done = request.done or answer.stopped is not None
        yield answer.end()

    def _fitted(self, said: tuple[Said, ...]) -> tuple[tuple[Said, ...], list[int]]:
        """As many of the last rounds as fit into the context with an answer, and their prompt."""
        context, dropped = self._speaker.context, 0
        prompt = self._speaker.encode(said)
        while context is not None and len(prompt) + self._wishes.max_new_tokens > context:
            asked = [place for place, each in enumerate(said) if each.role == "user"]
            if len(asked) == 1:
                if (room := context - len(prompt)) > 0:
                    self._tell(f"the context of {context} tokens has room for {room} tokens of the answer")
                break
            said = said[: asked[0]] + said[asked[1] :]
            dropped += 1
            prompt = self._speaker.encode(said)
        if dropped:
            self._tell(f"{dropped} of the oldest questions and answers are left out: the context has {context} tokens")
        return said, prompt
