"""Send a run's numbers to Weights & Biases, SwanLab or MLflow (docs/configuration.md#curves-in-a-tracker)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from training.config.changes import FREE
from training.config.keys import TrainConfig
from training.config.run_keys import TrackerSwitch
from training.option import Option

if TYPE_CHECKING:
    from training.metrics.tracking import Tracker


class TrackerProject(TrackerSwitch):
    """A tracker of `trackers`, and where its runs appear."""

    project: str = "pipetune"
    """The project, or experiment, that the run appears in."""

    name: str | None = None
    """The run's name there."""


class TrackerKeys(TrainConfig):
    """A run whose numbers may go to a service."""

    trackers: list[Literal["tensorboard", "wandb", "swanlab", "mlflow"]] = ["tensorboard"]
    """Where the numbers of metrics.jsonl are drawn as well: `tensorboard` (in `save_path/tensorboard`), `wandb`
    (Weights & Biases), `swanlab`, `mlflow`, each with `pip install` of that name
    (docs/configuration.md#curves-in-a-tracker). A resumed run goes on in the same curves."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _one(cls, trackers: Any) -> Any:
        """Read `trackers: wandb`, and `none`, as other tools take them."""
        if not isinstance(trackers, str):
            return trackers
        return [] if trackers == "none" else [trackers]

    wandb: TrackerProject = TrackerProject()
    swanlab: TrackerProject = TrackerProject()
    mlflow: TrackerProject = TrackerProject()


def _open_trackers(config: TrackerKeys, folder: Path, first_step: int) -> Sequence[Tracker]:
    from options.trackers.services import open_services

    return open_services(config, folder, first_step)


OPTION = Option(
    TrackerKeys,
    before="model_topo",
    rules=dict.fromkeys(("wandb", "swanlab", "mlflow"), FREE),
    open_trackers=_open_trackers,
)
