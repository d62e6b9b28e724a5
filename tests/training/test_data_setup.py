"""What a run refuses of its records before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.log import Log
from data.errors import DataError
from data.tokenized.dataset import check_vocabulary
from models.spec import ModelSpec
from tests.conftest import FAQ
from tests.launching import write_config
from training.config.yaml_file import load_config
from training.data_setup import RecordReader

SMALL = 300  # tokens: special ones, bytes, and few of the merges


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", vocab_size=SMALL)


def check(model: Path, tmp_path: Path, **keys: Any) -> None:
    config = load_config(write_config(tmp_path / "run.yml", model_path=str(model), **keys))
    reader = RecordReader(config, model, Log(quiet=True))
    data = reader.stream() if config.stream_gb else reader.read("data", config.data_path)
    check_vocabulary(reader.tokenizer, int(ModelSpec.from_folder(model).config.vocab_size), data)


def test_tokens_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"gives ids up to \d+, but the model's vocab_size is {SMALL}; expected"):
        check(model, tmp_path, data_path=str(FAQ))
    with pytest.raises(DataError, match=r"gives ids up to 511"):  # nobody knows yet which
        check(model, tmp_path, data_path=str(FAQ), stream_gb=0.001, max_steps=1)


def test_a_tokenizer_may_have_tokens_that_no_record_needs(model: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    records.write_text('[{"type": "pretrain", "text": "zq QZ"}]', encoding="utf-8")
    check(model, tmp_path, data_path=str(records))
