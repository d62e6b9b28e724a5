"""Schedules that plan themselves: options whose step no pipeline's plan describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.option import Keys, Option

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from options.planner.inputs import Basis
    from training.topology import Division


class OwnPlan(Protocol):
    """A step as such a schedule runs it."""

    @property
    def seconds(self) -> float:
        """The time of a step."""

    @property
    def peak(self) -> int:
        """Most bytes of a device."""

    @property
    def host(self) -> int:
        """Bytes of main memory."""

    @property
    def fits(self) -> bool:
        """Whether a device has room for it, and a host."""

    def describe(self) -> list[str]:
        """Say in lines what it takes."""

    def draw(self, path: Path) -> Path:
        """Draw it as a PNG, beside the memory that is there."""


@dataclass(frozen=True, kw_only=True)
class SelfPlannedOption(Option[Keys]):
    """An option with a schedule that plans itself.

    Attributes:
        schedule: the value of the key `schedule` that asks for it.
        fastest: returns the fastest plan on so many devices, of those that fit; if none does, that which takes the
            least, and None where the model cannot be divided among them.
        divide: divides a run's model, with lines for the log.
    """

    schedule: str
    fastest: Callable[[Basis, int], OwnPlan | None]
    divide: Callable[[Basis], Division]


def self_planned(config: TrainConfig) -> list[SelfPlannedOption[Any]]:
    """List the options of a config that plan themselves."""
    return [option for option in config.options if isinstance(option, SelfPlannedOption)]


def planners_for(config: TrainConfig, spec: ModelSpec) -> list[SelfPlannedOption[Any]]:
    """List those of them that train such a model: one that sees images may need whole stages."""

    def trains(option: SelfPlannedOption[Any]) -> bool:
        try:
            config.model_copy(update={"schedule": option.schedule}).check_model(spec)
        except ConfigError:
            return False
        return True

    return list(filter(trains, self_planned(config)))


def own_planner(config: TrainConfig) -> SelfPlannedOption[Any] | None:
    """Find the option whose schedule the config asks for, if it plans itself."""
    return next((option for option in self_planned(config) if option.schedule == config.schedule), None)
