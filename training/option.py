"""What an option is: something that a run may have besides, with keys, rules, callbacks and flags of its own.

Each lies in a folder of `options/`, and `options/__init__.py` lists them. The core imports none: an entry point hands
it the class of the config (`options.RunConfig`), which has the keys of all options and their list.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

from training.config.keys import TrainConfig
from training.config.option_keys import Keys, OptionKeys

if TYPE_CHECKING:
    from data.collation import Collation
    from data.sample_set import InMemory, KeptSamples
    from models.spec import ModelSpec
    from training.callbacks import Callback
    from training.distributed.processes import ProcessInfo
    from training.distributed.rank_monitor import RankMonitor
    from training.engine.trainer import Trainer
    from training.job import Task
    from training.metrics.tracking import Tracker
    from training.objective import ModelAndRecords


class Conversions(NamedTuple):
    """Where an option adds commands to convert_model.py.

    Attributes:
        commands: argparse's sub-parsers; each sets `act` as a default, which is called with the parsed words.
        source: has `--input-path`; as target and overwrite it is one of `parents`.
        target: has `--save-path`.
        overwrite: has `--overwrite`.
    """

    commands: Any
    source: ArgumentParser
    target: ArgumentParser
    overwrite: ArgumentParser


class CommandLine(NamedTuple):
    """Where an option adds flags: the command line of the entry points.

    Attributes:
        parser: takes them.
        source: argparse's group of flags of which one says where the config comes from; `--config` is in it.
        in_stages: whether the entry point has a pipeline.
    """

    parser: ArgumentParser
    source: Any
    in_stages: bool

    def staged(self, text: str) -> str:
        """Return the help of a flag that needs a pipeline: hidden without one."""
        return text if self.in_stages else SUPPRESS


class Hosts(Protocol):
    """Machines on which a run is started."""

    @property
    def devices(self) -> dict[str, list[int]]:
        """The numbers of the devices to use, by host."""

    @property
    def words(self) -> list[str]:
        """What names the hosts on the command line."""

    def launch(self, config: TrainConfig, reload: Callable[[str], TrainConfig]) -> NoReturn:
        """EntryPoint the run there in place of this process; `reload` returns the config with one more override."""


class EntryPoint(NamedTuple):
    """An entry point, and how it was started.

    Attributes:
        kind: of the config.
        in_stages: whether it has a pipeline; false for train_ds_zero.py.
        process: what a launcher made of this process; None where none started it.
        hosts: where the run is to be, if not on this machine alone.
    """

    kind: type[TrainConfig]
    in_stages: bool
    process: ProcessInfo | None
    hosts: Hosts | None


class Action(NamedTuple):
    """What is done in place of training, before processes start.

    Attributes:
        do: does it.
        reads_model: whether it needs the model's folder, which is then looked for before what takes seconds to import.
    """

    do: Callable[[Any, Namespace, EntryPoint], None]
    reads_model: Callable[[Any], bool] = lambda config: True


IsOverride = Callable[[str], bool]


class RankAction(Protocol):
    """What a rank does in place of training."""

    def __call__(self, config: Any, process: ProcessInfo, monitor: RankMonitor, in_stages: bool) -> bool:
        """Do it; return whether the processes are to start over. `in_stages` is false for train_ds_zero.py."""


@dataclass(frozen=True)
class Flags:
    """An option's flags on the command line of the entry points, and what they ask for.

    Attributes:
        add: adds them.
        needs: by the name of a flag, the flags without any of which it has no effect.
        check: completes and checks the parsed flags, beyond `needs`, by `parser.error`; given also what says whether a
            word is `key.sub=value` of the config, as the planner's `--data` swallows what stands behind it.
        find_hosts: finds the hosts that this process is to start the run on, if not this machine alone.
        prepare: does what is asked for before the config is read: the planner writes the file and names it in
            `config`. It may set `processes`, to load a config without model_topo for so many.
        acts: by the name of a flag, what is done in place of training, before processes start.
        on_ranks: by the name of a flag, what every rank does in place of training where the flag is given.
        wrap_trainer: returns what trains in place of a kind of trainer: a proof watches the steps of a user's own run,
            which it can do only from inside.
    """

    add: Callable[[CommandLine], None] = lambda line: None
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    check: Callable[[ArgumentParser, Namespace, IsOverride], None] = lambda parser, arguments, is_override: None
    find_hosts: Callable[[Namespace, ProcessInfo | None], Hosts | None] = lambda arguments, process: None
    prepare: Callable[[Namespace, EntryPoint], None] = lambda arguments, entry: None
    acts: Mapping[str, Action] = field(default_factory=dict)
    on_ranks: Mapping[str, Callable[[], RankAction]] = field(default_factory=dict)
    wrap_trainer: Callable[[Namespace, type[Trainer]], type[Trainer]] = lambda arguments, kind: kind


@dataclass(frozen=True)
class Option(OptionKeys[Keys]):
    """One option: its keys, and what it does; what it does not need it leaves out.

    Attributes:
        callbacks: makes its callbacks of a run, none where the config does not ask for it. They are called after the
            core's, in the order of the list.
        first_callbacks: makes those that are called before all others, the objective's too: the planner's, which
            settle what others build on, and complete a step's numbers before they are reported.
        language_model: the task of a language model, where the config asks for it: a subclass of the usual one
            (`training.language_model.LanguageModel`).
        model: the model that is trained on these sets of records in place of the given one, which has no more than
            their text needs.
        collation: what a loader of that model's records has to know, made of what the objective says of it.
        trainer: what trains in place of `PipelineTrainer`, or without stages of `ZeroTrainer`, where the config asks
            for it; given also whether there are stages.
        open_trackers: opens what receives the numbers of each step, given the run's folder and first step.
        add_to_export: adds files to a HuggingFace folder that is made of a run's checkpoint, given both folders.
        add_conversions: adds its commands to convert_model.py.
        flags: its flags on the command line of the entry points.
    """

    callbacks: Callable[[Keys, Task], Sequence[Callback]] = lambda config, task: ()
    first_callbacks: Callable[[Keys, Task], Sequence[Callback]] = lambda config, task: ()
    language_model: Callable[[Keys], type[Task] | None] = lambda config: None
    model: Callable[[Keys, ModelSpec, Sequence[KeptSamples | InMemory]], ModelSpec] = lambda config, spec, sets: spec
    collation: Callable[[Keys, ModelAndRecords, Collation], Collation] = lambda config, task, collation: collation
    trainer: Callable[[Keys, bool], type[Trainer] | None] = lambda config, in_stages: None
    open_trackers: Callable[[Keys, Path, int], Sequence[Tracker]] = lambda config, folder, first_step: ()
    add_to_export: Callable[[Path, Path], None] = lambda checkpoint, folder: None
    add_conversions: Callable[[Conversions], None] = lambda conversions: None
    flags: Flags = Flags()


def options_of(config: TrainConfig | type[TrainConfig]) -> tuple[Option[Any], ...]:
    """List the options of a config, which itself knows no more of them than their keys."""
    return cast("tuple[Option[Any], ...]", config.options)


def model_for(config: TrainConfig, spec: ModelSpec, sets: Sequence[KeptSamples | InMemory]) -> ModelSpec:
    """Return the model as options make it for the samples: one that sees, where there are images."""
    for option in options_of(config):
        spec = option.model(config, spec, sets)
    return spec


def add_to_export(options: Sequence[Option[Any]], checkpoint: Path, folder: Path) -> None:
    """Let options add their files to a HuggingFace folder that is made of a run's checkpoint."""
    for option in options:
        option.add_to_export(checkpoint, folder)


def find_action(options: Sequence[Option[Any]], arguments: Namespace) -> Action | None:
    """Find what the flags ask for in place of training, before processes start, if anything."""
    for option in options:
        for flag, act in option.flags.acts.items():
            if getattr(arguments, flag):
                return act
    return None


def rank_action(options: Sequence[Option[Any]], arguments: Namespace) -> RankAction | None:
    """Find what the flags ask every rank to do in place of training, if anything."""
    for option in options:
        for flag, find in option.flags.on_ranks.items():
            if getattr(arguments, flag):
                return find()
    return None


def wrap_trainer(options: Sequence[Option[Any]], arguments: Namespace, kind: type[Trainer]) -> type[Trainer]:
    """Return the kind of trainer that the flags ask for in place of `kind`."""
    for option in options:
        kind = option.flags.wrap_trainer(arguments, kind)
    return kind
