"""Runs that train adapters, through the real launcher: equal to peft's, resumed to the bit, exported and merged."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.terminal import safe_line
from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.peft_names import PEFT_WEIGHTS
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.errors import CheckpointError
from tests.closeness import assert_near
from tests.launching import (
    deepspeed,
    error_lines,
    metrics,
    supervised,
    topology,
    write_config,
)
from tests.launching import run as command
from tests.models.adapters import save_adapter
from tests.models.checkpoint.test_quantized import to_fp8
from tests.models.helpers import assert_same_bits, random_ids
from tests.training.starts import weights

pytestmark = [pytest.mark.launched, pytest.mark.slow]

LORA: dict[str, Any] = {"r": 2, "alpha": 6}
STEPS, LR = 6, 1e-2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "alibi": ("bloom", {}),
    "fused": ("phi3", {}),
    "caps": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "two-kinds-of-blocks": ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "norms-behind": ("olmo2", {}),
    "norms-of-heads": ("qwen3", {}),
    "joined-gates": ("glm", {}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "transposed-experts": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
}
TEXTS = ["Which file holds the config?", "configs/ds_config_pp.yml", "How many stages?", "As many as dims says."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter-runs")


@pytest.fixture(scope="module")
def base(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("mixtral", num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def start(base: Path) -> Path:
    return save_adapter(read_spec(base).training(Trained(Lora(**LORA))), base)


def config(path: Path, folder: Path, base: Path, start: Path, **keys: Any) -> Path:
    """Texts, so that each step sees the same tokens here and in the reference."""
    records = folder / "records.json"
    records.write_text(json.dumps([{"text": f"{text} {number}"} for number in range(2) for text in TEXTS]))
    defaults: dict[str, Any] = {
        "model_path": str(base),
        "data_path": str(records),
        "train_batch_size": 8,
        "max_steps": STEPS,
        "n_epoches": STEPS,
        "save_interval": 3,
        "keep_last": 9,
        "gradient_clipping": 0,
        "scheduler": None,
        "aux_router_loss": {"weight": 0.0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.99], "eps": 1e-8}},
        "lora": LORA | {"start_from": str(start)},
        "model_topo": topology((2, 1), [2, 3]),
    }
    return write_config(path, **(defaults | keys))


@pytest.fixture(scope="module")
def run(folder: Path, base: Path, start: Path) -> Path:
    path = config(folder / "run.yml", folder, base, start, save_path=str(folder / "run"), export_hf=True)
    result = supervised(2, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path, folder: Path) -> Path:
    pp_to_hg(run, folder / "peft")
    return folder / "peft"


def test_a_run_equals_peft_and_transformers(run: Path, exported: Path, base: Path, start: Path) -> None:
    assert_equals_peft(run, exported, base, start)


@pytest.mark.longest
@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_family_equals_peft_and_transformers(
    name: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, changes = FAMILIES[name]
    base = make_checkpoint(model_type, **changes)
    start = save_adapter(read_spec(base).training(Trained(Lora(**LORA))), base)
    keys: dict[str, Any] = {} if "experts" in str(changes) else {"aux_router_loss": {}}
    path = config(tmp_path / "run.yml", tmp_path, base, start, save_path=str(tmp_path / "run"), **keys)
    result = supervised(2, "train_ds.py", "--config", path)
    assert result.returncode == 0, result.stdout + result.stderr
    pp_to_hg(tmp_path / "run", tmp_path / "peft")
    assert_equals_peft(tmp_path / "run", tmp_path / "peft", base, start)


def assert_equals_peft(run: Path, exported: Path, base: Path, start: Path) -> None:
    """Compare losses, and every weight of the adapter after six steps of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, start, is_trainable=True)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    samples = tokens_of(run)
    losses = []
    for _ in range(STEPS):
        sums, count = torch.zeros(()), 0
        for ids in samples:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            sums = sums + F.cross_entropy(logits, ids[1:], reduction="sum")
            count += len(ids) - 1
        loss = sums / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in metrics(run)] == pytest.approx(losses, rel=1e-5)
    found = load_file(exported / PEFT_WEIGHTS)
    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    theirs = {name.replace(".default", ""): weight for name, weight in trained.items()}
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_near(found[name], tensor, torch.float32, name=name)


def tokens_of(run: Path) -> list[Tensor]:
    """The samples of a run, all of whose tokens are trained but the first."""
    tokenizer = AutoTokenizer.from_pretrained(run / f"step-{STEPS:06d}")
    records = json.loads((run.parent / "records.json").read_text())
    return [torch.tensor([*tokenizer(record["text"])["input_ids"], tokenizer.eos_token_id]) for record in records]


