"""`pp_to_hg` holds a run's checkpoint against the sums in its record, as a resume does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint.adapter import AdaptedStates
from models.checkpoint.adapter_settings import peft_config
from models.checkpoint.digest import DIGEST, model_digest
from models.checkpoint.layout import ADAPTER, RECORD, layer_file
from models.checkpoint.source import open_source
from models.checkpoint.tensor_files import save_state_dict
from models.conversion.to_pipeline import hg_to_pp
from tests.models.adapters import RandomFactors
from tests.models.command_line import convert, refusal
from tests.training.checkpoint.test_folder import DATA, TOPOLOGY, flip, truncate
from training.checkpoint.folder import CheckpointRecord, file_record
from training.config.objective import LoraSection
from training.engine.pipeline import PipelineTrainer
from training.errors import RunRefused
from training.language_model import LanguageModel

OTHER = "mp_rank_00_model_states.pt"  # of the optimizer, which an export does not read


def save_doubled(path: Path) -> None:
    """Write other numbers into a file of the same size."""
    save_state_dict({name: 2 * each for name, each in torch.load(path, weights_only=True).items()}, path)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "is damaged: its checksum differs"),
    "cut short": (truncate, "is shorter than recorded: "),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is longer than recorded: "),
    "of another step": (save_doubled, "is damaged: its checksum differs"),
}
KINDS: dict[str, tuple[str, ...]] = {"whole": (), "adapter": (), "merged": ("--merge",)}


def record(folder: Path, hosts: bool = False) -> None:
    """Write the record of a run whose files these are."""
    (folder / OTHER).write_bytes(b"moments")
    written = {path.name: file_record(path) for path in folder.iterdir() if path.is_file()}
    files = {"hosts": {"one": written, "two": {}}, "host": "one"} if hosts else {"files": written}
    CheckpointRecord.model_validate({"step": 3, "topology": TOPOLOGY, "data": DATA, **files}).write(folder)


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, folder = make_checkpoint("llama"), tmp_path_factory.mktemp("checkpoints")
    hg_to_pp(base, folder / "whole")
    shutil.copytree(folder / "whole", folder / "adapter", ignore=shutil.ignore_patterns("layer_*"))
    spec = read_spec(base).training(Trained(Lora(r=2, alpha=6)))
    states = AdaptedStates(open_source(base, spec.base), spec, RandomFactors(spec))
    for layer in range(spec.n_layers):
        state = states.read_layer(layer)
        save_state_dict(
            {each: state[each] for each in spec.trained_names(layer)}, folder / "adapter" / layer_file(layer)
        )
    settings = peft_config(spec, str(base)) | {DIGEST: model_digest(open_source(base, spec.base))}
    (folder / "adapter" / ADAPTER).write_text(json.dumps(settings))
    for kind in ("whole", "adapter"):
        record(folder / kind)
    return {"whole": folder / "whole", "adapter": folder / "adapter", "merged": folder / "adapter", "base": base}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_not_as_it_was_written_is_refused(
    kind: str, harm: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints[kind], folder)
    assert convert("pp_to_hg", folder, tmp_path / "export", *KINDS[kind]) == (0, [])
    hurt, reason = HARMS[harm]
    hurt(folder / layer_file(2))
    line = refusal("pp_to_hg", folder, tmp_path / "again", *KINDS[kind])
    assert f"{folder}: {layer_file(2)} {reason}" in line and "expected" in line


def test_what_an_export_does_not_read_does_not_matter(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["whole"], folder)
    flip(folder / OTHER)
    assert convert("pp_to_hg", folder, tmp_path / "export") == (0, [])


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_text_that_somebody_changed_is_named_and_taken(
    name: str, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["whole"], folder)
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert convert("pp_to_hg", folder, tmp_path / "export") == (0, [])
    (line,) = caplog.messages
    assert line.startswith(f"warning: {folder}: {name} is longer than recorded")


def test_a_base_that_moved_can_be_named(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["adapter"], folder)
    shutil.copytree(checkpoints["base"], tmp_path / "moved")
    settings = json.loads((folder / ADAPTER).read_text()) | {"base_model_name_or_path": str(tmp_path / "moved")}
    (folder / ADAPTER).write_text(json.dumps(settings))
    assert convert("pp_to_hg", folder, tmp_path / "export", "--merge") == (0, [])
    (line,) = caplog.messages
    assert ADAPTER in line


def test_a_damaged_base_of_an_adapter_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """It may be a checkpoint of a run too."""
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["adapter"], folder)
    shutil.copytree(checkpoints["whole"], tmp_path / "base")
    settings = json.loads((folder / ADAPTER).read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    (folder / ADAPTER).write_text(json.dumps(settings))
    record(folder)
    assert convert("pp_to_hg", folder, tmp_path / "export", "--merge") == (0, [])
    flip(tmp_path / "base" / layer_file(3))
    line = refusal("pp_to_hg", folder, tmp_path / "again", "--merge")
    assert f"{tmp_path / 'base'}: {layer_file(3)} is damaged" in line


def test_hosts_have_records_of_their_own_files(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["whole"], folder)
    record(folder, hosts=True)
    assert convert("pp_to_hg", folder, tmp_path / "export") == (0, [])
    flip(folder / layer_file(0))
    assert f"{layer_file(0)} is damaged" in refusal("pp_to_hg", folder, tmp_path / "again")


@pytest.mark.parametrize("content", ["{", "[]", '{"files": {"layer_00-model_states.pt": 3}}', '{"files": 1}', "{}"])
def test_a_damaged_record_is_refused(content: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["whole"], folder)
    (folder / RECORD).write_text(content)
    assert f"{folder}: {RECORD} is damaged" in refusal("pp_to_hg", folder, tmp_path / "export")


def test_a_folder_without_a_record_says_where_it_is_cut(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["whole"], folder)
    (folder / RECORD).unlink()
    truncate(folder / layer_file(1))
    line = refusal("pp_to_hg", folder, tmp_path / "export")
    assert f"{folder / layer_file(1)}: " in line and "cut short" in line


@pytest.mark.parametrize("key", ["model_path", "lora.start_from", "distillation.teacher"])
def test_a_run_that_begins_with_a_damaged_checkpoint_is_refused(
    key: str, checkpoints: dict[str, Path], tmp_path: Path, group: None
) -> None:
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoints["adapter" if key == "lora.start_from" else "whole"], folder)
    places = {"model_path": checkpoints["base"], "lora.start_from": None, "distillation.teacher": None} | {key: folder}
    lora = LoraSection(start_from=str(places["lora.start_from"])) if places["lora.start_from"] else None
    task = LanguageModel(PipelineTrainer, read_spec)
    task.model_folder, task._notes = Path(str(places["model_path"])), tmp_path / "notes"
    if teacher := places["distillation.teacher"]:
        task.other_models = {key: (teacher, read_spec(teacher))}
    job: Any = SimpleNamespace(
        progress=SimpleNamespace(checkpoint=None),
        config=SimpleNamespace(from_scratch=False, lora=lora),
        disk=SimpleNamespace(owns_folder=True),
    )
    task.check_weights(job)
    flip(folder / layer_file(2))
    with pytest.raises(RunRefused, match=f"{layer_file(2)} is damaged"):
        task.check_weights(job)
    job.progress.checkpoint = folder  # which a resume has looked at
    task.check_weights(job)
