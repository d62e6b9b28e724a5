"""Adapters that peft makes of transformers' whole model of images and text are read, or refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from models import load_model
from models.adapters import is_factor
from models.api import adapted_spec, read_spec
from models.errors import CheckpointError
from options import RunConfig
from options.images.model import seeing_model
from tests.models.images.conftest import golden_of
from tests.models.images.golden import Golden
from tests.options.images.test_adapters import by_transformers
from training.errors import ConfigError
from training.trained import check_start, with_trained


def adapter_of(golden: Golden, folder: Path, **settings: Any) -> Any:
    """Save an adapter of random numbers; the model with it, as peft has it."""
    torch.manual_seed(0)
    whole: Any = transformers.AutoModelForImageTextToText.from_pretrained(golden.folder, attn_implementation="sdpa")
    model: Any = get_peft_model(whole, LoraConfig(**{"r": 2, "lora_alpha": 6} | settings))
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2 if "lora_" in name else 0.05)
    model.save_pretrained(folder)
    assert (folder / SAFETENSORS_WEIGHTS_NAME).is_file()
    return model.eval()


CASES: list[Any] = [
    ("llava-tiny", {"target_modules": ["q_proj", "v_proj"]}, "of both", ("q_proj", "v_proj")),
    ("llava-tiny", {"target_modules": r".*language_model.*\.(q_proj|up_proj)"}, "of text", ("q_proj", "up_proj")),
    ("llava-tiny", {"target_modules": r".*tower.*q_proj|.*language.*v_proj"}, "of both", None),
    ("qwen2_5_vl-tiny", {"target_modules": "all-linear"}, "of both", None),
    ("qwen3_vl-tiny", {"target_modules": ["linear_fc1", "o_proj"], "use_rslora": True}, "of both", None),
    ("qwen3_5-tiny", {"target_modules": ["in_proj_qkv", "gate_proj"]}, "of text", None),
    ("gemma3-tiny", {"target_modules": ["q_proj"], "exclude_modules": ".*vision_tower.*"}, "of text", ("q_proj",)),
    ("mistral3-tiny", {"target_modules": ["q_proj", "merging_layer"], "modules_to_save": ["lm_head"]}, "of both", None),
    ("mistral3-tiny", {"target_modules": ["q_proj"], "layers_to_transform": [1]}, "of both", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "where", "targets"), CASES)
def test_it_computes_what_peft_computes(
    name: str, settings: dict[str, Any], where: str, targets: Any, shared: Path, tmp_path: Path
) -> None:
    golden = golden_of(shared, name)
    theirs = adapter_of(golden, tmp_path / "adapter", **settings)
    ours = load_model(golden.folder, adapter=tmp_path / "adapter", sees=True)
    lora = ours.spec.trained.lora
    assert lora is not None and (targets is None or set(lora.targets) >= set(targets))
    of_eyes = [each for each in ours.spec.trained_names(0) if each.startswith("eyes.")]
    assert bool(of_eyes) == (where == "of both")

    with torch.no_grad():
        wanted, found = by_transformers(theirs, golden, 0), ours(golden.ids(0)[None], images=golden.images(0))[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
    assert (found - golden.logits(0)).abs().max() > 1e-2
    trained = sum(weight.numel() for weight in theirs.parameters() if weight.requires_grad)
    assert sum(weight.numel() for weight in ours.parameters() if weight.requires_grad) == trained


def config(golden: Golden, adapter: Path, train: str, targets: Any) -> RunConfig:
    own: dict[str, Any] = {"model_path": str(golden.folder), "data_path": "d", "save_path": "s", "train_batch_size": 4}
    lora = {"r": 2, "alpha": 6, "targets": targets, "start_from": str(adapter)}
    own |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "lora": lora, "vision": {"train": train}}
    return RunConfig.model_validate(own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "targets", "line"),
    [
        ("all", ["q_proj", "v_proj"], ""),
        ("nothing", ["q_proj", "v_proj"], r"adapts other parts of the tower of images: eyes\..*expected the targets"),
        ("projector", ["q_proj", "v_proj", "linear_1"], "adapts other parts of the tower of images"),
        ("all", ["q_proj", "v_proj", "linear_1"], "adapts other parts of the tower of images: eyes.multi_modal"),
        ("all", ["q_proj", "v_proj", "down_proj"], r'lora.targets: .* has \["q_proj", "v_proj"\]; expected targets'),
    ],
)
def test_a_run_starts_from_what_it_trains(
    train: str, targets: list[str], line: str, shared: Path, tmp_path: Path
) -> None:
    golden, adapter = golden_of(shared, "llava-tiny"), tmp_path / "adapter"
    adapter_of(golden, adapter, target_modules=["q_proj", "v_proj"])
    asked = config(golden, adapter, train, targets)
    spec = seeing_model(asked, with_trained(read_spec(golden.folder), asked))
    if not line:
        check_start(asked, spec)
        return
    with pytest.raises(ConfigError, match=line):
        check_start(asked, spec)


@pytest.mark.slow
def test_without_eyes_it_is_refused_with_what_to_do(shared: Path, tmp_path: Path) -> None:
    golden, adapter = golden_of(shared, "llava-tiny"), tmp_path / "adapter"
    adapter_of(golden, adapter, target_modules=["q_proj"])
    for sees in (False, True):
        plain = golden.spec if sees else golden.spec.blind
        assert all(map(is_factor, adapted_spec(adapter, plain).trained_names(1)))
    with pytest.raises(CheckpointError, match="an adapter of a whole model of images and text is for records with"):
        load_model(golden.folder, adapter=adapter)
