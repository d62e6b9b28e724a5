"""Whole runs on records with images: what transformers learns from them, in one process and in several.

The jobs run one after the other in the same processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from data.settings import Pixels
from models.adapters import is_factor
from models.api import read_spec
from models.checkpoint.source import HuggingFaceSource
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.images import seeing
from options.demo.chat import ChatSession
from options.demo.chat_model import AnswerOptions, ChatModel
from options.demo.generation import GREEDY
from tests.conftest import SHARED
from tests.launching import topology
from tests.models.images.conftest import golden_of
from tests.models.images.test_seeing import written
from tests.options.images.test_peft_adapters import adapter_of
from tests.ranks import Ranks, job
from tests.training.starts import STEPS, TAKEN_UP_AT, steps
from training.checkpoint.folder import step_folder

VISION = SHARED / "golden" / "vision"
pytestmark = [
    pytest.mark.launched,
    pytest.mark.slow,
    pytest.mark.skipif(not VISION.is_dir(), reason="shared/golden/vision is not here"),
]

MODELS = "llava qwen2_5_vl qwen3_vl qwen3_5 gemma3 mistral3".split()
RECURRENT = ("qwen3_5",)  # whose states enlarge rounding
LR, EPS = 1e-3, 1e-6
ALL: dict[str, Any] = {"vision": {"train": "all"}}
# Records of text alone, and a decay that an unused tower would feel.
TEXT: dict[str, Any] = {"data_path": "words.json"}
TEXT["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.1}}
ON_HOST: dict[str, Any] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
# Name: the model, processes, kind and keys.
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    **{name: (name, 2, "pipeline", {"dims": (2, 1), **ALL}) for name in MODELS},
    "alone": ("llava", 1, "pipeline", ALL),
    "recomputed": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "use_grad_ckpt": True, **ALL}),
    "unpacked": ("gemma3", 2, "pipeline", {"dims": (2, 1), "packing": False, **ALL}),
    "two-rows": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "train_micro_batch_size_per_gpu": 2, **ALL}),
    "replicas": ("qwen3_vl", 2, "pipeline", {"dims": (1, 2), **ALL}),
    "model-axis": ("mistral3", 2, "pipeline", {"dims": (1, 1, 2), **ALL}),
    "zero": ("gemma3", 2, "zero", {"dims": (1, 2), "zero_optimization": {"stage": 1}, **ALL}),
    "zero-3": ("mistral3", 2, "zero", {"dims": (1, 2), "zero_optimization": {"stage": 3}, **ALL}),
    "zero-3-recomputed": (
        "qwen2_5_vl",
        2,
        "zero",
        {"dims": (1, 2), "zero_optimization": {"stage": 3}, "use_grad_ckpt": True, **ALL},
    ),
    "v-schedule": ("gemma3", 2, "pipeline", {"dims": (2, 1), "schedule": "dualpipev", **ALL}),
    "planned": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "use_grad_ckpt": "auto", "rebalance": True, **ALL}),
    "offloaded": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "offload_activations": True, **ALL}),
    "grid": ("qwen3_5", 4, "pipeline", {"dims": (2, 2), **ALL}),
    "frozen": ("llava", 2, "pipeline", {"dims": (2, 1)}),
    "projector": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "vision": {"train": "projector"}}),
    "with-lora": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "lora": {"r": 4, "alpha": 8}}),
    "tower-beside": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "model_path": "beside", **ALL}),
    "text": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), **TEXT}),
    "text-tower-inside": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "model_path": "inside", **TEXT}),
    "lora-of-tower": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "lora": {"r": 4, "alpha": 8}, **ALL}),
    "lora-of-tower-shared": ("mistral3", 2, "pipeline", {"dims": (1, 1, 2), "lora": {"r": 4, "alpha": 8}, **ALL}),
    "base-in-4-bits": (
        "mistral3",
        2,
        "pipeline",
        {"dims": (2, 1), "lora": {"r": 4, "alpha": 8, "base": "nf4"}, "use_grad_ckpt": True, **ALL},
    ),
    "from-peft": (
        "llava",
        2,
        "pipeline",
        {"dims": (2, 1), "lora": {"r": 2, "alpha": 6, "targets": ["q_proj", "v_proj"], "start_from": "peft"}, **ALL},
    ),
    "lora-of-tower-resumed": (
        "qwen2_5_vl",
        2,
        "pipeline",
        {"dims": (2, 1), "lora": {"r": 4, "alpha": 8}, "resume": "lora-of-tower", **ALL},
    ),
    "compiled": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "compile": True, **ALL}),
    "states-on-host": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "zero_optimization": ON_HOST, **ALL}),
    "rows-of-all": ("gemma3", 2, "pipeline", {"dims": (2, 1), "packing": "dataset", "train_batch_size": 2, **ALL}),
    "scratch": ("qwen2_5_vl", 2, "pipeline", {"dims": (2, 1), "from_scratch": True, **ALL}),
    "resumed": ("qwen3_vl", 2, "pipeline", {"dims": (2, 1), "resume": "qwen3_vl", **ALL}),
}
ALONE = ("compiled", "states-on-host", "rows-of-all", "scratch")
CASES |= {f"{name}-resumed": (*CASES[name][:3], CASES[name][3] | {"resume": name}) for name in ALONE}
OFTEN = "llava qwen3_vl gemma3 frozen with-lora resumed tower-beside zero".split()
LATER = {name: pytest.mark.longest for name in CASES if name not in OFTEN}
SEEING = [name for name in CASES if not name.startswith(("text", "from-peft", "base-in-4-bits", "scratch"))]
EXACT = [name for name in SEEING if name not in ("frozen", "projector") and "lora" not in name]


def cases(*names: str) -> list[Any]:
    return [pytest.param(name, marks=LATER.get(name, ())) for name in names]


def describe(folder: Path, name: str) -> dict[str, Any]:
    model, _, kind, keys = CASES[name]
    own: dict[str, Any] = {
        "model_path": str(VISION / f"{model}-tiny"),
        "data_path": str(VISION / f"{model}-tiny" / "records.json"),
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "max_steps": STEPS,
        "save_interval": TAKEN_UP_AT,
        "pack_len": 180,  # several samples in a row
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0}},
        **keys,
    }
    own["model_topo"] = topology(own.pop("dims", (1, 1)))
    for key in ("model_path", "data_path"):
        own[key] = str(folder / own[key])  # of a golden folder as it is
    if "start_from" in own.get("lora", {}):
        own["lora"] = own["lora"] | {"start_from": str(folder / own["lora"]["start_from"])}
    if "resume" in own:
        own["resume"] = str(step_folder(folder / own["resume"], TAKEN_UP_AT))
    return job(folder, name, kind, **own)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> Path:
    """Run the cases that are asked for."""
    folder = tmp_path_factory.mktemp("images")
    original = VISION / "qwen3_vl-tiny"
    hg_to_pp(original, folder / "beside")
    written(HuggingFaceSource(original, seeing(read_spec(original))), folder / "inside")
    text = json.loads((original / "records.json").read_text(encoding="utf-8"))[2:3]
    (folder / "words.json").write_text(json.dumps(4 * text), encoding="utf-8")
    if "from-peft" in asked:
        adapter_of(golden_of(SHARED, "llava-tiny"), folder / "peft", target_modules=["q_proj", "v_proj"])
    needed = asked | {name.removesuffix("-tower-inside") for name in asked}  # what one is compared with
    chosen = [name for name in CASES if name in needed or name not in LATER]
    for processes in (1, 2, 4):
        if own := [describe(folder, name) for name in chosen if CASES[name][1] == processes]:
            ranks.run(processes, "jobs", own, folder)
    return folder


def told(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def expected(name: str) -> dict[str, Any]:
    path = VISION / f"{CASES[name][0]}-tiny" / "expected.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", cases(*SEEING))
def test_the_first_loss_is_the_golden_one(name: str, runs: Path) -> None:
    assert told(runs, name)["error"] is None
    if "resumed" not in name:
        first = steps(runs / name)[1]
        assert first["loss"] == pytest.approx(expected(name)["loss"], rel=1e-5)
        if name in EXACT:
            assert first["grad_norm"] == pytest.approx(expected(name)["global_grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", cases(*EXACT))
def test_six_steps_are_those_of_transformers(name: str, runs: Path, tmp_path: Path) -> None:
    model = CASES[name][0]
    wanted, trained = trained_by_transformers(model)
    for step, line in steps(runs / name).items():
        assert line["loss"] == pytest.approx(wanted[step - 1], rel=1e-5), step

    pp_to_hg(step_folder(runs / name, STEPS), tmp_path / "exported")
    found, apart = load_file(tmp_path / "exported" / "model.safetensors"), 1e-3 if model in RECURRENT else 1e-4
    assert found.keys() == trained.keys()
    for each, weight in trained.items():
        assert (found[each] - weight).norm() <= apart * weight.norm() + 1e-7, each


@pytest.mark.parametrize("name", cases("from-peft"))
def test_a_run_goes_on_from_an_adapter_of_pefts_whole_model(name: str, runs: Path, tmp_path: Path) -> None:
    assert told(runs, name)["error"] is None
    pp_to_hg(step_folder(runs / name, STEPS), tmp_path / "adapter")
    folder, losses = VISION / f"{CASES[name][0]}-tiny", []
    for adapter in (runs / "peft", tmp_path / "adapter"):
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
        adapted = PeftModel.from_pretrained(model, adapter).eval()
        with torch.no_grad():
            losses.append(float(mean_loss(adapted, all_inputs(adapted, folder))))
    done = steps(runs / name)
    assert done[1]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] < done[STEPS]["loss"] < losses[0]


@pytest.mark.parametrize("name", cases("base-in-4-bits"))
def test_a_rounded_base_learns_beside_a_tower_that_keeps_its_bits(name: str, runs: Path) -> None:
    assert told(runs, name)["error"] is None
    done = steps(runs / name)
    assert done[1]["loss"] == pytest.approx(expected(name)["loss"], rel=0.05)
    assert done[1]["loss"] != pytest.approx(expected(name)["loss"], rel=1e-5), "as the language model's is rounded"
    assert done[STEPS]["loss"] < done[1]["loss"]
    factors = [each for file in layers(runs / name).values() for each in file if each.startswith("eyes.")]
    assert factors and all(map(is_factor, factors))


@pytest.mark.parametrize("name", cases("frozen", "projector"))
def test_what_is_not_trained_stays_to_the_bit(name: str, runs: Path, tmp_path: Path) -> None:
    pp_to_hg(step_folder(runs / name, STEPS), tmp_path / "exported")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    before = load_file(VISION / f"{CASES[name][0]}-tiny" / "model.safetensors")
    changed = {each for each, weight in found.items() if not torch.equal(weight, before[each])}
    tower = {each for each in before if "vision" in each or "visual" in each or "projector" in each}
    projector = {each for each in tower if "merger" in each} if name == "projector" else set()
    assert changed & tower == projector
    assert changed - tower
    assert steps(runs / name)[STEPS]["loss"] < steps(runs / name)[1]["loss"]


@pytest.mark.parametrize("name", cases("scratch"))
def test_a_tower_from_scratch_learns_and_is_what_transformers_reads(name: str, runs: Path, tmp_path: Path) -> None:
    assert told(runs, name)["error"] is None
    folder = VISION / f"{CASES[name][0]}-tiny"
    pp_to_hg(step_folder(runs / name, TAKEN_UP_AT), tmp_path / "exported")
    read: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        after = float(mean_loss(read, all_inputs(read, folder)))
    done, given = steps(runs / name), load_file(folder / "model.safetensors")
    assert done[TAKEN_UP_AT + 1]["loss"] == pytest.approx(after, rel=1e-5)
    assert done[STEPS]["loss"] < done[1]["loss"]
    found = load_file(tmp_path / "exported" / "model.safetensors")
    towers = [{each for each in state if "visual" in each} for state in (found, given)]
    assert towers[0] == towers[1] and not any(torch.equal(found[each], given[each]) for each in towers[0])


@pytest.mark.parametrize(
    "name",
    cases("resumed", "lora-of-tower-resumed", "tower-beside", "recomputed", *(f"{name}-resumed" for name in ALONE)),
)
def test_runs_that_differ_in_nothing_that_counts_are_the_same_to_the_bit(name: str, runs: Path) -> None:
    model, *_, keys = CASES[name]
    before = layers(runs / keys.get("resume", model))
    assert before
    torch.testing.assert_close(layers(runs / name), before, rtol=0, atol=0)


def layers(run: Path) -> dict[str, Any]:
    """The layer files of the last step."""
    return {path.name: torch.load(path, weights_only=True) for path in step_folder(run, STEPS).glob("layer_*")}


@pytest.mark.parametrize("name", cases("text-tower-inside"))
def test_a_run_on_text_leaves_a_tower_in_its_layers_as_it_is(name: str, runs: Path, tmp_path: Path) -> None:
    exported = []
    for run in ("text", name):
        pp_to_hg(step_folder(runs / run, STEPS), tmp_path / run)
        exported.append(load_file(tmp_path / run / "model.safetensors"))
    before = load_file(VISION / "qwen3_vl-tiny" / "model.safetensors")
    assert exported[0].keys() == exported[1].keys() == before.keys()
    assert all(torch.equal(exported[0][each], exported[1][each]) for each in before)
    assert {each for each in before if torch.equal(exported[1][each], before[each])} == {
        each for each in before if "visual" in each
    }


@pytest.mark.parametrize("name", cases("with-lora", "frozen"))
def test_a_checkpoint_is_asked_about_an_image(name: str, runs: Path, tmp_path: Path) -> None:
    """With the tokens that transformers generates of its export."""
    run, model = runs / name, VISION / f"{CASES[name][0]}-tiny"
    merge = ExportOptions(merge=name == "with-lora")
    pp_to_hg(step_folder(run, STEPS), tmp_path / "exported", options=merge)
    asked = [ChatModel(folder, pixels=Pixels()) for folder in (step_folder(run, STEPS), tmp_path / "exported")]
    answers = []
    for each in asked:
        chat = ChatSession(each, AnswerOptions(12, GREEDY), pytest.fail, pictures=[str(model / "images" / "a.png")])
        answers.append("".join(chat.ask("What?")))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["frozen"])
def test_the_log_says_what_is_seen(name: str, runs: Path) -> None:
    printed = " ".join(told(runs, name)["printed"].split())
    assert "images: in 3 samples of 4, 64 tokens, seen by the model's own tower, which stays as it is" in printed


_trained: dict[str, tuple[list[float], dict[str, Tensor]]] = {}


def trained_by_transformers(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Take six steps of AdamW with transformers' whole model: losses, and weights as it saves them."""
    if name not in _trained:
        folder = VISION / f"{name}-tiny"
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa")
        given = all_inputs(model, folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            mean = mean_loss(model, given)
            mean.backward()
            optimizer.step()
            losses.append(float(mean.detach()))
        _trained[name] = losses, saved(model)
    return _trained[name]


def all_inputs(model: Any, folder: Path) -> list[tuple[dict[str, Any], Tensor]]:
    """What the model gets of each sample, and its labels."""
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    samples = json.loads((folder / "expected.json").read_text(encoding="utf-8"))["samples"]
    stored = load_file(folder / "expected.safetensors")
    return [inputs_of(model, processor, folder, stored, number, each["images"]) for number, each in enumerate(samples)]


def mean_loss(model: Any, given: Sequence[tuple[dict[str, Any], Tensor]]) -> Any:
    """The mean loss of all trained tokens."""
    total = sum(loss_of(model, inputs, labels) for inputs, labels in given)
    return total / sum(int((labels[1:] >= 0).sum()) for _, labels in given)


def inputs_of(
    model: Any, processor: Any, folder: Path, stored: dict[str, Tensor], number: int, paths: Sequence[str]
) -> tuple[dict[str, Any], Tensor]:
    """What the model gets of a sample, and its labels."""
    from PIL import Image

    ids = stored[f"s{number}.input_ids"][None]
    inputs: dict[str, Any] = {"input_ids": ids}
    types = (ids == model.config.image_token_id).int()
    if paths:
        pictures = [Image.open(folder / path).convert("RGB") for path in paths]
        made = processor(images=pictures, return_tensors="pt")
        inputs |= {key: made[key] for key in ("pixel_values", "image_grid_thw", "image_sizes") if key in made}
    if "gemma3" in folder.name:
        inputs["token_type_ids"] = types
    elif paths and "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = types
    if "llava" in folder.name:
        inputs.pop("image_sizes", None)
    return inputs, stored[f"s{number}.labels"]


def loss_of(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    logits = model(**inputs, use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)


def saved(model: Any) -> dict[str, Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
