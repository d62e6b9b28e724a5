"""Two tokenizers for the tests of the data wing: byte-level BPE with ChatML, and a real sentencepiece model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from data.tokenized.tokenize import load_tokenizer


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    """A fresh copy, so that a test may change its template."""
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def sentencepiece_folder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixtral's sentencepiece model as a HuggingFace folder with a tokenizer.json."""
    source = tmp_path_factory.mktemp("tokenizer.model")
    shutil.copy(shared / "golden" / "tokenizers" / "mixtral-v1" / "tokenizer.model", source)
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, **specials}
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    folder = tmp_path_factory.mktemp("sentencepiece")
    load_tokenizer(source).save_pretrained(folder)
    return folder


@pytest.fixture
def sentencepiece(sentencepiece_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(sentencepiece_folder)
