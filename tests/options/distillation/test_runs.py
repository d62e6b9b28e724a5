"""Whole runs with a teacher: every topology finds and learns the same; a kill and a resume change nothing.

The jobs run one after the other in the same processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.tokenized.dataset import Dataset
from models import load_model
from options import RunConfig
from tests.closeness import assert_near
from tests.conftest import write_records
from tests.launching import metrics, topology
from tests.matrix import RUNS
from tests.ranks import Ranks, job
from tests.training.kept_files import fill, flip, forge, parts_of
from tests.training.starts import STEPS, TAKEN_UP, TAKEN_UP_AT, evaluations, losses, steps, weights
from training.batches import build_loader
from training.checkpoint.folder import step_folder
from training.data_setup import RecordReader

pytestmark = [pytest.mark.launched, pytest.mark.slow]

MADE, KNOWN = "log-probabilities of the data computed in", "log-probabilities of the data are known"
ANOTHER = "nothing is kept of it (another than before, or an emptied cache)"
TOP_K, WEIGHT, TEMPERATURE, WORDS = 5, 0.7, 2.0, 512
PIPE = {"model_topo": topology((2, 1))}
WITHIN = {"teacher": "teacher", "top_k": TOP_K, "weight": WEIGHT, "temperature": TEMPERATURE}
SELF = PIPE | {"distillation": {"teacher": "student", "top_k": WORDS}}
# Beside those of the matrix. Each has a cache of its own, so that its own topology makes what the teacher finds.
TOPOLOGIES: dict[str, tuple[int, str, dict[str, Any]]] = RUNS | {
    "grid": (4, "pipeline", {"model_topo": topology((2, 2)), "packing": "dataset"}),
    "grid-sequence": (4, "pipeline", {"model_topo": topology((2, 2)) | {"sequence": 2}}),
}
LATER: dict[str, Any] = dict.fromkeys(("replicas", "model", "zero3"), pytest.mark.slow)
LATER |= dict.fromkeys(("grid", "grid-sequence"), pytest.mark.longest)
OTHERS: dict[str, dict[str, Any]] = {
    "again": PIPE | {"train_micro_batch_size_per_gpu": 2, "resume": "stages", "cache": "stages"},
    "elsewhere": {"model_topo": topology((1, 2)), "resume": "stages", "cache": "stages"},
    "other-teacher": PIPE | {"resume": "stages", "cache": "stages", "distillation": WITHIN | {"teacher": "student"}},
    "other-head": PIPE | {"cache": "stages", "distillation": WITHIN | {"teacher": "other-head"}},
    "other-block": PIPE | {"cache": "stages", "distillation": WITHIN | {"teacher": "other-block"}},
    "other-angles": PIPE | {"cache": "stages", "distillation": WITHIN | {"teacher": "other-angles"}},
    "sweep": PIPE | {"cache": "stages", "distillation": WITHIN | {"temperature": 1.0, "weight": 1.0}},
    "lora": PIPE | {"cache": "stages", "lora": {"r": 2, "alpha": 8}},
    "bf16": PIPE | {"bf16": {"enabled": True}},
    "too-fast": PIPE | {"cache": "stages", "optimizer": {"type": "AdamW", "params": {"lr": 1e30}}},
    "self": SELF,
    "absent": PIPE | {"distillation": WITHIN | {"teacher": "nothing-there"}},
    "other-words": PIPE | {"distillation": WITHIN | {"teacher": "other-words"}},
    "all-words": PIPE | {"distillation": WITHIN | {"top_k": WORDS + 1}},
    "scores": PIPE | {"distillation": WITHIN | {"teacher": "scores"}},
    "shallow": {"model_topo": topology((2, 1)), "schedule": "dualpipev", "distillation": WITHIN | {"teacher": "flat"}},
}
UNDER_TEST = [pytest.param(name, marks=LATER.get(name, ())) for name in TOPOLOGIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation-runs")


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path], folder: Path) -> dict[str, Path]:
    student = make_checkpoint("llama", tie_word_embeddings=False)
    made = {"student": student, "nothing-there": folder / "nothing-there"}
    # Its layers are divided otherwise than the student's, and it has more rows than there are words.
    sizes = {"num_hidden_layers": 4, "vocab_size": WORDS + 16, "initializer_range": 0.2}
    made["teacher"] = make_checkpoint("llama", tie_word_embeddings=True, **sizes)
    made["flat"] = make_checkpoint("llama", num_hidden_layers=1)
    state = load_file(made["teacher"] / "model.safetensors")
    for name, weight in (("other-head", "model.norm.weight"), ("other-block", "model.layers.2.mlp.up_proj.weight")):
        made[name] = folder / name
        shutil.copytree(made["teacher"], made[name])
        save_file(state | {weight: state[weight] * 3}, made[name] / "model.safetensors", {"format": "pt"})
    made["other-angles"] = folder / "other-angles"
    shutil.copytree(made["teacher"], made["other-angles"])
    settings = json.loads((made["teacher"] / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 3.0}
    (made["other-angles"] / "config.json").write_text(json.dumps(settings))
    for name in ("other-words", "scores"):
        made[name] = folder / name
        shutil.copytree(student, made[name])
    tokenizer = made["other-words"] / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    vocabulary: dict[str, int] = words["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(words))
    settings = json.loads((student / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (made["scores"] / "config.json").write_text(json.dumps(settings))
    return made


def describe(name: str, kind: str, keys: dict[str, Any], models: dict[str, Path], folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = TAKEN_UP | {
        "model_path": str(models["student"]),
        "cache_dir": str(folder / f"cache-{keys.get('cache', name)}"),
        "distillation": WITHIN,
        "prompt_format": "plain",
    }
    own |= {key: value for key, value in keys.items() if key != "cache"}
    own["distillation"] = own["distillation"] | {"teacher": str(models[own["distillation"]["teacher"]])}
    if "resume" in keys:
        own["resume"] = str(step_folder(folder / keys["resume"], TAKEN_UP_AT))
    return job(folder, name, kind, **own)


@pytest.fixture(scope="module")
def records(folder: Path) -> None:
    write_records(folder / "records.json", 24)


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks, folder: Path, models: dict[str, Path], records: None, asked: set[str]
) -> dict[str, dict[str, Any]]:
    for processes in (1, 2, 4):
        chosen = [name for name, (size, *_) in TOPOLOGIES.items() if size == processes]
        cases = [
            describe(name, *TOPOLOGIES[name][1:], models, folder)
            for name in chosen
            if name in asked or name not in LATER
        ]
        if processes == 2:
            cases += [describe(name, "pipeline", keys, models, folder) for name, keys in OTHERS.items()]
        if cases:
            ranks.run(processes, "jobs", cases, folder)
    # Each token gets what the teacher finds of the one before it: a fault that nothing but the loss can show.
    shutil.copytree(folder / "cache-self", folder / "cache-shifted")
    (path,) = (folder / "cache-shifted").rglob("teacher-*.bin")
    found = numpy.frombuffer(parts_of(path)[0], numpy.int32).reshape(-1, 2, WORDS)
    forge(path, numpy.roll(found, 1, axis=0))
    cases = [describe("shifted", "pipeline", SELF, models, folder)]
    for name, change in (("flipped", flip), ("filled", fill)):
        shutil.copytree(folder / "cache-self", folder / f"cache-{name}")
        (path,) = (folder / f"cache-{name}").rglob("teacher-*.bin")
        change(path)
        cases.append(describe(name, "pipeline", SELF, models, folder))
    ranks.run(2, "jobs", cases, folder)
    disks = [folder / "disk0", folder / "disk1"]
    for name in ("hosts", "hosts-again", "hosts-known"):
        case = describe(name, "pipeline", PIPE | {"storage": "local"}, models, folder)
        case["config"] |= {"save_path": name, "cache_dir": "cache"}
        case |= {"hosts": ["node1", "node2"], "disks": [str(disk) for disk in disks], "first": True}
        for disk in disks:
            disk.mkdir(exist_ok=True)
        if name == "hosts-again":
            (gone,) = disks[1].rglob("teacher-*.bin")
            gone.unlink()
        ranks.run(2, "hosts", [case], folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "records"}


def found_by(folder: Path, name: str, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    """What the teacher of a run found: words and log-probabilities, [tokens, k]."""
    files = sorted((folder / f"cache-{name}").rglob("teacher-*.bin"), key=lambda path: path.stat().st_mtime)
    words, bits = (
        torch.from_numpy(numpy.frombuffer(bytearray(parts_of(files[0])[0]), numpy.int32)).view(-1, 2, top_k).unbind(1)
    )
    return words, bits.contiguous().view(torch.float32)


def data_of(folder: Path, models: dict[str, Path]) -> tuple[Dataset, RunConfig]:
    """The samples of the runs, in the order of the file."""
    config = RunConfig.model_validate(describe("alone", "", TOPOLOGIES["alone"][2], models, folder)["config"])
    return RecordReader(config, models["student"], Console(quiet=True)).read_sets()[0], config


def logits_of(model: Any, sample: Any) -> tuple[Tensor, Tensor]:
    """Logits of the trained tokens, by themselves, and what each should have been."""
    ids, labels = (torch.tensor(sample[name].tolist()) for name in ("input_ids", "labels"))
    trained = (labels[1:] >= 0).nonzero().squeeze(-1)
    with torch.no_grad():
        hidden = model.activations(ids[None])[0]
        return model.head.project(model.head.norm(hidden))[0, trained], labels[1:][trained]


def test_the_teacher_is_asked_of_every_token_in_its_place(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    data, _ = data_of(folder, models)
    teacher = load_model(models["teacher"], torch.float32)
    logits = torch.cat([logits_of(teacher, data.samples[number])[0] for number in range(len(data))])
    expected = logits.log_softmax(dim=-1)[:, :WORDS].topk(TOP_K)
    words, log_probabilities = found_by(folder, "alone")
    assert_near(log_probabilities, expected.values)
    assert (words == expected.indices).float().mean() > 0.99  # a tie may fall to the other
    mass = float(expected.values.exp().sum(dim=-1).mean())
    assert f"its {TOP_K} most probable words have {mass:.1%} of the probability" in outcomes["alone"]["printed"]
    assert 0.05 < mass < 0.95


def test_the_first_loss_is_the_formula(outcomes: dict[str, Any], folder: Path, models: dict[str, Path]) -> None:
    data, config = data_of(folder, models)
    batch = build_loader(data, config).batch(0)
    both = [load_model(models[name], torch.float32) for name in ("student", "teacher")]
    each = [[logits_of(model, data.samples[number]) for number in batch.samples] for model in both]
    (student, targets), (teacher, _) = (map(torch.cat, zip(*its, strict=True)) for its in each)
    teacher = teacher[:, :WORDS]
    rest = teacher.argsort(dim=-1, descending=True)[:, TOP_K:]
    shares = (teacher / TEMPERATURE).scatter(-1, rest, float("-inf")).softmax(dim=-1)
    divergence = F.kl_div((student / TEMPERATURE).log_softmax(dim=-1), shares, reduction="sum") / len(targets)
    cross_entropy = F.cross_entropy(student, targets)
    first = steps(folder / "alone")[1]
    assert_near(first["cross_entropy"], float(cross_entropy), kind="means")
    assert_near(first["kl"], float(divergence), kind="means")
    whole = (1 - WEIGHT) * cross_entropy + WEIGHT * TEMPERATURE**2 * divergence
    assert_near(first["loss"], float(whole), kind="means")


@pytest.mark.parametrize("name", UNDER_TEST)
def test_every_topology_finds_and_learns_the_same(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes[name]["error"] is None and MADE in outcomes[name]["printed"]
    words, log_probabilities = found_by(folder, name)
    others, expected = found_by(folder, "alone")
    assert_near(log_probabilities, expected)
    assert (words == others).float().mean() > 0.99
    found, wanted = steps(folder / name), steps(folder / "alone")
    if name == "grid":  # whose batches are of rows
        assert found[STEPS]["loss"] < found[1]["loss"]
        return
    for step in range(1, STEPS + 1):
        for key in ("loss", "cross_entropy", "kl", "grad_norm"):
            assert found[step][key] == pytest.approx(wanted[step][key], rel=1e-4), (step, key)
    assert wanted[STEPS]["kl"] < wanted[1]["kl"]
    assert evaluations(folder / name) == pytest.approx(evaluations(folder / "alone"), rel=1e-4)


def test_an_evaluation_reports_the_cross_entropy(outcomes: dict[str, Any], folder: Path) -> None:
    lines = [line for line in metrics(folder / "stages") if "eval_loss" in line]
    assert [line["step"] for line in lines] == [TAKEN_UP_AT, STEPS]
    assert all(line["eval_perplexity"] == pytest.approx(numpy.exp(line["eval_loss"])) for line in lines)
    assert lines[-1]["eval_loss"] == pytest.approx(steps(folder / "stages")[STEPS]["cross_entropy"], rel=0.5)


def test_a_resumed_run_goes_on_without_the_teacher(outcomes: dict[str, Any], folder: Path) -> None:
    for name in ("again", "elsewhere"):
        assert outcomes[name]["error"] is None, name
        assert KNOWN in outcomes[name]["printed"] and MADE not in outcomes[name]["printed"]
    assert losses(folder / "again") == losses(folder / "stages")
    torch.testing.assert_close(weights(folder / "again"), weights(folder / "stages"), rtol=0, atol=0)
    assert losses(folder / "elsewhere") == pytest.approx(losses(folder / "stages"), rel=1e-4)
    assert_near(weights(folder / "elsewhere"), weights(folder / "stages"))


def test_another_teacher_is_asked_anew_and_that_is_said(outcomes: dict[str, Any], folder: Path) -> None:
    printed = outcomes["other-teacher"]["printed"]
    assert outcomes["other-teacher"]["error"] is None and ANOTHER in printed and MADE in printed
    assert "changed since the checkpoint: distillation.teacher " in printed
    assert losses(folder / "other-teacher") != losses(folder / "stages")


@pytest.mark.parametrize("name", ["other-head", "other-block", "other-angles"])
def test_a_teacher_that_differs_in_one_weight_or_setting_is_another(
    name: str, outcomes: dict[str, Any], folder: Path
) -> None:
    assert outcomes[name]["error"] is None and MADE in outcomes[name]["printed"]
    assert steps(folder / name)[1]["kl"] != pytest.approx(steps(folder / "stages")[1]["kl"], rel=1e-4)


@pytest.mark.parametrize("name", ["flipped", "filled"])
def test_a_damaged_file_is_made_anew(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes[name]["error"] is None and MADE in outcomes[name]["printed"]
    assert losses(folder / name) == losses(folder / "self")


def test_other_settings_and_adapters_take_what_is_known(outcomes: dict[str, Any], folder: Path) -> None:
    assert KNOWN in outcomes["sweep"]["printed"] and KNOWN in outcomes["lora"]["printed"]
    assert MADE in outcomes["bf16"]["printed"]  # whose teacher computes in bf16 too
    rounded = [steps(folder / name)[STEPS]["loss"] for name in ("bf16", "stages")]
    assert rounded[0] == pytest.approx(rounded[1], rel=0.02)
    swept = steps(folder / "sweep")[1]
    assert swept["loss"] == pytest.approx(swept["kl"], rel=1e-6)
    adapted = steps(folder / "lora")
    assert adapted[1]["loss"] == pytest.approx(steps(folder / "stages")[1]["loss"], rel=1e-5)
    assert adapted[STEPS]["loss"] < adapted[1]["loss"]


def test_hosts_with_disks_of_their_own_have_a_file_each(outcomes: dict[str, Any], folder: Path) -> None:
    """The host without the last stage has it too, and the pass is repeated where one has lost it."""
    for name, line in (("hosts", MADE), ("hosts-again", MADE), ("hosts-known", KNOWN)):
        assert outcomes[name]["error"] is None and line in outcomes[name]["printed"], name
    one, two = ([path.read_bytes() for path in (folder / f"disk{disk}").rglob("teacher-*")] for disk in (0, 1))
    assert len(one) == 1 and one == two
    assert steps(folder / "disk0/hosts")[STEPS]["loss"] == pytest.approx(
        steps(folder / "alone")[STEPS]["loss"], rel=1e-4
    )


def test_a_loss_that_is_not_finite_ends_in_a_line(outcomes: dict[str, Any]) -> None:
    error = outcomes["too-fast"]["error"]
    assert "3 steps in a row (max_bad_steps)" in error
    assert error.endswith("expected a lower learning rate or fp32") and "\n" not in error


def test_a_model_has_nothing_to_learn_of_itself(outcomes: dict[str, Any], folder: Path) -> None:
    own, shifted = steps(folder / "self")[1], steps(folder / "shifted")[1]
    assert "have 100.0% of the probability" in outcomes["self"]["printed"] and KNOWN in outcomes["shifted"]["printed"]
    assert abs(own["loss"]) < 1e-5 and own["grad_norm"] < 1e-5
    assert shifted["loss"] > 0.01 and shifted["grad_norm"] > 0.01


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent", "distillation.teacher: "),
        ("other-words", "other words are in only one of them; expected the same tokenizer"),
        ("all-words", f"distillation.top_k: {WORDS + 1}; expected at most the {WORDS} words that there are"),
        ("scores", "distillation.teacher: "),
        ("shallow", "distillation.teacher: model_topo.process_topology.dims: 2 stages of two chunks"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(name: str, expected: str, outcomes: dict[str, Any]) -> None:
    error = outcomes[name]["error"]
    assert error is not None and expected in error and "\n" not in error
