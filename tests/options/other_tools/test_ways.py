"""The ways of three newcomers, from the file that they bring to a model that others read, with their mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from models import load_model
from options.any_layers import load_trained
from tests.conftest import ROOT
from tests.launching import Launch, metrics

pytestmark = [pytest.mark.longest, pytest.mark.launched]

IDS = torch.arange(4, 36).reshape(2, 16)
TRL = {
    "dataset_name": "pairs.json",
    "output_dir": "run",
    "beta": 0.2,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_length": 128,
    "logging_steps": 1,
    "bf16": False,
}
LLAMA_FACTORY = {
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "dataset": "faq",
    "dataset_dir": ".",
    "template": "qwen3",
    "cutoff_len": 128,
    "output_dir": "run",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": 4,
    "plot_loss": True,
}
SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from options.any_layers import Pipeline


def loss(outputs, labels):
    return F.cross_entropy(outputs, labels, label_smoothing=0.1)


torch.manual_seed(0)
points = torch.randn(64, 2)
layers = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
keys = {"save_path": sys.argv[1], sys.argv[2]: 16, "max_steps": int(sys.argv[3]), "optimizer": {"params": {"lr": 0.01}}}
pipeline = Pipeline(layers, loss=loss, parts=[2, 2], n_epoches=4, save_interval=2, **keys)
pipeline.train(TensorDataset(points, (points[:, 0] > 0).long()))
"""


class Place:
    """A folder in which somebody types commands of a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, content: object) -> None:
        text = yaml.safe_dump(content) if name.endswith(".yaml") else json.dumps(content, ensure_ascii=False)
        (self.folder / name).write_text(text, encoding="utf-8")

    def __call__(self, command: str, code: int = 0) -> str:
        """What a command prints."""
        script, *words = command.split()
        start = ["-m", "options.other_tools"] if script == "init" else [str(ROOT / script)]
        start = [script] if (self.folder / script).is_file() else start
        done = Launch(sys.executable, *start, *words, folder=self.folder).end()
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"{command}\n{printed[-4000:]}"
        assert "Traceback" not in printed
        return printed

    def logits(self, path: str) -> torch.Tensor:
        """Of what is read by this toolkit."""
        with torch.no_grad():
            return load_model(self.folder / path)(IDS).float()


def theirs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_from_trl_by_dpo_to_transformers(place: Place, make_checkpoint: Callable[..., Path]) -> None:
    answers = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No idea."} for n in range(32)]
    place.write("pairs.json", answers)
    place.write("dpo.yaml", TRL | {"model_name_or_path": str(make_checkpoint("qwen3"))})

    refused = place("train_ds.py --config dpo.yaml", 2)
    assert "did you mean preference.beta?" in refused and "pipetune init --from FILE" in refused
    assert "next: python train_ds.py --config run.yml --plan" in place("init dpo.yaml run.yml --gpus 2")
    assert "It is 0." in place("train_ds.py --config run.yml --inspect 1")
    assert "memory: fits" in place("train_ds.py --config run.yml --plan --devices 2xRTX4090")

    printed = place("train_ds.py --config run.yml max_steps=4 eval_share=0.25 eval_interval=2 save_interval=2")
    assert "saved: run/step-000004" in printed and "pp_to_hg" in printed
    steps = [line for line in metrics(place.folder / "run") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4] and steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)

    best = json.loads((place.folder / "run" / "best.json").read_text())["checkpoint"]
    printed = place("convert_model.py pp_to_hg --best --input-path run --save-path hf")
    assert f"checkpoint: {best}, the best by" in printed and "written: hf" in printed
    exported = AutoModelForCausalLM.from_pretrained(place.folder / "hf", dtype=torch.float32)
    torch.testing.assert_close(theirs(exported), place.logits(f"run/{best}"))


def test_from_llama_factory_by_lora_to_peft(place: Place, make_checkpoint: Callable[..., Path]) -> None:
    model = make_checkpoint("qwen3")
    place.write("faq.json", [{"ask": f"{n} 加 1 是多少？", "reply": f"是 {n + 1}。"} for n in range(24)])
    place.write(
        "dataset_info.json", {"faq": {"file_name": "faq.json", "columns": {"prompt": "ask", "response": "reply"}}}
    )
    place.write("lora.yaml", LLAMA_FACTORY | {"model_name_or_path": str(model)})
    text = (place.folder / "faq.json").read_text(encoding="utf-8")
    (place.folder / "faq.json").write_text(text, encoding="gb18030")

    assert "did you mean lora.r?" in place("train_ds.py --config lora.yaml", 2)
    assert "written: run.yml" in place("init lora.yaml run.yml")
    assert "iconv -f GB18030 -t UTF-8" in place("train_ds.py --config run.yml --inspect 2", 2)
    (place.folder / "faq.json").write_text(text, encoding="utf-8")
    assert "是 1。" in place("train_ds.py --config run.yml --inspect 2")
    assert "memory: fits" in place("train_ds.py --config run.yml --plan --devices RTX4090")
    assert "saved: run/step-000004" in place("train_ds.py --config run.yml")

    assert "adapter, for peft" in place("convert_model.py pp_to_hg --input-path run --save-path peft")
    assert "complete" in place("convert_model.py check --input-path peft")
    place("convert_model.py pp_to_hg --input-path run --save-path merged --merge")
    trained = place.logits("run")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert not torch.allclose(theirs(base), trained, atol=1e-4)
    torch.testing.assert_close(theirs(PeftModel.from_pretrained(base, place.folder / "peft")), trained)
    merged = AutoModelForCausalLM.from_pretrained(place.folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(theirs(merged), trained)
    assert "expected merge_and_unload" in place("convert_model.py pp_to_hg --input-path peft --save-path x --merge", 2)


def test_layers_of_ones_own_go_on_and_are_read(place: Place) -> None:
    (place.folder / "own.py").write_text(SCRIPT, encoding="utf-8")
    assert "did you mean train_batch_size?" in place("own.py run train_batch_sise 4", 2)
    place("own.py straight train_batch_size 8")
    place("own.py run train_batch_size 4")
    assert "after step 4" in place("own.py run train_batch_size 8")

    read = []
    for name in ("straight", "run"):
        layers = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
        load_trained(layers, place.folder / name)
        read.append(layers.state_dict())
    torch.testing.assert_close(read[1], read[0], rtol=0, atol=0)
    assert [line["step"] for line in metrics(place.folder / "run") if "loss" in line] == list(range(1, 9))
    assert "load_trained (docs/api.md)" in place("convert_model.py pp_to_hg --input-path run --save-path hf", 2)
