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
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.markup import escape

from common.whole_files import replace_text
from quickstart import own
from quickstart.answers import comparison
from quickstart.arithmetic import CORES, same_everywhere
from quickstart.base_model import ABOUT, make_base
from quickstart.questions import Question, sample_of, shipped
from training.distributed.processes import free_port
from training.errors import ConfigError, one_line_at_the_end

ROOT = Path("runs/quickstart")
CONFIG, RECORDS = Path("configs/quickstart.yml"), Path("data/samples/faq.json")
MODEL, PIPELINE, RUN, TUNED = "base", "base_pp", "checkpoints", "tuned"
MOST_TOKENS = 64  # of an answer

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Job:
    """What is done to which model.

    Attributes:
        folder: where everything lies.
        base: the model as a HuggingFace folder.
        config: of the run.
        overrides: what follows the config on the command line.
        fingerprint: of all that the results depend on.
        environment: of the commands, on top of this process's own.
        threads: of the process that answers; None for torch's choice.
    """

    folder: Path
    base: Path
    config: Path
    questions: list[Question]
    overrides: Sequence[str]
    fingerprint: str
    environment: Mapping[str, str]
    threads: int | None = None

    @property
    def pipeline(self) -> Path:
        return self.folder / PIPELINE

    @property
    def run_folder(self) -> Path:
        return self.folder / RUN

    @property
    def tuned(self) -> Path:
        return self.folder / TUNED


def main() -> int:
    arguments = parse_arguments()
    begin = time.monotonic()
    job = own_job(arguments) if arguments.model else shipped_job(arguments.save_path or ROOT)
    replace_text(job.folder / "fingerprint", job.fingerprint)
    say(2, "ask it")
    before = ask(job, job.base, "before")
    train(job)
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


def shipped_job(folder: Path) -> Job:
    """The shipped records on SmolLM2; what other records or other code made is removed."""
    say(1, ABOUT)
    if not (folder / MODEL).exists():
        make_base(folder / MODEL, folder / "download")
    fixed = {} if torch.cuda.is_available() else same_everywhere()
    arguments = [f"model_path={folder / PIPELINE}", f"save_path={folder / RUN}"] if folder != ROOT else []
    if torch.cuda.device_count() == 1:
        layers = sum(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model_topo"]["parts"])
        arguments += ["model_topo.process_topology.dims=[1,1]", f"model_topo.parts=[{layers}]"]
    digest = hashlib.sha256("\0".join(arguments).encode())
    code = [path for wing in ("models", "data", "training") for path in sorted(Path(wing).rglob("*.py"))]
    for path in (CONFIG, RECORDS, folder / MODEL / "config.json", *code):
        digest.update(path.read_bytes())
    job = Job(
        folder, folder / MODEL, CONFIG, shipped(RECORDS), arguments, digest.hexdigest(), fixed, CORES if fixed else None
    )
    if not is_known(job):
        for old in (job.pipeline, job.run_folder, job.tuned):
            if old.exists():
                console.print(f"{old}: of another version of the records or the program; made anew")
                shutil.rmtree(old)
    return job


def own_job(arguments: argparse.Namespace) -> Job:
    """The user's records on the user's model.

    Raises:
        ConfigError: the folder holds another job.
        CheckpointError, DataError: the model or the records cannot be read.
    """
    model = Path(arguments.model)
    folder = arguments.save_path or ROOT.with_name(f"quickstart-{model.resolve().name}")
    say(1, f"the base model: {model}")
    fingerprint = own.fingerprint(arguments.model, arguments.data, arguments.overrides)
    config = folder / "config.yml"
    job = Job(folder, model, config, sample_of(arguments.data), arguments.overrides, fingerprint, {})
    if not is_known(job):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: holds another model, other records or other keys; move it away, or give --save-path"
            )
        own.write_config(config, arguments.model, job.pipeline, arguments.data, job.run_folder)
    return job


def is_known(job: Job) -> bool:
    """Whether what lies in the job's folder is this job's."""
    path = job.folder / "fingerprint"
    return path.is_file() and path.read_text(encoding="utf-8") == job.fingerprint


