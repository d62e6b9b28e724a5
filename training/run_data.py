"""The records of a run as its config asks for them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from data.dataset import Dataset, load_dataset
from data.prompts import PromptFormat, default_format
from data.tokenize import load_tokenizer
from training.config import TrainConfig


def read_data(config: TrainConfig, folder: Path, log: Console) -> Dataset:
    """The tokenized records, and a line about each thing that was decided or cut."""
    tokenizer = load_tokenizer(folder)
    prompt_format = config.prompt_format or default_format(tokenizer)
    log.print(f"prompts: {prompt_format}")
    return _read("data", config.data_paths, config, tokenizer, prompt_format, log)


def read_evaluation_data(config: TrainConfig, folder: Path, log: Console) -> Dataset | None:
    """The same of `eval_data_path`, where there is one."""
    if not config.eval_data_paths:
        return None
    tokenizer = load_tokenizer(folder)
    prompt_format = config.prompt_format or default_format(tokenizer)
    return _read("evaluation data", config.eval_data_paths, config, tokenizer, prompt_format, log)


def _read(
    what: str,
    paths: list[str],
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    log: Console,
) -> Dataset:
    dataset = load_dataset(paths, tokenizer, config.max_seq_len, prompt_format)
    log.print(f"{what}: {dataset.summary(config.max_seq_len)}")
    return dataset
