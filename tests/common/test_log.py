"""The log keeps its own colours, and escapes what a terminal would obey in foreign text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.text import Text

from common.log import Log
from data.inspection.inspect import show_samples
from data.tokenized.tokenize import encode
from data.tokenized.tokenizer import load_tokenizer


def printed(*renderables: Any) -> str:
    file = io.StringIO()
    log = Log(file=file, force_terminal=True, color_system="standard", highlight=False, width=80)
    for each in renderables:
        log.print(each)
    return file.getvalue()


def test_the_log_keeps_its_own_colours_and_shows_those_of_others() -> None:
    attack = "\x1b[31mred \x1b]52;c;eA==\x07 \x9b2J \u202eback [bold]no markup[/] [/]"
    styled = Text("ours", style="bold green")
    assert printed(styled) == "\x1b[1;32mours\x1b[0m\n"
    found = printed(attack, Text(attack, style="bold green"))
    assert found.replace("\x1b[1;32m", "").replace("\x1b[0m", "").count("\x1b") == 0
    assert found.count("\\x1b[31mred \\x1b]52;c;eA==") == 2
    assert "\\x9b2J \\u202eback [bold]no markup[/] [/]" in found


def test_records_are_inspected_without_obeying_them(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    words = "one\x1b[2J\x07\r\ntwo\u202e\x9d"
    sample = encode({"type": "pretrain", "text": words}, tokenizer, 256, "plain")
    file = io.StringIO()
    log = Log(file=file, highlight=False, width=80)
    show_samples([sample], tokenizer, log)
    assert "one\\x1b[2J\\x07\\r\ntwo\\u202e\\x9d" in file.getvalue()
