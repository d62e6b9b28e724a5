"""What others wrote, made safe for a terminal: names of files and tensors, keys, records, messages of templates.

A terminal obeys what it prints: escape sequences move its cursor, change its title or its clipboard, bidirectional
controls show a line in another order than it has, a line break begins a line that looks like one of ours. Such
characters are shown as Python would write them (`\\x1b`). All other text stays as it is, in any script; the joiners
that some scripts and emoji need are kept.

Cost: a search by a regular expression, 0.1 microseconds for a line that has nothing to replace.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LONGEST = 4000  # characters of a line
TYPED = "PIPETUNE_COMMAND"  # the words that the user typed, such as "pipetune plan", where they are not a script's name

# C0 without tab and line feed, DEL, C1, bidirectional marks, embeddings, overrides and isolates, line and paragraph
# separators, lone surrogates, invisible operators and annotations, the byte order mark, tags.
_UNSAFE = (
    r"\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f"
)
_IN_TEXT, _IN_LINE = re.compile(f"[{_UNSAFE}]"), re.compile(rf"[{_UNSAFE}\t\n]")


def safe_text(text: str) -> str:
    """A text of any number of lines."""
    return _IN_TEXT.sub(_shown, text)


def safe_line(text: str, longest: int = LONGEST) -> str:
    """A single line, cut where it is longer than so many characters."""
    line = _IN_LINE.sub(_shown, text)
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def is_safe_line(text: str) -> bool:
    """Whether there is nothing that a terminal would obey, not even a line break."""
    return not _IN_LINE.search(text)


def reason_of(error: BaseException) -> str:
    """What a system's or a library's error says, on one line of at most 160 characters."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:160]


def typed_name() -> str | None:
    """Return the command that a usage line should name; none for the script's own name."""
    return os.environ.get(TYPED)


class LiveDisplay(Protocol):
    """Something that redraws itself below the lines that a process prints."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


live_views: list[LiveDisplay] = []  # open ones of this process


@contextmanager
def paused() -> Iterator[None]:
    """Let something else have the terminal, such as the progress bar of an evaluation."""
    views = list(live_views)
    for view in views:
        view.pause()
    try:
        yield
    finally:
        for view in views:
            view.resume()


def guard_logging() -> None:
    """Let every logger of this process, those of libraries too, tell safe text; further lines are indented."""
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  # its name in the standard library
        return safe_text(super().getMessage()).replace("\n", "\n  ")


def _shown(found: re.Match[str]) -> str:
    return ascii(found.group())[1:-1]
