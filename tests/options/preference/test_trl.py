"""Six steps of each loss of preferences equal trl's: losses and every weight, by the real launcher."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.environments import TRL
from data.chat.prompts import Prompts
from data.settings import Wanted
from data.tokenized.loading import load_dataset
from models.conversion.to_huggingface import pp_to_hg
from options.preference.losses import LOSSES, PairLoss
from options.preference.mismatch import Mismatched
from tests.closeness import assert_near
from tests.environments import environment
from tests.launching import deepspeed, metrics, topology, write_config
from tests.models.test_scores import save_scoring

pytestmark = [pytest.mark.launched, pytest.mark.longest]

STEPS, LR = 6, 1e-3
MEASURES = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
# Nothing stands behind an answer but its end, as trl trains all that follows the prompt.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}"
    "{% if message.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, and theirs
    "dpo": ({"loss": "dpo"}, {"trainer": "DPO", "loss_type": ["sigmoid"]}),
    "dpo, normalised": (
        {"loss": "dpo", "length_normalised": True},
        {"trainer": "DPO", "loss_type": ["sigmoid_norm"]},
    ),
    "dpo and sft": (
        {"loss": "dpo", "sft_weight": 0.5},
        {"trainer": "DPO", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ({"loss": "ipo"}, {"trainer": "DPO", "loss_type": ["ipo"]}),
    "simpo": (
        {"loss": "simpo", "gamma": 0.6},
        {"trainer": "CPO", "loss_type": "simpo", "simpo_gamma": 0.6, "cpo_alpha": 0.0},
    ),
}
MARKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kto": (
        {"loss": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.8},
        {"trainer": "KTO", "loss_type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.8},
    ),
    "apo": ({"loss": "apo_zero_unpaired"}, {"trainer": "KTO", "loss_type": "apo_zero_unpaired"}),
}
CASES |= MARKED
CASES["reward"] = {"loss": "reward", "center_weight": 0.02}, {"trainer": "Reward", "center_rewards_coefficient": 0.02}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "1x1": {"model_topo": topology((1, 1))},
    "2x1": {"model_topo": topology((2, 1))},
    "2x2": {"model_topo": topology((2, 2))},
    "sequence": {"model_topo": topology((1, 2)) | {"sequence": 2}},
    "dualpipev": {"model_topo": topology((2, 1)), "schedule": "dualpipev"},
    "unpacked": {"model_topo": topology((2, 1)), "packing": False},
}
WAYS = (
    [(name, "2x1") for name in CASES]
    + [("kto", "2x2"), ("kto", "sequence")]
    + [("dpo and sft", topology) for topology in TOPOLOGIES if topology != "2x1"]
)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("trl"), *TRL)


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_checkpoint("llama", tie_word_embeddings=False) for name in CASES if name != "reward"}
    made["reward"] = save_scoring(tmp_path_factory.mktemp("scoring"), "llama", 1)
    for folder in made.values():
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def beta(name: str) -> dict[str, float]:
    return {} if name == "reward" else {"beta": 2.0 if name == "simpo" else 0.3}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "pairs.json"
    made = [
        {
            "prompt": [{"role": "user", "content": f"How many stages has run {number}?"}],
            "chosen": [{"role": "assistant", "content": f"It has {number}." + " Each has layers." * (number % 3)}],
            "rejected": [{"role": "assistant", "content": "No idea" + ", sorry" * (number % 4)}],
        }
        for number in range(8)
    ]
    path.write_text(json.dumps(made))
    return path


@pytest.fixture(scope="module")
def marked(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Ours, and theirs in an order in which the answer before a record's is the one that we pair its prompt with."""
    folder = tmp_path_factory.mktemp("marked")
    ours, theirs = folder / "ours.json", folder / "theirs.json"
    made = [
        {
            "prompt": [{"role": "user", "content": f"How many stages has run {number}?"}],
            "completion": [{"role": "assistant", "content": f"It has {number}." * (1 + number % 3)}],
            "label": number % 3 > 0,
        }
        for number in range(8)
    ]
    ours.write_text(json.dumps(made))
    inputs = str(ours), models["kto"], 256, Prompts("chat_template")
    samples = load_dataset(*inputs, preference=Wanted("marked"), cache_dir=folder)
    partners, order = Mismatched(samples, 256).partners.tolist(), [0]
    while (after := partners[order[-1]]) != 0:
        order.append(after)
    assert len(order) == len(made)
    theirs.write_text(json.dumps([made[number] for number in reversed(order)]))
    return ours, theirs


@pytest.fixture(scope="module")
def theirs(
    python: Path,
    models: dict[str, Path],
    records: Path,
    marked: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """What trl makes of a case, once for all topologies."""
    made: dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}

    def get(name: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("theirs")
            settings = CASES[name][1] | beta(name) | {"learning_rate": LR, "max_steps": STEPS}
            run_trl(python, models[name], marked[1] if name in MARKED else records, folder, settings)
            log = json.loads((folder / "log.json").read_text())
            made[name] = log, load_file(folder / "weights.safetensors")
        return made[name]

    return get


def run_trl(python: Path, model: Path, records: Path, folder: Path, settings: dict[str, Any]) -> None:
    script = Path(__file__).with_name("by_trl.py")
    words = [str(each) for each in (python, script, model, records, folder, json.dumps(settings))]
    found = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(("name", "where"), WAYS)
def test_losses_and_weights_equal_trl(
    name: str,
    where: str,
    theirs: Callable[..., Any],
    models: dict[str, Path],
    records: Path,
    marked: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    keys = TOPOLOGIES[where]
    section = CASES[name][0] | beta(name)
    path = write_config(
        tmp_path / "run.yml",
        model_path=str(models[name]),
        data_path=str(marked[0] if name in MARKED else records),
        save_path=str(tmp_path / "run"),
        preference=section,
        train_batch_size=8,
        n_epoches=STEPS,
        gradient_clipping=0,
        scheduler=None,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.99], "eps": 1e-6}},
        **keys,
    )
    processes = keys["model_topo"]["process_topology"]["dims"]
    result = deepspeed(processes[0] * processes[1], "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout + result.stderr
    log, weights = theirs(name)
    own = metrics(tmp_path / "run")
    assert [line["loss"] for line in own] == pytest.approx([line["loss"] for line in log], rel=2e-5, abs=2e-6)
    for measure in MEASURES if name in MARKED else ():
        expected = pytest.approx([line[measure] for line in log], rel=1e-4, abs=1e-4)
        assert [line[measure] for line in own] == expected, measure
    assert name != "kto" or max(line["kl"] for line in own) > 0.01
    pp_to_hg(tmp_path / "run", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        assert_near(found[key], weight, name=key)


def test_the_odds_ratio_equals_trl(python: Path, models: dict[str, Path], records: Path, tmp_path: Path) -> None:
    """trl's ORPO adds the cross-entropy of prompts, too, so only its own part is compared."""
    scores = [[-0.5, -2.0], [-3.0, -0.1], [-1.0, -1.0]]
    run_trl(python, models["dpo"], records, tmp_path, {"trainer": "odds_ratio", "beta": 0.3, "scores": scores})
    found = LOSSES["orpo"](PairLoss("orpo", 0.3), torch.tensor(scores))
    assert found.tolist() == pytest.approx(json.loads((tmp_path / "losses.json").read_text()), rel=1e-5)
