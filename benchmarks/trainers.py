"""Ways to train the same samples, timed alike: Pipetune's engines, and transformers' Trainer.

The first step is left out; useful tokens per second are those without padding. On a GPU a step ends when its kernels
have.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import SequentialSampler

from training.run_data import build_loader

if TYPE_CHECKING:
    from data.loader import Loader
    from data.sample_set import SampleSet
    from training.config import TrainConfig
    from training.trainer import Trainer as Way


def by_pipetune(config: TrainConfig, samples: SampleSet, way: type[Way], steps: int) -> float:
    """Useful tokens per second of `steps` steps; the process group is there already."""
    from models.attention import choose_attention
    from models.spec import ModelSpec
    from training.deepspeed_config import training_dtype

    folder = Path(config.model_path)
    spec = ModelSpec.from_folder(folder)
    attention = choose_attention(config.use_flash_attn, training_dtype(config), spec.attention)
    spec.set_attention(attention.implementation)
    loader = build_loader(samples, config, config.model_topo.replicas)
    trainer = way.build(config, spec, folder, steps + 1)
    ends = []
    for step in range(steps + 1):
        trainer.train_step(loader, loader.batch(step))
        ends.append(now())
    return useful(loader, steps) / (ends[-1] - ends[0])


def by_transformers(
    config: TrainConfig, samples: SampleSet, steps: int, micro_batch: int, liger: bool = False
) -> float:
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
        TrainingArguments,
    )

    class InOrder(Trainer):
        """Takes the samples as they come."""

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    ends: list[float] = []
    loader = build_loader(samples, config, replicas=1)
    tokenizer = AutoTokenizer.from_pretrained(config.model_path)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model_path))
    if config.use_grad_ckpt:
        model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=config.save_path,
        max_steps=steps + 1,
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
    rows = shuffled_rows(loader, steps)
    InOrder(model, arguments, collator, train_dataset=rows, callbacks=[Clock()]).train()
    return useful(loader, steps) / (ends[-1] - ends[0])


def shuffled_rows(loader: Loader, steps: int) -> list[dict[str, list[int]]]:
    """The samples of each step in an order of chance; a Loader sorts them by length."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(steps + 1):
        numbers = loader.batch(step).samples
        for place in torch.randperm(len(numbers), generator=generator).tolist():
            sample = loader.data.samples[numbers[place]]
            rows.append({key: torch.as_tensor(sample[key]).tolist() for key in ("input_ids", "labels")})
    return rows


def useful(loader: Loader, steps: int) -> int:
    """Tokens in the measured steps."""
    return sum(loader.batch(step).tokens for step in range(1, steps + 1))


def now() -> float:
    """The time at which all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
