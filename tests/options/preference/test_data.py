"""Pairs on their way from a file to global batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.log import Log
from data.errors import DataError
from options import load_config
from options.planner.inputs import Workload
from options.streamed_data.stream import StreamLoader
from options.streamed_data.task import stream_of
from tests.launching import write_config
from tests.training.test_data_setup import SMALL, sets
from training.batches import build_loader
from training.command_line import inspect
from training.data_setup import RecordReader


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama", vocab_size=SMALL)


def pairs(path: Path, count: int) -> Path:
    records = [
        {"prompt": f"What is {number}?", "chosen": "One number. " * (1 + number % 3), "rejected": "A word."}
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


@pytest.mark.parametrize("packing", [False, "batch", "dataset"])
def test_pairs_are_packed_into_rows_that_hold_them(packing: str | bool, model: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model_path": str(model), "max_seq_len": 64, "packing": packing, "preference": {}}
    keys["data_path"] = str(pairs(tmp_path / "pairs.jsonl", 20))
    config = load_config(write_config(tmp_path / "run.yml", **keys))
    data, _ = RecordReader(config, model, Log(quiet=True)).read_sets()
    assert 64 < data.lengths.max() <= 128 and data.first.all()
    loader = build_loader(data, config)
    assert len(loader.collation.documents([0])[0]) == 2 and len(loader.batch(0).samples) >= 8
    assert loader.row_length >= data.lengths.max() and (packing != "dataset" or loader.row_length == 128)
    assert len(loader.batch(0).lengths) == 2 * len(loader.batch(0).samples)
    work = Workload.measured(loader, config)
    assert work.attended <= 64 < work.longest
    assumed = Workload.assumed(config)
    assert (assumed.length, assumed.attended, assumed.tokens) == (128, 64, 8 * 128)
    with pytest.raises(DataError, match="records 1 to 20: preference data"):
        sets(
            model, tmp_path, **{name: value for name, value in keys.items() if name not in ("model_path", "preference")}
        )


def test_pairs_are_streamed(model: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model_path": str(model), "max_seq_len": 64, "preference": {"loss": "simpo"}}
    keys |= {"stream_gb": 0.001, "max_steps": 1, "cache_dir": str(tmp_path / "cache")}
    keys |= {"data_path": str(pairs(tmp_path / "pairs.jsonl", 20))}
    config = load_config(write_config(tmp_path / "run.yml", **keys))
    stream: Any = stream_of(config, RecordReader(config, model, Log(quiet=True)))
    loader = build_loader(stream, config, kind=StreamLoader)
    assert loader.row_length == 128
    batch = loader.batch(0)
    known = list(loader.tensors(batch, 0))
    assert len(batch.samples) == 8 and sum(len(loss[4]) for _, loss in known) == 16 == len(batch.lengths)
    trained = sum(int((labels != -100).sum()) for _, (labels, *_) in known)
    assert trained == batch.supervised > 0
    stream.close()


def test_inspect_shows_a_pair(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {"model_path": str(model), "preference": {}}
    path = write_config(tmp_path / "run.yml", data_path=str(pairs(tmp_path / "pairs.jsonl", 3)), **keys)
    inspect(load_config(path), 1)
    printed = capsys.readouterr().out
    assert "sample 1: chosen " in printed and "; rejected " in printed
    assert printed.index("⟦One number.") < printed.index("⟦A word.")
