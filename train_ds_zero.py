"""Fine-tune a model with ZeRO: the same config, data, loss, checkpoints and export as train_ds.py, without a pipeline.

deepspeed --num_gpus 8 train_ds_zero.py --config configs/ds_config_zero.yml [key.sub=value ...]
deepspeed --hostfile ./hostfile train_ds_zero.py --config FILE
python train_ds_zero.py --config FILE     starts its own launcher, with a process for each GPU
python train_ds_zero.py --config FILE --hostfile ./hostfile
python train_ds_zero.py --config FILE --inspect 3
deepspeed --hostfile ./hostfile train_ds_zero.py --config FILE --check
"""

from __future__ import annotations

from common import early_signals

early_signals.note()  # before all that takes seconds to import

from argparse import Namespace  # noqa: E402
from functools import partial  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from training.command_line import parse_arguments, run_entry_point  # noqa: E402
from training.config.keys import TrainConfig  # noqa: E402
from training.config.yaml_file import load_config  # noqa: E402
from training.distributed.processes import ProcessInfo  # noqa: E402

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor


def main() -> None:
    arguments = parse_arguments("Fine-tune a model with ZeRO.", in_stages=False)
    run_entry_point(
        arguments,
        lambda process: load_spread_config(arguments.config, arguments.overrides, process),
        partial(run, arguments),
    )


def run(arguments: Namespace, config: TrainConfig, process: ProcessInfo, monitor: RankMonitor) -> bool:
    """Do the whole job of one rank."""
    if arguments.check:
        from training.checking import check_run

        return check_run(False, config, process, monitor)
    from training.engine.zero import ZeroTrainer
    from training.options import train_language_model

    return train_language_model(config, process, monitor, ZeroTrainer)


def load_spread_config(path: str, overrides: list[str], process: ProcessInfo | None) -> TrainConfig:
    """Load the config; without model_topo every process that was started, or every GPU, is a replica."""
    config = load_config(path, overrides)
    if "model_topo" not in config.model_fields_set:
        processes = process.world_size if process else gpus()
        config = load_config(path, [*overrides, f"model_topo.process_topology.dims=[1, {processes}]"])
    config.check_entry_point(in_stages=False)
    return config


def gpus() -> int:
    """Count the GPUs of this machine; at least one process runs."""
    import torch

    return max(1, torch.cuda.device_count())


if __name__ == "__main__":
    main()
