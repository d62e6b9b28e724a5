"""Whole runs that start again: with the same config to the last bit, with another one as training.config.changes says.

The jobs of all tests that a session asks for run one after the other in the same two processes
(tests/workers/jobs.py). A run that takes up a checkpoint of another folder finds there what a kill at that moment would
have left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import tiered
from tests.launching import OFFLOAD, metrics, topology
from tests.ranks import Ranks
from tests.training.starts import (
    COSINE,
    NEEDED,
    STEPS,
    TAKEN_UP_AT,
    Job,
    describe,
    evaluations,
    expected_rates,
    losses,
    make_models,
    needs,
    rates,
    scaler,
    steps,
    weights,
    write_records,
)
from training.checkpoint.folder import BEST, RECORD, step_folder

pytestmark = pytest.mark.launched

PIPE, DATA = ({"model_topo": topology(dims)} for dims in ((2, 1), (1, 2)))
PLAIN = {"zero_optimization": {"stage": 0}}
SCALE = 22  # of the loss, as a power of two: too much for the first steps
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": SCALE, "hysteresis": 1}}
PACKED = {"packing": "dataset", "pack_len": 256, "train_batch_size": 2}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 2.0e-4, "weight_decay": 0.1}, "no_wd_kws": ["norm"]}}
ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1.0e-2}}} | PLAIN
ROUTER = {"aux_router_loss": {"weight": 0.5}}


# What goes on to the last bit: keys, model, engine.
EXACT: dict[str, tuple[dict[str, Any], str, str]] = {
    "packed": (PIPE | PACKED, "llama", "pipeline"),
    "fp16": (PIPE | FP16, "llama", "pipeline"),
    "lion": (PIPE | LION, "llama", "pipeline"),
    "lion-bf16": (PIPE | LION | BF16, "llama", "pipeline"),
    "host-sums": (PIPE | BF16 | OFFLOAD | {"offload_gradients": True}, "llama", "pipeline"),
    "sgd": (DATA | SGD, "llama", "pipeline"),
    "adafactor": (PIPE | ADAFACTOR, "llama", "pipeline"),
    "moe": (PIPE | ROUTER, "mixtral", "pipeline"),
    "dualpipev-dropout": (PIPE | {"schedule": "dualpipev"}, "bloom", "pipeline"),
    "zero-1-dropout": (DATA, "bloom", "zero"),
    "zero-2-dropout": (DATA | {"zero_optimization": {"stage": 2}}, "bloom", "zero"),
    "zero-3-dropout": (DATA | {"zero_optimization": {"stage": 3}} | BF16, "bloom", "zero"),
}
# What goes on after a change: the source, the change, the engine, the relative tolerance of the losses.
CHANGED: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "moe-to-1x2": ("moe", DATA, "pipeline", 1e-5),
    "moe-to-zero-2": ("moe", DATA | {"zero_optimization": {"stage": 2}}, "zero", 1e-5),
    "lion-bf16-to-1x2": ("lion-bf16", DATA, "pipeline", 2e-3),
    "lion-unpacked": ("lion", {"packing": False, "train_micro_batch_size_per_gpu": 2}, "pipeline", 1e-5),
    "sgd-offload": ("sgd", OFFLOAD, "pipeline", 1e-5),
}
# A step whose gradient is no number: by engine and precision.
LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline-0": (PIPE | PLAIN, "pipeline"),
    "pipeline-1": (PIPE, "pipeline"),
    "pipeline-0-bf16": (PIPE | PLAIN | BF16, "pipeline"),
    "pipeline-1-bf16": (PIPE | BF16, "pipeline"),
    "zero-0": (DATA | PLAIN, "zero"),
    "zero-2": (DATA | {"zero_optimization": {"stage": 2}}, "zero"),
    "zero-3": (DATA | {"zero_optimization": {"stage": 3}}, "zero"),
}
EVALUATED = PIPE | {"eval_interval": 2}
EVALUATING = "a batch of an evaluation"  # as the failure detector hears of it

Outcomes = Callable[[str], dict[str, Any]]


OTHER_ROWS: list[dict[str, Any]] = [{"pack_len": 384}, {"pack_len": None, "max_seq_len": 300}, {"packing": "batch"}]
TEN = Job("ten", PIPE | {"max_steps": 10})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path], folder: Path) -> dict[str, Path]:
    return make_models(make_checkpoint, folder)


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, models: dict[str, Path], request: pytest.FixtureRequest) -> Outcomes:
    """How the jobs ended that this session's tests need."""
    write_records(folder)
    items = [item for item in request.session.items if item.path == request.path]
    jobs = {job.name: job for item in items for job in NEEDED.get(item.name, ())}
    ranks.run(2, "jobs", [describe(job, models, folder) for job in jobs.values()], folder)
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def straight(name: str) -> Job:
    """The job of `EXACT` whose checkpoints others take up."""
    keys, model, kind = EXACT[name]
    return Job(name, keys | {"save_interval": TAKEN_UP_AT, "keep_last": 9}, model, kind)


