"""Write a config of ours from another tool's, and show what became of each of its keys.

Every value has a comment that names where it comes from. What has no counterpart is listed below them, so nothing of
the other file is passed over in silence; what would train something else is refused.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.log import Log
from options import RunConfig
from options.other_tools.draft import Draft
from options.other_tools.reading import GDGPT, read_theirs
from options.other_tools.translation import translate
from options.planner.commented_yaml import commented, nested
from training.config.yaml_file import checked
from training.errors import ConfigError, exit_with_one_line


def write_or_exit(file: Path, new: Path, devices: int) -> None:
    """Do `write_config` for a command line: an error is one line and the exit code."""
    with exit_with_one_line():
        write_config(file, new, devices, Log(highlight=False))


def write_config(file: Path, new: Path, devices: int, log: Console) -> None:
    """Write the config `new` from another tool's file.

    Args:
        devices: to train on; 0 takes what its command line starts, or one.

    Raises:
        ConfigError: `file` cannot be translated, or `new` is there already.
    """
    theirs = read_theirs(file)
    if theirs.tool == GDGPT:
        raise ConfigError(f"{file}: a config of gdGPT works as it is; set its three paths")
    devices = devices or theirs.devices or 1
    try:
        draft = translate(theirs._replace(devices=devices))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    checked(RunConfig, nested(draft.ours), f"{file}, translated: ")

    first = f"From {theirs.tool}'s {file.name}, for {devices} device{'s' if devices > 1 else ''}"
    text = "\n".join([f"# {first}.", *commented(nested(draft.ours), draft.notes), *_comments(draft)]) + "\n"
    try:
        with new.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"{new}: {error.strerror}; expected the name of a new file") from None
    log.print(table_of(draft, first))
    for line in draft.differs:
        log.print(f"differs: {line}")
    log.print(f"written: {new}")
    for flag in ("--inspect 2", "--plan", ""):
        log.print(f"next: python train_ds.py --config {new} {flag}".rstrip())


def _comments(draft: Draft) -> list[str]:
    lost = [f"#   {theirs} ({why})" for theirs, why in draft.lost.items()]
    differs = [f"#   {line}" for line in draft.differs]
    return [*(["# no counterpart:"] if lost else []), *lost, *(["# differs:"] if differs else []), *differs]


def table_of(draft: Draft, title: str) -> Table:
    """Show each value with where it comes from, then what is lost."""
    table = Table("key", "value", "from", title=title)
    for key, value in draft.ours.items():
        table.add_row(key, str(value), draft.notes[key])
    table.add_section()
    for theirs, why in draft.lost.items():
        table.add_row("none", "", f"{theirs}: {why}")
    return table
