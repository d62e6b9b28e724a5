"""Ways to train the same samples, timed alike: Pipetune's engines, and transformers' Trainer.

Useful tokens are those without padding. On a GPU a step ends when its kernels have.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import SequentialSampler

from benchmarks.steps import now, train
from benchmarks.turns import Pace
from training.data_setup import build_loader

if TYPE_CHECKING:
    from data.loader import Loader
    from data.sample_set import SampleSet
    from training.config.keys import TrainConfig
    from training.engine.trainer import Trainer as Way

MOST_STEPS = 12


def by_pipetune(config: TrainConfig, samples: SampleSet, way: type[Way], pace: Pace) -> None:
    """Train by one of our engines; the process group is there already."""
    from models.api import read_spec
    from models.attention.kernels import choose_attention
    from training.config.deepspeed_config import training_dtype
    from training.plan.auto import divide

    folder = Path(config.model_path)
    spec = read_spec(folder)
    attention = choose_attention(config.use_flash_attn is True, training_dtype(config), spec.attention)
    spec.set_attention(attention.implementation)
    loader = build_loader(samples, config)
    train(way.build(config, spec, folder, divide(config, spec, way.in_stages)), loader, pace)


def by_transformers(config: TrainConfig, samples: SampleSet, pace: Pace, micro_batch: int, liger: bool = False) -> None:
    """The same by transformers' Trainer as its documentation has it, in this one process.

    Args:
        micro_batch: samples in a micro-batch, padded to the longest by transformers' own collator.
        liger: patch the model with Liger's kernels.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainingArguments,
    )

    class InOrder(Trainer):
        """Takes the samples as they come."""

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        """Waits before each step and tells what it took, the making of its batch included."""

        def on_train_begin(self, arguments: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = not pace.wait()
            self.begin = now()

        def on_step_end(self, arguments: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
            pace.done(now() - self.begin, loader.batch(state.global_step - 1).tokens)
            self.on_train_begin(arguments, state, control)

    loader = build_loader(samples, config)
    tokenizer = AutoTokenizer.from_pretrained(config.model_path)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_path))
    if config.use_grad_ckpt:
        model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=config.save_path,
        max_steps=MOST_STEPS,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=config.train_batch_size // micro_batch,
        gradient_checkpointing=config.use_grad_ckpt is True,
        bf16=config.bf16.enabled,
        use_cpu=not torch.cuda.is_available(),
        use_liger_kernel=liger,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer)
    InOrder(model, arguments, collator, train_dataset=shuffled_rows(loader), callbacks=[Clock()]).train()


def shuffled_rows(loader: Loader) -> list[dict[str, list[int]]]:
    """The samples of each step in an order of chance; a Loader sorts them by length."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(MOST_STEPS):
        numbers = loader.batch(step).samples
        for place in torch.randperm(len(numbers), generator=generator).tolist():
            sample = loader.data.samples[numbers[place]]
            rows.append({key: torch.as_tensor(sample[key]).tolist() for key in ("input_ids", "labels")})
    return rows
