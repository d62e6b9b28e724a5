"""Shows that the export of a run's checkpoint carries a model card, and that of other layers carries none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from common.version import VERSION
from models.conversion.to_pipeline import hg_to_pp
from tests.conftest import CHATML
from tests.models.command_line import convert
from tests.models.helpers import copy_of
from training.checkpoint.folder import CheckpointRecord, DataOrder
from training.config.keys import TrainConfig
from training.metrics import run_info
from training.metrics.run_info import write_run_info
from training.topology import Topology

TOPOLOGY = Topology(stages=2, replicas=1, zero_stage=1, parts=[3, 2])
ORDER = DataOrder(samples=20, fingerprint="0", seed=42, train_batch_size=8, dataloader_drop_last=False)


def lines_of(steps: int) -> list[dict[str, object]]:
    numbers = {"epoch": 1, "samples": 8, "tokens": 1000, "supervised": 400, "lr": 1e-4, "tokens_per_s": 5.0}
    return [{"step": step, "loss": 4.0 / step, "peak_memory": [1, 2], **numbers} for step in range(1, steps + 1)]


def run_from(base: Path, run: Path) -> Path:
    """A run's folder as its own writers leave it, with a checkpoint after step 2 of 3."""
    run.mkdir()
    data = {"path": str(run / "facts.json"), "repeat": 2}
    keys = {"model_path": str(base), "data_path": [data], "save_path": str(run), "train_batch_size": 8}
    (run / "turns.jinja").write_text(CHATML)
    keys["prompt_format"] = str(run / "turns.jinja")
    topo = {"process_topology": {"axes": ["pipe", "data"], "dims": [2, 1]}, "parts": TOPOLOGY.parts}
    config = TrainConfig.model_validate(keys | {"model_topo": topo, "optimizer": {"type": "Lion"}})
    write_run_info(run, config, TOPOLOGY.parts)
    lines = [*lines_of(3), {"step": 2, "eval_loss": 2.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hg_to_pp(base, run / "step-000002")
    CheckpointRecord(step=2, topology=TOPOLOGY, data=ORDER).write(run / "step-000002")
    (run / "latest").write_text("step-000002")
    return run


def test_export_of_a_run_has_a_card(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = copy_of(make_checkpoint("llama"), tmp_path / "llama")
    (base / "README.md").write_text("The base model.\n")
    run = run_from(base, tmp_path / "polite")
    assert convert("pp_to_hg", run, tmp_path / "out") == (0, [])

    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["pipetune"]}
    assert "# polite" in card.text
    for message in (
        f"| base model | {tmp_path.name}/llama |",
        "| data | facts.json |",
        "| samples | 16, of 2,000 tokens, 800 of them with loss |",
        "| steps | 2 |",
        "| epochs | 1 |",
        "| loss | 4 in the first step, 2 in the last |",
        "| evaluation loss | 2.5 |",
    ):
        assert message in card.text
    revision = json.loads((run / "run.json").read_text())["git"]["revision"]
    assert f"| Pipetune | {VERSION}, revision {revision}" in card.text
    settings = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert (settings["optimizer"]["type"], settings["prompt_format"]) == ("Lion", "turns.jinja")
    assert str(tmp_path) not in card.content  # the paths of the machine are nobody's business
    assert (tmp_path / "out" / "training.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "README.base.md").read_text() == "The base model.\n"


def test_a_copy_of_the_code_that_is_no_clone_has_its_version(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_info, "CODE", tmp_path)
    run = run_from(make_checkpoint("llama"), tmp_path / "run")
    assert convert("pp_to_hg", run, tmp_path / "out") == (0, [])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"| Pipetune | {VERSION} |" in card
    assert f"pipetune {VERSION}" not in card, "it is named once"


def test_layers_of_no_run_get_no_card(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    run = run_from(make_checkpoint("llama"), tmp_path / "run")
    copy_of(run / "step-000002", tmp_path / "elsewhere" / "copy")
    torn = run_from(make_checkpoint("llama"), tmp_path / "torn")
    (torn / "run.json").write_text('{"config": ')
    (run / "step-000002" / "checkpoint.json").unlink()
    for number, layers in enumerate([run / "step-000002", tmp_path / "elsewhere" / "copy", torn]):
        target = tmp_path / f"out{number}"
        assert convert("pp_to_hg", layers, target) == (0, [])
        assert not (target / "README.md").exists()
        assert not (target / "training.png").exists()
