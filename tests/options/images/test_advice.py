"""Whatever plans advise, searches try and --auto chooses for records with images, a run does not refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.adapters import is_factor
from models.api import read_spec
from models.family import EYES
from options import RunConfig, load_config
from options.images.model import seeing_model, training_tower
from options.planner.command import plan_run
from options.planner.inputs import Basis, Images
from options.planner.search import Advice, advise, candidates
from tests.conftest import FAQ
from tests.models.images.conftest import golden_of
from tests.models.images.golden import Golden
from tests.options.planner.auto.helpers import auto
from tests.options.planner.helpers import basis_of, config_of
from tests.options.planner.test_command import arguments
from training.config.deepspeed_config import check_sharing

LONG = 16_384  # tokens of a row, for which a run on text is advised to pass in chunks and to share them
IMAGES = Images(number=2.0, tokens=30.0, most=60)
REFUSED = ("schedule: weight_streaming", "row_chunk", "model_topo.sequence")
GPU = "8xA100-40G"


@pytest.fixture(scope="module")
def llava(shared: Path) -> Golden:
    return golden_of(shared, "llava-tiny")


def plain_and_seeing(golden: Golden, folder: Path, train: Any = "nothing", **keys: Any) -> tuple[Basis, Basis]:
    """A plan's inputs for rows of text, and for rows with images."""
    config = config_of(folder, 2, max_seq_len=LONG, use_grad_ckpt=False, vision={"train": train}, **keys)
    seeing = basis_of(training_tower(golden.spec, train), config, GPU)
    plain = replace(seeing, spec=golden.spec.blind, known={})
    return plain, replace(seeing, workload=replace(seeing.workload, images=IMAGES))


def too_small(basis: Basis) -> list[Advice]:
    """What is advised where nothing fits."""
    return advise(replace(basis, device=replace(basis.device, memory=500_000)))


@pytest.mark.slow
def test_nothing_is_advised_that_a_run_refuses(llava: Golden, tmp_path: Path) -> None:
    plain, seeing = map(too_small, plain_and_seeing(llava, tmp_path, zero_optimization={"stage": 1}))
    of_text, changes = ([each.change for each in found] for found in (plain, seeing))
    assert [change for change in of_text if change.startswith(REFUSED[:2])], "else this shows nothing"
    assert changes and not [change for change in changes if change.startswith(REFUSED)]
    for each in seeing:
        basis = each.best.basis  # type: ignore[union-attr]  # a pipeline's, as no other schedule is left
        check_sharing(basis.config, basis.spec)


@pytest.mark.parametrize("train", ["nothing", "all"])
def test_adapters_are_advised_as_far_as_the_tower_is_trained(train: str, llava: Golden, tmp_path: Path) -> None:
    _, seeing = plain_and_seeing(llava, tmp_path, train)
    (found,) = (each for each in too_small(seeing) if each.change == "lora: true, which trains adapters")
    names = found.alone.basis.trained_names[0]  # type: ignore[union-attr]
    assert all(map(is_factor, names))
    assert any(name.startswith(f"{EYES}.") for name in names) == (train == "all")


def test_a_search_tries_nothing_that_a_run_refuses(llava: Golden, tmp_path: Path) -> None:
    plain, seeing = plain_and_seeing(llava, tmp_path)
    tried = {}
    for name, basis in (("text", plain), ("images", seeing)):
        tried[name] = [each.config for each in candidates(basis, 4, ())]
    for config in tried["images"]:
        check_sharing(config, seeing.spec)
    for name, configs in tried.items():
        chunked = {config.model_dump()["row_chunk"] for config in configs}
        shared = {config.model_topo.sequence for config in configs}
        assert (len(chunked) > 1, len(shared) > 1) == (name == "text", name == "text")


@pytest.mark.parametrize("records", ["images", "text"])
def test_a_searched_plan_shows_no_schedule_that_a_run_refuses(
    records: str, llava: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = llava.folder / "records.json" if records == "images" else FAQ
    keys: dict[str, Any] = {"train_batch_size": 8, "max_seq_len": 256, "model_path": str(llava.folder)}
    config = config_of(tmp_path, 2, data_path=str(data), cache_dir=str(tmp_path / "cache"), **keys)
    plan_run(config, arguments(devices="2xA100-40G", search=True))
    said = capsys.readouterr().out
    assert ("weight streaming: " in said) == (records == "text")
    assert ("images: " in said) == (records == "images")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava-tiny", "qwen3_vl-tiny"])
def test_what_auto_writes_is_a_run_that_sees(name: str, shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, name)
    path = auto(golden.folder, tmp_path / "run", "vision.train=all", data=golden.folder / "records.json")
    config = load_config(path)
    assert isinstance(config, RunConfig) and config.vision.train == "all"
    spec = seeing_model(config, read_spec(golden.folder))
    check_sharing(config, spec)
    parts = config.model_topo.parts or []
    assert parts[0] >= spec.first_layers
