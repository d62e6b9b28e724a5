"""Adapters in the tower of a model of images: peft, and transformers with the merged model, give the same logits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import CausalLM
from models.adapters import Lora, Trained, is_factor
from models.api import read_spec
from models.checkpoint.adapter import AdaptedStates
from models.checkpoint.layout import ADAPTER, layer_file
from models.checkpoint.side_files import copy_side_files
from models.checkpoint.source import open_source
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.derived.proof import CPU
from models.errors import CheckpointError
from models.images import reached
from models.images.small import token_types
from models.spec import ModelSpec
from options import RunConfig
from options.images.model import seeing_model
from tests.models.adapters import RandomFactors
from tests.models.images.conftest import golden_of
from tests.models.images.golden import Golden
from training.errors import ConfigError
from training.trained import adapter_file, check_same_base, in_checkpoint, with_trained


def adapted(golden: Golden, train: Any, targets: Any = "all-linear") -> ModelSpec:
    lora = Lora(r=2, alpha=6, targets=targets, beside=reached(golden.spec, train))
    return golden.spec.training(Trained(lora))


def save_run(spec: ModelSpec, base: Path, folder: Path) -> Path:
    """Write the checkpoint of a run whose adapters are random numbers."""
    folder.mkdir()
    copy_side_files(base, folder, in_checkpoint(spec).base)
    for name, content in adapter_file(spec, base).items():
        (folder / name).write_bytes(content)
    for layer in range(spec.n_layers):
        torch.save(RandomFactors(spec).read(layer, spec.trained_names(layer)), folder / layer_file(layer))
    return folder


def by_transformers(model: Any, golden: Golden, sample: int) -> Tensor:
    ids = golden.ids(sample)[None]
    inputs = dict(zip(golden.sees.inputs, golden.images(sample), strict=True))
    types = token_types(model.get_base_model() if isinstance(model, PeftModel) else model, ids)
    found: Tensor = model(input_ids=ids, **inputs, **types, use_cache=False).logits[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "targets"),
    [
        ("llava-tiny", "all", "all-linear"),
        ("llava-tiny", "projector", ("q_proj", "linear_1")),
        ("qwen2_5_vl-tiny", "all", r".*\.(q_proj|qkv)"),
        ("qwen3_vl-tiny", "all", "all-linear"),
        ("gemma3-tiny", "all", "all-linear"),
        ("mistral3-tiny", "all", ("q_proj", "merging_layer")),
    ],
)
def test_peft_and_the_merged_model_see_what_a_run_saw(
    name: str, train: str, targets: Any, shared: Path, tmp_path: Path
) -> None:
    golden = golden_of(shared, name)
    spec = adapted(golden, train, targets)
    of_tower = [each for each in spec.trained_names(0) if each.startswith("eyes.")]
    assert of_tower and all(map(is_factor, of_tower))
    run = save_run(spec, golden.folder, tmp_path / "run")
    states = AdaptedStates(open_source(golden.folder, spec.base), spec, RandomFactors(spec))
    ours = CausalLM(spec, states, torch.float32, CPU).eval()
    with torch.no_grad():
        wanted = ours(golden.ids(0)[None], images=golden.images(0))[0]
    assert (wanted - golden.logits(0)).abs().max() > 1e-2

    pp_to_hg(run, tmp_path / "adapter")
    whole: Any = transformers.AutoModelForImageTextToText
    beside = PeftModel.from_pretrained(whole.from_pretrained(golden.folder), tmp_path / "adapter").eval()
    torch.testing.assert_close(by_transformers(beside, golden, 0).detach(), wanted, rtol=0, atol=5e-5)
    ours.zero_grad()
    ours(golden.ids(0)[None], images=golden.images(0)).square().mean().backward()
    trainable = PeftModel.from_pretrained(
        whole.from_pretrained(golden.folder), tmp_path / "adapter", is_trainable=True
    ).eval()
    by_transformers(trainable, golden, 0).square().mean().backward()
    gradients = {name: weight.grad for name, weight in trainable.named_parameters()}
    for each in of_tower:
        path = f"base_model.model.model.{each.removeprefix('eyes.')}.default.weight"
        found, expected = ours.layers[0].get_parameter(each).grad, gradients[path]
        assert (found is None) == (expected is None), each
        if found is not None and expected is not None:
            assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-8, each

    pp_to_hg(run, tmp_path / "merged", options=ExportOptions(merge=True))
    merged = whole.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(by_transformers(merged, golden, 0).detach(), wanted, rtol=0, atol=5e-5)


def test_only_the_part_of_the_tower_that_is_trained_has_adapters(shared: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    spec = adapted(golden, "projector", ("q_proj", "linear_1"))
    assert [name for name in spec.trained_names(0) if name.startswith("eyes.")] == [
        "eyes.multi_modal_projector.linear_1.lora_A",
        "eyes.multi_modal_projector.linear_1.lora_B",
    ], "the tower's own q_proj is not the projector's"
    assert spec.trained.lora
    quantized = spec.training(Trained(replace(spec.trained.lora, base="nf4")))
    assert quantized.packed_names(1) and not quantized.packed_names(0), "the tower keeps its bits"
    without = spec.training(Trained(replace(spec.trained.lora, beside=(), modules_to_save=("q_proj",))))
    assert not [name for name in without.trained_names(0) if name.startswith("eyes.")]


def test_an_adapter_is_refused_beside_another_tower(shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    run = save_run(adapted(golden, "nothing"), golden.folder, tmp_path / "run")
    text = (run / ADAPTER).read_text(encoding="utf-8")
    begin = text.index('"saw_images": "') + len('"saw_images": "')
    other = "0" if text[begin] != "0" else "1"
    (run / ADAPTER).write_text(text[:begin] + other + text[begin + 1 :], encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"not the tower of images that the adapter in .* was trained with"):
        pp_to_hg(run, tmp_path / "merged", options=ExportOptions(merge=True))


def test_a_run_does_not_go_on_beside_another_tower(shared: Path, tmp_path: Path) -> None:
    golden = golden_of(shared, "llava-tiny")
    spec = adapted(golden, "projector")
    run = save_run(spec, golden.folder, tmp_path / "run")
    other = shutil.copytree(golden.folder, tmp_path / "other", copy_function=shutil.copyfile)
    for path in (other, *other.rglob("*")):
        path.chmod(0o755)
    check_same_base(run, other, spec, tmp_path / "notes")
    state = load_file(other / "model.safetensors")
    (name,) = [each for each in state if each.endswith("encoder.layers.0.mlp.fc1.bias")]
    save_file(state | {name: state[name] + 1e-3}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"model_path: .*: not the tower of images that the adapter in .* was trained"
    ):
        check_same_base(run, other, spec, tmp_path / "notes")


def config(folder: Path, **keys: Any) -> RunConfig:
    own = {"model_path": str(folder), "data_path": "d", "save_path": "s", "train_batch_size": 4}
    own |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return RunConfig.model_validate(own | keys)


@pytest.mark.parametrize(
    ("name", "train", "targets", "line"),
    [
        ("llava-tiny", "all", ["q_proj", "linear_9"], "lora.targets: 'linear_9' matches no layer of this model"),
        ("llava-tiny", "projector", ["up_proj"], "vision.train: projector: lora.targets names no linear layer there"),
        ("gemma3-tiny", "projector", "all-linear", "vision.train: projector: lora.targets names no linear layer"),
        ("llava-tiny", "all", ["q_proj", "linear_1"], ""),
        ("llava-tiny", "nothing", ["q_proj", "linear_1"], "lora.targets: 'linear_1' matches no layer of this model"),
    ],
)
def test_names_of_the_tower_are_checked(name: str, train: str, targets: Any, line: str, shared: Path) -> None:
    folder = golden_of(shared, name).folder
    asked = config(folder, lora={"r": 2, "targets": targets}, vision={"train": train})
    if not line:
        found = seeing_model(asked, with_trained(read_spec(folder), asked))
        adapted_there = [each for each in found.trained_names(0) if each.startswith("eyes.")]
        assert any("linear_1" in each for each in adapted_there) and any("q_proj" in each for each in adapted_there)
        return
    with pytest.raises(ConfigError, match=line):
        seeing_model(asked, with_trained(read_spec(folder), asked))
