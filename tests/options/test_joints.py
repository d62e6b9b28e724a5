"""Where two capabilities meet: each pair of the table goes all the way, or is refused in a line.

A cell trains, is taken up on another topology, and is exported; transformers or peft reads the export. The run's own
evaluations, before the first step and after the last, have to be what these compute of the weights that it began with
and of what it exported. Every pair of capabilities of two kinds is a cell, so a new one gets its cells by one line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from models.adapters import Lora, Trained
from models.api import read_spec
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from options import RunConfig
from tests.launching import metrics, topology
from tests.models.adapters import save_adapter
from tests.ranks import Ranks
from tests.training.starts import steps
from training.checkpoint.folder import step_folder
from training.data_setup import RecordReader

pytestmark = pytest.mark.launched

STEPS, TAKEN_UP_AT = 4, 2
SHARED_AXIS = topology((1, 1, 2))
STAGES, REPLICAS = {"model_topo": topology((2, 1), (3, 3))}, {"model_topo": topology((1, 2))}
LABELS = ["negative", "neutral", "positive"]
ENDS = {"r": 2, "alpha": 6, "targets": ["q_proj", "v_proj"]}

# What a run may be asked for, by kind; the first of each kind is what it does by itself.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "trained": {
        "full": {},
        "lora": {"lora": {"r": 2, "alpha": 6}},
        "rslora": {"lora": {"r": 2, "alpha": 6, "rslora": True, "lr_ratio": 4.0}},
        "embedding": {"lora": ENDS | {"modules_to_save": ["embed_tokens"]}},
        "ends": {"lora": ENDS | {"modules_to_save": ["embed_tokens", "lm_head"]}},
        "start-from": {"lora": {"r": 2, "alpha": 6, "start_from": "adapter"}},
        "nf4": {"lora": {"r": 2, "alpha": 6, "base": "nf4"}, "use_grad_ckpt": True},
        "frozen-stage": {"freeze": ["embed_tokens", r"layers\.[01]\."]},
    },
    "objective": {
        "tokens": {},
        "dpo": {"preference": {"loss": "dpo"}},
        "orpo": {"preference": {"loss": "orpo", "sft_weight": 0.5}},
        "kto": {"preference": {"loss": "kto"}},
        "reward": {"preference": {"loss": "reward"}},
        "classes": {"labels": LABELS},
        "distillation": {"distillation": {"teacher": "teacher", "top_k": 8}},
    },
    "engine": {
        "stages": STAGES,
        "replicas": REPLICAS,
        "dualpipev": {"schedule": "dualpipev", "model_topo": topology((2, 1))},
        "streaming": {"schedule": "weight_streaming", "model_topo": topology((2, 1))},
        "model-axis": {"model_topo": SHARED_AXIS},
        "sequence": {"model_topo": topology((1, 2)) | {"sequence": 2}},
        "zero": {"model_topo": topology((1, 2)), "zero_optimization": {"stage": 3}},
    },
    "model": {"untied": {}, "tied": {}, "experts": {}},
    "data": {
        "packed": {},
        "padded": {"packing": False},
        "rows": {"packing": "dataset"},
        "windows": {"stream_gb": 0.001},
        "gdgpt": {"prompt_format": "gdgpt", "max_seq_len": 320},
    },
    "cache": {"own": {}, "of-another-model": {}},
}
DEFAULTS = {kind: next(iter(choices)) for kind, choices in KINDS.items()}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Refused cells, by both names, and how the line begins.
REFUSED: dict[tuple[str, str], str] = {
    ("nf4", "streaming"): "lora.base: not with schedule: weight_streaming; expected none, or another schedule",
    ("nf4", "zero"): "lora.base: ZeRO stage 3 divides weights in 16 bits; expected stage <= 2, or no lora.base",
    ("distillation", "streaming"): "distillation: not with schedule: weight_streaming; expected none, or another",
    ("ends", "reward"): "lora.modules_to_save: no module 'lm_head'; expected some of ",  # it has a head of its own
    ("ends", "classes"): "lora.modules_to_save: no module 'lm_head'; expected some of ",
    ("dpo", "windows"): "stream_gb: dpo compares each answer with the model before training, which needs all records",
    ("kto", "windows"): "stream_gb: kto compares each answer with the model before training, which needs all records",
    ("distillation", "windows"): "stream_gb: a teacher reads all records before the first step; expected no stream_gb",
}
# Some of each kind for `make test` and `make test-slow`; all are in `make test-all`.
DIAGONAL = ("lora+zero", "ends+tied", "dpo+of-another-model")
SECOND = ("start-from+dpo", "frozen-stage+streaming", "nf4+model-axis", "kto+zero", "reward+tied", "lora+classes")


def cells() -> Iterator[Any]:
    for one, other in combinations(KINDS, 2):
        for first in [name for name in KINDS[one] if name != DEFAULTS[one]]:
            for second in [name for name in KINDS[other] if name != DEFAULTS[other]]:
                name = f"{first}+{second}"
                tier = pytest.mark.slow if name in SECOND else pytest.mark.longest
                yield pytest.param(name, id=name, marks=[] if name in DIAGONAL else [tier])


CELLS = list(cells())


class Cell:
    """The choices of a cell: its two, and what a run does by itself."""

    def __init__(self, name: str) -> None:
        self.name, self.pair = name, tuple(name.split("+"))
        self.chosen = dict(DEFAULTS)
        for each in self.pair:
            (kind,) = [kind for kind, choices in KINDS.items() if each in choices]
            self.chosen[kind] = each

    def __getattr__(self, kind: str) -> str:
        return self.chosen[kind]

    @property
    def scores(self) -> bool:
        return self.objective in ("reward", "classes")

    @property
    def base(self) -> str:
        return f"{self.objective if self.scores else 'language'}-{self.model}"

    @property
    def adapts(self) -> bool:
        return self.trained not in ("full", "frozen-stage")

    def config(self, folder: Path, save: str, cache: str, **changes: Any) -> dict[str, Any]:
        data = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "marked", "classes": "texts"}
        records = str(folder / f"{data.get(self.objective, 'dialogues')}.json")
        keys: dict[str, Any] = {
            "model_path": str(folder / self.base),
            "data_path": records,
            "eval_data_path": records,
            "save_path": str(folder / save),
            "cache_dir": str(folder / cache),
            "max_seq_len": 128,
            "max_steps": STEPS,
            "save_interval": TAKEN_UP_AT,
            "keep_last": 9,
            "train_batch_size": 4,
            "eval_at_start": True,
            "eval_interval": STEPS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-2}},
            "tensorboard": {"enabled": False},
        }
        for kind, choice in self.chosen.items():
            keys |= KINDS[kind][choice]
        if self.adapts and "start_from" in keys["lora"]:
            keys["lora"] = keys["lora"] | {"start_from": str(folder / f"adapter-{self.base}")}
        if self.objective == "distillation":
            keys["distillation"] = keys["distillation"] | {"teacher": str(folder / f"other-{self.base}")}
        return keys | changes

    def jobs(self, folder: Path) -> list[dict[str, Any]]:
        """List the starts of a cell: one that finds another model's cache, the whole run, and one that takes it up."""
        kind = "zero" if self.engine == "zero" else "pipeline"
        name, jobs = self.name, list[tuple[str, str, dict[str, Any]]]()
        if self.cache == "of-another-model":
            other: dict[str, Any] = {"model_path": str(folder / f"other-{self.base}"), "max_steps": 1}
            if self.objective == "distillation":
                other = {"max_steps": 1, "distillation": {"teacher": str(folder / self.base), "top_k": 8}}
            jobs.append((f"{name}-before", kind, self.config(folder, f"{name}-before", f"cache-{name}", **other)))
            jobs.append((f"{name}-own", kind, self.config(folder, f"{name}-own", f"cache-{name}-own")))
        jobs.append((name, kind, self.config(folder, name, f"cache-{name}")))
        elsewhere = STAGES if self.engine != "stages" else REPLICAS
        changes = elsewhere | {"resume": str(step_folder(folder / name, TAKEN_UP_AT)), "schedule": "1f1b"}
        if self.engine == "zero":
            changes |= {"zero_optimization": {"stage": 1}}
        jobs.append((f"{name}-later", "pipeline", self.config(folder, f"{name}-later", f"cache-{name}", **changes)))
        return [{"name": each, "kind": its, "config": keys, "events": {}} for each, its, keys in jobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("joints")
    write_records(folder)
    for model, (family, changes) in MODELS.items():
        made = make_checkpoint(family, num_hidden_layers=4, **changes)
        for kind, labels in (("language", 0), ("reward", 1), ("classes", len(LABELS))):
            name = f"{kind}-{model}"
            save_model(folder / name, made, labels)
            save_other(folder / name, folder / f"other-{name}")
            lora = Lora(r=2, alpha=6, modules_to_save=("score",) if labels else ())
            adapter = save_adapter(read_spec(folder / name).training(Trained(lora)), folder / name)
            shutil.copytree(adapter, folder / f"adapter-{name}")
    return folder


def write_records(folder: Path) -> None:
    asked = [f"How many stages has run {number}?" for number in range(8)]
    good = [f"It has {number}." + " All of them." * (number % 3) for number in range(8)]
    bad = ["No" * (number % 5 + 1) for number in range(8)]
    rows = list(zip(asked, good, bad, strict=True))
    marked = [{"prompt": a, "completion": b if n % 3 else c, "label": n % 3 > 0} for n, (a, b, c) in enumerate(rows)]
    made = {
        "dialogues": [{"messages": [message("user", a), message("assistant", b)]} for a, b, _ in rows],
        "pairs": [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in rows],
        "marked": marked,
        "texts": [{"text": b, "label": LABELS[number % len(LABELS)]} for number, (_, b, _) in enumerate(rows)],
    }
    for name, records in made.items():
        (folder / f"{name}.json").write_text(json.dumps(records))


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def save_model(folder: Path, language: Path, labels: int) -> None:
    """Save a language model, or one with its blocks that scores."""
    shutil.copytree(language, folder)
    if labels:
        names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: n for n, name in enumerate(LABELS)}}
        known = names if labels > 1 else {"num_labels": labels}
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(language, **known)
        torch.nn.init.normal_(model.score.weight, std=0.2)
        model.save_pretrained(folder)


