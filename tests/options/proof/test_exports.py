"""What a proof exports is read back as transformers and peft read it: equal logits of a sound export alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from models.adapters import Lora
from models.conversion import to_huggingface, to_peft
from models.weight_map import WeightMap
from options import RunConfig
from options.proof.exports import compare_exports, plan_exports
from options.proof.samples import EVALUATED
from options.proof.small_run import ADAPTER, MODEL, SmallRun, write_model
from tests.conftest import FAQ

Make = Callable[..., tuple[SmallRun, Path]]
LORA = {"r": 4, "alpha": 16}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


def make_small_run(model: Path, folder: Path, **keys: Any) -> tuple[SmallRun, Path]:
    """The small run of a config, and what stands for its last checkpoint."""
    needed: dict[str, Any] = {
        "model_path": str(model),
        "data_path": str(FAQ),
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "train_batch_size": 8,
    }
    (inside := folder / "proof").mkdir()
    small = SmallRun.make(RunConfig.model_validate(needed | keys), inside, Console(quiet=True))
    checkpoint = inside / "step"
    shutil.copytree(inside / (ADAPTER if small.config.lora else MODEL), checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(small.spec.raw))
    if not small.config.lora:
        write_model(checkpoint, small.spec, seed=7)
    return small, checkpoint


@pytest.fixture
def make_small(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Make:
    def make(family: str, model: dict[str, Any], **keys: Any) -> tuple[SmallRun, Path]:
        return make_small_run(make_checkpoint(family, **model), tmp_path, **keys)

    return make


@pytest.mark.parametrize(
    ("family", "model", "keys", "ways"),
    [
        ("llama", {"tie_word_embeddings": True}, {"bf16": {"enabled": True}}, 1),
        ("gemma2", {"sliding_window": 16}, {}, 1),
        ("chatglm", {"num_layers": 6}, {}, 1),
        ("llama", {}, {"freeze": ["embed_tokens"]}, 1),
        ("mixtral", MIXTRAL, {"lora": LORA, "bf16": {"enabled": True}}, 2),
        ("llama", {}, {"lora": LORA | {"rslora": True}, "fp16": {"enabled": True}}, 2),
        ("chatglm", {"num_layers": 6}, {"lora": LORA}, 1),
    ],
    ids=str,
)
def test_a_sound_export_is_what_was_trained(
    family: str, model: dict[str, Any], keys: dict[str, Any], ways: int, make_small: Make
) -> None:
    small, checkpoint = make_small(family, model, **keys)
    planned, lines = plan_exports(small.spec)
    assert len(planned) == ways and len(lines) == (family == "chatglm" and "lora" in keys)
    rows = compare_exports(small, checkpoint)
    assert [row.what for row in rows] == [f"logits of the exported {name}" for name in planned]
    assert all(row.holds and row.count == EVALUATED for row in rows), rows


def test_what_transformers_has_no_class_for_is_said(make_small: Make) -> None:
    small, checkpoint = make_small("baichuan", {"tie_word_embeddings": False, "num_attention_heads": 4})
    assert compare_exports(small, checkpoint) == []
    (line,) = plan_exports(small.spec)[1]
    assert line == "exports: not read back, as transformers has no class for the small model"


def left_out() -> AbstractContextManager[Any]:
    """An export without one of the weights."""
    plan = to_huggingface.original_infos

    def forgetful(*arguments: Any) -> Any:
        return {name: info for name, info in plan(*arguments).items() if "layers.1.mlp.up_proj" not in name}

    return patch.object(to_huggingface, "original_infos", forgetful)


def exchanged() -> AbstractContextManager[Any]:
    """Keys under the name of values."""
    rename = WeightMap.on_disk

    def exchange(self: WeightMap, layer: int, state: Any) -> Any:
        made = rename(self, layer, state)
        pairs = {name: name.replace("k_proj", "v_proj") for name in made if "k_proj" in name}
        return made | {key: made[value] for key, value in pairs.items()} | {v: made[k] for k, v in pairs.items()}

    return patch.object(WeightMap, "on_disk", exchange)


def other_alpha() -> AbstractContextManager[Any]:
    """An adapter_config.json with another scale than was trained."""
    write = to_peft.peft_config
    return patch.object(to_peft, "peft_config", lambda *words: write(*words) | {"lora_alpha": 8})


def unreadable() -> AbstractContextManager[Any]:
    """An adapter's file that peft does not find."""
    return patch.object(to_peft, "PEFT_WEIGHTS", "adapter.safetensors")


def merged_twice() -> AbstractContextManager[Any]:
    """A merge that adds the factors with twice their scale."""
    scale = Lora.scale.fget  # type: ignore[attr-defined]
    merge = to_huggingface.MergedStates.read_layer

    def doubled(self: Any, layer: int) -> Any:
        with patch.object(Lora, "scale", property(lambda lora: 2 * scale(lora))):
            return merge(self, layer)

    return patch.object(to_huggingface.MergedStates, "read_layer", doubled)


@pytest.mark.parametrize(
    ("fault", "keys", "name"),
    [
        (left_out, {}, "model"),
        (exchanged, {}, "model"),
        (left_out, {"lora": LORA}, "merged model"),
        (merged_twice, {"lora": LORA}, "merged model"),
        (other_alpha, {"lora": LORA}, "adapter"),
        (unreadable, {"lora": LORA}, "adapter"),
    ],
)
def test_a_faulty_export_is_found(
    fault: Callable[[], AbstractContextManager[Any]], keys: dict[str, Any], name: str, make_small: Make
) -> None:
    small, checkpoint = make_small("llama", {}, **keys)
    with fault():
        rows = compare_exports(small, checkpoint)
    assert f"logits of the exported {name}" in [row.what for row in rows if not row.holds], rows
