"""The teacher of a distillation: what it must have in common with the student, and as what it is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.quantities import counted
from data.tokenized.tokenizer import load_tokenizer
from models.adapters import Trained
from models.checkpoint.hub import find_model
from models.errors import CheckpointError
from models.spec import ModelSpec
from training.config.deepspeed_config import check_length, check_sharing
from training.config.keys import TrainConfig
from training.config.objective import RouterLoss
from training.config.precision import FP8
from training.errors import ConfigError

if TYPE_CHECKING:
    from options.distillation.keys import DistillationSection

TEACHER = "distillation.teacher"


def read_teacher(
    config: TrainConfig,
    section: DistillationSection,
    spec: ModelSpec,
    folder: Path,
    read_spec: Callable[[Path], ModelSpec],
    weights: bool = True,
) -> tuple[Path, ModelSpec]:
    """Find the teacher of the model of `spec`: its folder, and its own spec.

    Args:
        folder: of the student, with its tokenizer.
        weights: fetch the teacher's; a plan needs none.

    Raises:
        ConfigError: it is no language model of the same vocabulary, or does not fit this run's topology.
        CheckpointError, DataError: it is not there, or a tokenizer is not.
    """
    try:
        place = find_model(section.teacher, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{TEACHER}: {error}") from None
    try:
        teacher = read_spec(place)
        teacher.check_writes(place)
        config.with_parts([]).parts_for(teacher.n_layers)
        check_length(config, teacher)
        check_sharing(config, teacher)
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{TEACHER}: {error}") from None
    if unlike := load_tokenizer(folder).get_vocab().items() ^ load_tokenizer(place).get_vocab().items():
        raise ConfigError(
            f"{TEACHER}: {place}: another vocabulary than that of {folder}: {min(unlike)} and "
            f"{counted(len(unlike) - 1, 'other word')} are in only one of them; expected the same tokenizer"
        )
    if (top_k := section.top_k) > (words := shared_words(spec, teacher)):
        raise ConfigError(f"distillation.top_k: {top_k}; expected at most the {words:,} words that there are")
    return place, teacher


def shared_words(spec: ModelSpec, teacher: ModelSpec) -> int:
    """Count the rows of the smaller vocabulary; those beyond only pad the larger one."""
    return min(int(each.config.vocab_size) for each in (spec, teacher))


def config_of_teacher(config: TrainConfig) -> TrainConfig:
    """Return the config by which the teacher is built: whole, frozen and in even parts."""
    changes: dict[str, Any] = {"lora": None, "freeze": [], "distillation": None, "fp8": FP8()}
    changes |= {"aux_router_loss": RouterLoss(weight=0.0)}
    changes |= dict.fromkeys("from_scratch use_grad_ckpt offload_activations offload_gradients compile".split(), False)
    return config.with_parts([]).model_copy(update=changes)


def frozen(spec: ModelSpec) -> ModelSpec:
    """Freeze all of a model but the smallest weight of its last block, as DeepSpeed's optimizers need one."""
    last, shapes = spec.n_blocks, spec.shapes(spec.n_blocks)
    smallest = min(spec.trained_names(last), key=lambda name: shapes[name].numel())
    return spec.training(Trained(freeze=(f"^(?!{re.escape(spec.path(last, smallest))}$)",)))
