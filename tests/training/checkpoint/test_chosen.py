"""Which checkpoint of a run an export takes, and what it says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import CheckpointError
from tests.training.checkpoint.test_folder import whole
from training.checkpoint.chosen import choose_checkpoint
from training.checkpoint.folder import Best
from training.checkpoint.run_folder import name_latest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, the earlier one better."""
    for step in (20, 30):
        name_latest(whole(tmp_path, step))
        (tmp_path / f"step-{step:06d}" / "config.json").write_text("{}")
    Best(checkpoint="step-000020", step=20, measure="eval_error", value=0.05561).write(tmp_path)
    return tmp_path


def test_the_newest_is_taken_and_a_better_one_named(run: Path) -> None:
    folder, lines = choose_checkpoint(run, wants_best=False)
    assert folder == run / "step-000030"
    assert lines == [
        "checkpoint: step-000030, the newest",
        "best: step-000020 by eval_error 0.0556; --best takes it",
    ]


def test_the_best_is_taken_where_it_is_asked_for(run: Path) -> None:
    folder, lines = choose_checkpoint(run, wants_best=True)
    assert (folder, lines) == (run / "step-000020", ["checkpoint: step-000020, the best by eval_error 0.0556"])


def test_a_checkpoint_that_is_given_is_taken(run: Path) -> None:
    folder, lines = choose_checkpoint(run / "step-000020", wants_best=False)
    assert (folder, lines) == (run / "step-000020", ["checkpoint: step-000020, as given"])


def test_without_an_evaluation_there_is_no_best(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (run / "best.json").unlink()
    with pytest.raises(CheckpointError, match=r"--best: no checkpoint of .* was evaluated"):
        choose_checkpoint(run, wants_best=True)
    with pytest.raises(CheckpointError, match=r"--best: .* is no folder of a run"):
        choose_checkpoint(tmp_path_factory.mktemp("model"), wants_best=True)


def test_what_has_no_huggingface_layout_is_told_apart(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (run / "step-000030" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"layers of a script, .* expected load_trained"):
        choose_checkpoint(run, wants_best=False)
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"an adapter in peft's layout, .* expected merge_and_unload"):
        choose_checkpoint(adapter, wants_best=False)


def test_a_best_json_of_earlier_versions_is_read(run: Path) -> None:
    (run / "best.json").write_text('{"checkpoint": "step-000020", "step": 20, "eval_loss": 0.5, "records": ""}')
    assert choose_checkpoint(run, wants_best=True)[1] == ["checkpoint: step-000020, the best by evaluation 0.5000"]
