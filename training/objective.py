"""What is trained: beside `Task` (on what) and `Callback` (when), the third interface of a run.

Fine-tuning on tokens is the core's (`training.fine_tuning`); every other objective is an option with a key of its own,
whose class of the config says `objective`. An objective says

* which records it takes, how many documents a sample has, and which tensors go with a micro-batch (`data.collation`);
* of which model it trains the weights, and which other models it needs;
* the loss on the last stage;
* what is computed before the first step and before each, and what is measured, as callbacks;
* what the planner and the proof have to know of it.

Loader, engine, evaluation, planner and proof ask it, and name none. It is made of a config and keeps nothing else, so
`config.objective` may be asked anywhere; what a run finds out lies in its callbacks and collations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from data.collation import Collation
from data.sample_set import KeptSamples, Sample, SampleSet, documents
from data.settings import Wanted
from models.layers import Embedding, Head
from models.loss.interface import MicroBatchLoss
from models.spec import ModelSpec
from training.callbacks import Callback

if TYPE_CHECKING:
    from data.loader import Loader
    from training.config.keys import TrainConfig
    from training.engine.trainer import Trainer
    from training.evaluation import Evaluation


class ModelAndRecords(Protocol):
    """What callbacks of an objective or an option may ask of the task: its model, and its records once they are read.

    Attributes:
        spec: of the model that is trained.
        model_folder: where its weights to begin with come from.
        in_stages: whether its layers are divided into pipeline stages.
        kind: how it is spread over processes.
        other_models: that the objective needs, by the config's key.
        dataset: the records to train on.
        held_out: those to evaluate on, if any.
        loader: of the global batches to train on.
        known_loader: the loader, where lengths of all samples are known before the first step.
        evaluation: on the global batches to evaluate on, if any.
    """

    in_stages: bool

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def model_folder(self) -> Path: ...
    @property
    def kind(self) -> type[Trainer]: ...
    @property
    def other_models(self) -> dict[str, tuple[Path, ModelSpec]]: ...
    @property
    def dataset(self) -> KeptSamples: ...
    @property
    def held_out(self) -> KeptSamples | None: ...
    @property
    def loader(self) -> Loader: ...
    @property
    def known_loader(self) -> Loader | None: ...
    @property
    def evaluation(self) -> Evaluation | None: ...
    def collation(self, config: TrainConfig, data: SampleSet) -> Collation: ...


class Objective(ABC):
    """What a config trains.

    Attributes:
        documents: at most in a sample; each has at most `max_seq_len` tokens.
        unit: what has at most `max_seq_len` tokens, in a word for the log.
        best_by: the number of an evaluation by which the best checkpoint is chosen; the smaller, the better.
        has_perplexity: whether `eval_loss` is a mean cross-entropy of words.
        right: the measure that is the share of right samples, if one is.
        printed: the measures on the screen, by their names there.
        unprinted: how measures begin that the line of an evaluation leaves out; metrics.jsonl has them.
        says_words: whether it trains a language model, and no model that gives a text numbers instead.
        looks_ahead: whether it trains layers that predict further ahead, where the model has them.
        sees: whether its samples may have images.
        by_token: whether its loss is a sum over tokens, each by what is before it, so that a row may come in chunks.
    """

    documents: ClassVar[int] = 1
    unit: ClassVar[str] = "sample"
    best_by: ClassVar[str] = "eval_loss"
    has_perplexity: ClassVar[bool] = False
    right: ClassVar[str] = ""
    printed: ClassVar[Mapping[str, str]] = {}
    unprinted: ClassVar[tuple[str, ...]] = ()
    says_words: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = False
    sees: ClassVar[bool] = False
    by_token: ClassVar[bool] = False

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @property
    def wanted(self) -> Wanted | None:
        """Which judged records it takes; None for plain ones."""
        return None

    def collation(self, data: SampleSet) -> Collation:
        """Return what a loader of these samples has to know."""
        return Collation(data)

    def model(self, spec: ModelSpec) -> ModelSpec:
        """Return the model it trains, made of that of the config's folder: another head or a further layer, say."""
        return spec

    def other_models(
        self, spec: ModelSpec, folder: Path, read_spec: Callable[[Path], ModelSpec], weights: bool = True
    ) -> dict[str, tuple[Path, ModelSpec]]:
        """Read and check the other models it needs, each with its folder, by the config's key; nothing is communicated.

        Args:
            spec: of the model that is trained.
            folder: of that model, with the tokenizer that the records are read with.
            read_spec: reads a model folder's config.json and finds its family.
            weights: fetch them too; a plan needs none.

        Raises:
            ConfigError: one does not fit.
            CheckpointError, DataError: one is missing, or a tokenizer.
        """
        return {}

    @abstractmethod
    def loss(self, router_loss_weight: float) -> MicroBatchLoss:
        """Make the loss of a micro-batch, on the last stage, in the place of `micro_batch_loss` (`models.loss`).

        Args:
            router_loss_weight: weight of the router loss of mixture-of-experts; 0 without one.
        """

    def callbacks(self, task: ModelAndRecords) -> list[Callback]:
        """List what is done before the first step and before each, and what adds measures to the metrics."""
        return []

    @property
    def rate_share(self) -> float:
        """How large its usual learning rate is, as a share of fine-tuning's."""
        return 1.0

    def logit_copies(self, on_gpu: bool) -> int:
        """Count the copies of a chunk of logits (`models.loss.lean`) that its loss holds beyond the cross-entropy's."""
        return 0

    def unplanned(self) -> list[str]:
        """List lines for a plan and the log, on what it does that is not planned."""
        return []

    @abstractmethod
    def formula(self) -> Formula:
        """Return the loss written out for one sample, the reference of a proof.

        Raises:
            ConfigError: there is none, or `--prove` cannot compare it.
        """