def test_a_run_exports_its_adapter(run: Path, exported: Path) -> None:
    """As `pp_to_hg` does, with a card that says what it is."""
    expected, found = (load_file(folder / PEFT_WEIGHTS) for folder in (exported, run / "hf"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    card = (run / "hf" / "README.md").read_text(encoding="utf-8")
    assert "library_name: peft" in card and "A LoRA adapter of the base model" in card


@pytest.mark.parametrize("options", [ExportOptions(dtype=torch.bfloat16), ExportOptions(verify=True)])
def test_options_of_a_whole_model_are_refused_for_an_adapter(options: ExportOptions, run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no effect on an adapter; expected them with --merge"):
        pp_to_hg(run, tmp_path / "export", options=options)
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_holds_the_adapter_alone(run: Path, base: Path) -> None:
    files = sum(path.stat().st_size for path in (run / f"step-{STEPS:06d}").glob("*.pt"))
    weights = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert files < weights / 2


def test_an_export_answers_as_the_run_does(run: Path, exported: Path, base: Path, folder: Path) -> None:
    ids = random_ids(2, 20)
    expected = load_model(run)(ids)
    served = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), exported
    )
    torch.testing.assert_close(served(ids).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(load_model(base, adapter=exported)(ids), expected)
    pp_to_hg(run, folder / "merged", options=ExportOptions(merge=True))
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", attn_implementation="eager")
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    whole = served.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, whole[name], atol=1e-6, rtol=1e-6)


def test_demo_answers_with_an_adapter(run: Path, exported: Path, base: Path) -> None:
    """Of a run, and of a base with what was exported in two stages: the answer that transformers and peft give."""
    words = ("--prompt", "Which file", "--raw", "--greedy", "--max-new-tokens", "12")
    answers = [
        command(sys.executable, "demo.py", "--model", run, *words),
        deepspeed(2, "demo.py", "--model", base, "--adapter", exported, *words),
    ]
    assert all(answer.returncode == 0 for answer in answers), answers
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    ids = tokenizer(words[1], return_tensors="pt")["input_ids"]
    ended = PeftModel.from_pretrained(model, exported).generate(
        input_ids=ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    expected = tokenizer.decode(ended[0, ids.shape[1] :], skip_special_tokens=True).strip("\ufffd")  # half a letter
    assert expected
    for answer in answers:
        assert safe_line(expected) in answer.stdout


def test_a_base_in_fp8_trains_as_what_it_stands_for(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """To the bit, on other stages: the base without `lora.base` is read as bf16."""
    base = make_checkpoint("qwen3")
    to_fp8(base)
    start = save_adapter(read_spec(base).training(Trained(Lora(**LORA))), base)
    keys: dict[str, Any] = {"bf16": {"enabled": True}, "aux_router_loss": {}}
    held = {"lora": LORA | {"start_from": str(start), "base": "fp8"}, "save_path": str(tmp_path / "held")}
    runs = (2, {"save_path": str(tmp_path / "wide")}), (1, held | {"model_topo": topology((1, 1), [5])})
    for processes, run in runs:
        result = supervised(
            processes, "train_ds.py", "--config", config(tmp_path / "run.yml", tmp_path, base, start, **keys, **run)
        )
        assert result.returncode == 0, result.stdout + result.stderr
    for name in ("wide", "held"):
        pp_to_hg(tmp_path / name, tmp_path / f"{name}-peft")
    wide, packed = (load_file(tmp_path / f"{name}-peft" / PEFT_WEIGHTS) for name in ("wide", "held"))
    assert_same_bits(packed, wide)


def test_an_adapter_resumed_on_other_stages_is_the_same(run: Path, folder: Path, base: Path, start: Path) -> None:
    resumed = folder / "resumed"
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / f"step-{STEPS:06d}")
    keys = {"save_path": str(resumed), "model_topo": topology((1, 1), [5]), "resume": str(resumed / "step-000003")}
    assert_equals_straight(config(folder / "resumed.yml", folder, base, start, **keys), run, processes=1)


def assert_equals_straight(path: Path, run: Path, processes: int = 2) -> None:
    """Run to the end, and compare losses and every weight with the run that nobody disturbed."""
    result = supervised(processes, "train_ds.py", "--config", path)
    assert result.returncode == 0 and "resumed: " in result.stdout, result.stdout + result.stderr
    found, expected = (metrics(each) for each in (path.with_suffix(""), run))
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    assert_same_bits(weights(path.with_suffix(""), STEPS), weights(run, STEPS))


def test_another_base_is_refused(run: Path, folder: Path, base: Path, start: Path) -> None:
    other = folder / "other-base"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, other / "model.safetensors")
    path = config(folder / "other.yml", folder, other, start, save_path=str(run), max_steps=STEPS + 2)
    result = supervised(2, "train_ds.py", "--config", path)
    assert result.returncode == 2
    (line,) = error_lines(result)
    assert "model_path" in line and "not the weights" in line and str(base.name) in line
