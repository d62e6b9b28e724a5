"""Escape foreign text for a terminal: names of files and tensors, keys, records, messages of templates.

A terminal obeys what it prints: escape sequences move its cursor and change its title or clipboard, bidirectional
controls reorder a line, a line break begins a line that looks like one of ours. Such characters are written as Python
would (`\\x1b`). All other text stays, in any script, with the joiners that some scripts and emoji need.

Cost: 0.1 microseconds for a line without such characters.
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
    """Escape a text of any number of lines."""
    return _IN_TEXT.sub(_escaped, text)


def safe_line(text: str, longest: int = LONGEST) -> str:
    """Escape a text as a single line, shortened to `longest` characters."""
    line = _IN_LINE.sub(_escaped, text)
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def is_safe_line(text: str) -> bool:
    """Test whether a text is one line with nothing that a terminal would obey."""
    return not _IN_LINE.search(text)


def reason_of(error: BaseException) -> str:
    """Put the text of an error on one line of at most 160 characters."""
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
    """Pause the live views, so that something else may draw, such as the progress bar of an evaluation."""
    views = list(live_views)
    live_views.clear()  # so that lines printed meanwhile do not pause and resume them once more
    for view in views:
        view.pause()
    try:
        yield
    finally:
        live_views.extend(views)
        for view in views:
            view.resume()


def guard_logging() -> None:
    """Escape the messages of all loggers of this process, those of libraries too; indent their further lines."""
    logging.setLogRecordFactory(_Record)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  # its name in the standard library
        return safe_text(super().getMessage()).replace("\n", "\n  ")


def _escaped(found: re.Match[str]) -> str:
    return ascii(found.group())[1:-1]
