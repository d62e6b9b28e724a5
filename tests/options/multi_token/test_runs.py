"""Whole runs with layers ahead: every topology learns the same, as transformers' layers would, and the model no less.

The jobs run one after the other in the same processes (tests/workers/jobs.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from models.api import load_model
from models.checkpoint.layout import layer_file
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.errors import CheckpointError
from options import RunConfig
from options.demo.drafts import Drafter
from options.demo.generation import Request, generate_many
from tests.closeness import assert_near
from tests.conftest import write_records
from tests.launching import metrics, topology
from tests.matrix import RUNS
from tests.options.multi_token.folders import add_layers_ahead
from tests.ranks import Ranks, job
from tests.training.starts import STEPS, TAKEN_UP, TAKEN_UP_AT, losses, steps, weights
from training.batches import build_loader
from training.checkpoint.folder import step_folder
from training.data_setup import RecordReader

pytestmark = [pytest.mark.launched, pytest.mark.slow]

WEIGHT, DEPTH, LR, EPS = 0.3, 2, 1e-3, 1e-6
MTP = {"weight": WEIGHT, "depth": DEPTH, "init": "copy"}
PIPE = {"model_topo": topology((2, 1))}
# With layers ahead `parts: auto` splits the model elsewhere, which sums the gradient's norm in another order.
SPLIT = {"model_topo": topology((2, 1)) | {"parts": [3, 2]}}
# Beside those of the matrix: processes, kind and keys.
TOPOLOGIES: dict[str, tuple[int, str, dict[str, Any]]] = RUNS | {
    "recomputed": (2, "pipeline", PIPE | {"use_grad_ckpt": True}),
    "streaming": (2, "pipeline", {"model_topo": topology((1, 2)), "schedule": "weight_streaming"}),
    "grid": (4, "pipeline", {"model_topo": topology((2, 2))}),
}
LATER: dict[str, Any] = dict.fromkeys(
    ("replicas", "recomputed", "dualpipev", "zero3", "grid", "elsewhere", "bf16"), pytest.mark.longest
)
OTHERS: dict[str, dict[str, Any]] = {
    "again": PIPE | {"train_micro_batch_size_per_gpu": 2, "resume": "stages"},
    "elsewhere": {"model_topo": topology((1, 2)), "resume": "stages"},
    "clipped": SPLIT | {"gradient_clipping": 0.5},
    "without": SPLIT | {"gradient_clipping": 0.5, "mtp": None},
    "only": PIPE | {"mtp": MTP | {"only": True}},
    "tied": PIPE | {"mtp": MTP | {"detach": False}, "model": "tied"},
    "untied-learning": PIPE | {"mtp": MTP | {"detach": False}},
    "stored": PIPE | {"mtp": {"weight": WEIGHT}, "model": "glm", "gradient_clipping": 1.0},
    "stored-again": PIPE | {"mtp": {"weight": WEIGHT}, "model": "glm", "gradient_clipping": 1.0, "resume": "stored"},
    "lora": PIPE | {"mtp": {"weight": WEIGHT}, "model": "glm", "lora": {"r": 2, "alpha": 8}},
    "lora-again": PIPE | {"mtp": {"weight": WEIGHT}, "model": "glm", "lora": {"r": 2, "alpha": 8}, "resume": "lora"},
    "stale": PIPE | {"mtp": None, "model": "glm"},
    "bf16": PIPE | {"bf16": {"enabled": True}},
}
ONE = {
    "tied-alone": {"model_topo": topology((1, 1)), "mtp": MTP | {"detach": False}, "model": "tied"},
    "stored-alone": {"model_topo": topology((1, 1)), "mtp": {"weight": WEIGHT}, "model": "glm"},
}
UNDER_TEST = [pytest.param(name, marks=LATER.get(name, ())) for name in TOPOLOGIES if name != "alone"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multi-token-runs")
    write_records(folder / "records.json", 24)
    return folder


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    made = {
        "llama": make_checkpoint("llama", tie_word_embeddings=False),
        "tied": make_checkpoint("llama", tie_word_embeddings=True),
        "glm": make_checkpoint("glm4_moe", tie_word_embeddings=False, topk_group=1, first_k_dense_replace=1, **experts),
    }
    add_layers_ahead(made["glm"], 1)
    return made


def describe(name: str, kind: str, keys: dict[str, Any], models: dict[str, Path], folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = TAKEN_UP | {
        "model_path": str(models[keys.get("model", "llama")]),
        "mtp": MTP,
        "prompt_format": "plain",
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0}},
    }
    own |= {key: value for key, value in keys.items() if key != "model"}
    if "resume" in keys:
        own["resume"] = str(step_folder(folder / keys["resume"], TAKEN_UP_AT))
    return job(folder, name, kind, **own)


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, models: dict[str, Path], asked: set[str]) -> dict[str, dict[str, Any]]:
    for processes in (1, 2, 4):
        cases = [
            describe(name, kind, keys, models, folder)
            for name, (size, kind, keys) in TOPOLOGIES.items()
            if size == processes and (name in asked or name not in LATER)
        ]
        more = {1: ONE, 2: OTHERS}.get(processes, {})
        cases += [
            describe(name, "pipeline", keys, models, folder)
            for name, keys in more.items()
            if name in asked or name not in LATER
        ]
        if cases:
            ranks.run(processes, "jobs", cases, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "records"}


class ReferenceLayer(nn.Module):
    """A layer ahead of transformers' parts, as `init: copy` makes it of a model."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        config = trunk.config
        self.decoder = LlamaDecoderLayer(config, config.num_hidden_layers - 1)
        self.decoder.load_state_dict(trunk.model.layers[-1].state_dict())
        self.embedding_norm, self.hidden_norm, self.norm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.norm.load_state_dict(trunk.model.norm.state_dict())
        self.joined = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        identity = torch.eye(config.hidden_size)
        self.joined.weight.data = torch.cat([identity, config.hidden_size**0.5 * identity], dim=1)


