"""Put a config together from another tool's values, with a note on each, and keep what has no place here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training.config.foreign_names import FOREIGN
from training.errors import ConfigError

NOT_HERE = "not known to Pipetune; look whether the run needs it"


class Draft:
    """A config of ours in the making.

    Attributes:
        ours: values by dotted key.
        notes: on each of them, which values of theirs it comes from.
        lost: values of theirs without a counterpart, and why.
        differs: lines on what Pipetune does otherwise.
    """

    def __init__(self, tool: str, theirs: Mapping[str, Any]) -> None:
        self.tool = tool
        self.ours: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.differs: list[str] = []
        self._left = {name.replace("-", "_"): value for name, value in theirs.items() if value is not None}

    def has(self, *names: str) -> bool:
        """Say whether one of their keys is given and not taken yet."""
        return any(name in self._left for name in names)

    def take(self, *names: str, otherwise: Any = None) -> Any:
        """Take the value of the first of their keys that is given, which then has found its place."""
        for name in names:
            if name in self._left:
                return self._left.pop(name)
        return otherwise

    def put_back(self, name: str, value: Any) -> None:
        """Give a value of theirs another of their names."""
        self._left[name] = value

    def put(self, key: str, value: Any, note: str) -> None:
        """Set a value of ours."""
        self.ours[key], self.notes[key] = value, note

    def move(
        self, key: str, *names: str, otherwise: Any = None, by: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Take a value of theirs, or what their tool takes without it, and set ours; neither sets nothing.

        Args:
            by: makes our value of theirs.
        """
        given = next((name for name in names if self.has(name)), None)
        value = self.take(given) if given else otherwise
        if value is not None:
            default = f"{names[0]}: {value}, the default of {self.tool}"
            self.put(key, by(value), f"{given}: {value}" if given else default)

    def lose(self, name: str, why: str) -> None:
        """Take a value for which there is no place, and say why."""
        if self.has(name):
            self.lost[f"{name}: {self.take(name)}"] = why

    def drop(self, *names: str) -> None:
        """Take values that change nothing here."""
        for name in names:
            self.take(name)

    def refuse(self, name: str, value: Any, expected: str) -> ConfigError:
        """Make the error for what would train something else."""
        return ConfigError(f"{name}: {value}: is not trained here; expected {expected}")

    def lose_the_rest(self) -> None:
        """Take what nobody has taken, with the words of the table of names; what is off asks for nothing."""
        for name in [name for name, value in self._left.items() if value is not False]:
            key, advice, _ = FOREIGN.get(name.lower(), (None, "", []))
            self.lose(name, (f"see {key}" if key else "") or advice or NOT_HERE)


def source(path: Any, **more: Any) -> Any:
    """Return an entry of data_path; split and subset are a hub's, and files have none."""
    files = Path(str(path)).suffix or Path(str(path)).exists()
    more = {} if files else {key: value for key, value in more.items() if value}
    return {"path": path} | more if more else path


def is_true(value: Any) -> bool:
    """Read a switch: `auto` of axolotl's counts, and the words of a command line."""
    return value is True or str(value).lower() in ("true", "auto", "yes", "1")


def as_list(value: Any) -> list[Any]:
    """Read a list, or names with commas or blanks between them."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value) if isinstance(value, (list, tuple)) else [value]
