"""`Pipeline`: any layers, one after the other, trained in a pipeline by a script of your own.

    pipeline = Pipeline(nn.Sequential(...), loss=F.cross_entropy, parts=[3, 2], save_path="run", train_batch_size=32)
    pipeline.train(dataset)

The script is started by `deepspeed --num_gpus 2 script.py`, or by `python script.py`, which starts the launcher itself.
Stages, replicas, micro-batches, precision, ZeRO, checkpoints, metrics and the timeline are those of any run
(`training.config.keys`); the loop and the engine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from training.any_model.config import PipelineConfig
from training.config.yaml_file import checked
from training.distributed.processes import Place
from training.distributed.script import run_from_script
from training.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from training.any_model.samples import Collate
    from training.any_model.stage import ForwardStep, Layer, Loss
    from training.distributed.rank_monitor import RankMonitor


class Pipeline:
    """Layers that are trained in stages.

    Args:
        layers: an `nn.Sequential`, or a list of layers. In place of a layer may stand a function without arguments that
            makes it (`functools.partial(nn.Linear, 64, 64)`): then only the processes of its stage do. Each layer takes
            what the one before it gave, a tensor or a tuple of tensors; see `training.any_model.stage`.
        forward_step: what a layer does with a micro-batch: takes the layer and what the one before it gave, and gives
            what the next one takes. Where absent, the layer is called with it: `layer(inputs)`.
        loss: takes what the last layer gave and the labels of a micro-batch, and gives a scalar: a mean over the rows,
            so that the mean over the micro-batches is that of the batch.
        parts: layers per stage, or how many stages (1); then the largest has as few parameters as can be. The processes
            that the launcher starts beyond one a stage make further replicas.
        config: in place of `parts` and `keys`, the whole config, read from a file (`load_config_of`).
        keys: of a `PipelineConfig`; `save_path` and `train_batch_size` are required.

    Nothing is checked here: what is wrong `train` says in one line.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[Layer],
        *,
        loss: Loss,
        forward_step: ForwardStep = nn.Module.__call__,
        parts: Sequence[int] | int | None = None,
        config: PipelineConfig | None = None,
        **keys: Any,
    ) -> None:
        self.layers = list(layers)
        self.loss = loss
        self.forward_step = forward_step
        self._parts = parts
        self._config = config
        self._keys = keys

    def config(self, processes: int) -> PipelineConfig:
        """The config of a run on so many processes.

        Raises:
            ConfigError: a key is unknown or has a wrong value.
        """
        if self._config:
            beside = [*self._keys, *(["parts"] if self._parts is not None else [])]
            if beside:
                raise ConfigError(f"config: stands beside {', '.join(beside)}; expected them in it")
            return self._config
        asked = 1 if self._parts is None else self._parts
        stages, parts = (asked, None) if isinstance(asked, int) else (len(asked), list(asked))
        grid = {"dims": [stages, max(1, processes // max(1, stages))]}
        return checked(PipelineConfig, {"model_topo": {"process_topology": grid, "parts": parts}} | self._keys)

    def train(
        self, dataset: Dataset[Any], collate: Collate | None = None, eval_dataset: Dataset[Any] | None = None
    ) -> None:
        """Train from the beginning, or from the newest checkpoint in `save_path`, and return when all steps are done.

        A process that cannot go on, or was asked to stop and saved, ends here, as one of `train_ds.py` does.

        Args:
            dataset: with a length, of samples `(inputs, labels)`, each a tensor or a tuple of tensors; the first and
                the last stage read it. What is random in a sample has to come from torch's generator.
            collate: makes a micro-batch of a list of samples; stacks them where absent.
            eval_dataset: of samples likewise, on which the loss is measured as `eval_interval` and `eval_at_start` say.
        """

        def run(config: PipelineConfig, place: Place, monitor: RankMonitor) -> bool:
            from training.any_model.task import Layers  # brings DeepSpeed, which has to be told of the device first
            from training.job import Job
            from training.options import run_options

            task = Layers(self.layers, self.forward_step, self.loss, dataset, collate, eval_dataset)
            return Job(task, config, place, monitor, run_options(config)).run()

        run_from_script(lambda place: self.config(place.world_size if place else 0), run)


def load_trained(layers: nn.Sequential | Sequence[nn.Module], path: str | Path) -> None:
    """Give layers, all in one process, the weights of a run: of a checkpoint, or of a run's `save_path` the newest.

    Raises:
        ConfigError: they are those of other layers.
        CheckpointError: there are none, or they are damaged.
    """
    from models.checkpoint.layout import resolve
    from training.any_model.stage import load_layers

    load_layers(dict(enumerate(layers)), resolve(path))
