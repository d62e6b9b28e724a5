"""Parse command lines, and say what is wrong with one in a line."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import NoReturn

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Report a wrong word in one line that begins with `error:`, and name the option that is like it."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith(UNKNOWN):
            near: list[str] = []
            for word in re.findall(r"--[\w-]+", message):
                near += get_close_matches(word.replace("_", "-"), self._option_string_actions, 1)
            hint = f"; did you mean {' and '.join(near)}?" if near else ""
        self.exit(2, f"error: {message}{hint} ({self.prog} --help lists all options)\n")
