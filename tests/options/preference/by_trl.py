"""Train preferences with trl, for `test_trl.py`: by_trl.py MODEL RECORDS FOLDER SETTINGS, with records in a JSON list.

Writes FOLDER/losses.json, FOLDER/log.json with all that trl logs of each step, and the trained weights as
FOLDER/weights.safetensors. SETTINGS is JSON: the trainer and what its config gets besides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl  # type: ignore[import-not-found]
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def main() -> None:
    model_folder, records, folder, given = sys.argv[1:]
    settings: dict[str, Any] = json.loads(given)
    kind = settings.pop("trainer")
    if kind == "odds_ratio":
        from trl.experimental.orpo import ORPOTrainer  # type: ignore[import-not-found]

        trainer = ORPOTrainer.__new__(ORPOTrainer)
        trainer.beta, trainer.accelerator = settings["beta"], SimpleNamespace(device="cpu")
        scores = torch.tensor(settings["scores"])
        Path(folder, "losses.json").write_text(json.dumps((-trainer.odds_ratio_loss(*scores.T)[0]).tolist()))
        return
    if kind == "CPO":
        from trl.experimental.cpo import CPOConfig as Config  # type: ignore[import-not-found]
        from trl.experimental.cpo import CPOTrainer as Trainer
    else:
        Trainer, Config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")  # noqa: N806
    common = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": 256,
        "seed": 1,
    }
    by = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    model = by.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = "!"  # no end of an answer, which transformers would pass over where it scores the last token
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = Trainer(
        model=model,
        args=Config(**common | settings),
        train_dataset=Dataset.from_list(json.loads(Path(records).read_text())),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    Path(folder, "losses.json").write_text(json.dumps(losses))
    Path(folder, "log.json").write_text(json.dumps([line for line in trainer.state.log_history if "loss" in line]))
    state = trainer.model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    save_file(
        {name: each.contiguous() for name, each in state.items() if name not in tied}, f"{folder}/weights.safetensors"
    )


if __name__ == "__main__":
    main()
