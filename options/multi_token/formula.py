"""The loss of layers ahead written out with torch, for one document at a time: the reference of a proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ahead.names import MODULE
from training.fine_tuning import WordsFormula
from training.objective import Along, EndsOfModel

if TYPE_CHECKING:
    from data.sample_set import Sample
    from options.multi_token.keys import DraftSection


class AheadFormula(WordsFormula):
    """Cross-entropy of what each layer ahead says of the tokens k + 1 further on."""

    along_as = "mtp_loss"
    about = "loss of the layers ahead"

    def __init__(self, z_loss_weight: float, section: DraftSection) -> None:
        super().__init__(z_loss_weight)
        self._section = section
        self.along_weight = section.weight

    def along(self, model: EndsOfModel, document: Sample, hidden: Tensor) -> Along:
        ids, labels = torch.tensor(document["input_ids"]), torch.tensor(document["labels"])
        head, sums, tokens = model.head, list[Tensor](), list[int]()
        states = head.norm(hidden)
        if any(layer.norm is None for layer in head.ahead or ()):
            states = hidden
        for k, layer in enumerate(head.ahead or (), start=1):
            length = max(len(ids) - k, 0)
            if length == 0:
                states = states[:, :0]
                sums, tokens = [*sums, torch.zeros(())], [*tokens, 0]
                continue
            states = layer(model.embedding.embed_tokens(ids[None, k:]), states[:, :length], torch.arange(length)[None])
            logits = head.project(states if layer.norm is not None else head.norm(states))[0, : length - 1]
            sums.append(F.cross_entropy(logits, labels[k + 1 :], reduction="sum"))
            tokens.append(int((labels[k + 1 :] >= 0).sum()))
        return Along(torch.stack(sums), torch.tensor(tokens))

    def learns_along(self, name: str) -> bool:
        return not self._section.detach or f".{MODULE}." in name

    def in_norm(self, name: str) -> bool:
        return not self._section.detach or self._section.only or f".{MODULE}." not in name
