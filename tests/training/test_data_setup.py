"""What a run refuses of its records before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.log import Log
from data.errors import DataError
from data.tokenized.dataset import Dataset, check_vocabulary
from models.api import read_spec
from options import load_config
from tests.conftest import FAQ
from tests.launching import write_config
from training.data_setup import RecordReader

SMALL = 300  # tokens: special ones, bytes, and few of the merges


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", vocab_size=SMALL)


def check(model: Path, tmp_path: Path, **keys: Any) -> None:
    config = load_config(write_config(tmp_path / "run.yml", model_path=str(model), **keys))
    reader = RecordReader(config, model, Log(quiet=True))
    data = reader.read("data", config.data_path)
    check_vocabulary(reader.tokenizer, int(read_spec(model).config.vocab_size), data)


def test_tokens_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"gives ids up to \d+, but the model's vocab_size is {SMALL}; expected"):
        check(model, tmp_path, data_path=str(FAQ))


def test_a_tokenizer_may_have_tokens_that_no_record_needs(model: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    records.write_text('[{"type": "pretrain", "text": "zq QZ"}]', encoding="utf-8")
    check(model, tmp_path, data_path=str(records))


def written(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps([{"type": "pretrain", "text": text} for text in texts]), encoding="utf-8")
    return path


def sets(model: Path, tmp_path: Path, **keys: Any) -> tuple[Dataset, Dataset | None]:
    """What a run with these keys trains on, and what it evaluates on."""
    config = load_config(write_config(tmp_path / "run.yml", model_path=str(model), **keys))
    data, held_out = RecordReader(config, model, Log(quiet=True)).read_sets()
    assert isinstance(data, Dataset)
    return data, held_out


def test_a_share_of_the_samples_is_held_out_and_none_of_it_is_trained_on(model: Path, tmp_path: Path) -> None:
    texts = [f"number {number}" for number in range(50)]
    path = written(tmp_path / "d.json", texts + texts[:20])  # some stand twice
    data, held_out = sets(model, tmp_path, data_path=str(path), eval_share=0.2)
    assert held_out is not None
    assert len(held_out) == 10 == len(set(held_out.digests.tolist()))
    assert not set(data.digests.tolist()) & set(held_out.digests.tolist())
    assert set(data.digests.tolist()) | set(held_out.digests.tolist()) == set(
        sets(model, tmp_path, data_path=str(path))[0].digests.tolist()
    )
    again, other = (sets(model, tmp_path, data_path=str(path), eval_share=0.2, seed=seed)[1] for seed in (42, 43))
    assert again is not None and other is not None
    assert again.fingerprint() == held_out.fingerprint() != other.fingerprint()


def test_a_share_is_at_least_one_sample_and_leaves_one(model: Path, tmp_path: Path) -> None:
    data, held_out = sets(model, tmp_path, data_path=str(written(tmp_path / "2.json", ["a", "b"])), eval_share=0.01)
    assert held_out is not None and (len(data), len(held_out)) == (1, 1)
    with pytest.raises(DataError, match=r"^eval_share: 0.01 of 1 different samples leaves none to train on$"):
        sets(model, tmp_path, data_path=str(written(tmp_path / "1.json", ["a", "a"])), eval_share=0.01)
