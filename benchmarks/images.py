"""How long a step waits for pixels: photos of a million pixels in JPEG, a model of images and text in two stages.

The run is one that a user would start, with random weights; its metrics.jsonl says how long each step took and how much
of that it waited for data. Beside it stands what the same images cost where they are made in the step itself, which is
what the wait would be without processes that decode ahead (`data.images.ahead`). Answers are long, so that a step takes
longer than its images take to be decoded: where it does not, no process can hide that.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.report import Report, against_targets

PICTURES, BATCH, STEPS, UNTIMED = 64, 8, 10, 2
WIDTH, HEIGHT, GRAIN = 1280, 960, 8  # pixels of a photo, and of each patch of noise in it
TARGET = 0.05  # of a step
WORDS = 60  # repetitions of an answer
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}  # of the language model


def measure(folder: Path) -> Report:
    """Train on photos, and report how long the steps waited for them."""
    from benchmarks.drafting import run
    from benchmarks.steps import topology
    from training.metrics.reporter import read_metrics

    records = make_photos(folder)
    make_model(folder / "model")
    config: dict[str, Any] = {
        "model_path": str(folder / "model"),
        "data_path": str(records),
        "cache_dir": str(folder / "cache"),
        "save_path": str(folder / "run"),
        "max_seq_len": 512,
        "max_steps": STEPS,
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-4}},
        **topology(2, 1),
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run("train_ds.py", "--config", str(folder / "config.yml"))

    steps = read_metrics(folder / "run" / "metrics.jsonl")[UNTIMED:]
    seconds = median(step["seconds"] for step in steps)
    waited = median(step["times"]["data"] for step in steps)
    alone = seconds_for_pixels(folder / "model", records)
    return against_targets(
        f"images: a step of {BATCH} photos of {WIDTH} x {HEIGHT} pixels",
        seconds_of_a_step=(seconds, ""),
        seconds_for_pixels_in_one_process=(alone, ""),
        share_waited=(waited / seconds, f"at most {TARGET:g}"),
    )


def make_photos(folder: Path) -> Path:
    """Write photos of noise, which compress as real ones do, and a record for each; return the records' file."""
    import numpy
    from PIL import Image

    noise = numpy.random.default_rng(0)
    (folder / "photos").mkdir()
    records = []
    for number in range(PICTURES):
        coarse = noise.integers(0, 256, (HEIGHT // GRAIN, WIDTH // GRAIN, 3), dtype=numpy.uint8)
        photo = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        photo.save(folder / "photos" / f"{number}.jpg", quality=90)
        said = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A red circle. " * WORDS}]
        records.append({"images": [f"photos/{number}.jpg"], "conversations": said})
    path = folder / "records.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def make_model(folder: Path) -> None:
    """Write the LLaVA of examples/images with a larger language model."""
    from examples.images import make

    make.make_model(folder, **SIZES)


def seconds_for_pixels(model: Path, records: Path) -> float:
    """Measure how long a step's images take in one process."""
    from data.images.pictures import Pictures

    pictures = Pictures(model)
    photos = [records.parent / record["images"][0] for record in json.loads(records.read_text())[:BATCH]]
    images = [pictures.look(photo, records.parent) for photo in photos]
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        pictures.tensors(images)
        taken.append(time.perf_counter() - begin)
    return min(taken)
