"""What an option is: something that a run may have besides, with keys, rules, callbacks and flags of its own.

Each lies in a folder of `options/`, and `options/__init__.py` lists them. The core imports none: an entry point hands
it the class of the config (`options.RunConfig`), which has the keys of all options and their list.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from training.config.changes import Rule
from training.config.keys import TrainConfig

if TYPE_CHECKING:
    from training.callbacks import Callback
    from training.job import Task

Keys = TypeVar("Keys", bound=TrainConfig)


@dataclass(frozen=True)
class Option(Generic[Keys]):
    """One option; what it does not need it leaves out.

    Attributes:
        keys: the core's keys and its own, with a docstring each. A method `contradictions` of the class may yield lines
            beside those of `super()`.
        before: the key of the core before which its own stand, on the pages of the docs and in config.yml.
        rules: how its keys may change between two starts; a key without a rule must stay the same.
        callbacks: makes its callbacks of a run, none where the config does not ask for it. They are called after the
            core's, in the order of the list.
        add_flags: adds its flags to the command line of the entry points.
        act: does what its flags ask for in place of training, before processes start; returns whether they ask.
    """

    keys: type[Keys]
    before: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    callbacks: Callable[[Keys, Task], Sequence[Callback]] = lambda config, task: ()
    add_flags: Callable[[ArgumentParser], None] = lambda parser: None
    act: Callable[[Keys, Namespace], bool] = lambda config, arguments: False
