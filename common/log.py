"""Print a run's lines on standard output by rich, with foreign text made safe for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from common.terminal import paused, safe_text


class Log(Console):
    """A console without markup and line wrapping that escapes control characters; its own colours stay."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print above a live view: rich lets only the view's own console do that, and would write into the view."""
        with paused():
            super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Make the pieces of a line safe."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(safe_text(segment.text), segment.style)
