"""Parse command lines, and say what is wrong with one in a line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NoReturn

WRONG = re.compile(r"(?:(?<=invalid choice: ')|--)[\w-]+")  # words of argparse's complaint


class Parser(argparse.ArgumentParser):
    """Report a wrong word in one line that begins with `error:`, and name the option that is like it.

    Attributes:
        meant: what stands here for words that are none here, such as `--max_length` and commands of other tools.
    """

    meant: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        near: list[str] = []
        if message.startswith("unrecognized arguments: ") or "invalid choice: " in message:
            for word in WRONG.findall(message):
                meant = self.meant.get(word)
                near += [meant] if meant else get_close_matches(word.replace("_", "-"), self._option_string_actions, 1)
        hint = f"; did you mean {' and '.join(near)}?" if near else ""
        self.exit(2, f"error: {message}{hint} ({self.prog} --help lists all options)\n")
