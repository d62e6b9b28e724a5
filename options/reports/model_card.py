"""The model card of an exported run: README.md and training.png.

The card is made from run.json and the lines of metrics.jsonl up to the checkpoint. It is public, so paths are cut to
their last names. The base model's own card stays, as README.base.md.
"""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import yaml

from training.checkpoint.folder import CheckpointRecord
from training.metrics.reporter import METRICS_FILE, read_metrics
from training.metrics.run_info import RUN_FILE

CARD, BASE_CARD, PICTURE = "README.md", "README.base.md", "training.png"
# Keys of the config that say where files were and numbers went, not what was trained.
PLACES = "model_path data_path eval_data_path save_path cache_dir resume tensorboard wandb swanlab mlflow".split()


def write_card(checkpoint: Path, target: Path) -> None:
    """Write the card of an exported checkpoint to `target`, if the run's files lie beside the checkpoint.

    Raises:
        OSError: a file of the run cannot be read, or the card cannot be written.
    """
    run, record = checkpoint.parent, CheckpointRecord.read(checkpoint)
    if record is None or not (run / RUN_FILE).is_file() or not (run / METRICS_FILE).is_file():
        return
    lines = [line for line in read_metrics(run / METRICS_FILE) if line["step"] <= record.step]
    if not any("loss" in line for line in lines):
        return
    try:
        info = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # torn by a power cut; the next start rewrites it
        return
    if (target / CARD).exists():
        (target / CARD).rename(target / BASE_CARD)
    (target / CARD).write_text(card(info, lines, run.resolve().name), encoding="utf-8")
    from options.reports.report import draw_run  # imports matplotlib, which takes two seconds

    draw_run(run, target / PICTURE, last_step=record.step)


def card(info: dict[str, Any], lines: list[dict[str, Any]], name: str) -> str:
    """Format README.md the way model hubs expect.

    Args:
        info: content of run.json.
        lines: of metrics.jsonl, up to the checkpoint.
        name: the heading.
    """
    config, steps = info["config"], [line for line in lines if "loss" in line]
    sums = {key: sum(map(itemgetter(key), steps)) for key in ("samples", "tokens", "supervised")}
    sources = [source["path"] if isinstance(source, dict) else source for source in config["data_path"]]
    versions = dict(info["versions"])
    own, state = versions.pop("pipetune", "unknown"), info["git"]  # older runs have no version
    revision = ""
    if state:
        revision = f", revision {state['revision']}{', modified' if state['modified'] else ''}"
    rows = {
        "base model": "none: random weights" if config["from_scratch"] else _end(config["model_path"], 2),
        "data": ", ".join(_end(source, 1) for source in sources),
        "samples": f"{sums['samples']:,}, of {sums['tokens']:,} tokens, {sums['supervised']:,} of them with loss",
        "steps": f"{len(steps):,}",
        "epochs": str(steps[-1]["epoch"]),
        "loss": f"{_short(steps[0]['loss'])} in the first step, {_short(steps[-1]['loss'])} in the last",
        "topology": f"{info['topology']['stages']} stages, {info['topology']['replicas']} replicas",
        "Pipetune": own + revision,
        "with": ", ".join(f"{package} {version}" for package, version in versions.items()),
    }
    if evaluated := [line["eval_loss"] for line in lines if "eval_loss" in line]:
        rows["evaluation loss"] = _short(evaluated[-1])
    table = "\n".join(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows.items())
    trained = "A part of the weights" if config.get("freeze") else "All weights"
    library = "transformers"
    if config.get("lora"):
        trained, library = "A LoRA adapter of the base model,", "peft"
    kept = {key: value for key, value in config.items() if key not in PLACES}
    if kept.get("prompt_format"):
        kept["prompt_format"] = _end(kept["prompt_format"], 1)  # which may be a file
    settings = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return f"""---
library_name: {library}
tags: [pipetune]
---

# {name}

{trained} fine-tuned with Pipetune.

| | |
|---|---|
{table}

![loss, learning rate, throughput and memory over the steps]({PICTURE})

The licence of the base model holds for this one too.

## Config

```yaml
{settings}```
"""


def _end(path: str, names: int) -> str:
    return "/".join(PurePath(path).parts[-names:])


def _short(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4g}"
