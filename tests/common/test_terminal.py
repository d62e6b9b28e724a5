"""Foreign text on a terminal: what it would obey is escaped, and all that a person reads stays."""

from __future__ import annotations

import logging
import sys
import unicodedata

import pytest

from common.terminal import guard_logging, is_safe_line, safe_line, safe_text

BIDIRECTIONAL = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
MARKS = "\u061c\u200e\u200f"
READ = "Pipetune 流水线 दाख़िल ক্‌ষ العربية עברית ไทย 👩\u200d👩\u200d👧 ❤\ufe0f a\u0301 \xa0\u3000\xad\u200c"


def obeyed(char: str) -> bool:
    """Return whether a terminal may do more with a character than show it."""
    controls = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
    return controls or unicodedata.bidirectional(char) in BIDIRECTIONAL or char in MARKS


def test_every_character_that_a_terminal_obeys_is_shown_instead() -> None:
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        if obeyed(char):
            assert not is_safe_line(char)
            assert safe_line(char) == ascii(char)[1:-1]
            assert safe_text(char) == (char if char in "\n\t" else safe_line(char))
        elif unicodedata.category(char) not in ("Cf", "Cn"):
            assert safe_line(char) == safe_text(char) == char
    assert safe_line(READ) == safe_text(READ) == READ


def test_a_line_is_cut_where_it_is_too_long() -> None:
    assert safe_line("x" * 9, longest=8) == "xxxxx..."
    assert safe_line("\n" * 4, longest=8) == r"\n\n\n\n"


def test_loggers_of_libraries_print_safe_text(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogRecordFactory()
    logger = logging.getLogger("pipetune.test")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        guard_logging()
        logger.warning("tensor %s", "a\x1b[2J\nerror: forged")
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "tensor a\\x1b[2J\n  error: forged\n"
