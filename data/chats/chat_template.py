"""Chat templates: a dialogue as a template writes it, and exactly which characters of it the model has to write.

A record is rendered once, as a server renders it. Which of the text bears loss is told by a scaffold
(`data.chats.scaffold`): the same template's text around stand-ins, made once for all dialogues of one structure. Where
a template looks at the words themselves (some split thoughts from an answer), the record takes the slower way: it is
rendered again with marks around the assistants' words, and for each turn up to there. Either way the text without marks
is compared with the rendered one, character by character, and a record that cannot be masked exactly is refused.

What a template refuses or leaves out (system messages, messages of one role in a row, tools, thoughts) is said in
another way (`data.chats.rewrites`); the first one that the template takes is used for all dialogues of that structure.

Cost: one rendering a record, 15 to 150 microseconds; a scaffold costs a rendering or two for each kind of turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from data.chats.marks import CONTENT, Place, StandIns, Unplaceable, Wrapped, structure
from data.chats.messages import JSON, Call, Said, as_dicts
from data.chats.ranges import Range, joined, ranges_of, without
from data.chats.rewrites import Rewrite, rewrites, tools_as_text, with_short_ids
from data.chats.sandbox import SlowTemplate, generated_spans, render
from data.chats.scaffold import OTHER_TOOLS, SOME_TOOLS, Placed, Scaffold, placed_by_marks, tools_between
from data.chats.turns import Turn, TurnFinder, Vocabulary, generated
from data.errors import DataError
from data.prompts import CHAT_TEMPLATE, PromptFormat, Written, end_of_sequence, template_in_file

REFUSED = "the chat template refuses the record: {reason}"
CHANGED = "the chat template changes the words of an answer; use prompt_format: plain"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
MOST_PLANS = 10_000  # structures remembered

QUESTION, ANSWER = Said("user", "?"), Said("assistant", "!", supervised=True)

_templates: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, ChatTemplate]] = WeakKeyDictionary()


def chat_template(
    tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat = CHAT_TEMPLATE, tools: bool = False
) -> ChatTemplate:
    """The template that a format means, with all that is known of it already.

    Args:
        prompt_format: chat_template or the path of a Jinja file.
        tools: some tokenizers have a template of its own for dialogues with tools.

    Raises:
        DataError: there is no such template.
    """
    if prompt_format != CHAT_TEMPLATE:
        text = template_in_file(prompt_format)
    elif tokenizer.chat_template:
        text = tokenizer.get_chat_template(None, [{}] if tools else None)
    else:
        raise DataError("the tokenizer has no chat template; use prompt_format: plain")
    known = _templates.setdefault(tokenizer, {})
    key = (text, tokenizer.eos_token, len(tokenizer))
    if key not in known:
        known[key] = ChatTemplate(tokenizer, text)
    return known[key]


class Plan(NamedTuple):
    """How dialogues of one structure are written.

    Attributes:
        tools: the template itself describes the tools.
        scaffold: None where each record has to be looked at.
    """

    rewrite: Rewrite
    tools: bool
    scaffold: Scaffold | None


class ChatTemplate:
    """Writes dialogues by one template.

    Args:
        text: the template in Jinja; it runs in transformers' sandbox.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self._text = text
        self._eos_token = tokenizer.eos_token
        self._names = dict(tokenizer.special_tokens_map)
        self._tracks = bool(GENERATION.search(text))
        added = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._vocabulary = Vocabulary(_one_of(special), _one_of(special | {token.content for token in added}))
        self._plans: dict[Any, Plan] = {}
        self._finder = TurnFinder(self._vocabulary)
        self._finder = TurnFinder(self._vocabulary, self._probe_end_of_turn())
        # Some templates leave out thoughts without a word, others have an opinion on ids.
        self._knows_thoughts = self._takes([QUESTION, ANSWER._replace(reasoning=".")])
        self._short_ids = self._accepts(_calling("call00001")) and not self._accepts(_calling("call-1"))

    def write(self, said: Sequence[Said], tools: list[JSON] | None = None) -> Written:
        """The whole text of a dialogue, and where loss is in it.

        Raises:
            DataError: the template refuses the dialogue, or cannot be masked exactly.
        """
        said, tools, scaffold = self._prepare(said, tools or [])
        text = self._render(said, tools)
        placed = scaffold.place(said, text) if scaffold else None
        return self._mask(said, text, placed or self._look(said, tools, text))

    def ask(self, said: Sequence[Said], tools: list[JSON] | None = None) -> str:
        """The text that a model is asked with for what follows these messages.

        Raises:
            DataError: the template refuses the dialogue.
        """
        prepared, described, _ = self._prepare([*said, ANSWER], tools or [])
        return self._render(prepared[:-1], described, asking=True)

    def _prepare(self, said: Sequence[Said], tools: list[JSON]) -> tuple[Sequence[Said], list[JSON], Scaffold | None]:
        """The dialogue in the words that the template takes."""
        if self._short_ids and not all(SHORT_ID.fullmatch(call_id) for each in said for call_id in each.ids):
            said = with_short_ids(said)
        key = (structure(said), bool(tools))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(said, bool(tools))
        said = plan.rewrite(said)
        if tools and not plan.tools:
            return tools_as_text(said, tools), [], plan.scaffold
        return said, tools, plan.scaffold

    def _plan(self, said: Sequence[Said], tools: bool) -> Plan:
        """The first way to say it that the template takes whole."""
        for rewrite in rewrites(said, self._knows_thoughts):
            for native in (True, False) if tools else (True,):
                with suppress(Unplaceable, DataError):
                    rewritten = rewrite(said) if native else tools_as_text(rewrite(said), SOME_TOOLS)
                    return Plan(rewrite, native, self._scaffold(rewritten, native and tools))
        return Plan(list, True, None)

    def _scaffold(self, said: Sequence[Said], tools: bool) -> Scaffold:
        marks = StandIns(said)
        some = SOME_TOOLS if tools else []
        text = self._render(marks.said, some)
        between = None
        if tools:
            between = tools_between(text, self._render(marks.said, OTHER_TOOLS))
            if between is None:
                raise Unplaceable
        places = marks.find(text)
        if not {leaf for leaf in marks.leaves if leaf.part == CONTENT} <= {place.leaf for place in places}:
            raise Unplaceable
        return Scaffold(text, places, self._turns(self._finder, text, places, marks.said, some), between)

    def _turns(
        self, finder: TurnFinder, text: str, places: Sequence[Place], said: Sequence[Said], tools: list[JSON]
    ) -> list[Turn]:
        def render(part: Sequence[Said], asking: bool = False) -> str:
            try:
                return self._render(part, tools, asking)
            except DataError:  # not every beginning of a dialogue is one that the template takes
                return ""

        turns = finder.find(text, places, said, render)
        if not self._tracks:
            return turns
        return generated(turns, self._spans(said, tools), text, self._vocabulary)

    def _look(self, said: Sequence[Said], tools: list[JSON], text: str) -> list[Placed]:
        """What a scaffold tells, told by this one dialogue."""
        # A template may look at the others' words as well, and then again need marks there to be told apart.
        for everybody in (False, True):
            with suppress(Unplaceable):
                finder = TurnFinder(self._vocabulary, self._finder.end_of_turn, strict=not everybody)
                return self._look_at(said, tools, text, Wrapped(said, text, everybody), finder)
        raise DataError(CHANGED)

    def _look_at(
        self, said: Sequence[Said], tools: list[JSON], text: str, marks: Wrapped, finder: TurnFinder
    ) -> list[Placed]:
        marked = self._render(marks.said, tools)
        if marks.without(marked) != text:
            raise Unplaceable
        places = marks.find(marked)
        turns = self._turns(finder, marked, places, marks.said, tools)
        return placed_by_marks(said, text, places, turns)

    def _mask(self, said: Sequence[Said], text: str, placed: list[Placed]) -> Written:
        loss = [each for turn in placed for each in _loss(said[turn.message], turn)]
        last = placed[-1]
        if not last.ended and last.message == len(said) - 1 and said[-1].supervised:  # nothing tells the model to stop
            end = last.parts[-1][1]
            token = end_of_sequence(self._eos_token)
            text = text[:end] + token + text[end:]
            loss.append((end, end + len(token)))
        return Written(text, joined(loss))

    def _render(self, said: Sequence[Said], tools: list[JSON], asking: bool = False) -> str:
        # What render_jinja_template does, without its copy of the messages, which takes longer than the rendering.
        try:
            return render(self._text, **self._given(said, tools), add_generation_prompt=asking)
        except SlowTemplate:
            raise
        except Exception as error:  # a template may raise anything
            raise DataError(REFUSED.format(reason=" ".join(str(error).split()))) from None

    def _spans(self, said: Sequence[Said], tools: list[JSON]) -> list[tuple[int, int]]:
        """What the template marks as generated."""
        return generated_spans(self._text, **self._given(said, tools), add_generation_prompt=False)

    def _given(self, said: Sequence[Said], tools: list[JSON]) -> dict[str, Any]:
        """What a template can see."""
        return {"messages": as_dicts(said), "tools": tools or None, "documents": None, **self._names}

    def _takes(self, said: Sequence[Said]) -> bool:
        """The template writes all words of a dialogue."""
        marks = StandIns(said)
        with suppress(Unplaceable, DataError):
            return {place.leaf for place in marks.find(self._render(marks.said, []))} >= set(marks.leaves)
        return False

    def _accepts(self, said: Sequence[Said]) -> bool:
        with suppress(DataError):
            self._render(said, [])
            return True
        return False

    def _probe_end_of_turn(self) -> str | None:
        said = [QUESTION, ANSWER, QUESTION]
        marks = StandIns(said)
        with suppress(Unplaceable, DataError):
            text = self._render(marks.said, [])
            places = marks.find(text)
            (turn,) = self._turns(self._finder, text, places, marks.said, [])
            own = next(place for place in places if place.leaf.message == turn.message)
            return text[own.end : turn.parts[-1][1]].strip() or None
        return None


def _loss(said: Said, turn: Placed) -> list[Range]:
    """What bears loss of a turn."""
    if not said.pieces:
        return turn.parts if said.supervised else []
    if turn.words is None:
        raise DataError(CHANGED)
    origin, begin, end = turn.words
    pieces = ranges_of(said.pieces, origin, not said.supervised, (begin, end))
    return [left for part in turn.parts for left in without(part, pieces)] if said.supervised else pieces


def _one_of(tokens: set[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _calling(call_id: str) -> list[Said]:
    call = Call(call_id, "f", {})
    return [QUESTION, Said("assistant", "", calls=(call,)), Said("tool", ".", call_id=call_id, name="f"), ANSWER]
