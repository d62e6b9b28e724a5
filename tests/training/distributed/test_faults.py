"""Ranks that die, fail or hang, and steps that are not finite: the run ends soon and names rank and reason."""

from __future__ import annotations

import json
import math
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from data.tokenized.tokenizer import load_tokenizer
from tests.cases import tiered
from tests.conftest import FAQ, write_records
from tests.launching import deepspeed, error_lines, metrics, topology, write_config
from tests.ranks import Ranks
from training.distributed.rank_monitor import LEASE

pytestmark = pytest.mark.launched

HOST = socket.gethostname()
PATIENCE = 0.25  # minutes, of the runs that are to hang; by far more than a step takes anywhere
GOOD_SAMPLES = 15
BAD_TOKEN = 511
SIGN = "\N{PILCROW SIGN}"  # in no record of the FAQ


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


# Kind and rank of the fault; the rank that the error names and what else it says; the exit code.
FAULTS = {
    "raises": ("raises:1:3", "rank 1 (stage 1, host", "ValueError: the third step breaks", 1),
    "dies": ("dies:1:3", "rank 1 (stage 1, host", "died without an error", 1),
    "hangs": ("hangs:1:3", "rank 1 (stage 1, host", "faulty.py:", 1),
    "mistake": ("mistake:1:3", "rank 1 (stage 1, host", "data.json: record 7: gone", 2),
    "starves": ("starves:1:3", "rank 1 (stage 1, host", "bytes; --plan says ", 2),
    "rank 0 raises": ("raises:0:3", "rank 0 (stage 0, host", "ValueError: the third step breaks", 1),
    "rank 0 dies": ("dies:0:3", "rank 0 (stage 0, host", "died without an error", 1),
    "freezes": ("freezes:1:3", "rank 1 (stage 1, host", "does not answer", 1),
    "rank 0 hangs": ("hangs:0:3", "rank 0 (stage 0, host", "faulty.py:", 1),
}


