"""Shows that a conversion holds about one layer, and that a rank opens its own shards only."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.api import read_spec
from models.checkpoint.source import HuggingFaceSource
from models.checkpoint.tensor_files import SafetensorsFile
from tests.launching import run
from tests.models.helpers import copy_of, error_line, write_weights

MIB = 2**20
# A process tells its peak memory itself: what the system reports to its parent begins with the parent's own memory.
MEASURED = """
import re, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
FIELDS = {"torch_dtype": "bfloat16", "vocab_size": 64, "num_attention_heads": 8, "tie_word_embeddings": False}
DENSE = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2720, "num_hidden_layers": 24}
EXPERTS = {"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}
EXPERTS |= {"num_local_experts": 32}
SIZES = {"llama": DENSE, "mixtral": EXPERTS}
TINY_SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
LAYER = {"llama": 25 * 10**6, "mixtral": 101 * 10**6}  # bytes of a block


def write_model(folder: Path, file: str, sizes: dict[str, object]) -> Path:
    """A bf16 checkpoint in one file, without a tokenizer; every number is a half."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS | {"num_key_value_heads": 8} | sizes))
    spec = read_spec(folder)
    tensors: dict[str, Tensor] = {}
    for layer in range(spec.n_layers):
        shapes = spec.shapes(layer)
        for binding in spec.weight_map.bindings(layer, shapes):
            for name, shape in binding.disk_shapes(shapes).items():
                tensors[name] = torch.full(shape, 0.5, dtype=torch.bfloat16)
    write_weights(folder, {file: tensors})
    return folder


def peak_memory(command: str, source: Path, target: Path) -> int:
    """Bytes that a conversion needs at most."""
    words = ["convert_model.py", command, "--input-path", str(source), "--save-path", str(target)]
    done = run(sys.executable, "-c", MEASURED, *words)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "file"),
    [
        pytest.param("llama", "pytorch_model.bin", marks=pytest.mark.longest),
        ("mixtral", "model.safetensors"),
        pytest.param("llama", "model.safetensors", marks=pytest.mark.longest),
        pytest.param("mixtral", "pytorch_model.bin", marks=pytest.mark.longest),
    ],
)
def test_conversion_holds_two_layers_at_most(model_type: str, file: str, tmp_path: Path) -> None:
    """Beside what a model of no size needs: Python, torch and the family's part of transformers."""
    tiny = write_model(tmp_path / "tiny", file, SIZES[model_type] | TINY_SIZES)
    large = write_model(tmp_path / "large", file, SIZES[model_type])
    most = 2 * LAYER[model_type] + 24 * MIB
    assert most < (large / file).stat().st_size * 0.6
    for command, suffix in (("hg_to_pp", "layers"), ("pp_to_hg", "out")):
        targets = [folder.with_name(f"{folder.name}.{suffix}") for folder in (tiny, large)]
        needed = [peak_memory(command, *pair) for pair in zip((tiny, large), targets, strict=True)]
        assert needed[1] - needed[0] < most
        tiny, large = targets
    shutil.rmtree(tmp_path)


@pytest.fixture
def shard_a_layer(llama: Callable[..., Path], tmp_path: Path) -> tuple[Path, dict[int, str]]:
    """A llama with one shard a layer, all of them garbage; and the name of each layer's shard."""
    folder = copy_of(llama(), tmp_path / "shards")
    source = HuggingFaceSource(folder, read_spec(folder))
    shards = {layer: f"model-{layer + 1:05d}-of-00004.safetensors" for layer in range(4)}
    files = {}
    for layer, shard in shards.items():
        bindings = source.weight_map.bindings(layer, source.spec.shapes(layer))
        files[shard] = {name: source.read(name) for binding in bindings for name in binding.disk}
    write_weights(folder, files)
    (tmp_path / "good").mkdir()
    for shard in shards.values():
        shutil.move(folder / shard, tmp_path / "good")
        (folder / shard).write_bytes(b"garbage" * 1000)
    return folder, shards


@pytest.mark.parametrize("layer", range(4))
def test_rank_opens_the_shards_of_its_own_layers_only(
    shard_a_layer: tuple[Path, dict[int, str]], layer: int, tmp_path: Path
) -> None:
    folder, shards = shard_a_layer
    shutil.copy(tmp_path / "good" / shards[layer], folder)
    source = HuggingFaceSource(folder, read_spec(folder))
    source.check_layer(layer)
    assert source.read_layer(layer).keys() == source.spec.shapes(layer).keys()
    for other in set(shards) - {layer}:
        assert str(folder / shards[other]) in error_line(partial(source.check_layer, other))
        assert str(folder / shards[other]) in error_line(partial(source.read_layer, other))


def test_a_file_is_open_as_long_as_it_is_read(shard_a_layer: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    """A tensor that was read outlives its file, and nothing stays open."""
    path = tmp_path / "good" / shard_a_layer[1][0]
    file = SafetensorsFile(path)
    name = next(iter(file))
    tensor, expected = file.read(name), load_file(path)[name]
    assert open_handles(path)
    del file
    gc.collect()
    torch.testing.assert_close(tensor, expected, atol=0, rtol=0)
    del tensor
    gc.collect()
    assert not open_handles(path)


def open_handles(path: Path) -> list[str]:
    """This process's descriptors of a file."""
    folder = Path("/proc/self/fd")
    return [each for each in os.listdir(folder) if os.path.realpath(folder / each) == str(path.resolve())]
