"""What a config has to know of an option; what the option does in a run is in `training.option`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from training.config.changes import MayChange

if TYPE_CHECKING:
    from training.config.keys import TrainConfig

Keys = TypeVar("Keys", bound="TrainConfig")


@dataclass(frozen=True)
class OptionKeys(Generic[Keys]):
    """The keys of an option.

    Attributes:
        keys: the core's keys and its own, with a docstring each; `TrainConfig` where it has none. A method
            `contradictions` of the class may yield lines beside those of `super()`.
        before: the key of the core before which its own stand, on the pages of the docs and in config.yml.
        rules: how its keys may change between two starts; a key without a rule must stay the same.
        objective_key: its key that asks for another objective than fine-tuning, which `keys.objective` then returns; no
            two such keys go together.
    """

    keys: type[Keys]
    before: str = ""
    rules: Mapping[str, MayChange] = field(default_factory=dict)
    objective_key: str = ""
