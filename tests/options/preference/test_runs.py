"""Whole runs on pairs of answers: the reference is made once, of the start weights; a kill and a resume change nothing.

The jobs run one after the other in the same two processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.closeness import assert_near
from tests.launching import metrics, topology
from tests.ranks import Ranks, job
from tests.training.kept_files import flip, parts_of, shift, swap
from tests.training.starts import STEPS, TAKEN_UP, TAKEN_UP_AT, evaluations, losses, steps, weights
from training.checkpoint.folder import BEST, step_folder

pytestmark = [pytest.mark.launched, pytest.mark.slow]

PIPE, DATA = ({"model_topo": topology(dims)} for dims in ((2, 1), (1, 2)))
MADE, KNOWN = (
    "reference: log-probabilities of the data computed in",
    "reference: log-probabilities of the data are known",
)
LORA = {"lora": {"r": 2, "alpha": 8}}
KTO = {"preference": {"loss": "kto", "beta": 0.2, "desirable_weight": 1.5}, "data_path": "marked.json"}
OTHERS = {
    "other-block": "model.layers.0.mlp.up_proj.weight",
    "other-head": "lm_head.weight",
    "other-embedding": "model.embed_tokens.weight",
}
JOBS: dict[str, dict[str, Any]] = {
    "run": PIPE,
    "again": PIPE | {"resume": "run"},  # the cache has the reference
    "elsewhere": DATA | {"resume": "run"},
    "sweep": PIPE | {"preference": {"loss": "ipo"}},  # the same reference, another loss
    "bf16": PIPE | {"bf16": {"enabled": True}},  # another one
    "lora": PIPE | LORA,
    "late": PIPE | {"resume": "run", "cache_dir": "other-cache"},  # no reference, and the weights of step 3
    "other-loss": PIPE | {"resume": "run", "preference": {"loss": "dpo", "beta": 0.5}},
    "streamed": PIPE | {"schedule": "weight_streaming", "cache_dir": "cache-of-turns"},  # which makes the reference
    "simpo": PIPE | {"preference": {"loss": "simpo", "beta": 2.0}},
    "kto": PIPE | KTO,
    "kto-again": PIPE | KTO | {"resume": "kto"},
    "kto-elsewhere": DATA | KTO | {"resume": "kto", "train_micro_batch_size_per_gpu": 4},
    "kto-lora": PIPE | KTO | LORA,
    "kto-one-prompt": PIPE | KTO | {"data_path": "one-prompt.json"},
    "other-block": PIPE | {"model_path": "other-block"},
    "other-head": PIPE | {"model_path": "other-head"},
    "other-embedding": PIPE | {"model_path": "other-embedding"},
    "kto-other-head": PIPE | KTO | {"model_path": "other-head"},
    "apo": PIPE | {"preference": {"loss": "apo_zero_unpaired"}, "data_path": "marked.json"},
}


# Name: the job that is run again with a copy of the cache, and what has become of the references in it.
SPOILT: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped": ("run", flip),
    "swapped": ("run", swap),
    "forged": ("run", shift),
    "kto-forged": ("kto", shift),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preference-runs")


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    model = make_checkpoint("llama", tie_word_embeddings=False)
    pairs = [
        {
            "prompt": f"How many stages has run {n}?",
            "chosen": f"It has {n}." + " All." * (n % 3),
            "rejected": "No" * (n % 5 + 1),
        }
        for n in range(30)
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs))
    marked = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for n, pair in enumerate(pairs)
        for name in (("chosen", "rejected") if n % 3 else ("chosen",))
    ]
    (folder / "marked.json").write_text(json.dumps(marked))
    (folder / "one-prompt.json").write_text(json.dumps([each | {"prompt": "How many?"} for each in marked]))
    state = load_file(model / "model.safetensors")
    for name, weight in OTHERS.items():
        shutil.copytree(model, folder / name)
        save_file(state | {weight: state[weight] * 1.5}, folder / name / "model.safetensors", {"format": "pt"})
    cases = {name: describe(name, keys, model, folder) for name, keys in JOBS.items()}
    found = ranks.jobs([*cases.values()], folder)
    spoilt: list[dict[str, Any]] = []
    for name, (origin, change) in SPOILT.items():
        (cache := folder / f"cache-{name}").mkdir()
        shutil.copytree(folder / "cache" / "datasets", cache / "datasets")
        for path in cache.rglob("reference-*"):
            change(path)
        own = cases[origin]["config"] | {"save_path": str(folder / name), "cache_dir": str(cache)}
        spoilt.append(cases[origin] | {"name": name, "config": own})
    return found | ranks.jobs(spoilt, folder)


def describe(name: str, keys: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = (
        TAKEN_UP
        | {
            "model_path": str(model),
            "preference": {"loss": "dpo", "beta": 0.2},
        }
        | keys
    )
    places = {"data_path": "pairs.json", "model_path": str(model), "cache_dir": "cache"} | keys
    own |= {key: str(folder / str(places[key])) for key in ("data_path", "model_path", "cache_dir")}
    if "resume" in keys:
        own["resume"] = str(step_folder(folder / keys["resume"], TAKEN_UP_AT))
    return job(folder, name, **own)


def test_a_run_learns_and_says_what_it_counts(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["run"]["error"] is None and MADE in outcomes["run"]["printed"]
    done = steps(folder / "run")
    first, last = done[1], done[STEPS]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)  # the model is its own reference
    assert last["loss"] < first["loss"] and last["rewards/accuracies"] == 1.0 and last["samples"] == 8
    margin = last["rewards/chosen"] - last["rewards/rejected"]
    assert last["rewards/margins"] == pytest.approx(margin) and margin > 0
    evaluated = [line for line in metrics(folder / "run") if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [TAKEN_UP_AT, STEPS]
    assert all(line["eval_error"] == 1 - line["eval_rewards/accuracies"] for line in evaluated)
    assert "eval_perplexity" not in evaluated[0]
    best = json.loads((folder / "run" / BEST).read_text())
    assert (best["measure"], best["value"]) == ("eval_error", min(line["eval_error"] for line in evaluated))


def test_turns_at_all_layers_learn_the_same(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["streamed"]["error"] is None and MADE in outcomes["streamed"]["printed"]
    for found, expected in zip(metrics(folder / "streamed"), metrics(folder / "run"), strict=True):
        for key in (key for key in expected if key.startswith(("loss", "eval_", "rewards/", "logps/", "grad_norm"))):
            assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


def test_kto_learns_and_says_what_it_counts(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["kto"]["error"] is None and MADE in outcomes["kto"]["printed"]
    assert "answers: 2" in outcomes["kto"]["printed"] and "undesirable, weighted" in outcomes["kto"]["printed"]
    done = steps(folder / "kto")
    first, last = done[1], done[STEPS]
    assert first["kl"] == pytest.approx(0, abs=1e-4)
    of_desirable = (first["loss"] - 0.5) * 8 / 0.25  # each answer weighs 0.5 before it is learnt, or 0.75
    assert 0 < of_desirable < 8 and of_desirable == pytest.approx(round(of_desirable), abs=1e-2)
    assert last["loss"] < first["loss"] and last["kl"] >= 0 and any(line["kl"] > 0 for line in done.values())
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"]) and (
        last["rewards/margins"] > 0
    )
    assert "desirable" not in last and "rewards/accuracies" not in last
    evaluated = [line for line in metrics(folder / "kto") if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [TAKEN_UP_AT, STEPS]
    assert all({"eval_kl", "eval_rewards/chosen"} <= line.keys() for line in evaluated)
    assert not {"eval_error", "eval_perplexity"} & evaluated[0].keys()
    best = json.loads((folder / "kto" / BEST).read_text())
    assert (best["measure"], best["value"]) == ("eval_loss", min(line["eval_loss"] for line in evaluated))
    assert all(line["kl"] == 0 for line in steps(folder / "apo").values())
    assert steps(folder / "kto-lora")[1]["loss"] == pytest.approx(first["loss"], abs=1e-4)


def test_kto_is_refused_where_prompts_have_no_other_answers(outcomes: dict[str, Any]) -> None:
    error = outcomes["kto-one-prompt"]["error"]
    assert error.startswith("data: ") and "answers are to the same prompt, and kto pairs each prompt" in error


@pytest.mark.parametrize("name", ["again", "elsewhere", "kto-again", "kto-elsewhere"])
def test_a_resumed_run_goes_on_with_the_reference_of_the_start(
    name: str, outcomes: dict[str, Any], folder: Path
) -> None:
    assert outcomes[name]["error"] is None and KNOWN in outcomes[name]["printed"]
    run = "kto" if name.startswith("kto") else "run"
    expected = weights(folder / run)
    if name.endswith("again"):
        assert losses(folder / name) == losses(folder / run)
        torch.testing.assert_close(weights(folder / name), expected, rtol=0, atol=0)
        assert evaluations(folder / name)[STEPS] == evaluations(folder / run)[STEPS]
    else:
        assert losses(folder / name) == pytest.approx(losses(folder / run), rel=1e-4)
        assert_near(weights(folder / name), expected)


def test_a_reference_belongs_to_weights_and_dtype(outcomes: dict[str, Any], folder: Path) -> None:
    assert KNOWN in outcomes["sweep"]["printed"]
    assert MADE in outcomes["bf16"]["printed"]
    assert MADE not in outcomes["simpo"]["printed"] and KNOWN not in outcomes["simpo"]["printed"]
    files = {
        name: {path.name for path in (folder / name).glob("reference-*")} for name in ("run", "sweep", "bf16", "simpo")
    }
    assert files["run"] == files["sweep"] and len(files["run"]) == 2 and not files["run"] & files["bf16"]
    assert not files["simpo"]
    # Adapters begin as nothing, so the reference of their run is that of the base.
    assert KNOWN in outcomes["lora"]["printed"] or MADE in outcomes["lora"]["printed"]
    own = sorted((folder / "lora").glob("reference-*")), sorted((folder / "run").glob("reference-*"))
    found, expected = (
        [torch.frombuffer(bytearray(parts_of(path)[0]), dtype=torch.float32) for path in paths] for paths in own
    )
    for each, other in zip(sorted(found, key=len), sorted(expected, key=len), strict=True):
        assert_near(each, other)


def test_a_run_that_lost_its_reference_is_refused(outcomes: dict[str, Any]) -> None:
    """The weights to compare with are not those of step 3."""
    error = outcomes["late"]["error"]
    assert "have to be compared with the weights that this run began with" in error and "reference-" in error


@pytest.mark.parametrize("name", ["other-block", "other-head", "other-embedding", "kto-other-head"])
def test_a_model_that_differs_in_one_weight_has_a_reference_of_its_own(
    name: str, outcomes: dict[str, Any], folder: Path
) -> None:
    assert MADE in outcomes[name]["printed"] and KNOWN not in outcomes[name]["printed"]
    first = steps(folder / name)[1]
    if name.startswith("kto"):
        unplanned = "preference.loss: kto takes a forward pass more in each step, which is not planned"
        assert unplanned in " ".join(outcomes[name]["printed"].split())
        assert first["kl"] == pytest.approx(0, abs=1e-4)
        assert first["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    else:
        assert first["loss"] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("name", ["forged", "kto-forged"])
def test_a_kept_reference_of_other_weights_is_refused_before_the_first_step(
    name: str, outcomes: dict[str, Any], folder: Path
) -> None:
    """Whatever went wrong with its name and sum: a model is its own reference when it begins."""
    error = outcomes[name]["error"]
    assert error.startswith("reference: the kept log-probabilities of the data are not those of the weights"), error
    assert not (folder / name / "metrics.jsonl").exists() or not steps(folder / name)


@pytest.mark.parametrize("name", ["flipped", "swapped"])
def test_a_damaged_reference_is_computed_anew(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert MADE in outcomes[name]["printed"] and outcomes[name]["error"] is None
    assert losses(folder / name) == losses(folder / "run")


def test_another_loss_is_refused_in_the_same_run(outcomes: dict[str, Any]) -> None:
    assert outcomes["other-loss"]["error"].startswith("preference.beta: 0.5, but ")
