"""Train a layer ahead for a real small model, and count what it drafts; ten minutes on two cores.

SmolLM2-135M, the quickstart's model, has no such layer. A new one learns maths problems alone (`mtp: {init: copy, only:
true}`), and each evaluation counts, on problems that it does not learn from, how many of its drafts are the model's own
next token. Then it answers some of these problems with drafts and without, as `demo.py` does.

`--picture FILE` draws the shares by step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.report import table_of
from benchmarks.tokenizing import pairs

STEPS, EVALUATED_EVERY = 60, 10
LEARNT, EVALUATED, ASKED = 480, 24, 6
MOST_TOKENS = 96  # of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafts of a new layer ahead, before and after it learnt.")
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart/base"), help="the quickstart's model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--picture", type=Path, help="draw the shares by step into this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=".") as folder:
        figures = measure(arguments.base.resolve(), Path(folder).resolve())
    if arguments.picture:
        draw(figures["evaluations"], arguments.picture)
    if arguments.json:
        print(json.dumps(figures))
        return
    console = Console()
    names = "mtp_loss", "right", "agrees"
    rows = [(str(step), *map("{:.3f}".format, line.values())) for step, line in figures["evaluations"].items()]
    console.print(table_of("A new layer ahead of SmolLM2-135M", ("step", *names), rows))
    rows = [(way, f"{speed:.1f}") for way, speed in figures["tokens_per_s"].items()]
    console.print(table_of("Answers, greedy", ("way", "tokens/s"), rows))
    print(f"drafts: {figures['drafts']}")


def measure(base: Path, folder: Path) -> dict[str, Any]:
    """Train the layer, and answer with it."""
    known = list(islice(pairs(), LEARNT + EVALUATED + ASKED))
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in known
    ]
    for name, part in (("records", records[:LEARNT]), ("evaluated", records[LEARNT : LEARNT + EVALUATED])):
        (folder / f"{name}.json").write_text(json.dumps(part), encoding="utf-8")
    config = {
        "model_path": str(base),
        "data_path": str(folder / "records.json"),
        "eval_data_path": str(folder / "evaluated.json"),
        "eval_interval": EVALUATED_EVERY,
        "eval_at_start": True,
        "save_path": str(folder / "run"),
        "max_seq_len": 512,
        "max_steps": STEPS,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}},
        "mtp": {"weight": 1.0, "init": "copy", "only": True},
        "model_topo": {"process_topology": {"dims": [1, 1]}},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run("train_ds.py", "--config", str(folder / "config.yml"))

    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {"mtp_loss": "eval_mtp_loss", "right": "eval_draft_1_right", "agrees": "eval_draft_1_agrees"}
    evaluated = [line for line in lines if "eval_loss" in line]
    evaluations = {line["step"]: dict(zip(names, map(line.get, names.values()), strict=True)) for line in evaluated}
    return {"evaluations": evaluations} | answer(folder / "run", [question for question, _ in known[-ASKED:]])


def answer(model: Path, questions: list[str]) -> dict[str, Any]:
    """Answer greedily with drafts and without, in turn; return the speed of each, and what became of the drafts."""
    from transformers import AutoTokenizer

    from models.api import load_model
    from models.checkpoint.layout import resolve
    from options.demo.drafts import Drafter
    from options.demo.generation import Request, generate_many

    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in questions
    ]
    loaded = load_model(model, ahead=True)
    drafter = Drafter(loaded)
    without = partial(generate_many, loaded, rows=1)
    ways: dict[str, Callable[[list[Request]], Iterator[Any]]] = {
        "without drafts": without,
        "--draft": drafter.generate,
    }
    seconds, answers = dict.fromkeys(ways, 0.0), {way: list[list[int | None]]() for way in ways}
    for prompt in prompts:
        for way, generate in ways.items():
            begin = time.perf_counter()
            answers[way].append([token for _, token in generate([Request(prompt, MOST_TOKENS, set())])])
            seconds[way] += time.perf_counter() - begin
    assert answers["without drafts"] == answers["--draft"], "drafts change no greedy answer"
    speeds = {way: MOST_TOKENS * len(prompts) / seconds[way] for way in ways}
    return {"tokens_per_s": speeds, "drafts": drafter.tally.describe()}


def run(script: str, *words: str) -> str:
    """Run a command of the project; return what it prints, or exit with it where it fails."""
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def draw(evaluations: dict[int, dict[str, float]], path: Path) -> None:
    """Draw the shares of drafts by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    shown = {"agrees": "the model's own next but one token (greedy decoding accepts it)", "right": "the text's"}
    for name, label in shown.items():
        axes.plot(list(evaluations), [100 * line[name] for line in evaluations.values()], marker="o", label=label)
    axes.set(xlabel="step", ylabel="% of drafts", ylim=(0, None), title="Drafts of a new layer ahead, SmolLM2-135M")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
