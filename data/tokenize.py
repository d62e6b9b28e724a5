"""Records to token ids and labels.

A record's whole text is tokenized at once, exactly as a server would tokenize it, and a token bears loss when it begins
inside a supervised piece. Labels are aligned with the input ids (not shifted).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypedDict

from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.errors import DataError
from data.native_tokenizers import native_tokenizer
from data.prompts import Dialogue, PromptFormat, Span, default_format, write, write_question
from data.records import Pretrain, Record, parse_record

IGNORED = -100  # the label of a token without loss, as in transformers and torch


class Sample(TypedDict):
    """One tokenized record; both lists have the same length."""

    input_ids: list[int]
    labels: list[int]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder: transformers' own, or Pipetune's for ChatGLM3 and Baichuan2.

    No code from the folder is run.

    Raises:
        DataError: the folder has no tokenizer that transformers can read.
    """
    # transformers warns of texts longer than the model's window; Pipetune cuts and reports them itself.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    if (native := native_tokenizer(Path(folder))) is not None:
        return native
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds here
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"{folder}: no usable tokenizer: {reason}") from None
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: the tokenizer cannot tell where its tokens lie in the text; expected a tokenizer.json"
        )
    return tokenizer


def encode(
    record: Record | dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    prompt_format: PromptFormat | None = None,
) -> Sample:
    """Turn one record of any kind into token ids and labels.

    Args:
        record: a parsed record, or its JSON object.
        max_seq_len: what is longer is cut at the end.
        prompt_format: the tokenizer's chat template when it ships one, else plain, where absent.

    Raises:
        DataError: the record is wrong or the format cannot hold it.
    """
    sample = encode_whole(record, tokenizer, prompt_format)
    return {"input_ids": sample["input_ids"][:max_seq_len], "labels": sample["labels"][:max_seq_len]}


def encode_whole(
    record: Record | dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat | None = None
) -> Sample:
    """`encode` without a limit on the length."""
    parsed: Record = record if isinstance(record, BaseModel) else parse_record(record)
    chosen = prompt_format or default_format(tokenizer)
    sample = _tokenize(write(parsed, tokenizer, chosen), tokenizer)
    if chosen == "plain" or isinstance(parsed, Pretrain):
        # A chat template writes its own beginning of sequence; elsewhere the tokenizer's goes first, as in pretraining.
        prefix = beginning_of_sequence(tokenizer)
        sample = {
            "input_ids": prefix + sample["input_ids"],
            "labels": [IGNORED] * len(prefix) + sample["labels"],
        }
    return sample


def encode_question(
    dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat | None = None
) -> list[int]:
    """The token ids that a model is asked with: the dialogue up to where its last answer begins."""
    chosen = prompt_format or default_format(tokenizer)
    text = write_question(dialogue, tokenizer, chosen)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return beginning_of_sequence(tokenizer) + ids if chosen == "plain" else ids


def beginning_of_sequence(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer itself puts before a text, often one <s>, often none."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed: list[int] = tokenizer("a")["input_ids"]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start]
    return []


def _tokenize(spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> Sample:
    text = "".join(span.text for span in spans)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends, end = [], 0
    for span in spans:
        end += len(span.text)
        ends.append(end)
    labels = []
    current = 0
    for token, (start, _) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        while current < len(ends) - 1 and start >= ends[current]:
            current += 1
        labels.append(token if spans[current].supervised else IGNORED)
    return {"input_ids": list(encoding["input_ids"]), "labels": labels}
