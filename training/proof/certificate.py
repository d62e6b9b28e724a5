"""The outcome of a proof: a table for people and a file for programs.

proof.json says which config was proved (the SHA-256 of it with every default filled in), by which versions, on which
devices, how the small run differed from the user's, and the numbers of each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from common.whole_files import replace_text
from training.config.keys import TrainConfig
from training.metrics.run_info import CODE, git_state, machine, versions
from training.metrics.step_metrics import to_json
from training.proof.comparison import Row

CERTIFICATE = "proof.json"


def table(rows: Sequence[Row], title: str) -> Table:
    """A row for each property."""
    made = Table(title=title, title_justify="left")
    for heading in ("property", "compared", "largest", "bound", "verdict", "where"):
        made.add_column(heading, justify="right" if heading in ("compared", "largest", "bound") else "left")
    for row in rows:
        style = "green" if row.holds else "bold red"
        made.add_row(
            row.what,
            f"{row.count:,}",
            short(row.largest),
            short(row.bound),
            Text("holds" if row.holds else "FAILS", style),
            row.where if row.largest else "",
        )
    return made


def short(value: float) -> str:
    """A difference or a bound, for a person."""
    return f"{value:.1e}" if value else "0"


def write_certificate(
    config: TrainConfig, small: TrainConfig, differs: Sequence[str], rows: Sequence[Row], seconds: float
) -> Path:
    """Write proof.json beside the run, whole; nothing else in `save_path` is touched.

    Args:
        differs: how the small run differs from the user's, where that counts.
    """
    path = Path(config.save_path) / CERTIFICATE
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if torch.cuda.is_available() else {}
    content = {
        "proved": all(row.holds for row in rows),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config_sha256": hashlib.sha256(to_json(config.dump())).hexdigest(),
        "versions": versions() | nccl,
        "git": git_state(CODE),
        "machine": machine(),
        "dims": config.model_topo.process_topology.dims,
        "small_dims": small.model_topo.process_topology.dims,
        "differs": list(differs),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
        "small_config": small.dump(),
    }
    replace_text(path, to_json(content, indent=2).decode() + "\n")
    return path
