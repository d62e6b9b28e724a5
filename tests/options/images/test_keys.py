"""What a run with images refuses in a line, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.api import read_spec
from models.images import seeing
from models.spec import ModelSpec
from options import RunConfig
from options.images.model import seeing_model
from tests.launching import topology
from training.errors import ConfigError
from training.trained import with_trained


@pytest.fixture(scope="module")
def deep(shared: Path) -> ModelSpec:
    """A model that adds features of images behind its first two blocks, of three."""
    folder = shared / "golden" / "vision" / "qwen3_vl-tiny"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return seeing(read_spec(folder))


def config(**keys: Any) -> RunConfig:
    own = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 4}
    own |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return RunConfig.model_validate(own | keys)


def staged(dims: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model_topo": topology(dims) | more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"row_chunk": 64}, "row_chunk: the records have images, which lie in whole rows; expected no row_chunk"),
    ({"schedule": "weight_streaming", **staged((2, 1))}, "schedule: weight_streaming: not with images in the records"),
    (staged((1, 2), sequence=2), "model_topo.sequence: not with images in the records, as they lie in whole rows"),
    ({"preference": {"loss": "reward"}}, "preference: not with images in the records; expected records of text alone"),
    ({"labels": ["a", "b"]}, "labels: not with images in the records; expected records of text alone"),
    ({"distillation": {"teacher": "t"}}, "distillation: not with images in the records; expected records of text"),
    ({"mtp": {}}, "mtp: not with images in the records; expected records of text alone"),
    ({"schedule": "dualpipev", **staged((2, 1), parts=[2, 1, 1, 1])}, "parts: .2, 1, 1, 1.: qwen3_vl_text adds"),
    (
        staged((2, 1), parts=[2, 3]),
        "model_topo.parts: .2, 3.: qwen3_vl_text adds features of images behind its first",
    ),
    (staged((4, 1)), "4 stages: qwen3_vl_text needs its first 3 layers in one stage"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_images_do_not_go_with_is_refused(keys: dict[str, Any], message: str, deep: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=message):
        seeing_model(config(**keys), deep)


@pytest.mark.parametrize("train", ["nothing", "projector", "all"])
def test_the_config_says_what_of_the_tower_is_trained(train: str, deep: ModelSpec) -> None:
    found = seeing_model(config(vision={"train": train}, **staged((2, 1))), deep)
    trained = [name for name in found.trained_names(0) if name.startswith("eyes.")]
    every = [name for name in deep.trained_names(0) if name.startswith("eyes.")]
    wanted = {"nothing": [], "projector": [name for name in every if "merger" in name], "all": every}
    assert trained == wanted[train]


def test_contradictions_of_its_keys() -> None:
    for keys, message in (
        ({"vision": {"min_pixels": 9, "max_pixels": 4}}, "min_pixels: 9 is above max_pixels: 4"),
        ({"vision": {"train": "tower"}}, "'nothing', 'projector' or 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**keys)


def test_freeze_is_not_for_the_tower(shared: Path) -> None:
    folder = shared / "golden" / "vision" / "llava-tiny"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    with pytest.raises(ConfigError, match=r"'vision' matches no weight; .* .vision.train is for what sees images"):
        with_trained(read_spec(folder), config(freeze=["vision"]))
