"""Put a config together from another tool's values, with a note on each, and keep what has no place here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from options.other_tools.reading import HF, Theirs
from training.config.foreign_names import FOREIGN, NAMES
from training.errors import ConfigError

NOT_HERE = "not known to Pipetune; look whether the run needs it"


class Draft:
    """A config of ours in the making.

    Attributes:
        theirs: the other tool's file.
        method: what is trained, in its words.
        usual: what it trains without a key, by our key.
        left: values of theirs by name, without those that have found their place.
        ours: values by dotted key.
        notes: on each of them, which values of theirs it comes from.
        lost: values of theirs without a counterpart, and why.
        differs: lines on what Pipetune does otherwise.
    """

    def __init__(self, theirs: Theirs, usual: Mapping[str, Any]) -> None:
        self.theirs, self.method, self.usual = theirs, theirs.method, dict(usual)
        self.ours: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.differs: list[str] = []
        given = theirs.values.items()
        self.left = {name.replace("-", "_"): value for name, value in given if value not in (None, "")}

    def names(self, key: str) -> list[str]:
        """List what their tool calls a key of ours: as the table of names has it, or as transformers' Trainer does."""
        return NAMES[self.theirs.tool].get(key) or NAMES[HF].get(key, [key])

    def take(self, *names: str, otherwise: Any = None) -> Any:
        """Take the value of the first of their keys that is given, which then has found its place."""
        given = next((name for name in names if name in self.left), None)
        return otherwise if given is None else self.left.pop(given)

    def find(self, key: str) -> tuple[Any, str]:
        """Take what they say on a key of ours, or train without it: the value, None without any, and a note."""
        names = self.names(key)
        given = next((name for name in names if name in self.left), None)
        if given is None:
            usual = self.usual.get(key)
            return usual, f"{names[0]}: {usual}, the default of {self.theirs.tool}"
        value = self.left.pop(given)
        return value, f"{given}: {value}"

    def put(self, key: str, value: Any, note: str) -> None:
        """Set a value of ours."""
        self.ours[key], self.notes[key] = value, note

    def move(self, key: str, by: Callable[[Any], Any] = lambda value: value) -> None:
        """Set a value of ours by theirs; `by` makes it, and None of what asks for nothing."""
        value, note = self.find(key)
        if value is not None and (made := by(value)) is not None:
            self.put(key, made, note)

    def refuse(self, name: str, value: Any, known: Iterable[str]) -> ConfigError:
        """Make the error for what would train something else than is known."""
        *first, last = known
        expected = f"{', '.join(first)} or {last}" if first else last
        return ConfigError(f"{name}: {value}: is not trained here; expected {expected}")

    def lose(self, names: Iterable[str], why: str = "") -> None:
        """Take values for which there is no place, each with a reason; what is off asks for nothing."""
        for name in names:
            value = self.left.pop(name)
            key, advice, _ = FOREIGN.get(name.lower(), ("", NOT_HERE, []))
            if value is not False:
                self.lost[f"{name}: {value}"] = why or (f"see {key}" if key else advice)

    def leave_out(self, section: str, kept: Collection[str], why: str) -> None:
        """Take what they say on the keys of a section that this run does not have, all but those that are kept."""

        def is_out(key: str) -> bool:
            place, _, name = key.partition(".")
            return place == section and name not in kept

        self.usual = {key: value for key, value in self.usual.items() if not is_out(key)}
        self.lose([name for name in self.left if is_out(FOREIGN.get(name, ("",))[0])], why)
