"""Fine-tune a model with ZeRO: the same config, data, loss, checkpoints and export as train_ds.py, without a pipeline.

deepspeed --num_gpus 8 train_ds_zero.py --config configs/ds_config_zero.yml [key.sub=value ...]
deepspeed --hostfile ./hostfile train_ds_zero.py --config FILE
python train_ds_zero.py --config FILE     starts its own launcher, with a process for each GPU
python train_ds_zero.py --config FILE --hostfile ./hostfile
python train_ds_zero.py --config FILE --inspect 3
python train_ds_zero.py --config FILE --plan [--devices 8xA100-40G] [--calibrate]
deepspeed --hostfile ./hostfile train_ds_zero.py --config FILE --check
"""

from __future__ import annotations

from common import early_signals

early_signals.note()  # before all that takes seconds to import

from argparse import Namespace  # noqa: E402
from functools import partial  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from options import RunConfig, load_config  # noqa: E402
from training.command_line import parse_arguments, run_entry_point  # noqa: E402
from training.config.keys import TrainConfig  # noqa: E402
from training.config.yaml_file import load_config_of  # noqa: E402
from training.distributed.processes import ProcessInfo  # noqa: E402
from training.option import options_of, rank_action  # noqa: E402

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor


def main() -> None:
    arguments = parse_arguments(RunConfig, "Fine-tune a model with ZeRO.", in_stages=False)
    run_entry_point(
        RunConfig,
        arguments,
        lambda process: load_spread_config(arguments.config, arguments.overrides, process, arguments.processes),
        partial(run, arguments),
        in_stages=False,
    )


def run(arguments: Namespace, config: TrainConfig, process: ProcessInfo, monitor: RankMonitor) -> bool:
    """Do the whole job of one rank."""
    if action := rank_action(options_of(config), arguments):
        return action(config, process, monitor, in_stages=False)
    from training.runs import train_language_model, trainer_kind

    return train_language_model(config, process, monitor, trainer_kind(config, in_stages=False))


def load_spread_config(
    path: str, overrides: list[str], process: ProcessInfo | None, processes: int | None = None
) -> TrainConfig:
    """Load the config; without model_topo each process that was started, is asked for, or GPU is a replica.

    What a step divides into is judged when their number is known. To count GPUs takes torch, which takes seconds; what
    is wrong with any number is found before.
    """
    if process is None:
        load_config(path, [*overrides, "gradient_accumulation_steps=null"])
    if processes is None:
        processes = process.world_size if process else gpus()
    spread = {"process_topology": {"dims": [1, processes]}}
    config = load_config_of(RunConfig, path, overrides, {"model_topo": spread})
    config.check_entry_point(in_stages=False)
    return config


def gpus() -> int:
    """Count the GPUs of this machine; at least one process runs."""
    import torch

    return max(1, torch.cuda.device_count())


if __name__ == "__main__":
    main()
