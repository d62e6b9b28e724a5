"""Models that give a text numbers instead of a next token: transformers' classes ...ForSequenceClassification.

The head's projection has a row for each number, `score.weight` on disk, and is applied to the last token of a document.
config.json tells such a model by its class; a language model becomes one by a config.json of this kind and new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from models.errors import CheckpointError
from models.family import HEAD_WEIGHT, Family, Rule
from models.layers import Head

KIND, SCORE = "ForSequenceClassification", "score"
LABELS, SINGLE = "id2label", "single_label_classification"
OWN_FIELDS = ("architectures", LABELS, "label2id", "num_labels", "problem_type")  # of a config.json of this kind


class ScoringHead(Head):
    """A head with a row for each number: [B, S, H] -> [B, S, numbers]."""

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        super().__init__(family, config)
        self.cap, self.scale = None, 1.0
        self.lm_head = nn.Linear(getattr(config, family.word_width), config.num_labels, bias=False)


def labels_of(raw: dict[str, Any]) -> list[str]:
    """List the labels of a model of this kind by the content of its config.json; empty for any other model."""
    if not str((raw.get("architectures") or [""])[0]).endswith(KIND):
        return []
    names = raw.get(LABELS) or {}
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names) or raw.get("num_labels", 2))]


def check_labels(asked: Sequence[str], own: Sequence[str], where: object) -> None:
    """Refuse labels that are not a model's own, by number; a single one, or numbers alone, may be called anything."""
    nameless = len(own) == 1 or list(own) == [f"LABEL_{number}" for number in range(len(own))]
    if len(asked) != len(own) or not (nameless or list(asked) == list(own)):
        raise CheckpointError(f"labels: {list(asked)}, but {where} has {list(own)}; expected these, in this order")


def padding_problem(config: PreTrainedConfig) -> str | None:
    """Say what keeps transformers from the same scores in batches, if anything."""
    pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if pad is None:
        return "config.json has no pad_token_id, so transformers scores one text at a time; expected one, for batches"
    if pad in (ends if isinstance(ends, list) else [ends]):
        what = f"pad_token_id {pad} also ends texts, and transformers scores the last token that is not padding"
        return f"config.json: {what}; expected a token of its own"
    return None


def scoring_family(family: Family) -> Family:
    """Give a family the other head."""
    rule = Rule(f"{SCORE}.weight", HEAD_WEIGHT)
    return replace(family, head=(rule, *family.head), projection=ScoringHead, head_bias=False)


def scoring_fields(raw: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Make the config.json of a model that scores from that of a language model.

    Raises:
        CheckpointError: transformers has no such class for the family.
    """
    kind = raw["model_type"]
    if (name := MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)) is None:
        raise CheckpointError(f"model_type {kind!r}: transformers has no class that scores texts for this family")
    numbers = {str(number): label for number, label in enumerate(labels)}
    named = {LABELS: numbers, "label2id": {label: int(number) for number, label in numbers.items()}}
    problem = {"problem_type": SINGLE} if len(labels) > 1 else {}
    return raw | {"architectures": [name]} | named | problem
