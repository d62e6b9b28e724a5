"""Whether a turn is served as it is trained.

A server sends the dialogue up to an answer, rendered with `add_generation_prompt`, and the model writes what the
template has behind it, until a token ends the turn. Where the training text has something else before the answer, or
another answer, the model is asked in a way that it was not trained for; a person should see both.
"""

from __future__ import annotations

from data.chat.marks import Marked

EXAMPLE = 120  # characters of each text that differs
OTHER_PROMPT = "what a server sends before an answer differs from what is trained before it"
OTHER_ANSWER = "what a server expects as an answer differs from what is trained as one"


def agreement(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def differences(text: str, begin: int, end: int, prompt: Marked | None, upto: Marked | None) -> dict[str, str]:
    """How a turn differs from what a server sends and expects."""
    if prompt is None or upto is None:
        return {}
    if text[:begin] != prompt.text:
        return {OTHER_PROMPT: _differing(prompt.text, text[:begin])}
    answer = upto.text[len(prompt.text) :]
    # A turn may be ended by the next role's token, which stands in no answer.
    if not upto.text.startswith(prompt.text) or not text[begin:end].startswith(answer.rstrip()):
        return {OTHER_ANSWER: _differing(answer, text[begin:end])}
    return {}


def _differing(served: str, trained: str) -> str:
    """Two texts side by side, from a little before they part."""
    begin = max(0, agreement(served, trained) - EXAMPLE // 3)
    both = [repr(each[begin : begin + EXAMPLE]) for each in (served, trained)]
    return f"served {both[0]}, trained {both[1]}"
