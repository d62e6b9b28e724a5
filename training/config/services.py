"""Sections of a config for what a run talks to: trackers, and the ports of its hosts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from training.config.section import Section


class TrackerSwitch(Section):
    """A tracker of `trackers`."""

    enabled: bool | None = Field(default=None, exclude=True)
    """`true` adds it to `trackers`, `false` takes it out."""


Port = Annotated[int, Field(ge=1, le=65535)]


class Ports(Section):
    """`ports`: where rank 0's host listens to the others."""

    meeting: Port | None = None
    """On rank 0's host: where the ranks meet, for firewalls. Without the key the launcher's choice."""

    failure_detector: Port | None = None
    """On rank 0's host: where they notice that one is lost. Without the key any free one."""

    @model_validator(mode="after")
    def _check(self) -> Ports:
        if self.meeting and self.meeting == self.failure_detector:
            raise ValueError(f"failure_detector: {self.meeting} is that of meeting; expected another one")
        return self