def again(name: str, source: str, change: dict[str, Any], kind: str = "pipeline", model: str = "") -> list[Job]:
    """A job of `EXACT`, and one that takes it up with other keys."""
    keys, usual, _ = EXACT[source]
    return [straight(source), Job(name, keys | change, model or usual, kind, source=source)]


@needs(**{name: again(f"{name}-again", name, {}, EXACT[name][2]) for name in EXACT})
@pytest.mark.parametrize("name", tiered(EXACT, quick=["packed"], longest=["lion", "zero-1-dropout"]))
def test_a_run_goes_on_to_the_last_bit(name: str, outcomes: Outcomes, folder: Path) -> None:
    straight, again = folder / name, folder / f"{name}-again"
    assert outcomes(f"{name}-again")["error"] is None, outcomes(name)["error"]
    assert f"after step {TAKEN_UP_AT}\n" in outcomes(f"{name}-again")["printed"]
    assert losses(again) == losses(straight)
    assert len(losses(again)) == STEPS - TAKEN_UP_AT
    found, expected = weights(again), weights(straight)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    if name == "fp16":
        scalers = [vars(scaler(run)) for run in (straight, again)]
        assert scalers[0] == scalers[1]
        assert scalers[0]["cur_scale"] < 2**SCALE


@needs(**{name: again(name, source, change, kind) for name, (source, change, kind, _) in CHANGED.items()})
@pytest.mark.parametrize("name", tiered(CHANGED, quick=["moe-to-1x2"], longest=["lion-unpacked", "moe-to-zero-2"]))
def test_a_run_goes_on_after_a_change(name: str, outcomes: Outcomes, folder: Path) -> None:
    source, _, _, tolerance = CHANGED[name]
    message = outcomes(name)
    assert message["error"] is None
    assert "changed since the checkpoint: " in message["printed"]
    found, expected = torch.tensor(losses(folder / name)), torch.tensor(losses(folder / source))
    assert len(found) == STEPS - TAKEN_UP_AT
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    assert rates(folder / name) == {s: r for s, r in rates(folder / source).items() if s > TAKEN_UP_AT}


@needs(*again("fp16-to-1x2", "fp16", DATA))
@pytest.mark.slow
def test_the_loss_scale_moves_to_another_topology(outcomes: Outcomes, folder: Path) -> None:
    """Where a replica's own gradients overflow earlier: at half the scale, and not at what a run starts with."""
    outcome = outcomes("fp16-to-1x2")
    assert outcome["error"] is None
    assert losses(folder / "fp16-to-1x2")[0] == pytest.approx(losses(folder / "fp16")[0], rel=2e-3)
    assert len(outcome["used"]) >= STEPS - TAKEN_UP_AT - 1
    before = scaler(folder / "fp16", TAKEN_UP_AT).cur_scale
    assert scaler(folder / "fp16-to-1x2").cur_scale in (before, before / 2)
    assert rates(folder / "fp16-to-1x2").items() <= rates(folder / "fp16").items()