class Parts(NamedTuple):
    """Hold the parts of one sample's loss.

    Attributes:
        of_sample: counts 1 / samples of the global batch.
        of_tokens: a sum, counts 1 / trained tokens of the first documents of the global batch.
        noted: [n], numbers whose means over samples are compared too, in the order of `Formula.noted`.
    """

    of_sample: Tensor
    of_tokens: Tensor
    noted: Tensor


class EndsOfModel(Protocol):
    """A whole model in one process, as far as what is learnt along of its hidden states needs it."""

    @property
    def embedding(self) -> Embedding: ...
    @property
    def head(self) -> Head: ...


class Along(NamedTuple):
    """Hold what is learnt along: the mean over n losses, each a mean over its tokens in the global batch.

    Attributes:
        sums: [n], of each over the tokens of a document.
        tokens: [n], how many they are.
    """

    sums: Tensor
    tokens: Tensor

    def __add__(self, other: object) -> Along:
        assert isinstance(other, Along)
        return Along(self.sums + other.sums, self.tokens + other.tokens)

    @property
    def mean(self) -> Tensor:
        return (self.sums / self.tokens.clamp(min=1)).mean()


NOTHING_ALONG = Along(torch.zeros(0), torch.zeros(0))


class Formula(ABC):
    """An objective written out with torch for one sample at a time, from all logits at once.

    A mistake in its loss must not affect it too, so it uses nothing of that. Documents are run by themselves.

    Attributes:
        noted: names in metrics.jsonl of further numbers that are compared; what the model finds of them before the
            first step is given to `parts`.
        about: what these numbers are, as a row's heading.
        begins_alone: whether what is kept of a run's first weights must be this model's: the proof has another model
            leave its own in the cache first.
        widening: factor of the bounds of losses and norms, where these feel the rounding of sums.
        along_as: the name in metrics.jsonl of the mean of what is learnt along, if there is some.
        along_weight: what that mean counts.
    """

    noted: tuple[str, ...] = ()
    about: str = ""
    begins_alone: bool = False
    widening: float = 1.0
    along_as: str = ""
    along_weight: float = 0.0

    @abstractmethod
    def parts(self, sample: Sample, found: Sequence[tuple[Tensor, Tensor]], begin: Tensor, auxiliary: bool) -> Parts:
        """Compute the parts of a sample's loss.

        Args:
            found: of each document, logits [S, V] of all its tokens and what they should predict [S - 1], -100 where a
                token is not trained.
            begin: [noted], what this returned in `noted` before the first step.
            auxiliary: whether losses count that an evaluation leaves out.
        """

    def along(self, model: EndsOfModel, document: Sample, hidden: Tensor) -> Along:
        """Compute what is learnt along of a document, and counts in the gradients alone.

        Args:
            model: that is trained, in one process.
            hidden: [1, S, H], what its last block gives for the document.
        """
        return NOTHING_ALONG

    def learns_along(self, name: str) -> bool:
        """Return whether a weight `<layer>.<name>` learns from that."""
        return True

    def in_norm(self, name: str) -> bool:
        """Return whether a weight counts in the norm by which gradients are clipped."""
        return True

    def record(self, sample: Sample) -> dict[str, Any]:
        """Write a sample as a record in a file of token ids."""
        (document,) = documents(sample)
        return record_of(document)

    def compared_logits(self, logits: Tensor) -> Tensor:
        """Return what of a document's logits [S, V] an export has to find, too."""
        return logits


def record_of(document: Sample) -> dict[str, Any]:
    """Write a document as a record in a file of token ids."""
    record: dict[str, Any] = dict(document)
    images = record.pop("images", None)
    return record | {"placed_images": images} if images else record


def log_probabilities(found: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Compute the log-probability of what each token should predict, [S - 1] a document; 0 where it is not trained."""
    return [-torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="none") for logits, wanted in found]
