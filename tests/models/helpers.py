"""What the tests of the models wing share: reading and rewriting checkpoint folders, the oracle, one-line errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from models import CausalLM, CheckpointError
from models.api import read_spec
from models.checkpoint.publish import MARK, publish_folder
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.spec import ModelSpec
from tests.conftest import ORIGINALS, TINY
from tests.launching import run
from tests.models.originals import expected_of_original

LAYOUTS = ["huggingface", "pipeline"]
CONVERTERS: dict[str, Callable[..., None]] = {"huggingface": hg_to_pp, "pipeline": pp_to_hg}  # by what they read
SHARDED = {"single": None, "sharded": {"max_shard_size": "100KB"}}
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"

WeightFiles = dict[str, dict[str, Tensor]]  # file name -> name on disk -> tensor


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers itself loads and runs it."""
    caps_scores = read_config(folder)["model_type"] == "gemma2"  # which only its plain attention does on a CPU
    attention = "eager" if caps_scores else None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def expected_of(folder: Path, ids: Tensor, workspace: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of `shifted_loss` under their names on disk, by transformers alone."""
    if read_config(folder)["model_type"] in ORIGINALS:
        return expected_of_original(folder, ids)
    model = oracle(folder)
    logits = model(ids, use_cache=False).logits
    shifted_loss(logits, ids).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    model.save_pretrained(workspace)
    return logits.detach(), joined(read_weights(workspace))


def in_layout(folder: Path, layout: str, target: Path) -> Path:
    """A HuggingFace folder as it is, or its pipeline layout written to `target`."""
    if layout == "huggingface":
        return folder
    hg_to_pp(folder, target)
    return target


def compatible(folder: Path, workspace: Path) -> Path:
    """A HuggingFace folder through the pipeline layout and back, exported for servers of any age."""
    hg_to_pp(folder, workspace / "layers")
    layout: Any = "native" if read_config(folder)["model_type"] in ORIGINALS else "original"
    pp_to_hg(workspace / "layers", workspace / "compatible", options=ExportOptions(layout=layout, compat=True))
    return workspace / "compatible"


def spec_of(model_type: str = "llama", **changes: Any) -> ModelSpec:
    """The spec of a tiny model, from the content of its config.json alone."""
    fields = ORIGINALS[model_type][0] if model_type in ORIGINALS else TINY | {"n_head": 4}
    return read_spec(Path(), fields | {"model_type": model_type} | changes)


def random_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    """Token ids [rows, length] of the tiny models' vocabulary, without the special ones."""
    return torch.randint(3, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect what autograd saves inside."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy as transformers defines it, written out."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def gradients(model: CausalLM) -> dict[str, Tensor]:
    """The gradient of every parameter under its name on disk."""
    named: dict[str, Tensor] = {}
    shared = {id(model.embedding.embed_tokens.weight)} if model.spec.tied else set()
    for number, layer in enumerate(model.layers):
        found = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
        assert found.keys() == dict(layer.named_parameters()).keys()
        if number:  # a tied head's gradient is the embedding's
            found = {name: grad for name, grad in found.items() if id(layer.get_parameter(name)) not in shared}
        named |= model.spec.weight_map.on_disk(number, found)
    return named


def read_weights(folder: Path) -> WeightFiles:
    """Every weight file of a HuggingFace folder, read by the libraries that define the formats."""
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return files | {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.bin"))}


def write_weights(folder: Path, files: WeightFiles, index: bool | None = None) -> None:
    """Replace a HuggingFace folder's weights, with an index where there are several files (or as `index` says)."""
    for pattern in ("*.safetensors", "*.bin", "*.index.json"):
        for path in folder.glob(pattern):
            path.unlink()
    for file, tensors in files.items():
        if file.endswith(".bin"):
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if index if index is not None else len(files) > 1:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        name = BIN_INDEX if next(iter(files)).endswith(".bin") else SAFETENSORS_INDEX
        (folder / name).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the tensors of every weight file of a HuggingFace folder in turn."""
    files = read_weights(folder)
    indexed = any(folder.glob("*.index.json"))
    for tensors in files.values():
        change(tensors)
    write_weights(folder, files, indexed)


def fill_biases(weights: dict[str, Tensor]) -> None:
    """Give the biases values; a new model's are zero."""
    for name, tensor in weights.items():
        if name.endswith(".bias"):
            tensor.normal_(std=0.3)


def change_config(folder: Path, **changes: object) -> None:
    """Set fields of config.json."""
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def copy_of(folder: Path, target: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, target))


def published(folder: Path, **files: str) -> Path:
    """A folder that Pipetune wrote, with some text files."""
    with publish_folder(folder) as target:
        for name, text in files.items():
            (target / f"{name}.txt").write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, but for what says who wrote it, when, and from where."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARK]
    read = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: re.sub(rb',\n "origin": ".*"', b"", content) for name, content in read.items()}


def side_files(folder: Path) -> dict[str, bytes]:
    """Every file of a HuggingFace folder but the weights and their index."""
    return {n: d for n, d in contents(folder).items() if not n.endswith((".safetensors", ".bin", ".index.json"))}


def joined(files: WeightFiles) -> dict[str, Tensor]:
    """All the tensors, whichever file they lie in."""
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes, shapes and bits: NaN equals NaN here, and -0.0 differs from 0.0."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        found = actual[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def assert_round_trip(folder: Path, workspace: Path) -> Path:
    """Convert to `workspace`/layers and back to `workspace`/exported and compare everything; gives the latter."""
    hg_to_pp(folder, workspace / "layers")
    pp_to_hg(workspace / "layers", workspace / "exported")
    exported = read_weights(workspace / "exported")
    original = {
        file.removeprefix("pytorch_").replace(".bin", ".safetensors"): tensors
        for file, tensors in read_weights(folder).items()
    }
    assert list(exported) == list(original)
    for file, tensors in original.items():
        assert_same_bits(exported[file], tensors)
    assert side_files(workspace / "exported") == side_files(folder)
    if len(original) > 1:
        index = json.loads((workspace / "exported" / SAFETENSORS_INDEX).read_text())
        assert index["weight_map"] == {name: file for file, tensors in exported.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in joined(exported).values())
    return workspace / "exported"


def error_line(call: Callable[[], object]) -> str:
    """The text of the CheckpointError that `call` raises, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert text.strip()
    assert len(text.splitlines()) == 1, text
    return text


def run_convert_model(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`python convert_model.py <words>` as a user runs it."""
    return run(sys.executable, "convert_model.py", *words)


@torch.no_grad()
def greedy(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, each by a pass over the whole text."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