def save_other(folder: Path, other: Path) -> None:
    """Save a model that differs in two weights: one of the second block, and the last norm."""
    shutil.copytree(folder, other)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.layers.1.self_attn.v_proj.weight", "model.norm.weight"):
        state[name] = state[name] + 0.3 * torch.randn(state[name].shape, generator=generator)
    save_file(state, other / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, asked: set[str]) -> dict[str, dict[str, Any]]:
    """What the starts of each cell ended with, those that a config is refused for included."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(asked):
        possible = []
        for job in Cell(name).jobs(folder):
            try:
                RunConfig.model_validate(job["config"])
                possible.append(job)
            except ValidationError as error:
                found[job["name"]] = {"error": error.errors()[0]["msg"].removeprefix("Value error, ")}
        try:
            ranks.run(2, "jobs", possible, folder)
        except AssertionError as error:  # a traceback: the cell's own failure
            found |= {job["name"]: {"error": str(error)} for job in possible}
        else:
            found |= {job["name"]: json.loads((folder / f"{job['name']}.json").read_text()) for job in possible}
    return found


@pytest.mark.parametrize("name", CELLS)
def test_two_capabilities_go_all_the_way(
    name: str, outcomes: dict[str, dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    cell = Cell(name)
    if expected := REFUSED.get((cell.pair[0], cell.pair[1])):
        found = str(outcomes[name]["error"])
        assert found.startswith(expected) and "\n" not in found
        return
    assert outcomes[name]["error"] is None

    taken_up(cell, outcomes, folder)
    if cell.cache == "of-another-model":
        assert losses(folder / name) == losses(folder / f"{name}-own")

    started, exported = start_of(cell, folder), export_of(cell, folder, tmp_path)
    if cell.trained == "nf4":
        return  # transformers and peft have the base in its own precision
    first, *_, last = [line for line in metrics(folder / name) if "eval_loss" in line]
    for line, model in ((first, started), (last, exported)):
        measure, value = measured(cell, model, folder)
        assert line[measure] == pytest.approx(value, rel=1e-4, abs=1e-5), (line["step"], measure)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in steps(run).values()]


def taken_up(cell: Cell, outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    """Expect the run that was taken up elsewhere to do as the whole one."""
    later = f"{cell.name}-later"
    assert outcomes[later]["error"] is None, outcomes[later]["error"]
    rel = 2e-2 if cell.trained == "nf4" else 1e-3
    assert losses(folder / later) == pytest.approx(losses(folder / cell.name)[TAKEN_UP_AT:], rel=rel)


def open_base(cell: Cell, folder: Path) -> Any:
    kind = AutoModelForSequenceClassification if cell.scores else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def start_of(cell: Cell, folder: Path) -> Any:
    """Open what a run began with, by transformers and peft."""
    base = open_base(cell, folder / cell.base)
    if cell.trained == "start-from":
        return PeftModel.from_pretrained(base, folder / f"adapter-{cell.base}").eval()
    return base


def export_of(cell: Cell, folder: Path, target: Path) -> Any:
    """Export a run and open it by transformers, or peft; where both are possible they have to be equal."""
    run = folder / cell.name
    if not cell.adapts:
        pp_to_hg(run, target / "exported")
        return open_base(cell, target / "exported")
    pp_to_hg(run, target / "adapter")
    pp_to_hg(run, target / "merged", options=ExportOptions(merge=True))
    adapted = PeftModel.from_pretrained(open_base(cell, folder / cell.base), target / "adapter").eval()
    merged = open_base(cell, target / "merged")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    return adapted


@torch.no_grad()
def measured(cell: Cell, model: Any, folder: Path) -> tuple[str, float]:
    """Compute what the run calls by a name in its evaluations, one document at a time."""
    config = RunConfig.model_validate(cell.config(folder, "x", "cache-of-tests", stream_gb=None, max_steps=None))
    data = RecordReader(config, folder / cell.base, Console(quiet=True)).read_sets()[0]
    found, counts = [], []
    for number in range(len(data)):
        ids, labels = (
            torch.tensor(list(data.samples[number][name]), dtype=torch.int64) for name in ("input_ids", "labels")
        )
        end = int(data.first[number]) or len(ids)
        logits = model(input_ids=ids[None, :end]).logits[0].float()
        value = float(data.values[number])
        if cell.objective == "classes":
            found.append(-logits.log_softmax(dim=-1)[int(value)])
        elif cell.objective == "reward":
            found.append(logits[0])
        elif cell.objective != "kto" or value:
            wanted = labels[1:end]
            trained = wanted >= 0
            found.append(-F.cross_entropy(logits[:-1][trained], wanted[trained], reduction="sum"))
            counts.append(int(trained.sum()))
    total = float(torch.stack(found).sum())
    if cell.objective in ("tokens", "distillation"):
        return "eval_loss", -total / sum(counts)
    names = {"classes": "eval_loss", "reward": "eval_rewards/chosen"}
    return names.get(cell.objective, "eval_logps/chosen"), total / len(found)


def test_the_table_has_every_pair_once() -> None:
    names = [name for choices in KINDS.values() for name in choices]
    assert len(set(names)) == len(names)
    assert {*DIAGONAL, *SECOND, *(f"{one}+{other}" for one, other in REFUSED)} <= {cell.id for cell in CELLS}
