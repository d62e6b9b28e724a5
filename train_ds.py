"""Fine-tune a model with DeepSpeed pipeline parallelism.

deepspeed --num_gpus 2 train_ds.py --config configs/quickstart.yml [key.sub=value ...]
deepspeed --hostfile ./hostfile train_ds.py --config configs/ds_config_pp.yml
python train_ds.py --config FILE          starts its own launcher
python train_ds.py --config FILE --hostfile ./hostfile
python train_ds.py --auto --model DIR --data FILE --save DIR [--dry-run] [key.sub=value ...]
python train_ds.py --config FILE --inspect 3
python train_ds.py --config FILE --plan [--devices 8xA100-40G] [--search] [--calibrate]
python train_ds.py --config FILE --prove
deepspeed --hostfile ./hostfile train_ds.py --config FILE --check
"""

from __future__ import annotations

from common import early_signals

early_signals.note()  # before all that takes seconds to import

import sys  # noqa: E402
from argparse import Namespace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from training.command_line import open_door, parse_arguments  # noqa: E402
from training.config.keys import TrainConfig  # noqa: E402
from training.config.yaml_file import load_config  # noqa: E402
from training.distributed.processes import Place  # noqa: E402
from training.launch.start import Hosts, name_accelerator  # noqa: E402

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor


def main() -> None:
    arguments = parse_arguments("Fine-tune a model with DeepSpeed pipeline parallelism.")

    def load(place: Place | None) -> TrainConfig:
        config = load_config(arguments.config, arguments.overrides)
        config.check_door(in_stages=True)
        return config

    open_door(arguments, load, partial(run, arguments), plan, prove, auto)


def plan(config: TrainConfig, arguments: Namespace) -> None:
    """What the run will take."""
    name_accelerator()
    from training.plan.command import plan_run

    plan_run(config, arguments)


def auto(arguments: Namespace, hosts: Hosts | None) -> Path:
    """The config file that suits machine, model and data."""
    name_accelerator()
    from training.auto.command import configure

    return configure(arguments, hosts)


def prove(config: TrainConfig) -> None:
    """Whether the run will compute what it should."""
    from training.proof.command import prove_run

    prove_run(config, sys.argv[0])


def run(arguments: Namespace, config: TrainConfig, place: Place, monitor: RankMonitor) -> bool:
    """The whole job of one rank, which notes its steps in the folder `--record` if it is one of a proof."""
    if arguments.check:
        from training.checking import check_run

        return check_run(True, config, place, monitor)
    from training.engine.pipeline import PipelineTrainer
    from training.options import train_language_model

    kind = PipelineTrainer
    if arguments.record:
        from training.proof.recorder import recorder_in

        kind = recorder_in(arguments.record)
    return train_language_model(config, place, monitor, kind)


if __name__ == "__main__":
    main()
