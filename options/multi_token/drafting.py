"""Prepare a run's last stage for its layers ahead, and keep its copy of the embedding up to date."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from deepspeed import comm
from torch import Tensor, nn

from models.family import EMBEDDING_WEIGHT, HEAD_WEIGHT
from models.layers import Block, Embedding, Head
from models.pipeline import PipelineModel
from options.multi_token.collation import AheadCollation
from options.multi_token.loss import AheadLoss
from training.callbacks import Choice, JobView
from training.distributed.communication import among_members
from training.errors import ConfigError
from training.measures import Measures, loss_of

if TYPE_CHECKING:
    from data.loader import GlobalBatch, Loader
    from options.multi_token.keys import DraftSection
    from training.engine.trainer import Trainer
    from training.loop import Run
    from training.metrics.step_metrics import StepMetrics
    from training.objective import ModelAndRecords


class Drafting(Measures):
    """Give the loss embeddings of the next tokens, and add its measures to the metrics."""

    def __init__(self, task: ModelAndRecords, section: DraftSection) -> None:
        super().__init__()
        self._task, self._section = task, section
        self._copy: EmbeddingCopy | None = None

    def on_build(self, job: JobView) -> Iterable[Choice]:
        spec, ahead = self._task.spec, self._task.spec.family.ahead
        assert ahead
        new = "new ones, copies of the last block" if spec.language else "those of the model"
        who = "only they learn" if self._section.only else f"weight {self._section.weight:g}"
        yield Choice(report=[f"layers ahead: {ahead.depth}, {new}; {who} (mtp)"])

    def on_start(self, run: Run) -> None:
        """Connect the loss; raises as `connect`."""
        self.connect(run.trainer, [run.loader, *(run.evaluation.loaders.values() if run.evaluation else [])])

    def connect(self, trainer: Trainer, loaders: Sequence[Loader]) -> None:
        """Tell loss and loaders of the layers ahead, and give the loss an embedding; all ranks call it together.

        Raises:
            ConfigError: the embedding is to learn, and lies on another stage than the head, which has no copy of it.
        """
        spec, module, loss = self._task.spec, trainer.engine.module, loss_of(trainer)
        assert spec.family.ahead and isinstance(loss, AheadLoss)
        loss.expect(spec.family.ahead.depth)
        for loader in loaders:
            assert isinstance(loader.collation, AheadCollation)
            loader.collation.depth = spec.family.ahead.depth

        apart = isinstance(module, PipelineModel) and module.stage_owner(0) != module.stage_owner(spec.n_layers - 1)
        if apart and not spec.tied:
            if not self._section.detach:
                what = "the embedding is on the first stage, and only a head that is tied to it has a copy"
                raise ConfigError(f"mtp.detach: false, but {what}; expected detach: true, one stage, or dualpipev")
            self._copy = EmbeddingCopy(module, EMBEDDING_WEIGHT in spec.trained_names(0))

        layers, loss.sends_back = dict(module.named_children()), apart
        first, last = layers.get("0"), layers.get(str(spec.n_layers - 1))
        if not isinstance(last, Head):
            return
        self._prepare(last, [layer for layer in layers.values() if isinstance(layer, Block)])
        if self._copy:
            loss.embed = partial(embed_with, module, self._copy.weight)
        elif isinstance(first, Embedding):
            loss.embed = partial(embed_by, first.embed_tokens)
        else:
            loss.embed = partial(embed_with, module, last.lm_head.weight)

    def on_step_end(self, run: Run, metrics: StepMetrics, batch: GlobalBatch) -> None:
        super().on_step_end(run, metrics, batch)
        if self._copy:
            self._copy.follow()

    def _prepare(self, head: Head, blocks: list[Block]) -> None:
        """Have the layers ahead recompute where blocks do, and leave them out of the norm that clips the model's own.

        So the model learns to the bit what it learns without them.
        """
        for layer in head.ahead or ():
            layer.decoder.recompute = any(block.recompute for block in blocks)  # type: ignore[union-attr]
            for weight in layer.parameters():
                if self._section.detach and not self._section.only:
                    weight.ds_pipe_replicated = True  # type: ignore[attr-defined]


class EmbeddingCopy:
    """The last stage's copy of an untied embedding, which has no gradient; all ranks make it together.

    Attributes:
        weight: the embedding on the first stage, the copy on the last one, and nothing between.
    """

    weight: Tensor

    def __init__(self, module: PipelineModel, is_trained: bool) -> None:
        head = module.spec.n_layers - 1
        self._group: Any = None
        for ranks in module.end_ranks():
            with among_members():
                group = comm.new_group(ranks=ranks)
            if module.global_rank in ranks:
                self._group, self._source = group, ranks[0]

        if module.stage_id == module.stage_owner(0):
            self.weight = module.get_submodule("0").get_parameter(EMBEDDING_WEIGHT).data
        elif module.stage_id == module.stage_owner(head):
            self.weight = torch.empty_like(module.get_submodule(str(head)).get_parameter(HEAD_WEIGHT).data)
        self._follow()
        self._is_trained = is_trained

    def follow(self) -> None:
        """Take over the first stage's values after a step."""
        if self._is_trained:
            self._follow()

    def _follow(self) -> None:
        if self._group is not None:
            comm.broadcast(self.weight, self._source, group=self._group)


def embed_by(words: nn.Embedding, ids: Tensor) -> Tensor:
    """Look tokens up in the embedding itself, which may lie in host memory."""
    found: Tensor = words(ids.to(words.weight.device))
    return found.to(ids.device)


def embed_with(module: Any, weight: Tensor, ids: Tensor) -> Tensor:
    """Look tokens up in a weight like the embedding's; with tensor parallelism this rank has some of its words."""
    if module.share.ranks.size == 1:
        return F.embedding(ids, weight)
    return module.share.look_up(weight, ids)
