"""Read a config of another tool: YAML, JSON, or a shell script with its command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.terminal import reason_of
from data.paths import read_small
from training.config.yaml_file import parse_yaml
from training.errors import ConfigError

HF, GDGPT = "HF Trainer", "gdGPT"
TOOLS: dict[str, dict[str, Any]] = parse_yaml(Path(__file__).with_name("tools.yml").read_text(encoding="utf-8"))
COMMANDS = {tool["command"]: name for name, tool in TOOLS.items() if "command" in tool}
OF_ALL = {"per_device_train_batch_size", "learning_rate", "output_dir"}  # a file without any mark is of the Trainer
SCRIPTS = re.compile(r"(sft|dpo|kto|orpo|cpo|reward|run_clm)[\w-]*\.py$")
DEVICES = ("NPROC_PER_NODE", "nproc_per_node", "nproc-per-node", "num_processes", "num_gpus")


class Theirs(NamedTuple):
    """Hold a config of another tool.

    Attributes:
        method: the word of the command line that says what is trained, such as `dpo`; empty in other files.
        devices: to train on, each of which had a batch of its own; 0 where the command line does not say.
        folder: that its paths are relative to: of the file.
    """

    tool: str
    values: dict[str, Any]
    method: str
    devices: int
    folder: Path


def read_theirs(path: Path) -> Theirs:
    """Read a file.

    Raises:
        ConfigError: it is missing, holds no keys, or is of no tool that is known here.
    """
    try:
        text = read_small(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a config of another tool") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None

    values = _as_yaml(text)
    tool, method, devices = "", "", 0
    if values is None:
        tool, method, values, devices = _as_command(text, path)
    marked = (name for name, declared in TOOLS.items() if values.keys() & set(declared["marks"]))
    tool = tool or next(marked, "") or (HF if values.keys() & OF_ALL else "")
    if not tool:
        raise ConfigError(f"{path}: of no tool that is known here; expected a config of {', '.join(TOOLS)}")
    return Theirs(tool, values, method, devices, path.parent)


def _as_yaml(text: str) -> dict[str, Any] | None:
    """Read keys and values of YAML or JSON, as our own configs are read; None for anything else."""
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else None


def _as_command(text: str, path: Path) -> tuple[str, str, dict[str, Any], int]:
    """Read the options of a command line, the first of a script that has any."""
    lines = text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines()
    commands = [line for line in lines if " --" in line and not line.lstrip().startswith("#")]
    if not commands:
        raise ConfigError(f"{path}: neither keys and values nor a command line with --options")
    try:
        words = shlex.split(" ".join([*(line for line in lines if line.startswith("export ")), commands[0]]))
    except ValueError as error:
        raise ConfigError(f"{path}: the command line cannot be read: {error}") from None

    tool, method, start = "", "", len(words)
    for number, word in enumerate(words):
        if found := SCRIPTS.search(word):
            tool, method, start = HF if found[1] == "run_clm" else "TRL", found[1], number + 1
            break
        if Path(word).name in COMMANDS and number + 1 < len(words):
            tool, method, start = COMMANDS[Path(word).name], words[number + 1], number + 2
            break
    options = _options(words[start:] if tool else words)
    launcher = _options(words[:start])
    launcher |= dict(word.split("=", 1) for word in words[:start] if re.match(r"\w+=", word))
    numbers = [as_list(launcher[name])[0] for name in DEVICES if launcher.get(name)]
    devices = next((int(number) for number in numbers if str(number).isdecimal()), 0)
    return tool, method, options, devices


def _options(words: list[str]) -> dict[str, Any]:
    """Read `--name value`, `--name=value`, `--name several values` and switches, each value as YAML."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [_value(value)] if equals else []
        elif name:
            options[name].append(_value(word))
    return {name: _unwrapped(values) for name, values in options.items()}


def _unwrapped(values: list[Any]) -> Any:
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    """Read a word of the command line: 1e-4 is a number, `{"a": 1}` an object."""
    try:
        return parse_yaml(word)
    except (yaml.YAMLError, ValueError):
        return word


def is_true(value: Any) -> bool:
    """Read a switch: `auto` of axolotl's counts, and the words of a command line."""
    return str(value).lower() in ("true", "auto", "yes", "1")


def as_list(value: Any) -> list[Any]:
    """Read a list, or names with commas or blanks between them."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value) if isinstance(value, (list, tuple)) else [value]
