"""An adapter for peft names a base that peft can load, and is whole or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.checkpoint import adapter
from models.checkpoint.layout import ADAPTER, Manifest
from models.conversion.check_adapter import check_adapter
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from tests.disks import fill, small_disk
from tests.hub import COMMIT, NAME
from tests.models.adapters import save_run
from tests.models.helpers import random_ids
from training.checkpoint.side_files import read_side_files

Make = Callable[..., Path]
OBSTACLE = "is in the pipeline layout"


def exported(model: Path, base: Path, target: Path) -> dict[str, object]:
    """Settings in the export of a run whose base is `base`, a copy of `model` in some layout."""
    run = save_run(read_spec(model).training(Trained(Lora(r=2, targets=("q_proj",)))), model, base)
    pp_to_hg(run, target)
    found: dict[str, object] = json.loads((target / ADAPTER).read_text())
    return found


def test_the_base_is_the_folder_that_the_layers_came_from(make_checkpoint: Make, tmp_path: Path) -> None:
    model, base = make_checkpoint("llama"), tmp_path / "layers"
    hg_to_pp(model, base)
    assert exported(model, base, tmp_path / "peft")["base_model_name_or_path"] == str(model)
    ids = random_ids(1, 8)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")(input_ids=ids).logits
    torch.testing.assert_close(found, load_model(tmp_path / "peft")(ids), atol=1e-4, rtol=1e-4)
    assert not any(OBSTACLE in line for line in check_adapter(tmp_path / "peft")[1])


@pytest.mark.parametrize("converted", [False, True])
def test_a_base_of_the_hub_is_named_as_there(
    converted: bool, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its folder in the hub's cache is gone; and found by that name."""
    model = make_checkpoint("llama")
    cached = tmp_path / f"hub/models--{NAME.replace('/', '--')}/snapshots/{COMMIT}"
    shutil.copytree(model, cached)
    base = cached
    if converted:
        base = tmp_path / "layers"
        hg_to_pp(cached, base)
        shutil.rmtree(tmp_path / "hub")
    settings = exported(model, base, tmp_path / "peft")
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, COMMIT)
    monkeypatch.setattr(adapter, "find_model", {f"{NAME}@{COMMIT}": model}.__getitem__)
    assert adapter.base_folder(tmp_path / "peft") == model


@pytest.mark.parametrize("why", ["moved", "a run's", "unknown"])
def test_a_base_that_peft_cannot_load_is_told(why: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """The folder that it came from is gone; the base was trained since; another program wrote the layers."""
    model, origin, base = make_checkpoint("llama"), tmp_path / "original", tmp_path / "layers"
    shutil.copytree(model, origin)
    hg_to_pp(origin, base)
    if why == "moved":
        origin.rename(tmp_path / "elsewhere")
    elif why == "unknown":
        (base / "pipetune.json").unlink()
    else:
        for name, content in read_side_files(base, read_spec(base)).items():
            (base / name).write_bytes(content)
        manifest = Manifest.read(base)
        assert manifest is not None and manifest.origin is None
    assert exported(model, base, tmp_path / "peft")["base_model_name_or_path"] == str(base)
    _, lines = check_adapter(tmp_path / "peft")
    (line,) = (line for line in lines if OBSTACLE in line)
    assert "peft" in line and str(base) in line and "base_model_name_or_path" in line


@pytest.mark.parametrize("name", ["gone", "x" * 5000, "", "\0"])
def test_a_base_that_is_not_there_is_named(name: str, make_checkpoint: Make, tmp_path: Path) -> None:
    model = make_checkpoint("llama")
    settings = exported(model, model, tmp_path / "peft")
    (tmp_path / "peft" / ADAPTER).write_text(json.dumps(settings | {"base_model_name_or_path": name}))
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path: .*demo.py --model BASE --adapter DIR"):
        load_model(tmp_path / "peft")


def test_a_full_disk_is_told_in_a_line(make_checkpoint: Make, tmp_path: Path) -> None:
    model = make_checkpoint("llama")
    run = save_run(read_spec(model).training(Trained(Lora(r=2))), model)
    with small_disk(tmp_path / "disk", 1) as (disk, is_one):
        if not is_one:
            pytest.skip("no file system can be mounted here")
        filler = fill(disk)
        with open(filler, "r+b") as file:
            file.truncate(filler.stat().st_size - 2**14)
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device; nothing was changed"):
            pp_to_hg(run, disk / "peft")
        assert [path.name for path in disk.iterdir()] == [filler.name]
        filler.unlink()
        pp_to_hg(run, disk / "peft")


@pytest.mark.parametrize(("module", "found"), [("embed_out", False), ("embed_in", True), ("input_layernorm", True)])
def test_a_module_that_peft_would_pass_over_is_refused(
    module: str, found: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    """transformers reads `embed_out` of GPT-NeoX into a module that it calls `lm_head`."""
    model = make_checkpoint("gpt_neox")
    lora = Lora(r=2, targets=("query_key_value",), modules_to_save=(module,))
    run = save_run(read_spec(model).training(Trained(lora)), model)
    if not found:
        with pytest.raises(CheckpointError, match="embed_out: peft has no module of this name; expected --merge"):
            pp_to_hg(run, tmp_path / "peft")
        return
    pp_to_hg(run, tmp_path / "peft")
    ids = random_ids(1, 8)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")(input_ids=ids).logits
    torch.testing.assert_close(theirs, load_model(run)(ids), atol=1e-4, rtol=1e-4)
