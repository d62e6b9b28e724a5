"""Runs that tokenize while they train, through the real launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.log import Log
from data.errors import DataError
from data.tokenized.dataset import check_vocabulary
from options import RunConfig, load_config
from options.proof.small_run import small_config
from options.streamed_data.task import stream_of
from tests.conftest import FAQ
from tests.launching import topology, write_config
from tests.options.proof.test_shrink import config_of, whole
from tests.training.checkpoint.test_resume import finished, kill_after, losses
from tests.training.test_data_setup import SMALL
from training.checkpoint.folder import CheckpointRecord, step_folder
from training.checkpoint.resume import check_resumable
from training.config.changes import compare, settings_of
from training.data_setup import RecordReader
from training.errors import ConfigError

STEPS = 10
STREAM = {"stream_gb": 1.0e-5, "max_steps": STEPS}  # less than the records that are handed to a tokenizer together


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for file in range(3):
        lines = [json.dumps({"text": f"{file} and {number}"}) for number in range(600)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.launched
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_last_bit_and_tokenizes_nothing_twice(
    make_checkpoint: Callable[..., Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: dict[str, Any] = {
        "model_path": str(make_checkpoint("llama")),
        "data_path": str(texts),
        "train_batch_size": 200,
        "train_micro_batch_size_per_gpu": 50,
        "max_seq_len": 64,
        "save_interval": 2,
        "model_topo": topology((2, 1)),
    }
    configs = []
    for name in ("straight", "killed"):
        keys = STREAM | {"cache_dir": str(tmp_path / f"{name}-cache")}
        configs.append(write_config(tmp_path / f"2x1-{name}.yml", **shared | keys))
    straight, killed = configs
    printed = finished(straight).stdout
    assert "data: 3 files" in printed
    assert "steps: 10 of 200 samples\n" in printed
    made = [number for number in range(1, 10) if f"data: window {number}, in epoch" in printed]
    assert made == [1, 2, 3, 4, 5], "2,000 samples: an epoch has four windows, the last one a smaller one"
    assert "data: window 5, in epoch 2" in printed
    left = list((tmp_path / "straight-cache" / "streams").glob("*/datasets/*"))
    assert not left, "removed when the run is done"

    kill_after(7, killed, monkeypatch)
    printed = finished(killed).stdout
    assert "resumed: " in printed
    assert "data: window 1, in epoch" not in printed
    assert losses(killed) == losses(straight)
    assert [step for step, _ in losses(straight)] == list(range(1, STEPS + 1))

    saved = step_folder(killed.with_suffix(""), STEPS)
    record = CheckpointRecord.read(saved)
    assert record is not None
    assert [samples for samples, *_ in record.data.windows] == [512, 512, 512, 264, 512]

    # A batch is the same over replicas.
    for config, dims in ((straight, (2, 1)), (killed, (1, 2))):
        again = yaml.safe_load(config.read_text()) | {"max_steps": STEPS + 2, "model_topo": topology(dims)}
        config.write_text(yaml.safe_dump(again))
        finished(config)
    assert losses(killed)[STEPS:] == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(straight)[STEPS:]]

    with pytest.raises(ConfigError, match=r"stream_gb: 1.0, but .* was trained with 1e-05"):
        check_resumable(saved, record, record.data, load_config(killed, ["stream_gb=1.0"]))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"max_steps": None}, "max_steps: expected a number"),
        ({"packing": "dataset"}, "packing: dataset packs whole epochs"),
        ({"stream_gb": 0}, "stream_gb"),
        ({"eval_share": 0.1}, "eval_share: nobody knows all samples of a stream; expected "),
        ({"preference": {}}, "stream_gb: dpo compares"),
        ({"preference": {"loss": "kto"}}, "stream_gb: kto compares"),
        ({"distillation": {"teacher": "t"}}, "stream_gb: a teacher reads all records before the first step"),
    ],
)
def test_what_a_stream_asks_for(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yml", model_path="m", data_path="d", **STREAM | keys)
    with pytest.raises(ConfigError, match=complaint):
        load_config(config)


def test_an_objective_without_a_reference_takes_a_stream(tmp_path: Path) -> None:
    keys = STREAM | {"preference": {"loss": "simpo"}}
    assert load_config(write_config(tmp_path / "run.yml", model_path="m", data_path="d", **keys)).stream_gb == 1e-5


def test_a_run_keeps_its_size_of_a_stream(tmp_path: Path) -> None:
    def settings(**keys: Any) -> dict[str, Any]:
        return settings_of(load_config(write_config(tmp_path / "run.yml", model_path="m", data_path="d", **keys)))

    with pytest.raises(ConfigError, match=r"stream_gb: 1e-05, but step-1 was trained with none"):
        compare(settings(max_steps=STEPS), settings(**STREAM), "step-1", RunConfig.rules)


def test_tokens_that_the_model_does_not_have_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_checkpoint("llama", vocab_size=SMALL)
    keys = STREAM | {"model_path": str(model), "data_path": str(FAQ)}
    config = load_config(write_config(tmp_path / "run.yml", **keys))
    reader = RecordReader(config, model, Log(quiet=True))
    with pytest.raises(DataError, match=r"gives ids up to 511"):  # nobody knows yet which
        check_vocabulary(reader.tokenizer, SMALL, stream_of(config, reader))


def test_a_proof_says_that_it_reads_the_first_window(tmp_path: Path) -> None:
    config = config_of(stream_gb=1, max_steps=1000)
    _, differs = small_config(config, whole("llama", tmp_path / "whole"), config.model_topo, tmp_path)
    assert "stream_gb: the samples of the first window, not streamed" in differs