@pytest.mark.parametrize(
    "name", tiered(FAULTS, quick=(), slow=["raises", "dies"])
)  # a hang: tests/pretend/test_hangs.py
def test_first_error_is_named_and_comes_last(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, who, what, code = FAULTS[name]
    monkeypatch.setenv("FAULT", fault)
    config = write_config(
        tmp_path / "run.yml",
        model_path=str(model),
        data_path=str(FAQ),
        model_topo=topology((2, 1)),
        **{"timeout_minutes": PATIENCE} if "hangs" in name or name == "freezes" else {},
    )
    result = deepspeed(2, "tests/workers/faulty.py", "--config", config)
    assert result.returncode != 0
    lines = error_lines(result)
    assert len(lines) == 1, result.stdout + result.stderr
    assert who in lines[0] and what in lines[0] and HOST in lines[0]
    after = result.stderr.split(lines[0])[1]
    assert all("launch.py" in line for line in after.strip().splitlines()), result.stderr
    assert "Traceback" not in result.stderr
    assert ("the full traceback is in" in lines[0]) == ("raises" in name or "hangs" in name)
    for report in (tmp_path / "run").glob("traceback-*"):
        assert str(report) in lines[0] and "faulty.py" in report.read_text(encoding="utf-8")
    if "dies" not in name:
        assert result.returncode == code
    assert len(metrics(tmp_path / "run")) == 2
    assert not list((tmp_path / "run").glob(f"{LEASE}-*")) or name == "rank 0 dies"


@pytest.mark.longest
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_full_disk_keeps_the_checkpoint_before(
    policy: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank can write no more from step 3 of 4 on."""
    monkeypatch.setenv("FAULT", "fills:1:3")
    write_records(tmp_path / "data.json", 32)
    config = write_config(
        tmp_path / "run.yml",
        model_path=str(model),
        data_path=str(tmp_path / "data.json"),
        model_topo=topology((2, 1)),
        save_interval=1,
        on_save_error=policy,
    )
    result = deepspeed(2, "tests/workers/faulty.py", "--config", config)
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = error_lines(result)
    assert "could not be saved" in line
    assert ("step-000003" in line and "File too large" in line) if policy == "stop" else "step-000004" in line
    assert (re.search("warning: step-000003 could not be saved: .*File too large", result.stdout) is not None) == (
        policy == "continue"
    )
    run_folder = tmp_path / "run"
    assert (run_folder / "latest").read_text() == "step-000002"
    assert sorted(path.name for path in run_folder.glob("step-*")) == ["step-000001", "step-000002"]
    assert len(metrics(run_folder)) == (4 if policy == "continue" else 3)

    again = deepspeed(2, "train_ds.py", "--config", config)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "after step 2" in again.stdout
    assert (run_folder / "latest").read_text() == "step-000004"


def spoil(model: Path, token: int) -> None:
    """Make a token's embedding NaN."""
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = math.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def bad_step_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Kind of trainer and keys, by name."""
    bf16 = {"bf16": {"enabled": True}}
    no_clipping = {"gradient_clipping": 0}
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind, stages in (("pipeline", (0, 1)), ("zero", (0, 1, 2, 3))):
        for stage in stages:
            for keys in ({}, bf16, no_clipping, bf16 | no_clipping):
                if stage == 0 and keys and keys != no_clipping and kind == "pipeline":
                    continue
                name = "-".join([kind, str(stage), *keys])
                cases[name] = (kind, {"zero_optimization": {"stage": stage}} | keys)
    return cases


BAD_STEPS = bad_step_cases()
NO_CLIPPING = "-gradient_clipping"
ALIKE = [f"{name}{NO_CLIPPING}" for name in ("pipeline-[01]", "zero-0*", "zero-2*", "zero-3", "zero-1-bf16")]
ALIKE += ["zero-1", "zero-1-bf16", "zero-3-bf16"]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> dict[str, dict[str, float]]:
    """The outcomes of the cases of this session."""
    folder = tmp_path_factory.mktemp("bad-steps")
    model = make_checkpoint("llama", tie_word_embeddings=False)
    spoil(model, BAD_TOKEN)
    generator = random.Random(0)
    rows = [[generator.randrange(3, BAD_TOKEN) for _ in range(20)] for _ in range(GOOD_SAMPLES)]
    rows.append([7, BAD_TOKEN, 8, 9])
    (folder / "samples.json").write_text(json.dumps([{"input_ids": row, "labels": row} for row in rows]))
    common = {
        "model_path": str(model),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder / "run"),
        "train_batch_size": len(rows),
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"params": {"lr": 1e-3}},
    }
    dims = {"pipeline": (2, 1), "zero": (1, 2)}
    cases = [
        {"name": name, "kind": kind, "config": common | keys | {"model_topo": topology(dims[kind])}}
        for name, (kind, keys) in BAD_STEPS.items()
        if name in asked
    ]
    ranks.run(2, "bad_steps", cases, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in BAD_STEPS if name in asked}


@pytest.mark.parametrize("name", tiered(BAD_STEPS, quick=["pipeline-1-bf16", "zero-2"], longest=ALIKE))
def test_a_step_that_is_not_finite_changes_nothing(name: str, outcomes: dict[str, dict[str, float]]) -> None:
    outcome = outcomes[name]
    assert not math.isfinite(outcome["loss"])
    assert not math.isfinite(outcome["grad_norm"])
    assert outcome["after_bad"] == outcome["before"]
    assert outcome["after_good"] < outcome["before"]


@pytest.mark.slow
def test_records_that_make_nan_are_named(ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_checkpoint("llama", tie_word_embeddings=False)
    tokenizer = load_tokenizer(model)
    faq = FAQ.read_text(encoding="utf-8")
    spoil(model, (set(tokenizer.encode(SIGN)) - set(tokenizer.encode(faq))).pop())
    records = json.loads(faq)[:8]
    for number in (3, 6):
        records[number - 1] = {"type": "instruct", "instruct": f"What does {SIGN} mean?", "output": "A paragraph."}
    (tmp_path / "data.json").write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    config = write_config(
        tmp_path / "run.yml",
        model_path=str(model),
        data_path=str(tmp_path / "data.json"),
        model_topo=topology((2, 1)),
        n_epoches=9,
        max_bad_steps=2,
    )
    outcome = ranks.train(2, config)
    line = outcome["error"]
    assert "step 2: the loss is nan" in line and "2 steps in a row" in line
    assert line.endswith(f"no finite loss from {tmp_path}/data.json: record 3, {tmp_path}/data.json: record 6")
    assert "step 1: the loss is nan" in outcome["printed"]
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [None, None]


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param({"initial_scale_power": 40, "min_loss_scale": 2**40, "hysteresis": 1}, marks=pytest.mark.slow),
        pytest.param({"loss_scale": 2**40}, marks=pytest.mark.longest),
    ],
    ids=["dynamic", "static"],
)
def test_a_loss_scale_that_cannot_fall_is_no_endless_search(
    scale: dict[str, Any], ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A gradient that overflows is left out while fp16 finds its scale; at the least scale it is a bad step."""
    write_records(tmp_path / "data.json", 8)
    config = write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(tmp_path / "data.json"),
        model_topo=topology((2, 1)),
        fp16={"enabled": True} | scale,
        n_epoches=9,
    )
    line = ranks.train(2, config)["error"]
    assert "the gradient's norm inf at a loss scale of 1.09951e+12; ended after 3 steps in a row" in line
    assert "expected a lower learning rate or fp32" in line
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
