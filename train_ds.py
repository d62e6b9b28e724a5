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

from argparse import Namespace  # noqa: E402
from functools import partial  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from options import RunConfig, load_config  # noqa: E402
from training.command_line import parse_arguments, run_entry_point  # noqa: E402
from training.config.keys import TrainConfig  # noqa: E402
from training.distributed.processes import ProcessInfo  # noqa: E402
from training.option import options_of, rank_action, wrap_trainer  # noqa: E402

if TYPE_CHECKING:
    from training.distributed.rank_monitor import RankMonitor


def main() -> None:
    arguments = parse_arguments(RunConfig, "Fine-tune a model with DeepSpeed pipeline parallelism.")

    def load(process: ProcessInfo | None) -> TrainConfig:
        config = load_config(arguments.config, arguments.overrides)
        config.check_entry_point(in_stages=True)
        return config

    run_entry_point(RunConfig, arguments, load, partial(run, arguments))


def run(arguments: Namespace, config: TrainConfig, process: ProcessInfo, monitor: RankMonitor) -> bool:
    """Do the whole job of one rank."""
    if action := rank_action(options_of(config), arguments):
        return action(config, process, monitor, in_stages=True)
    from training.runs import train_language_model, trainer_kind

    kind = wrap_trainer(options_of(config), arguments, trainer_kind(config))
    return train_language_model(config, process, monitor, kind)


if __name__ == "__main__":
    main()
