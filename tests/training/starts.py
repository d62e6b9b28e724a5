"""Starts of runs for tests: what each is of, how it is described to tests/workers/jobs.py, and what it left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.checkpoint.layout import layer_file
from tests import ranks
from tests.conftest import FAQ
from tests.launching import metrics
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.saved_slices import SavedOptimizer
from training.config.optimization import Scheduler
from training.optimizer.lr_schedules import lr_ratio

Test = TypeVar("Test", bound=Callable[..., None])

LR = 1.0e-3
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}}
STEPS, TAKEN_UP_AT = 6, 3
# Of a run that is taken up, and evaluated, in its middle.
TAKEN_UP = {"max_steps": STEPS, "save_interval": TAKEN_UP_AT, "eval_share": 0.2, "eval_interval": TAKEN_UP_AT}
NAN = "\x01"  # a token that the records do not have


class Job(NamedTuple):
    """A start of a run.

    Attributes:
        run: the name of its folder; several jobs of one run are several starts.
        source: the run whose checkpoint of step TAKEN_UP_AT it takes up, if it has another folder.
        events: see tests/workers/jobs.py.
    """

    name: str
    keys: dict[str, Any] = {}
    model: str = "llama"
    kind: str = "pipeline"
    run: str = ""
    source: str = ""
    events: dict[int | str, str] = {}

    @property
    def folder(self) -> str:
        return self.run or self.name


NEEDED: dict[str, list[Job]] = {}  # by the name of a test with its case, or without


def needs(*jobs: Job, **by_case: list[Job]) -> Callable[[Test], Test]:
    """Say which jobs a test looks at, or each of its cases."""

    def note(test: Test) -> Test:
        NEEDED.update(
            {f"{test.__name__}[{case}]": list(its) for case, its in by_case.items()} or {test.__name__: list(jobs)}
        )
        return test

    return note


def make_models(make_checkpoint: Callable[..., Path], folder: Path) -> dict[str, Path]:
    """Make the models of all jobs, by name."""
    llama = make_checkpoint("llama", tie_word_embeddings=False)
    made = {
        "llama": llama,
        "mixtral": make_checkpoint("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "bloom": make_checkpoint("bloom", hidden_dropout=0.1, attention_dropout=0.1),
    }
    for name in ("nan", "removed", "without-weights", "llama-9"):
        made[name] = folder / "models" / name
        shutil.copytree(llama, made[name])
    (made["without-weights"] / "model.safetensors").unlink()
    settings = json.loads((llama / "config.json").read_text())
    (made["llama-9"] / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 9e-6}))
    weights = load_file(llama / "model.safetensors")
    (nan,) = Tokenizer.from_file(str(llama / "tokenizer.json")).encode(NAN).ids
    weights["model.embed_tokens.weight"][nan] = float("nan")
    save_file(weights, made["nan"] / "model.safetensors", metadata={"format": "pt"})
    return made


def write_records(folder: Path) -> None:
    """Write the records of all jobs."""
    records = json.loads(FAQ.read_text(encoding="utf-8"))[:24]
    for name, chosen in (("records", records), ("evaluation", records[3:9]), ("one", records[4:5])):
        (folder / f"{name}.json").write_text(json.dumps(chosen), encoding="utf-8")
    spoilt = [*records[:2], {"text": f"All is {NAN}."}, *records[2:7]]  # in the second of four batches
    (folder / "spoilt.json").write_text(json.dumps(spoilt), encoding="utf-8")


def describe(job: Job, models: dict[str, Path], folder: Path) -> dict[str, Any]:
    spoilt = job.model == "nan"
    keys: dict[str, Any] = {
        "model_path": str(models[job.model]),
        "data_path": str(folder / ("spoilt.json" if spoilt else "records.json")),
        "save_path": str(folder / job.folder),
        "max_steps": STEPS,
        "train_batch_size": 2 if spoilt else 8,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1.0e-6}},
        "scheduler": COSINE,
        "prompt_format": "plain",
    }
    keys |= job.keys
    if "eval_interval" in job.keys:
        keys["eval_data_path"] = str(folder / ("spoilt.json" if spoilt else "evaluation.json"))
    if job.keys.get("eval_data_path"):
        keys["eval_data_path"] = job.keys["eval_data_path"].format(one=folder / "one.json")
    if job.source:
        keys["resume"] = str(step_folder(folder / job.source, TAKEN_UP_AT))
    events = {step: event.format(removed=models["removed"]) for step, event in job.events.items()}
    return ranks.job(folder, job.name, job.kind, **{"keep_last": 2} | keys) | {"events": events}


def steps(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metrics(run) if "loss" in line}


def rates(run: Path) -> dict[int, float]:
    return {step: line["lr"] for step, line in steps(run).items()}


def evaluations(run: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}


def losses(run: Path) -> list[float]:
    """After the step at which other jobs take the run up."""
    return [line["loss"] for step, line in steps(run).items() if step > TAKEN_UP_AT]


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Of all layers."""
    found: dict[str, Tensor] = {}
    folder = step_folder(run, step)
    for layer in range(5):
        state = torch.load(folder / layer_file(layer), weights_only=True)
        found |= {f"{layer}.{name}": tensor for name, tensor in state.items()}
    return found


def expected_rates(total: int, lr: float = LR) -> dict[int, float]:
    scheduler = Scheduler.model_validate(COSINE)
    return {step: lr * lr_ratio(step - 1, total, scheduler) for step in range(1, total + 1)}


def scaler(run: Path, step: int = STEPS) -> Any:
    folder = step_folder(run, step)
    record = CheckpointRecord.read(folder)
    assert record is not None
    return SavedOptimizer(folder, record.topology).loss_scaler()
