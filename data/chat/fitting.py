"""Rewrite what a chat template does not take, or refuse it (`data.chat.fallbacks` says what there is)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from data.chat.fallbacks import FEATURES, Feature, with_short_ids
from data.chat.messages import JSON, Said
from data.chat.rendering import Rendering
from data.errors import DataError
from data.settings import Fallback

NOT_TAKEN = "the chat template takes no {feature}; template_fallback: rewrite says it {replacement}"
NEEDS_TOOLS = "the chat template is for dialogues with tools; expected some"
REWRITTEN = "rewritten: {feature}, which the chat template does not take, is said {replacement}"
NEW_IDS = "rewritten: calls got ids of nine letters and digits, as the chat template takes no others"
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
EXAMPLE = 200  # characters of a rewritten dialogue


class Fitting:
    """Make dialogues fit a template.

    Args:
        fallback: what is done with what the template does not take; each feature's own default where absent.
    """

    def __init__(self, rendering: Rendering, fallback: Fallback | None) -> None:
        self._rendering, self._fallback = rendering, fallback
        self._taken: dict[str, bool] = {}

    def fit(self, said: Sequence[Said], tools: list[JSON]) -> tuple[Sequence[Said], list[JSON], dict[str, str]]:
        """Rewrite what the template does not take; return the dialogue and what was rewritten.

        Raises:
            DataError: that is to be refused.
        """
        if self._rendering.needs_tools and not tools:
            raise DataError(NEEDS_TOOLS)
        notes = {}
        if self._rendering.short_ids and not all(map(SHORT_ID.fullmatch, _call_ids(said))):
            said = with_short_ids(said)
            notes[NEW_IDS] = next(_call_ids(said))

        for feature in FEATURES:
            if not feature.present(said, tools) or self.takes(feature):
                continue
            if (self._fallback or feature.default) == "refuse":
                raise DataError(NOT_TAKEN.format(feature=feature.name, replacement=feature.replacement))
            said, tools = feature.rewrite(said, tools)
            example = " ".join(f"{message.role}: {message.text!r}" for message in said)
            notes[REWRITTEN.format(feature=feature.name, replacement=feature.replacement)] = example[:EXAMPLE]
        return said, tools, notes

    def takes(self, feature: Feature) -> bool:
        """Test whether the template writes all words of a dialogue with this feature."""
        if feature.name not in self._taken:
            enough = any if feature.any_of else all
            self._taken[feature.name] = enough(self._rendering.writes(said, tools) for said, tools in feature.tried)
        return self._taken[feature.name]


def _call_ids(said: Sequence[Said]) -> Iterator[str]:
    return chain.from_iterable(message.ids for message in said)
