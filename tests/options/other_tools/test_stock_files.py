"""Stock files of five other tools: each becomes a config that works at once, with the values that the tool trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from models import load_model
from options import RunConfig, load_config
from options.other_tools.command import write_config
from options.planner.command import plan_run
from tests.cases import tiered
from tests.options.planner.test_command import arguments
from training.command_line import inspect
from training.optimizer.lr_schedules import lr_ratio

STOCK = sorted((Path(__file__).parent / "stock").iterdir())
PAIR = {"prompt": "What is it?", "chosen": "A toolkit.", "rejected": "A tool, or so."}
FILES: dict[str, list[dict[str, Any]]] = {
    "RECORDS": [{"instruction": "What is it?", "input": "", "output": "A toolkit."}],
    "PAIRS": [PAIR],
    "MARKED": [{"prompt": "What is it?", "completion": "A toolkit.", "label": good} for good in (True, False)],
    "DIALOGUES": [{"conversations": [{"from": "human", "value": "Well?"}, {"from": "gpt", "value": "Yes, it is."}]}],
}
DATA_SETS = {
    "own": {"file_name": "own.json", "columns": {"prompt": "ask", "response": "reply"}},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "texts": {"file_name": "texts.json", "columns": {"prompt": "text"}},
}
ENTRIES: dict[str, dict[str, Any]] = {
    "own": {"ask": "What is it?", "reply": "A toolkit."},
    "pairs": {
        "conversations": [{"from": "human", "value": "What is it?"}],
        "chosen": {"from": "gpt", "value": "A toolkit."},
        "rejected": {"from": "gpt", "value": "A tool, or so."},
    },
    "texts": {"text": "A text to go on with, and some more of it."},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> dict[str, str]:
    """What stands in a stock file for a model and for data."""
    folder = tmp_path_factory.mktemp("data")
    found = {"MODEL": str(make_checkpoint()), "DATA": str(folder), "TEXTS": str(folder / "texts.txt")}
    for name, records in FILES.items():
        found[name] = str(folder / f"{name.lower()}.json")
        Path(found[name]).write_text(json.dumps(24 * records), encoding="utf-8")
    for name, record in ENTRIES.items():
        (folder / f"{name}.json").write_text(json.dumps(24 * [record]), encoding="utf-8")
    (folder / "texts.txt").write_text("\n".join(24 * ["A text to go on with, and some more of it."]), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(DATA_SETS), encoding="utf-8")
    return found


def translated(file: Path, places: dict[str, str], tmp_path: Path, devices: int = 0) -> RunConfig:
    """The config that is made of a stock file."""
    text = file.read_text(encoding="utf-8")
    for name, place in places.items():
        text = text.replace(name, place)
    (tmp_path / file.name).write_text(text, encoding="utf-8")
    write_config(tmp_path / file.name, tmp_path / "new.yml", devices, Console(quiet=True))
    return load_config(tmp_path / "new.yml", [f"save_path={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    "file", tiered(STOCK, quick=["trl_dpo.*", "llama_factory_lora*", "axolotl_lora.*"], longest=[])
)
def test_a_stock_file_is_inspected_and_planned_at_the_first_start(
    file: Path, places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = translated(file, places, tmp_path)
    config.check_entry_point(in_stages=True)
    load_model(config.model_path)
    inspect(config, 1)
    plan_run(config, arguments())
    assert "MFU" in capsys.readouterr().out or config.model_topo.processes


def stock(name: str) -> Path:
    return next(file for file in STOCK if file.stem == name)


# The values of LLaMA-Factory's hparams (lora_alpha: "default: lora_rank * 2", cutoff_len 2048), of TRL's DPOConfig and
# of axolotl's schemas; what they leave out is transformers' TrainingArguments'.
EXPECTED: dict[str, dict[str, Any]] = {
    "llama_factory_lora_sft": {
        "optimizer.params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "train_batch_size": 8,
        "n_epoches": 3,
        "max_seq_len": 2048,
        "mask": "assistant",
        "packing": "batch",
        "lora.r": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.0,
        "lora.targets": "all-linear",
        "scheduler.type": "WarmupCosineLR",
        "scheduler.params.cos_min_ratio": 0.0,
        "scheduler.params.warmup_ratio": 0.1,
        "gradient_clipping": 1.0,
        "bf16.enabled": True,
        "trackers": [],
        "preference": None,
    },
    "trl_dpo": {
        "optimizer.params": {"lr": 5e-7, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "train_batch_size": 16,
        "n_epoches": 1,
        "max_seq_len": 1024,
        "preference.loss": "dpo",
        "preference.beta": 0.05,
        "preference.sft_weight": 0.0,
        "scheduler.type": "linear",
        "scheduler.params.min_ratio": 0.0,
        "scheduler.params.warmup_num_steps": 0,
        "bf16.enabled": True,  # DPOConfig's default, unless fp16
        "lora": None,
    },
    "axolotl_lora": {
        "optimizer.params": {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "train_batch_size": 8,
        "n_epoches": 4,
        "max_seq_len": 4096,
        "packing": "dataset",
        "prompt_format": "plain",
        "mask": "assistant",
        "lora.r": 32,
        "lora.alpha": 16,
        "lora.dropout": 0.05,
        "lora.targets": "all-linear",
        "scheduler.type": "WarmupCosineLR",
        "scheduler.params.warmup_num_steps": 10,
        "eval_share": 0.05,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_trains_what_the_tool_would(name: str, places: dict[str, str], tmp_path: Path) -> None:
    config = translated(stock(name), places, tmp_path)
    for dotted, expected in EXPECTED[name].items():
        found: Any = config
        for step in dotted.split("."):
            found = getattr(found, step)
        assert found == expected, dotted


@pytest.mark.parametrize(("name", "devices", "batch"), [("ms_swift_sft", 0, 16), ("trl_kto", 0, 8), ("trl_kto", 4, 16)])
def test_a_batch_counts_the_devices(
    name: str, devices: int, batch: int, places: dict[str, str], tmp_path: Path
) -> None:
    config = translated(stock(name), places, tmp_path, devices)
    assert config.train_batch_size == batch
    assert config.model_topo.processes == (devices or {"ms_swift_sft": 4, "trl_kto": 2}[name])


@pytest.mark.parametrize(
    ("name", "theirs"), [("llama_factory_lora_sft", "cosine"), ("trl_dpo", "linear"), ("axolotl_full", "cosine")]
)
def test_rates_are_transformers_own_a_step_ahead(
    name: str, theirs: str, places: dict[str, str], tmp_path: Path
) -> None:
    import torch
    from transformers import get_scheduler

    scheduler = translated(stock(name), places, tmp_path).scheduler
    assert scheduler is not None
    total, share = 40, scheduler.params.warmup_ratio
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    least = {"min_lr_rate": 0.1} if name == "axolotl_full" else {}
    kind = "cosine_with_min_lr" if least else theirs
    steps = -(-int(share * 1000) * total // 1000)
    expected = get_scheduler(kind, optimizer, steps, total, least)
    rates = []
    for _ in range(total + 1):
        rates.append(expected.get_last_lr()[0])
        optimizer.step()
        expected.step()
    ours = [lr_ratio(step, total, scheduler) for step in range(total)]
    if steps:
        assert ours == pytest.approx(rates[1:], abs=1e-6)
    else:  # the first has the full rate in both; ours reaches the end in the last step
        assert ours == pytest.approx(rates[:-1], abs=1 / total)
