"""`Pipeline`: train any sequence of layers in a pipeline, from a script of your own.

    pipeline = Pipeline(nn.Sequential(...), loss=F.cross_entropy, parts=[3, 2], save_path="run", train_batch_size=32)
    pipeline.train(dataset)

Start the script with `deepspeed --num_gpus 2 script.py`, or with `python script.py`, which starts the launcher itself.
Stages, replicas, micro-batches, precision, ZeRO, checkpoints, metrics and the timeline work as in any run
(`training.config.keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from options.any_layers.config import PipelineConfig
from training.config.yaml_file import checked
from training.distributed.processes import ProcessInfo
from training.distributed.script import run_from_script
from training.errors import ConfigError, exit_with_one_line

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from options.any_layers.samples import Collate
    from options.any_layers.stage import ForwardStep, Layer, Loss
    from training.distributed.rank_monitor import RankMonitor


class Pipeline:
    """Layers that are trained in stages; `train` checks the arguments.

    Args:
        layers: an `nn.Sequential`, or a list of layers. A function without arguments that makes a layer
            (`functools.partial(nn.Linear, 64, 64)`) may replace it; only the processes of its stage call it. The input
            of each layer is the output of the one before, a tensor or a tuple of tensors (`options.any_layers.stage`).
        forward_step: takes a layer and its input, returns its output; by default `layer(inputs)`.
        loss: takes the last layer's output and the labels of a micro-batch, returns a scalar: a mean over the samples,
            so that the mean over the micro-batches is that of the batch.
        parts: layers per stage, or the number of stages (1), divided so that the largest stage has the fewest
            parameters. Processes beyond one per stage become further replicas.
        config: replaces `parts` and `keys`: the whole config, read from a file (`load_config_of`).
        keys: of a `PipelineConfig`; `save_path` and `train_batch_size` are required.

    A whole model instead of its layers ends the script with one line.
    """

    def __init__(
        self,
        layers: nn.Sequential | nn.ModuleList | Sequence[Layer],
        *,
        loss: Loss,
        forward_step: ForwardStep = nn.Module.__call__,
        parts: Sequence[int] | int | None = None,
        config: PipelineConfig | None = None,
        **keys: Any,
    ) -> None:
        process = ProcessInfo.from_environment()
        with exit_with_one_line(process.rank if process else None, goes_on=True, page="docs/api.md"):
            self.layers: list[Layer] = as_layers(layers)
        self.loss = loss
        self.forward_step = forward_step
        self._parts = parts
        self._config = config
        self._keys = keys

    def config(self, processes: int) -> PipelineConfig:
        """Return the config of a run on this number of processes."""
        if self._config:
            extra = [*self._keys, *(["parts"] if self._parts is not None else [])]
            if extra:
                raise ConfigError(f"config: given together with {', '.join(extra)}; expected them in the config")
            return self._config
        asked = 1 if self._parts is None else self._parts
        stages, parts = (asked, None) if isinstance(asked, int) else (len(asked), list(asked))
        grid = {"dims": [stages, max(1, processes // max(1, stages))]}
        return checked(PipelineConfig, {"model_topo": {"process_topology": grid, "parts": parts}} | self._keys)

    def train(
        self, dataset: Dataset[Any], collate: Collate | None = None, eval_dataset: Dataset[Any] | None = None
    ) -> None:
        """Train from the beginning, or from the newest checkpoint in `save_path`; return when all steps are done.

        A process that cannot continue, or was asked to stop and saved, exits here, as in `train_ds.py`.

        Args:
            dataset: has a length and samples `(inputs, labels)`, each a tensor or a tuple of tensors; the first and the
                last stage read it. Random samples must draw from torch's generator.
            collate: makes a micro-batch from a list of samples; stacks them by default.
            eval_dataset: of such samples, evaluated as `eval_interval` and `eval_at_start` ask for.
        """

        def run(config: PipelineConfig, process: ProcessInfo, monitor: RankMonitor) -> bool:
            from options.any_layers.task import Layers  # imports DeepSpeed, after the device is set
            from training.job import Job
            from training.runs import run_callbacks

            task = Layers(self, dataset, collate, eval_dataset)
            return Job(task, config, process, monitor, run_callbacks(config, task)).run()

        run_from_script(lambda process: self.config(process.world_size if process else 0), run)


def load_trained(layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module], path: str | Path) -> None:
    """Load a run's weights into layers, all in one process, from a checkpoint or the newest one in a `save_path`.

    Raises:
        ConfigError: the weights are those of other layers, or `layers` is a whole model.
        CheckpointError: there are none, or they are damaged.
    """
    from models.checkpoint.layout import resolve
    from options.any_layers.stage import load_layers

    load_layers(dict(enumerate(as_layers(layers))), resolve(path, layers=True))


def as_layers(layers: Any) -> list[Any]:
    """Return the layers of a `Pipeline` as a list.

    Raises:
        ConfigError: it is a whole model, whose `forward` alone knows the order, or something else than layers.
    """
    # One layer after the other, or no forward at all.
    in_order = not isinstance(layers, nn.Module) or type(layers).forward in (nn.Sequential.forward, nn.Module.forward)
    found = list(layers) if in_order and isinstance(layers, Iterable) else [layers]
    odd = next((each for each in found if each is layers or not callable(each)), None)
    if odd is None:
        return found
    what = f"found {type(odd).__name__}"
    if isinstance(odd, nn.Module):
        advice = "list its layers in the order in which its forward calls them; what they share passes between them"
        if hasattr(odd, "save_pretrained"):  # a model of transformers
            advice = f"a decoder: save_pretrained it to a folder, train_ds.py's model_path; another model: {advice}"
        what += f", whose forward is its own: {advice}"
    raise ConfigError(f"layers: expected an nn.Sequential or a list of layers; {what}")