@needs(*(job for number, change in enumerate(OTHER_ROWS) for job in again(f"packed-{number}", "packed", change)))
@pytest.mark.slow
def test_other_rows_of_packed_epochs_are_refused(outcomes: Outcomes) -> None:
    where = "but .*step-000003 was trained with"
    refusals = (
        rf"pack_len: 384, {where} 256; expected 256, or another save_path",
        r"data_path: not the samples|max_seq_len: 300, " + where,
        rf"packing: batch, {where} dataset; expected dataset, or another save_path",
    )
    for number, refusal in enumerate(refusals):
        assert re.search(refusal, outcomes(f"packed-{number}")["error"])


@needs(*again("other-model", "packed", {}, model="llama-9"))
def test_another_model_is_refused(outcomes: Outcomes) -> None:
    message = outcomes("other-model")["error"]
    assert message.startswith("model_path: config.json: rms_norm_eps: 9e-06, but ")
    assert message.endswith("was trained with 1e-06; expected 1e-06, or another save_path")


def left_out(name: str) -> Job:
    keys, kind = LEFT_OUT[name]
    return Job(f"left-out-{name}", keys | SGD | {"max_steps": None}, "nan", kind)


@needs(**{name: [left_out(name)] for name in LEFT_OUT})
@pytest.mark.parametrize(
    "name", tiered(LEFT_OUT, quick=["pipeline-1"], longest=["pipeline-0-bf16", "zero-0", "zero-2"])
)
def test_a_left_out_step_does_not_hold_back_the_learning_rate(name: str, outcomes: Outcomes, folder: Path) -> None:
    outcome = outcomes(f"left-out-{name}")
    assert outcome["error"] is None
    run = steps(folder / f"left-out-{name}")
    left_out = [step for step, line in run.items() if line["loss"] is None]
    assert len(left_out) == 1
    assert left_out[0] < len(run), "the last step: nothing follows that could show it"
    assert rates(folder / f"left-out-{name}") == expected_rates(len(run), lr=0.05)
    used = {int(step): rate for step, rate in outcome["used"].items() if int(step) not in left_out}
    assert used == {step: line["lr"] for step, line in run.items() if step not in left_out}


@needs(left_out("pipeline-0"), left_out("pipeline-1"))
@pytest.mark.slow
def test_left_out_steps_leave_the_same_weights_in_every_stage(outcomes: Outcomes, folder: Path) -> None:
    del outcomes  # they have run
    runs = [folder / f"left-out-{name}" for name in ("pipeline-0", "pipeline-1")]
    expected, found = (weights(run, max(steps(run))) for run in runs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, equal_nan=True)


@needs(straight("fp16"))
@pytest.mark.slow
def test_finding_the_scale_does_not_hold_back_the_learning_rate(outcomes: Outcomes, folder: Path) -> None:
    outcome = outcomes("fp16")
    assert rates(folder / "fp16") == expected_rates(STEPS)
    used = {int(step): rate for step, rate in outcome["used"].items()}
    assert 0 < len(used) < STEPS, "steps are left out while the scale is found"
    assert used.items() <= rates(folder / "fp16").items()


