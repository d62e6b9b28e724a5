"""Train beside other tools: transformers' Trainer, the same with peft's adapters, and trl's DPO; an hour on two cores.

Each part trains a model of SmolLM2-135M's shape on the same records, from the same weights, with the same optimizer: by
the peer in one process with all cores, and by Pipetune as its user writes it, in two stages and in one process, with
`train_micro_batch_size_per_gpu: auto`. All make one step in turn (`benchmarks.workers`); figures are medians of steps,
ratios medians of the rounds' ratios. What comes before the first step does not count, so neither does the pass of
Pipetune's DPO over the reference, which trl computes in each step.

- `trainer-256`, `trainer-1024`: full rows of so many tokens, 16 and 8 a step; `trainer-1024-16`: 16 of 1,024.
  `trainer-mixed`: maths problems as they are, which the Trainer gets one by one, so that it pads nothing.
- `peft-256`, `peft-mixed`: adapters of rank 16 on all linear layers of the blocks.
- `trl-mixed`: DPO on maths problems and the answers to others.
- `...-bf16`: in bf16, which for a peer means autocast over fp32 weights.

Peers run in an environment of their own, which pip fills.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environments import TRL, make_environment
from benchmarks.report import Report, run_parts, table_of
from benchmarks.tokenizing import CHATML, make_tokenizer, pairs
from benchmarks.workers import Turn, Turns

if TYPE_CHECKING:  # the process that compares needs no torch
    from data.loader import GlobalBatch
    from options import RunConfig
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics

SMOLLM2: dict[str, Any] = {  # SmolLM2-135M's shape
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODEL: dict[str, Any] = {"model_type": "llama", **SMOLLM2, "eos_token_id": 1, "bos_token_id": None}  # 1: <|im_end|>
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LORA: dict[str, Any] = {"lora": {"r": 16, "alpha": 32}}
DPO: dict[str, Any] = {"preference": {"loss": "dpo", "beta": 0.1}}
LR = 1e-5
ROUNDS, RECORDS = 3, 512


@dataclass(frozen=True)
class Case:
    """What is trained on, and how.

    Attributes:
        rows: samples of a step.
        length: of a full row; 0 for records as they are.
        micro_batch: samples that the peer takes at a time.
        keys: of Pipetune's config.
    """

    peer: str
    rows: int
    length: int
    micro_batch: int
    keys: dict[str, Any]


FP32_CASES = {
    "trainer-256": Case("Trainer", 16, 256, 4, {}),
    "trainer-1024": Case("Trainer", 8, 1024, 1, {}),
    "trainer-1024-16": Case("Trainer", 16, 1024, 1, {}),
    "trainer-mixed": Case("Trainer", 32, 0, 1, {}),
    "peft-256": Case("peft", 16, 256, 4, LORA),
    "peft-mixed": Case("peft", 32, 0, 1, LORA),
    "trl-mixed": Case("trl", 16, 0, 2, DPO),
}
CASES = FP32_CASES | {
    f"{name}-bf16": Case(each.peer, each.rows, each.length, each.micro_batch, each.keys | BF16)
    for name, each in FP32_CASES.items()
}
STAGES = {"two stages": 2, "one process": 1}


def measure(name: str, folder: Path) -> Report:
    """Measure a case."""
    from benchmarks.steps import save_random_model

    case = CASES[name]
    make_tokenizer(folder)
    template = CHATML.replace("<|im_end|>\\n", "<|im_end|>")  # as trl trains on all that follows the prompt
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    save_random_model(folder)
    write_records(folder, case)
    python = make_environment(folder / "environment", *TRL)

    with Turns(folder) as turns:
        turns.add(case.peer, None, "benchmarks.peers", "peer", python=python, case=name)
        for way, stages in STAGES.items():
            turns.add(way, stages, "benchmarks.peers", "own", case=name, stages=stages)
        turns.rounds(ROUNDS)
        figures = {way: figures_of(turns, way, case) for way in turns.ways}
    return report_of({name: figures})


def figures_of(turns: Turns, way: str, case: Case) -> dict[str, Any]:
    """Collect the figures of a way."""
    steps = turns.ways[way].steps
    return {
        "tokens_per_s": turns.speed(way),
        "ratio": turns.ratio(way, case.peer),
        "rows": steps[-1]["rows"],
        "losses": [step["loss"] for step in steps],
        "peak_mb": max(step["peak"] for step in steps) / 1e6,
    }


def report_of(measured: dict[str, dict[str, Any]]) -> Report:
    """Show the figures of several cases."""
    columns = ("case", "way", "rows", "tokens/s", "of the peer", "loss of each step", "peak, MB")
    rows = []
    for name, figures in measured.items():
        for way, row in figures.items():
            speed, peak = f"{row['tokens_per_s']:,.0f}", f"{row['peak_mb']:,.0f}"
            losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
            rows.append((name, way, str(row["rows"]), speed, f"{row['ratio']:.2f}", losses, peak))
    return Report(measured, table_of("Beside other tools", columns, rows))


def measure_all(folder: Path) -> Report:
    """Measure all cases, one after the other."""
    measured: dict[str, Any] = {}
    for name in CASES:
        (folder / name).mkdir()
        measured |= measure(name, folder / name).figures
    return report_of(measured)


def write_records(folder: Path, case: Case) -> None:
    """Write the records of a case; for full rows answers that are longer than they.

    The records that are shipped are few, and come again and again.
    """
    known = list(islice(cycle(pairs()), RECORDS + 16))
    records: list[dict[str, Any]] = []
    for number, (question, answer) in enumerate(known[:RECORDS]):
        prompt = [{"role": "user", "content": question}]
        texts = answer, known[number + 1][1]
        if case.length:
            texts = " ".join(known[number + more][1] for more in range(16)), ""
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in texts)
        preferred = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        records.append(preferred if "preference" in case.keys else {"messages": prompt + chosen})
    (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")


def config_of(folder: Path, case: Case, stages: int) -> RunConfig:
    """Write down what a user would."""
    from benchmarks.steps import topology
    from options import RunConfig

    keys: dict[str, Any] = {
        "model_path": str(folder.parent),
        "data_path": str(folder.parent / "records.json"),
        "save_path": str(folder / "run"),
        "cache_dir": str(folder.parent / "cache"),
        "train_batch_size": case.rows,
        "train_micro_batch_size_per_gpu": "auto",
        "max_seq_len": case.length or 1024,
        "max_steps": ROUNDS + 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1 if "bf16" in case.keys else 0},
        "trackers": [],
        "timeout_minutes": 60,  # the others' steps
    }
    return RunConfig.model_validate(keys | topology(stages, 1) | case.keys)


def train_own(folder: Path, case: str, stages: int) -> None:
    """Train in one process of Pipetune, in a script as a user writes it."""
    import resource

    from benchmarks.steps import now
    from training.api import train
    from training.callbacks import Callback
    from training.distributed.processes import gather

    turn = Turn(folder)

    class Clock(Callback):
        """Takes the time from one step's end to the next one's."""

        def on_start(self, run: Run) -> None:
            turn.wait()
            self.begin = now()

        def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
            seconds = now() - self.begin
            peak = sum(gather(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            rows = run.config.train_micro_batch_size_per_gpu
            turn.done(seconds, metrics.tokens, loss=metrics.loss, peak=peak, rows=rows)
            turn.wait()
            self.begin = now()

    train(config_of(folder, CASES[case], stages), callbacks=[Clock()])


def train_peer(folder: Path, case: str) -> None:
    """Train by the peer."""
    import resource

    from rich.console import Console

    from benchmarks.steps import clock_of, in_order, train_by_transformers, trainer_arguments
    from training.batches import build_loader
    from training.data_setup import RecordReader

    asked = CASES[case]
    config = config_of(folder, asked, 1).model_copy(update={"train_micro_batch_size_per_gpu": 1})
    samples = RecordReader(config, folder.parent, Console(quiet=True)).read("data", config.data_path)
    turn = Turn(folder)
    arguments: dict[str, Any] = {"learning_rate": LR, "lr_scheduler_type": "constant", "weight_decay": 0.0}

    def figures() -> dict[str, Any]:
        return {"peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "rows": asked.micro_batch}

    def with_adapters(model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))

    if asked.peer != "trl":
        prepare = with_adapters if asked.peer == "peft" else None
        train_by_transformers(config, samples, turn, asked.micro_batch, figures=figures, prepare=prepare, **arguments)
        return

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]

    loader = build_loader(samples, config)
    records = json.loads((folder.parent / "records.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder.parent)
    tokenizer.pad_token = "!"
    more = {"beta": 0.1, "max_length": config.max_seq_len}
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder.parent, dtype="float32"),
        args=trainer_arguments(config, asked.micro_batch, DPOConfig, **arguments, **more),
        train_dataset=Dataset.from_list([records[number] for number in in_order(loader)]),
        processing_class=tokenizer,
        callbacks=[clock_of(turn, lambda step: loader.batch(step).tokens, figures)],
    )
    trainer._get_train_sampler = lambda *_: range(len(trainer.train_dataset))
    trainer.train()


WORKERS: dict[str, Callable[..., None]] = {"own": train_own, "peer": train_peer}

if __name__ == "__main__":
    run_parts("Speed beside other tools.", {name: partial(measure, name) for name in CASES}, WORKERS)
