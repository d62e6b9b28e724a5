"""One job of the quickstart: a model that is asked, trained and asked again, by the commands that a user would type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from common.parent import end_with_this_process
from common.whole_files import replace_text
from options import load_config
from quickstart.questions import Question
from training.config.keys import TrainConfig
from training.launch.agent import free_port

PIPELINE, RUN, TUNED = "base_pp", "checkpoints", "tuned"
MOST_TOKENS = 64  # of an answer

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class QuickstartJob:
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


def is_known(job: QuickstartJob) -> bool:
    """Return whether what lies in the job's folder is this job's."""
    path = job.folder / "fingerprint"
    return path.is_file() and path.read_text(encoding="utf-8") == job.fingerprint


def tune(job: QuickstartJob) -> None:
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


def training_arguments(job: QuickstartJob) -> list[str]:
    """Return the arguments of `deepspeed`: one process for each stage."""
    processes = settings(job).model_topo.processes
    arguments = ["--num_gpus", str(processes), "--master_port", str(free_port())]
    return [*arguments, "train_ds.py", "--config", str(job.config), *job.overrides]


def settings(job: QuickstartJob) -> TrainConfig:
    """Make the run's config.

    Raises:
        ConfigError: its file or an override is wrong.
    """
    return load_config(job.config, list(job.overrides))


def ask(job: QuickstartJob, model: Path, name: str) -> list[str]:
    """Get the model's answers, each in a dialogue of its own; texts to continue are a prompts file of their own."""
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
        config = settings(job)
        words += ["--prompt-format", config.prompt_format] if config.prompt_format and not raw else []
        words += ["--template-args", json.dumps(config.template_args)] if config.template_args and not raw else []
        run(job, sys.executable, "demo.py", *words)
        told = target.read_text(encoding="utf-8").splitlines()
        answers |= {number: json.loads(line)["answer"] for number, line in zip(asked, told, strict=True)}
    return [answers[number] for number in range(len(job.questions))]


def run(job: QuickstartJob, *command: str | Path) -> None:
    """Run a command and show it; leave where it fails, as it has said why."""
    words = [str(word) for word in command]
    shown = " ".join(words).replace(f"{sys.executable} -m deepspeed.launcher.runner", "deepspeed")
    console.print(f"[bold]$ {escape(shown.replace(sys.executable, 'python'))}[/]")
    environment = os.environ | dict(job.environment)
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    if code := subprocess.run(words, check=False, env=environment, preexec_fn=end_with_this_process()).returncode:
        sys.exit(code if code > 0 else 1)


def say(number: int, text: str) -> None:
    console.rule(f"[bold]{number}/6[/] {escape(text)}", align="left")