@needs(
    TEN,
    Job("six", PIPE | {"keep_last": 9}),
    Job("six-to-ten", PIPE | {"max_steps": 10}, run="six"),
    Job("stopped", PIPE | {"max_steps": 10}, events={4: "stop"}),
    Job("shortened", DATA | {"max_steps": 6}, run="stopped"),
    Job("linear", PIPE | {"scheduler": {"type": "linear", "params": {"min_ratio": 0.0}}}, run="linear"),
    Job("linear-to-eight", PIPE | {"scheduler": COSINE, "max_steps": 8}, run="linear"),
)
@pytest.mark.slow
def test_an_extended_run_has_the_learning_rates_of_a_long_one(outcomes: Outcomes, folder: Path) -> None:
    ten = rates(folder / "ten")
    assert ten == expected_rates(10)
    first = expected_rates(6)
    assert rates(folder / "six") == first | {step: rate for step, rate in ten.items() if step > 6}
    assert {int(step): rate for step, rate in outcomes("six-to-ten")["used"].items()} == {
        step: rate for step, rate in ten.items() if step > 6
    }
    assert "max_steps 6 -> 10: the learning rate is that of the new schedule" in outcomes("six-to-ten")["printed"]
    assert outcomes("stopped")["code"] == 128 + 15
    assert rates(folder / "stopped") == {s: r for s, r in ten.items() if s <= 4} | {5: first[5], 6: first[6]}
    assert rates(folder / "linear")[6] == 0.0
    eight = expected_rates(8)
    assert {s: r for s, r in rates(folder / "linear").items() if s > 6} == {7: eight[7], 8: eight[8]}
    assert "scheduler.type linear -> WarmupCosineLR: " in outcomes("linear-to-eight")["printed"]


@needs(
    Job("done", PIPE),
    Job("beyond", PIPE | {"max_steps": 4, "export_hf": True}, run="done"),
    Job("exactly", PIPE | {"export_hf": True}, run="done"),
)
def test_max_steps_at_or_below_the_steps_done(outcomes: Outcomes, folder: Path) -> None:
    run = folder / "done"
    message = "nothing to train: {} has 6 steps done, and max_steps asks for {}"
    below, exactly = outcomes("beyond"), outcomes("exactly")
    assert (below["error"], below["code"], exactly["error"], exactly["code"]) == (None, 0, None, 0)
    lines = below["printed"].splitlines()
    assert lines[-1] == message.format(step_folder(run, 6), 4)
    assert "exported" not in below["printed"]
    assert message.format(step_folder(run, 6), 6) in exactly["printed"].splitlines()
    assert f"exported: {run / 'hf'}" in exactly["printed"]
    assert list(steps(run)) == list(range(1, 7))


@needs(
    Job("evaluated", EVALUATED),
    Job("evaluation-left", EVALUATED, run="interrupted", events={EVALUATING: "stop"}),
    Job("evaluation-left-again", EVALUATED, run="interrupted", events={EVALUATING: "stop"}),
    Job("evaluation-missed", EVALUATED, run="interrupted", events={4: "stop"}),
    Job("evaluation-due", EVALUATED, run="interrupted", events={6: "stop"}),
    Job("evaluation-done", EVALUATED, run="interrupted"),
    Job("shortened-before", PIPE | {"eval_interval": 9}, run="cut-short", events={4: "stop"}),
    Job("shortened-after", PIPE | {"eval_interval": 9, "max_steps": 4}, run="cut-short"),
)
def test_evaluations_of_a_stopped_run_are_made_up_for(outcomes: Outcomes, folder: Path) -> None:
    expected = evaluations(folder / "evaluated")
    assert list(expected) == [2, 4, 6]
    for name, step in (("left", 2), ("left-again", 2), ("missed", 4)):
        outcome = outcomes(f"evaluation-{name}")
        assert outcome["code"] == 128 + 15
        where = "before step 3 of 6: this start trained nothing" if name == "left-again" else f"after step {step} of 6"
        assert f"stopped {where}; the same command goes on from there" in outcome["printed"]
        assert ("eval_perplexity" in outcome["printed"]) == (name == "missed"), "that of step 2"
    assert evaluations(folder / "interrupted") == expected
    order = [line["step"] for line in metrics(folder / "interrupted")]
    assert order == [1, 2, 2, 3, 4, 4, 5, 6, 6], "those that were missed came before the next step"
    assert outcomes("evaluation-due")["code"] == 0, "asked to stop in the last step, which was the end anyway"
    assert "nothing to train" in outcomes("evaluation-done")["printed"]
    best = [json.loads((folder / name / BEST).read_text()) for name in ("evaluated", "interrupted")]
    assert best[0] == best[1]
    assert list(evaluations(folder / "cut-short")) == [4], "the run's last step, as it turned out"


