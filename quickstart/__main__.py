"""The whole main job with its effect shown: `make quickstart`, on a real small model or on the user's own.

    HuggingFace folder -> questions -> pipeline layout -> training in 2 stages -> HuggingFace folder -> questions

    python -m quickstart
    python -m quickstart --model DIR --data FILE [key.sub=value ...]

Each step runs the command that a user would type. Everything lies in one folder; a second start goes on where the first
ended, and reuses what is still valid. Of the shipped run that is the base model always, the rest as long as the config,
the records and Pipetune's own code are the same. What was trained of a user's own model is never removed.

Cost, on two cores: 8 minutes and 6 GB of memory; `python -m benchmarks.memory --only quickstart` measures it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
from itertools import chain
from pathlib import Path

import torch
import yaml
from rich.markup import escape

from common.whole_files import replace_text
from models.checkpoint.layout import Layout, layout_of, resolve
from models.errors import CheckpointError
from quickstart import own
from quickstart.answers import comparison
from quickstart.arithmetic import CORES, same_everywhere
from quickstart.base_model import ABOUT, NAME, make_base
from quickstart.job import PIPELINE, RUN, QuickstartJob, ask, console, is_known, say, settings, tune
from quickstart.questions import sample_of, shipped
from training.errors import ConfigError, exit_with_one_line
from training.preflight import SOURCE, check_writable

ROOT = Path("runs/quickstart")
CONFIG, RECORDS = Path("configs/quickstart.yml"), Path("data/samples/faq.json")
MODEL = "base"


def main() -> int:
    arguments = parse_arguments()
    begin = time.monotonic()
    if arguments.save_path:
        check_writable("--save-path", arguments.save_path)
    job = own_job(arguments) if arguments.model else shipped_job(arguments.save_path or ROOT)
    say(2, "ask it")
    before = ask(job, job.base, "before")
    tune(job)
    say(6, "ask the same questions again")
    after = ask(job, job.tuned, "after")
    table, summary, passed = comparison(job.questions, before, after, judged=not arguments.model)
    console.print(table)
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    console.print(f"{summary}; {minutes} min {seconds} s")
    finish(job, bool(arguments.model))
    return 0 if passed else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a small model, or your own, and compare its answers.")
    parser.add_argument("--model", metavar="DIR", help="your own model, a HuggingFace folder; needs --data")
    parser.add_argument("--data", metavar="FILE", help="your own records: a file, a folder or a glob; needs --model")
    parser.add_argument("--save-path", type=Path, metavar="DIR", help="where everything lies; below runs where absent")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="with --model: keys of the run's config")
    arguments = parser.parse_intermixed_args()
    if bool(arguments.model) != bool(arguments.data):
        parser.error("--model and --data (MODEL= and DATA= of make): expected both or none")
    if arguments.overrides and not arguments.model:
        parser.error("keys: expected --model and --data, as the shipped run is always the same")
    return arguments


def shipped_job(folder: Path) -> QuickstartJob:
    """Train SmolLM2 on the shipped records; results of other records or other code are removed first."""
    say(1, f"the base model: {NAME}")
    console.print(ABOUT)
    if not (folder / MODEL).exists():
        make_base(folder / MODEL, folder / "download")
    fixed = {} if torch.cuda.is_available() else same_everywhere()
    arguments = [f"model_path={folder / PIPELINE}", f"save_path={folder / RUN}"] if folder != ROOT else []
    if torch.cuda.device_count() == 1:
        layers = sum(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model_topo"]["parts"])
        arguments += ["model_topo.process_topology.dims=[1,1]", f"model_topo.parts=[{layers}]"]
    digest = hashlib.sha256("\0".join(arguments).encode())
    code = chain.from_iterable(sorted(Path(source).rglob("*.py")) for source in SOURCE)
    for path in (CONFIG, RECORDS, folder / MODEL / "config.json", *code):
        digest.update(path.read_bytes())
    job = QuickstartJob(
        folder, folder / MODEL, CONFIG, shipped(RECORDS), arguments, digest.hexdigest(), fixed, CORES if fixed else None
    )
    if not is_known(job):
        for old in (job.pipeline, job.run_folder, job.tuned):
            if old.exists():
                console.print(f"{old}: of another version of the records or the program; made anew")
                shutil.rmtree(old)
        replace_text(job.folder / "fingerprint", job.fingerprint)
    return job


def own_job(arguments: argparse.Namespace) -> QuickstartJob:
    """Train the user's model on the user's records.

    Raises:
        ConfigError: the folder holds another job, or a key is wrong.
        CheckpointError, DataError: the model or the records cannot be read.
    """
    model = Path(arguments.model)
    folder = arguments.save_path or ROOT.with_name(f"quickstart-{model.resolve().name}")
    say(1, f"the base model: {model}")
    if layout_of(resolve(model)) is Layout.PIPELINE:
        raise CheckpointError(f"{model}: in the pipeline layout; expected a HuggingFace folder")
    fingerprint = own.fingerprint(arguments.model, arguments.data, arguments.overrides)
    config = folder / "config.yml"
    questions = sample_of(arguments.data, "on_bad_record=skip" in arguments.overrides)
    job = QuickstartJob(folder, model, config, questions, arguments.overrides, fingerprint, {})
    if not is_known(job):
        begun = (folder / "fingerprint").is_file() and not job.run_folder.exists() and not job.tuned.exists()
        if folder.exists() and any(folder.iterdir()) and not begun:
            raise ConfigError(
                f"{folder}: holds another model, other records or other keys; move it away, or give --save-path"
            )
        if begun:
            console.print(f"{folder}: of another model, other records or other keys, and not trained yet; made anew")
            shutil.rmtree(job.pipeline, ignore_errors=True)
        own.write_config(config, arguments.model, job.pipeline, arguments.data, job.run_folder)
        replace_text(folder / "fingerprint", job.fingerprint)
    settings(job)  # a wrong key is told before anything is asked
    return job


def finish(job: QuickstartJob, is_own: bool) -> None:
    """Draw the picture, and print what to do next."""
    from quickstart.picture import PICTURE, draw_picture  # what draws is large, and trains nothing

    picture = draw_picture(job.run_folder, job.folder / PICTURE)
    console.print(f"picture: {picture} (loss, learning rate, speed, memory, and what each stage did in two steps)")
    python = os.path.relpath(sys.executable)
    following = [
        (f"{python} demo.py --model {job.tuned}", "talk to it"),
        (f"{python} train_ds.py --config {job.config} --inspect 2", "see what of the records is trained"),
        ("make quickstart MODEL=DIR DATA=FILE", "the same with your own model and records"),
    ]
    if is_own:
        following[2] = f"{python} convert_model.py check --input-path {job.tuned}", "check that servers can load it"
    for command, what in following:
        console.print(f"next: {escape(command)}   # {what}")


if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main())
