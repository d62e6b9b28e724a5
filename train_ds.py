"""Fine-tune a model with DeepSpeed pipeline parallelism.

deepspeed --num_gpus 2 train_ds.py --config configs/quickstart.yml [key.sub=value ...]
deepspeed --hostfile ./hostfile train_ds.py --config configs/ds_config_pp.yml
python train_ds.py --config FILE          starts its own launcher
python train_ds.py --config FILE --inspect 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from rich.console import Console

from data.dataset import Dataset, load_dataset
from data.inspect import show_samples
from data.loader import Loader
from data.prompts import default_format
from data.tokenize import load_tokenizer
from models.attention import choose_attention
from models.checkpoint.layout import resolve
from models.spec import ModelSpec
from training import distributed
from training.config import TrainConfig
from training.config_file import load_config
from training.distributed import Place, agreed, exit_on_user_error
from training.errors import ConfigError


def main() -> None:
    arguments = parse_arguments()
    place = Place.from_environment()
    with exit_on_user_error(place.rank if place else 0):
        config = load_config(arguments.config, arguments.overrides)
        if arguments.inspect:
            inspect(config, arguments.inspect)
        elif place is None:
            distributed.launch(config.model_topo, sys.argv)
        else:
            distributed.start(place, config.model_topo)
            try:
                run(config, place)
            finally:
                distributed.stop()


def run(config: TrainConfig, place: Place) -> None:
    """The whole job of one rank."""
    from training.engine import build_engine, training_dtype
    from training.loop import train
    from training.saving import save_checkpoint

    log = Console(quiet=place.rank != 0, highlight=False, soft_wrap=True)
    with agreed():
        folder = resolve(config.model_path)
        spec = ModelSpec.from_folder(folder)
        parts = config.parts_for(spec.n_layers)
        dataset = read_data(config, folder, log)
        save_path = make_run_folder(config.save_path)
    loader = Loader(
        dataset.samples,
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.model_topo.replicas,
        config.seed,
        config.dataloader_drop_last,
    )
    total_steps = config.n_epoches * loader.steps_per_epoch
    log.print(f"model: {spec.family.name}, {spec.n_layers} layers in {len(parts)} stages of {parts}")
    attention = choose_attention(config.use_flash_attn, training_dtype(config), spec.family.attention)
    spec.set_attention(attention.implementation)
    log.print(f"attention: {attention.reason}")
    if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:
        log.print("optimizer: on the CPU; DeepSpeed compiles its part at the first use, about a minute")
    log.print(f"steps: {total_steps} of {config.train_batch_size} samples, {loader.steps_per_epoch} an epoch")
    if place.rank == 0:
        (save_path / "config.yml").write_text(yaml.safe_dump(config.dump(), sort_keys=False), encoding="utf-8")
    engine = build_engine(config, spec, folder, total_steps)
    train(engine, loader, total_steps, save_path, config.steps_per_print)
    log.print(f"saved: {save_checkpoint(engine, save_path, folder)}")


def make_run_folder(save_path: str) -> Path:
    """The run's folder, made where it does not exist."""
    folder = Path(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_path: {folder}: cannot be made: {error.strerror}; expected a folder") from None
    return folder


def read_data(config: TrainConfig, folder: Path, log: Console) -> Dataset:
    """The tokenized records, and a line about each thing that was decided or cut."""
    tokenizer = load_tokenizer(folder)
    prompt_format = config.prompt_format or default_format(tokenizer)
    dataset = load_dataset(config.data_paths, tokenizer, config.max_seq_len, prompt_format)
    log.print(f"prompts: {prompt_format}")
    log.print(f"data: {dataset.summary(config.max_seq_len)}")
    return dataset


def inspect(config: TrainConfig, count: int) -> None:
    """Print the first samples as they would be trained."""
    folder = resolve(config.model_path)
    console = Console()
    dataset = read_data(config, folder, console)
    show_samples(dataset.samples[:count], load_tokenizer(folder), console)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a model with DeepSpeed pipeline parallelism.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--inspect", type=int, default=0, metavar="N", help="print the first N samples and leave")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override keys of the config")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
