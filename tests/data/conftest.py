"""Fixtures of the data wing: byte-level BPE with ChatML, a real sentencepiece model, and a cache of the test's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.chat.prompts import Prompts
from data.settings import Truncate, Wanted
from data.tokenized import store
from data.tokenized.dataset import Dataset
from data.tokenized.loading import load_dataset
from data.tokenized.recipe import Recipe
from data.tokenized.store import Cache
from data.tokenized.tokenizer import load_tokenizer
from tests.data.caches import JUDGED_LIMIT, LIMIT, Load

PAIRS, TEMPLATE = Wanted("pairs"), Prompts("chat_template")


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


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of files that were just written are remembered as well: nobody writes them twice in a tick here."""
    monkeypatch.setattr("common.digests.SETTLED", -1.0)


@pytest.fixture
def load(tmp_path: Path, tokenizer_folder: Path, settled: None) -> Load:
    """`load_dataset` with a cache of the test's own."""

    def run(data: Any, tokenizer: Path = tokenizer_folder, limit: int = LIMIT, **options: Any) -> Dataset:
        return load_dataset(data, tokenizer, limit, "plain", cache_dir=tmp_path / "cache", **options)

    return run


@pytest.fixture
def load_judged(tmp_path: Path, tokenizer_folder: Path) -> Any:
    """`load_dataset` of records that are given as objects; pairs where nothing else is said."""

    def run(
        *records: dict[str, Any],
        wanted: Wanted | None = PAIRS,
        limit: int = JUDGED_LIMIT,
        how: Truncate = "turns",
        prompts: Prompts = TEMPLATE,
        **options: Any,
    ) -> Dataset:
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        options |= {"truncate": how, "cache_dir": tmp_path / "cache", "preference": wanted}
        return load_dataset(str(path), tokenizer_folder, limit, prompts, **options)

    return run


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were tokenized, build by build."""
    seen: list[str] = []
    build = store._build

    def counted(cache: Cache, wanted: Recipe, *rest: Any) -> Path:
        seen.append(wanted.names)
        return build(cache, wanted, *rest)

    monkeypatch.setattr(store, "_build", counted)
    return seen