def train(job: Job) -> None:
    """From the base model to the tuned one, as far as it is not done yet."""
    if job.tuned.exists():
        console.print(f"{job.tuned} is still valid; remove {job.folder} to start over")
        return
    say(3, "to the pipeline layout, one file per layer")
    if not job.pipeline.exists():
        run(job, sys.executable, "convert_model.py", "hg_to_pp", "--input-path", job.base, "--save-path", job.pipeline)
    say(4, "fine-tune every weight in a pipeline")
    run(job, sys.executable, "-m", "deepspeed.launcher.runner", *training_arguments(job))
    say(5, "back to the HuggingFace layout")
    run(job, sys.executable, "convert_model.py", "pp_to_hg", "--input-path", job.run_folder, "--save-path", job.tuned)


def training_arguments(job: Job) -> list[str]:
    """What follows `deepspeed` on the command line: a process for each stage."""
    config = yaml.safe_load(job.config.read_text(encoding="utf-8"))
    given = value_of(job, "model_topo.process_topology.dims")
    stages, replicas = given or config["model_topo"]["process_topology"]["dims"]
    arguments = ["--num_gpus", str(stages * replicas), "--master_port", str(free_port())]
    return [*arguments, "train_ds.py", "--config", str(job.config), *job.overrides]


def value_of(job: Job, key: str) -> Any:
    """What an override gives a key; None where none does."""
    words = (word.partition("=") for word in job.overrides)
    return next((yaml.safe_load(value) for name, _, value in words if name == key), None)


def ask(job: Job, model: Path, name: str) -> list[str]:
    """The model's answers, each in a dialogue of its own; texts to go on with are another file of prompts."""
    answers: dict[int, str] = {}
    for raw in (False, True):
        asked = [number for number, question in enumerate(job.questions) if question.raw == raw]
        if not asked:
            continue
        kind = "texts" if raw else "questions"
        prompts, target = job.folder / f"{kind}.jsonl", job.folder / f"{kind}-{name}.jsonl"
        lines = [json.dumps(job.questions[number].line, ensure_ascii=False) for number in asked]
        replace_text(prompts, "\n".join(lines) + "\n")
        target.unlink(missing_ok=True)  # they are asked again each time
        words: list[str | Path] = ["--model", model, "--prompts-file", prompts, "--output", target, "--greedy"]
        words += ["--max-new-tokens", str(MOST_TOKENS), *(["--raw"] if raw else [])]
        words += ["--dtype", "fp32", "--threads", str(job.threads)] if job.threads else []
        prompt_format = value_of(job, "prompt_format")
        words += ["--prompt-format", prompt_format] if prompt_format and not raw else []
        run(job, sys.executable, "demo.py", *words)
        told = target.read_text(encoding="utf-8").splitlines()
        answers |= {number: json.loads(line)["answer"] for number, line in zip(asked, told, strict=True)}
    return [answers[number] for number in range(len(job.questions))]


def finish(job: Job, is_own: bool) -> None:
    """The picture, and what to do next."""
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
        following[2] = f"{python} convert_model.py check --input-path {job.tuned}", "see which servers can serve it"
    for command, what in following:
        console.print(f"next: {escape(command)}   # {what}")


def run(job: Job, *command: str | Path) -> None:
    """Run a command and show it; leave where it fails, as it has said why."""
    words = [str(word) for word in command]
    shown = " ".join(words).replace(f"{sys.executable} -m deepspeed.launcher.runner", "deepspeed")
    console.print(f"[bold]$ {escape(shown.replace(sys.executable, 'python'))}[/]")
    environment = os.environ | dict(job.environment)
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    if code := subprocess.run(words, check=False, env=environment).returncode:
        sys.exit(code if code > 0 else 1)


def say(number: int, text: str) -> None:
    console.rule(f"[bold]{number}/6[/] {escape(text)}", align="left")


if __name__ == "__main__":
    with one_line_at_the_end():
        sys.exit(main())
