"""What a run may have besides: a folder for each option, with its code, keys, rules and flags; this is their list.

An option's first lines name its page of the docs, and `tests/options/` has its tests. Take one out by removing both
folders and its names here. Entry points read configs as `RunConfig` and hand the class on, so the core (`models/`,
`data/`, `training/`, `common/`) knows no option; `training.option` has the interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from options import (
    cluster,
    distillation,
    exports,
    images,
    multi_token,
    planner,
    preference,
    proof,
    reports,
    row_chunks,
    scores,
    streamed_data,
    timeline,
    trackers,
    weight_streaming,
)
from training.config.keys import TrainConfig
from training.config.yaml_file import load_config_of
from training.option import Option


class RunConfig(
    scores.ScoresKeys,
    preference.PreferenceKeys,
    distillation.DistillationKeys,
    multi_token.DraftKeys,
    streamed_data.StreamKeys,
    images.VisionKeys,
    row_chunks.ChunkKeys,
    timeline.TimelineKeys,
    trackers.TrackerKeys,
    weight_streaming.StreamingKeys,
    planner.PlannerKeys,
    title=TrainConfig.__name__,
):
    """A whole run."""

    options: ClassVar[tuple[Option[Any], ...]] = (
        preference.OPTION,
        distillation.OPTION,
        multi_token.OPTION,
        scores.OPTION,
        streamed_data.OPTION,
        images.OPTION,
        trackers.OPTION,
        weight_streaming.OPTION,
        row_chunks.OPTION,
        timeline.OPTION,
        planner.OPTION,
        proof.OPTION,
        reports.OPTION,
        exports.OPTION,
        cluster.OPTION,
    )


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `key.sub=value` overrides and check the result.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or has a wrong value.
    """
    return load_config_of(RunConfig, path, overrides)
