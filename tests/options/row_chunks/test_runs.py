"""Whole runs with rows in chunks: they learn what whole rows learn, go on from checkpoints, and are exported.

The jobs run one after the other in the same processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import write_records
from tests.launching import topology
from tests.models.attention.test_chunks import LATENT
from tests.ranks import Ranks, job
from tests.training.starts import STEPS, TAKEN_UP, TAKEN_UP_AT, evaluations, steps, weights
from training.checkpoint.folder import step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow]

CHUNK = 40  # of rows of 200 tokens
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"sliding_window": 24}),
    "bloom": ("bloom", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 24}),
    "deepseek-v3": ("deepseek_v3", LATENT),
    "chatglm3": ("chatglm", {}),
    "starcoder2": ("starcoder2", {}),  # derived
    "qwen3.5": ("qwen3_5_text", LINEAR),
    "qwen3-next": ("qwen3_next", LINEAR | EXPERTS),
}
# Runs of whole rows beside those of each model: the model and keys.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"lora": {"r": 4, "alpha": 8}}),
    "distilled": ("llama", {"distillation": {"teacher": "tied"}}),
    "routed": ("mixtral", {"aux_router_loss": {"weight": 0.05}}),
}
RECURRENT = ("qwen3.5", "qwen3-next")  # whose states enlarge rounding
IN_CHUNKS: dict[str, Any] = {"row_chunk": CHUNK}
# Name: the run of whole rows that it is compared with, processes, kind and keys.
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "alone": ("llama", 1, "pipeline", {}),
    "stages": ("llama", 2, "pipeline", {"dims": (2, 1)}),
    "recomputed": ("llama", 2, "pipeline", {"dims": (2, 1), "use_grad_ckpt": True}),
    "two-rows": ("llama", 2, "pipeline", {"dims": (2, 1), "train_micro_batch_size_per_gpu": 2}),
    "few": ("llama", 2, "pipeline", {"dims": (2, 1), "row_chunk": 120}),
    "tokens": ("llama", 2, "pipeline", {"dims": (2, 1), "row_chunk": 1}),
    "replicas": ("llama", 2, "pipeline", {"dims": (1, 2)}),
    "model": ("llama", 2, "pipeline", {"dims": (1, 1, 2)}),
    "zero": ("llama", 2, "zero", {"dims": (1, 2), "zero_optimization": {"stage": 1}}),
    "zero-0": ("llama", 2, "zero", {"dims": (1, 2), "zero_optimization": {"stage": 0}}),
    "with-lora": ("lora", 2, "pipeline", {"dims": (2, 1)}),
    "with-teacher": ("distilled", 2, "pipeline", {"dims": (2, 1)}),
    "with-router": ("routed", 2, "pipeline", {"dims": (2, 1)}),
    "resumed": ("llama", 2, "pipeline", {"dims": (2, 1), "resume": "stages"}),
    "from-whole-rows": ("llama", 2, "pipeline", {"dims": (2, 1), "resume": "llama-whole"}),
    "grid": ("llama", 4, "pipeline", {"dims": (2, 2)}),
    "four-stages": ("llama", 4, "pipeline", {"dims": (4, 1)}),
    **{
        name: (name, 2, "pipeline", {"dims": (2, 1), "use_grad_ckpt": name in ("gpt-oss", "gemma3")})
        for name in MODELS
        if name != "llama"
    },
}
OFTEN = "stages recomputed zero with-lora with-router resumed qwen3.5".split()  # kinds of models: test_chunks.py
LATER = {name: pytest.mark.longest for name in CASES if name not in OFTEN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("row-chunks")
    write_records(folder / "records.json", 24)
    return folder


def describe(name: str, model: Path, folder: Path, kind: str = "pipeline", **keys: Any) -> dict[str, Any]:
    if "resume" in keys:
        keys["resume"] = str(step_folder(folder / keys["resume"], TAKEN_UP_AT))
    own: dict[str, Any] = TAKEN_UP | {
        "model_path": str(model),
        "model_topo": topology(keys.pop("dims", (1, 1))),
        "prompt_format": "plain",
        "packing": "batch",
        "pack_len": 200,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}},
    }
    return job(folder, name, kind, **own | keys)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, folder: Path, make_checkpoint: Callable[..., Path], asked: set[str]) -> Path:
    """Run the cases that are asked for, and the runs of whole rows that they are compared with."""
    cases = {name: case for name, case in CASES.items() if name in asked or name not in LATER}
    if "resumed" in cases:
        cases = {"stages": CASES["stages"]} | cases
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        kind, changes = MODELS[name]
        made[name] = made.get(name) or make_checkpoint(kind, **changes)
        return made[name]

    def keys_of(whole: str) -> tuple[Path, dict[str, Any]]:
        name, keys = OTHERS.get(whole, (whole, {}))
        if "distillation" in keys:
            keys = {"distillation": {"teacher": str(model(keys["distillation"]["teacher"]))}}
        return model(name), keys

    needed = dict.fromkeys(whole for whole, *_ in cases.values())
    whole_rows = []
    for whole in needed:
        path, keys = keys_of(whole)
        whole_rows.append(describe(f"{whole}-whole", path, folder, **keys))
    ranks.run(1, "jobs", whole_rows, folder)
    for processes in (1, 2, 4):
        chosen = []
        for name, (whole, size, kind, keys) in cases.items():
            path, more = keys_of(whole)
            if size == processes:
                chosen.append(describe(name, path, folder, kind, **IN_CHUNKS | more | keys))
        if chosen:
            ranks.run(processes, "jobs", chosen, folder)
    return folder


def error_of(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())["error"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER.get(name, ())) for name in CASES])
def test_six_steps_are_those_of_whole_rows(name: str, runs: Path) -> None:
    assert error_of(runs, name) is None
    whole, found = (runs / f"{CASES[name][0]}-whole"), runs / name
    wanted = steps(whole)
    first = TAKEN_UP_AT + 1 if "resume" in CASES[name][3] else 1
    assert list(steps(found)) == list(range(first, STEPS + 1))
    for step, line in steps(found).items():
        assert line["loss"] == pytest.approx(wanted[step]["loss"], rel=1e-5), step
        assert line["grad_norm"] == pytest.approx(wanted[step]["grad_norm"], rel=1e-4), step
    for step, loss in evaluations(found).items():
        assert loss == pytest.approx(evaluations(whole)[step], rel=1e-5), step
    assert evaluations(found).keys() >= {STEPS}
    # AdamW takes steps of one size, also where a gradient is rounding. A norm of Qwen3.5 begins at nought and is all
    # steps: 1.05e-4 apart on one machine of CI. A bias of keys moves all scores of a query alike but for their turn by
    # position, which softmax leaves out: its gradient is what the sums do not cancel, 2.1e-5 apart on another.
    own = weights(found)
    for each, weight in weights(whole).items():
        apart = 3e-4 if name in RECURRENT or each.endswith("k_proj.bias") else 1e-5
        assert (own[each] - weight).norm() <= apart * weight.norm(), each


@pytest.mark.parametrize("name", ["stages"])
def test_the_log_says_into_how_many_chunks_rows_are_cut(name: str, runs: Path) -> None:
    printed = json.loads((runs / f"{name}.json").read_text())["printed"]
    assert re.search(r"rows: \d+ micro-batches of step 1 pass in \d", printed), printed


@pytest.mark.parametrize("name", ["resumed"])
def test_a_resumed_run_is_the_same_to_the_bit(name: str, runs: Path) -> None:
    found = weights(runs / name)
    for each, weight in weights(runs / "stages").items():
        assert torch.equal(found[each], weight), each
