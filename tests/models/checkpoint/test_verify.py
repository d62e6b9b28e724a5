"""Shows that `--verify` reads every tensor back from the disk, and that nothing is published where one differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.checkpoint.source import compare_bytes, forget_cached
from models.conversion import to_huggingface as exporting
from models.conversion import to_pipeline as importing
from tests.models.command_line import convert, refusal
from tests.models.helpers import contents, error_line, read_weights

COMMANDS = {"hg_to_pp": "huggingface", "pp_to_hg": "pipeline"}  # and the layout that each reads
FILES = {
    "hg_to_pp": [f"layer_{layer:02d}-model_states.pt" for layer in range(4)],
    "pp_to_hg": [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)],
}
DAMAGES = [(command, file, "flipped") for command in COMMANDS for file in FILES[command]]
DAMAGES += [(command, FILES[command][0], how) for command in COMMANDS for how in ("halved", "emptied")]


def before_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Do something to each file after it was written and before it is read back."""

    def forget(path: Path) -> None:
        act(path)
        forget_cached(path)

    for module in (importing, exporting):
        monkeypatch.setattr(module, "forget_cached", forget)


@pytest.mark.parametrize("command", COMMANDS)
def test_good_disk_passes_with_every_file_read_back(
    both_layouts: dict[str, Path], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = both_layouts[COMMANDS[command]]
    assert convert(command, source, tmp_path / "plain") == (0, [])
    read_back: list[str] = []
    before_reading(monkeypatch, lambda path: read_back.append(path.name))
    assert convert(command, source, tmp_path / "verified", "--verify") == (0, [])
    assert contents(tmp_path / "verified") == contents(tmp_path / "plain")
    assert sorted(read_back) == FILES[command]


@pytest.mark.parametrize("name", ["mixtral", "chatglm3", "baichuan2-7b", "gemma2"])
@pytest.mark.parametrize("options", [(), ("--dtype", "fp16", "--layout", "native", "--max-shard-size", "60KB")])
def test_good_disk_passes_whatever_the_export_changes(
    name: str, options: tuple[str, ...], make_case: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_case(name, dtype=torch.bfloat16)
    assert convert("hg_to_pp", folder, tmp_path / "layers", "--verify") == (0, [])
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "out", "--verify", *options) == (0, [])


@pytest.mark.parametrize(("command", "file", "how"), DAMAGES)
def test_damage_is_found_and_nothing_is_published(
    both_layouts: dict[str, Path], command: str, file: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = both_layouts[COMMANDS[command]]
    if command == "hg_to_pp":
        tensors = torch.load(both_layouts["pipeline"] / file, weights_only=True)
    else:
        tensors = read_weights(both_layouts["huggingface"])[file]
    name, tensor = max(tensors.items(), key=lambda item: float(item[1].std()))  # no norm, which are all alike
    numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()

    def damage(path: Path) -> None:
        if path.name != file:
            return
        data = path.read_bytes()
        assert data.count(numbers) == 1
        last = data.index(numbers) + len(numbers) - 1
        flipped = data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :]
        path.write_bytes({"flipped": flipped, "halved": data[: len(data) // 2], "emptied": b""}[how])

    before_reading(monkeypatch, damage)
    line = refusal(command, source, tmp_path / "out", "--verify")
    assert file in line and (name in line or how != "flipped")
    assert os.listdir(tmp_path) == []
    assert convert(command, source, tmp_path / "out") == (0, []), "without --verify nobody looks"


WEIGHT = torch.tensor([1.0, 2.0])
DIFFERENT = {
    "zeros": (WEIGHT * 0, WEIGHT * -0.0),
    "dtypes": (WEIGHT, WEIGHT.double()),
    "shapes": (WEIGHT, WEIGHT[None]),
    "nan": (WEIGHT, WEIGHT * torch.nan),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_every_bit_counts(one: Tensor, other: Tensor, tmp_path: Path) -> None:
    line = error_line(lambda: compare_bytes(tmp_path / "model.safetensors", {"x.weight": one}, {"x.weight": other}))
    assert "model.safetensors: x.weight " in line
    assert compare_bytes(tmp_path, {"x.weight": other}, {"x.weight": other.clone()}) == other.nbytes
