"""Shows that `--verify` reads every tensor back from the disk, and that nothing is published where one differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.checkpoint.source import compare, forget_cached
from models.conversion import to_huggingface as exporting
from models.conversion import to_pipeline as importing
from tests.models.cases import CASES
from tests.models.command_line import convert, refusal
from tests.models.helpers import change_weights, contents, error_line, joined, read_weights

COMMANDS = {"hg_to_pp": "huggingface", "pp_to_hg": "pipeline"}  # and the layout that each reads
FILES = {
    "hg_to_pp": [f"layer_{layer:02d}-model_states.pt" for layer in range(4)],
    "pp_to_hg": [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)],
}


def flip_a_bit(path: Path, tensor: Tensor) -> None:
    """Change the last byte of the place where a file holds a tensor."""
    data = bytearray(path.read_bytes())
    numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert data.count(numbers) == 1
    data[data.index(numbers) + len(numbers) - 1] ^= 1
    path.write_bytes(data)


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
    name: str, options: tuple[str, ...], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    case = CASES[name]
    folder = make_checkpoint(case.model_type, dtype=torch.bfloat16, **case.changes)
    assert convert("hg_to_pp", folder, tmp_path / "layers", "--verify") == (0, [])
    assert convert("pp_to_hg", tmp_path / "layers", tmp_path / "out", "--verify", *options) == (0, [])


CASES_OF_DAMAGE = [(command, file) for command in COMMANDS for file in FILES[command]]


@pytest.mark.parametrize(("command", "file"), CASES_OF_DAMAGE)
def test_flipped_bit_is_found_and_nothing_is_published(
    both_layouts: dict[str, Path], command: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = both_layouts[COMMANDS[command]]
    if command == "hg_to_pp":
        tensors = torch.load(both_layouts["pipeline"] / file, weights_only=True)
    else:
        tensors = read_weights(both_layouts["huggingface"])[file]
    name, tensor = max(tensors.items(), key=lambda item: float(item[1].std()))  # no norm, which are all alike

    def damage(path: Path) -> None:
        if path.name == file:
            flip_a_bit(path, tensor)

    before_reading(monkeypatch, damage)
    told = refusal(command, source, tmp_path / "out", "--verify")
    assert file in told
    assert name in told
    assert list(tmp_path.iterdir()) == []
    assert convert(command, source, tmp_path / "out") == (0, []), "without --verify nobody looks"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("share", [0.5, 0])
def test_file_that_became_shorter_is_found(
    both_layouts: dict[str, Path], command: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_reading(monkeypatch, lambda path: os.truncate(path, int(path.stat().st_size * share)))
    told = refusal(command, both_layouts[COMMANDS[command]], tmp_path / "out", "--verify")
    assert FILES[command][0] in told
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_number_pass(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("llama", num_hidden_layers=1)
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].mul_(torch.nan))
    for command, source, target in (("hg_to_pp", folder, "layers"), ("pp_to_hg", tmp_path / "layers", "out")):
        code, lines = convert(command, source, tmp_path / target, "--verify")
        assert code == 0
        assert [line.startswith(f"warning: {source}") for line in set(lines)] == [True]
    assert joined(read_weights(tmp_path / "out"))["model.norm.weight"].isnan().all()


WEIGHT = torch.tensor([1.0, 2.0])
DIFFERENT = [
    (WEIGHT * 0, WEIGHT * -0.0),
    (WEIGHT, WEIGHT.double()),
    (WEIGHT, WEIGHT[None]),
    (WEIGHT, WEIGHT * torch.nan),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=["zeros", "dtypes", "shapes", "nan"])
def test_every_bit_counts(one: Tensor, other: Tensor, tmp_path: Path) -> None:
    told = error_line(lambda: compare(tmp_path / "model.safetensors", {"x.weight": one}, {"x.weight": other}))
    assert "model.safetensors: x.weight " in told
    assert compare(tmp_path, {"x.weight": other}, {"x.weight": other.clone()}) == other.nbytes
