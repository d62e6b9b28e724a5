"""`--prove` with images in the records: what the run sees is compared, and what it exports is read with images."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from data.images.pictures import Pictures
from data.records.formats import convert
from data.sample_set import IGNORED, Sample
from models.conversion import to_huggingface
from options.proof.command import CERTIFICATE
from options.proof.exports import compare_exports, plan_exports
from options.proof.images import APART, IN_ONE, SEEN, SIDE, SmallImages
from options.proof.samples import LENGTH, with_images
from tests.conftest import SHARED
from tests.launching import run, topology, write_config
from tests.options.images.test_pairs import pairs
from tests.options.proof.test_exports import make_small_run

VISION = SHARED / "golden" / "vision"
NEEDED = pytest.mark.skipif(not VISION.is_dir(), reason="shared/golden/vision is not here")
ALL: dict[str, Any] = {"vision": {"train": "all"}}
MODELS = "llava qwen2_5_vl qwen3_vl qwen3_5 gemma3 mistral3".split()
WORDS, TOKEN = 300, 299


def prove(model: str, folder: Path, fault: str = "", **keys: Any) -> tuple[int, dict[str, bool], str]:
    """Try to prove a run of a golden folder: the exit code, the verdict on each row, and what was printed."""
    needed: dict[str, Any] = {
        "model_path": str(VISION / f"{model}-tiny"),
        "data_path": str(VISION / f"{model}-tiny" / "records.json"),
        "save_path": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "model_topo": topology((2, 1)),
    }
    config = write_config(folder / "run.yml", **(needed | keys))
    script = "tests/workers/unproved.py" if fault else "train_ds.py"
    result = run(sys.executable, script, "--config", config, "--prove", FAULT=fault)
    printed, certificate = result.stdout + result.stderr, folder / "run" / CERTIFICATE
    assert certificate.is_file(), printed
    rows = json.loads(certificate.read_text(encoding="utf-8"))["rows"]
    return result.returncode, {row["what"]: row["holds"] for row in rows}, printed


@NEEDED
@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        *((model, ALL) for model in MODELS),
        ("llava", {}),
        ("mistral3", {"vision": {"train": "projector"}, "bf16": {"enabled": True}}),
        ("qwen3_vl", {"lora": {"r": 4, "alpha": 8}}),
        ("qwen3_vl", {**ALL, "use_grad_ckpt": True, "model_topo": topology((2, 2), [3, 2])}),
    ],
    ids=str,
)
def test_a_run_with_images_is_proved(model: str, keys: dict[str, Any], tmp_path: Path) -> None:
    code, rows, printed = prove(model, tmp_path, **keys)
    assert code == 0 and all(rows.values()), printed
    assert "images: in 6 of 8 samples" in printed and any(row.startswith("logits of the exported") for row in rows)


@NEEDED
@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("images_exchanged", "llava"),
        ("placeholder_trained", "mistral3"),
        ("axis_short", "qwen2_5_vl"),
        ("features_reordered", "gemma3"),
    ],
)
def test_a_fault_of_images_is_found(fault: str, model: str, tmp_path: Path) -> None:
    code, rows, printed = prove(model, tmp_path, fault, model_topo=topology((1, 1)))
    assert code == 1 and not rows["loss"] and not rows["gradients"], printed


@NEEDED
@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("fault", ["", "images_exchanged"])
def test_preferences_with_images_are_proved_and_their_fault_is_found(fault: str, tmp_path: Path) -> None:
    (file := tmp_path / "pairs.json").write_text(json.dumps(pairs(VISION / "gemma3-tiny")), encoding="utf-8")
    keys = {**ALL, "preference": {"loss": "dpo", "beta": 0.2}, "max_seq_len": 300, "data_path": str(file)}
    code, rows, printed = prove("gemma3", tmp_path, fault, **keys, model_topo=topology((1 if fault else 2, 1)))
    assert (code, rows["loss"] and rows["gradients"]) == ((1, False) if fault else (0, True)), printed


@NEEDED
@pytest.mark.parametrize("model", MODELS)
def test_an_export_is_read_with_images(model: str, tmp_path: Path) -> None:
    folder = VISION / f"{model}-tiny"
    small, checkpoint = make_small_run(folder, tmp_path, data_path=str(folder / "records.json"), train_batch_size=4)
    assert small.spec.family.sees and plan_exports(small.spec)[1] == []
    (row,) = compare_exports(small, checkpoint)
    assert row.holds and row.count == len(small.evaluated), row
    assert {len(sample.get("images", [])) for sample in small.evaluated} == {0, 1, 2}


LARGE_TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
        "rope_theta": 5e6,
    },
}
LARGE_TOWER = {"hidden_size": 1024, "depth": 24, "num_heads": 16, "deepstack_visual_indexes": [5, 11, 17]}


@NEEDED
@pytest.mark.slow
def test_a_large_model_shrinks_with_its_tower(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    shutil.copytree(VISION / "qwen3_vl-tiny", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= LARGE_TEXT
    config["vision_config"] |= LARGE_TOWER | {"out_hidden_size": LARGE_TEXT["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    keys: dict[str, Any] = {"data_path": str(folder / "records.json"), "train_batch_size": 4}
    small, checkpoint = make_small_run(folder, tmp_path, model_topo=topology((2, 1), [20, 18]), **keys)
    assert small.config.model_topo.parts == [4, 2]  # features are added behind three blocks
    assert small.spec.config.vocab_size == 512 and "6 of 38 layers" in small.differs[0]
    (row,) = compare_exports(small, checkpoint)
    assert row.holds, row


@NEEDED
def test_an_export_without_a_weight_of_the_projector_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = VISION / "llava-tiny"
    small, checkpoint = make_small_run(folder, tmp_path, data_path=str(folder / "records.json"), train_batch_size=4)
    plan = to_huggingface.original_infos

    def forgetful(*words: Any) -> Any:
        return {name: info for name, info in plan(*words).items() if "projector.linear_1.weight" not in name}

    monkeypatch.setattr(to_huggingface, "original_infos", forgetful)
    (row,) = compare_exports(small, checkpoint)
    assert not row.holds, row


@NEEDED
def test_images_become_small_and_stand_before_what_is_trained(tmp_path: Path) -> None:
    folder = VISION / "llava-tiny"
    pictures = Pictures(folder)
    image = pictures.look(folder / "images" / "a.png", tmp_path)
    ids = [20, *[pictures.image_token] * image.tokens, *range(30, 130)]
    labels = [IGNORED] * (len(ids) - 40) + ids[-40:]
    sample: Sample = {"input_ids": ids, "labels": labels, "images": [image._replace(begin=1)] * (IN_ONE + 1)}
    made = SmallImages(pictures, TOKEN, WORDS, tmp_path).shorten([sample] * (SEEN + 1))
    first, last = made[0], made[-1]
    assert "images" not in last and TOKEN not in last["input_ids"] and len(last["input_ids"]) == LENGTH
    assert len(first["images"]) == IN_ONE and len(first["input_ids"]) == LENGTH + IN_ONE * image.tokens
    for each in first["images"]:
        place = slice(each.begin, each.begin + each.tokens)
        assert set(first["input_ids"][place]) == {TOKEN} and set(first["labels"][place]) == {IGNORED}
        assert max(each.width, each.height) <= SIDE and Path(each.path).parent == tmp_path
    behind = first["images"][-1].begin + first["images"][-1].tokens
    assert first["labels"][behind] == first["input_ids"][behind] != IGNORED
    assert max(set(first["input_ids"]) - {TOKEN}) < WORDS - APART
    between = first["images"][0].begin + first["images"][0].tokens
    assert between < first["images"][1].begin


def test_half_of_the_samples_have_images_where_there_are_some() -> None:
    tokens = numpy.array([0, 0, 4, 0, 0, 0, 9, 0])
    assert with_images([0, 1, 2, 3], tokens, 4) == [2, 6, 0, 1]
    assert with_images([0, 1, 3], tokens * 0, 2) == [0, 1]


def test_ready_made_ids_take_images_where_their_tokens_stand() -> None:
    image = ["/a.png", "0" * 16, 8, 8, 2, 1, {}]
    (record,) = convert({"input_ids": [5, 7, 7, 6], "placed_images": [image]}, "tokens").records
    assert record.images[0].begin == 1 and record.images[0].tokens == 2
    with pytest.raises(Exception, match="placed_images: expected 3 equal ids for an image from 2 on"):
        convert({"input_ids": [5, 7, 7, 6], "placed_images": [[*image[:4], 3, 2, {}]]}, "tokens")