class Reference(nn.Module):
    """transformers' model, with layers ahead of transformers' decoder layers, one document at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.trunk: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.layers = nn.ModuleList(ReferenceLayer(self.trunk) for _ in range(DEPTH))

    def sums(self, ids: Tensor, labels: Tensor) -> list[tuple[Tensor, int]]:
        """Sum the cross-entropy of the model and of each layer ahead; with how many targets each has."""
        model = self.trunk.model
        hidden = model(input_ids=ids[None], use_cache=False).last_hidden_state
        found = [_sum(self.trunk.lm_head(hidden), labels[1:])]
        hidden, head = hidden.detach(), self.trunk.lm_head.weight.detach()
        for k, layer in enumerate(self.layers, start=1):
            assert isinstance(layer, ReferenceLayer)
            if len(ids) - k < 1:
                break
            hidden = hidden[:, : len(ids) - k]
            words = model.embed_tokens(ids[None, k:]).detach()
            inputs = layer.joined(torch.cat([layer.embedding_norm(words), layer.hidden_norm(hidden)], dim=-1))
            positions = torch.arange(len(ids) - k)[None]
            mask = torch.full((len(ids) - k,) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
            angles = model.rotary_emb(inputs, positions)
            output = layer.decoder(inputs, attention_mask=mask, position_embeddings=angles, position_ids=positions)
            hidden = layer.norm(output[0] if isinstance(output, tuple) else output)
            found.append(_sum(F.linear(hidden, head), labels[k + 1 :]))
        return found


def _sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    logits = logits[0, : len(targets)]
    return F.cross_entropy(logits, targets, reduction="sum"), int((targets >= 0).sum())


def test_six_steps_are_those_of_transformers_layers(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    described = describe("alone", "", TOPOLOGIES["alone"][2], models, folder)
    config = RunConfig.model_validate(described["config"])
    data = RecordReader(config, models["llama"], Console(quiet=True)).read_sets()[0]
    loader, reference = build_loader(data, config), Reference(models["llama"])
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    noted = steps(folder / "alone")
    for step in range(1, STEPS + 1):
        totals, counts = [torch.zeros(())] * (1 + DEPTH), [0] * (1 + DEPTH)
        for number in loader.batch(step - 1).samples:
            sample = data.samples[number]
            ids, labels = (torch.tensor(numpy.asarray(sample[name], numpy.int64)) for name in ("input_ids", "labels"))
            for place, (total, count) in enumerate(reference.sums(ids, labels)):
                totals[place] = totals[place] + total
                counts[place] += count
        own, *ahead = (total / count for total, count in zip(totals, counts, strict=True))
        drafted = torch.stack(ahead).mean()
        optimizer.zero_grad()
        (own + WEIGHT * drafted).backward()
        optimizer.step()
        assert noted[step]["loss"] == pytest.approx(float(own.detach()), rel=1e-5), step
        assert noted[step]["mtp_loss"] == pytest.approx(float(drafted.detach()), rel=1e-5), step

    found = weights(folder / "alone")
    for k, layer in enumerate(reference.layers):
        for name, weight in layer.named_parameters():
            here = name.replace("decoder.", "decoder.block.")
            assert_near(found[f"4.ahead.{k}.{here}"], weight, name=f"{k}.{name}")
    assert_near(found["4.norm.weight"], reference.trunk.model.norm.weight)
    assert_near(found["2.block.mlp.up_proj.weight"], reference.trunk.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("name", UNDER_TEST)
def test_every_topology_learns_the_same(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes[name]["error"] is None
    found, wanted = steps(folder / name), steps(folder / "alone")
    for step in range(1, STEPS + 1):
        for key in ("loss", "mtp_loss", "mtp_loss_1", "mtp_loss_2"):
            assert found[step][key] == pytest.approx(wanted[step][key], rel=1e-4), (step, key)
    assert wanted[STEPS]["mtp_loss"] < wanted[1]["mtp_loss"]
    assert_near(weights(folder / name), weights(folder / "alone"))

    lines = {line["step"]: line for line in metrics(folder / name) if "eval_loss" in line}
    for step, line in lines.items():
        other = next(each for each in metrics(folder / "alone") if each["step"] == step and "eval_loss" in each)
        for key in ("eval_loss", "eval_mtp_loss"):
            assert line[key] == pytest.approx(other[key], rel=1e-4)
        assert {f"eval_draft_{k}_{what}" for k in (1, 2) for what in ("right", "agrees")} <= line.keys()
        assert line["eval_draft_1_right"] == pytest.approx(other["eval_draft_1_right"], abs=0.02)


def test_the_model_learns_to_the_bit_what_it_learns_without(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["clipped"]["error"] is None and outcomes["without"]["error"] is None
    found, wanted = weights(folder / "clipped"), weights(folder / "without")
    own = {name: tensor for name, tensor in found.items() if ".ahead." not in name}
    torch.testing.assert_close(own, wanted, rtol=0, atol=0)
    for key in ("loss", "grad_norm"):
        assert [each[key] for each in steps(folder / "clipped").values()] == [
            each[key] for each in steps(folder / "without").values()
        ]


def test_only_the_layers_ahead_learn_where_they_are_trained_alone(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["only"]["error"] is None
    first, last = weights(folder / "only", TAKEN_UP_AT), weights(folder / "only")
    changed = {name for name, tensor in last.items() if not torch.equal(tensor, first[name])}
    assert changed and all(".ahead." in name for name in changed)
    noted = steps(folder / "only")
    assert noted[1]["mtp_loss"] == pytest.approx(steps(folder / "alone")[1]["mtp_loss"], rel=1e-5)
    assert noted[STEPS]["mtp_loss"] < noted[1]["mtp_loss"]


def test_a_resumed_run_goes_on_to_the_bit(outcomes: dict[str, Any], folder: Path) -> None:
    for name, run in (("again", "stages"), ("stored-again", "stored")):
        assert outcomes[name]["error"] is None, name
        assert losses(folder / name) == losses(folder / run)
        torch.testing.assert_close(weights(folder / name), weights(folder / run), rtol=0, atol=0)


@pytest.mark.parametrize("name", [pytest.param("elsewhere", marks=LATER["elsewhere"])])
def test_a_run_goes_on_in_another_topology(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes[name]["error"] is None
    assert_near(weights(folder / name), weights(folder / "stages"))


def test_everything_learns_together_where_it_is_not_left_alone(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["tied"]["error"] is None
    assert_near(weights(folder / "tied"), weights(folder / "tied-alone"))
    error = outcomes["untied-learning"]["error"]
    assert error.startswith("mtp.detach: false, but the embedding is on the first stage") and "\n" not in error


@pytest.mark.parametrize("name", [pytest.param("bf16", marks=LATER["bf16"])])
def test_bf16_learns_about_the_same(name: str, outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes[name]["error"] is None
    rounded, exact = (steps(folder / each)[STEPS] for each in (name, "alone"))
    assert rounded["mtp_loss"] == pytest.approx(exact["mtp_loss"], rel=0.02)


def test_an_export_has_the_layers_under_their_own_names(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    assert outcomes["stored"]["error"] is None and outcomes["stored-alone"]["error"] is None
    pp_to_hg(folder / "stored", folder / "exported")
    found, given = load_file(folder / "exported" / "model.safetensors"), load_file(models["glm"] / "model.safetensors")
    assert found.keys() == given.keys()
    assert all(found[name].shape == tensor.shape for name, tensor in given.items())
    # What is shared is so in the export, too.
    assert torch.equal(found["model.layers.3.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["model.layers.3.shared_head.head.weight"], found["lm_head.weight"])
    state = torch.load(step_folder(folder / "stored", STEPS) / layer_file(4), weights_only=True)
    assert torch.equal(found["model.layers.3.eh_proj.weight"], state["ahead.0.joined.weight"])
    assert not torch.equal(found["model.layers.3.eh_proj.weight"], given["model.layers.3.eh_proj.weight"])


def test_a_run_without_them_says_that_they_stay_as_they_are(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    assert "layers ahead: 2, new ones, copies of the last block; weight 0.3 (mtp)" in outcomes["alone"]["printed"]
    line = "layers ahead: 1, exported as they are, so servers would draft with stale ones; mtp trains them"
    assert outcomes["stale"]["error"] is None and outcomes["stale"]["printed"].count(line) == 1
    assert "layers ahead" not in outcomes["without"]["printed"]

    pp_to_hg(folder / "stale", folder / "stale-exported")
    found, given = (load_file(each / "model.safetensors") for each in (folder / "stale-exported", models["glm"]))
    assert found.keys() == given.keys()
    assert torch.equal(found["model.layers.3.eh_proj.weight"], given["model.layers.3.eh_proj.weight"])
    # Copies are those of the trained model all the same.
    assert torch.equal(found["model.layers.3.shared_head.head.weight"], found["lm_head.weight"])
    assert not torch.equal(found["lm_head.weight"], given["lm_head.weight"])


def test_adapters_of_the_layers_ahead_are_merged_with_the_others(
    outcomes: dict[str, Any], folder: Path, models: dict[str, Path]
) -> None:
    for name in ("lora", "lora-again"):
        assert outcomes[name]["error"] is None, name
    assert losses(folder / "lora-again") == losses(folder / "lora")
    noted, name = steps(folder / "lora"), "model.layers.3.self_attn.o_proj.weight"
    assert noted[1]["mtp_loss"] == pytest.approx(steps(folder / "stored")[1]["mtp_loss"], rel=1e-5)
    assert noted[STEPS]["mtp_loss"] < noted[1]["mtp_loss"]
    with pytest.raises(CheckpointError, match="peft has no names for layers that predict ahead; expected --merge"):
        pp_to_hg(folder / "lora", folder / "peft")

    pp_to_hg(folder / "lora", folder / "merged", options=ExportOptions(merge=True))
    found, given = (load_file(each / "model.safetensors") for each in (folder / "merged", models["glm"]))
    state = torch.load(step_folder(folder / "lora", STEPS) / layer_file(4), weights_only=True)
    a, b = (state[f"ahead.0.decoder.block.self_attn.o_proj.lora_{factor}"] for factor in "AB")
    assert found.keys() == given.keys()
    assert_near(found[name], given[name] + 4 * b @ a)
    assert torch.equal(found["model.layers.3.enorm.weight"], given["model.layers.3.enorm.weight"])


def test_new_layers_are_exported_and_trained_on(outcomes: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    pp_to_hg(folder / "stages", folder / "new")
    config = json.loads((folder / "new" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTH
    found = load_file(folder / "new" / "model.safetensors")
    assert {f"model.layers.{number}.shared_head.norm.weight" for number in (3, 4)} <= found.keys()
    AutoModelForCausalLM.from_pretrained(folder / "new")

    models = {"llama": folder / "new"}
    case = describe("further", "pipeline", PIPE | {"mtp": {"weight": WEIGHT}}, models, folder)
    ranks.run(2, "jobs", [case], folder)
    assert json.loads((folder / "further.json").read_text())["error"] is None
    before, after = steps(folder / "stages")[STEPS], steps(folder / "further")[1]
    assert after["mtp_loss"] < before["mtp_loss"] + 0.5


def test_a_run_drafts_for_itself(outcomes: dict[str, Any], folder: Path) -> None:
    assert outcomes["stages"]["error"] is None
    drafter, plain = Drafter(load_model(folder / "stages", ahead=True)), load_model(folder / "stages")
    requests = [Request([1, 2, 3], 12, set()), Request([1, 2, 3], 12, set())]
    drafted = [token for _, token in drafter.generate(requests[:1])]
    assert drafted == [token for _, token in generate_many(plain, requests[1:])]
    assert drafter.tally.tokens == 11
