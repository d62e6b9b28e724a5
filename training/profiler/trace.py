"""A timeline as a file of the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from training.schedule.simulation import Span


def trace(steps: Mapping[int, Sequence[Sequence[Span]]], names: Sequence[str]) -> dict[str, Any]:
    """The trace of the recorded steps; times are in microseconds.

    Args:
        steps: the spans by step and rank.
        names: of the ranks.
    """
    events: list[dict[str, Any]] = []
    for rank, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    events += [
        {
            "ph": "X",
            "name": span.kind if span.micro_batch is None else f"{span.kind} {span.micro_batch}",
            "cat": span.kind,
            "pid": span.rank,
            "tid": 0,
            "ts": round(span.begin * 1e6, 1),
            "dur": round((span.end - span.begin) * 1e6, 1),
            "args": {"step": step, "stage": span.stage, "micro_batch": span.micro_batch},
        }
        for step, rows in steps.items()
        for spans in rows
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