@needs(*again("unmoved", "packed", {"eval_interval": TAKEN_UP_AT, "optimizer": {"params": {"lr": 0.0}}}))
@pytest.mark.slow
def test_the_best_checkpoint_is_one_of_the_run_s_own(outcomes: Outcomes, folder: Path) -> None:
    """The first evaluation is that of a checkpoint in another folder, and no later one is better."""
    assert outcomes("unmoved")["error"] is None
    found = evaluations(folder / "unmoved")
    assert list(found) == [TAKEN_UP_AT, STEPS] and len(set(found.values())) == 1
    assert json.loads((folder / "unmoved" / BEST).read_text())["checkpoint"] == f"step-{STEPS:06d}"


@needs(Job("nan-evaluation", EVALUATED | {"max_steps": 2, "optimizer": {"params": {"lr": 0.0}}}, "nan"))
@pytest.mark.slow
def test_an_evaluation_that_is_no_number_is_never_the_best(outcomes: Outcomes, folder: Path) -> None:
    assert outcomes("nan-evaluation")["error"] is None
    assert list(evaluations(folder / "nan-evaluation").values()) == [None]
    assert not (folder / "nan-evaluation" / BEST).exists()
    assert (step_folder(folder / "nan-evaluation", 2) / RECORD).is_file()


@needs(Job("short-row", EVALUATED | {"packing": "batch", "pack_len": 104, "max_seq_len": 200}, "without-weights"))
def test_a_short_row_is_refused_before_the_weights_are_read(outcomes: Outcomes) -> None:
    """Of the evaluation set; there are no weights at all."""
    message = outcomes("short-row")["error"]
    assert message.startswith("pack_len: 104 is shorter than the longest sample; expected at least ")


@needs(Job("abandoned", PIPE | {"save_interval": 2}, "removed", events={1: "remove {removed}"}))
@pytest.mark.slow
def test_the_model_may_go_once_the_run_has_begun(outcomes: Outcomes, folder: Path, models: dict[str, Path]) -> None:
    assert outcomes("abandoned")["error"] is None
    assert not re.search("^warning: .*model", outcomes("abandoned")["printed"], re.MULTILINE)
    assert not models["removed"].exists()
    saved, llama = step_folder(folder / "abandoned", STEPS), models["llama"]
    for name in ("config.json", "tokenizer.json"):
        assert (saved / name).read_bytes() == (llama / name).read_bytes()


@needs(
    TEN,
    Job("axes", {"model_topo": {"process_topology": {"axes": ["data", "pipe"], "dims": [1, 2]}}, "max_steps": 10}),
)
@pytest.mark.slow
def test_axes_in_the_other_order(outcomes: Outcomes, folder: Path) -> None:
    """One replica of two stages, said the other way round."""
    assert outcomes("axes")["error"] is None
    assert [line["loss"] for line in steps(folder / "axes").values()] == [
        line["loss"] for line in steps(folder / "ten").values()
    ]


@needs(
    *(
        Job(f"one-{name}", topo | {"eval_data_path": "{one}", "max_steps": 1, "packing": False})
        for name, topo in (("2x1", PIPE), ("1x2", DATA))
    )
)
@pytest.mark.slow
def test_an_evaluation_set_smaller_than_the_replicas(outcomes: Outcomes, folder: Path) -> None:
    assert outcomes("one-1x2")["error"] is None
    one, other = (evaluations(folder / f"one-{name}") for name in ("2x1", "1x2"))
    assert list(one) == [1]
    assert one[1] == pytest.approx(other[1], rel=1e-5)
