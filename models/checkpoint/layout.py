"""Detect the layout of a model folder, and list its weight files and side files.

The HuggingFace layout is config.json with safetensors or .bin files, single or sharded. The pipeline layout is
config.json with one `layer_XX-model_states.pt` a layer, as DeepSpeed writes them for a PipelineModule; a run's
checkpoint is one. It also holds `pipetune.json`, by which an export restores the original's files, and
`carried.safetensors`, tensors that belong to no layer.
"""

from __future__ import annotations

import json
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from common.hub import hub_name
from common.whole_files import read_regular
from models.errors import CheckpointError, reading

MANIFEST = "pipetune.json"
CARRIED = "carried.safetensors"
LATEST = "latest"
TEMPLATES = "additional_chat_templates"  # the one folder that tokenizers have
ADAPTER = "adapter_config.json"
RECORD = "checkpoint.json"  # of a run's checkpoint, which is a pipeline folder

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _in_the_folder(name: str) -> str:
    """Refuse a file name of a manifest that leads out of its folder."""
    inner = name.removeprefix(f"{TEMPLATES}/")
    if inner in ("", "..") or Path(inner).name != inner or "\0" in name:
        raise ValueError("expected the name of a file")
    return name


FileName = Annotated[str, AfterValidator(_in_the_folder)]


class Layout(Enum):
    HUGGINGFACE = "HuggingFace"
    PIPELINE = "pipeline"


def layer_file(layer: int) -> str:
    """Name a layer's file as DeepSpeed does."""
    return f"layer_{layer:02d}-model_states.pt"


def not_found(path: Path) -> CheckpointError:
    """Report a missing file; in a checkpoint of several hosts, which of them has it."""
    with suppress(Exception):  # no record, or a damaged one
        written = json.loads(read_regular(path.parent / RECORD))["hosts"]
        host = next(host for host, files in written.items() if path.name in files)
        return CheckpointError(
            f"{path}: not here, as it was written on host {host}; expected the hosts of the run that saved it, in "
            "the same order, or a folder that convert_model.py gather brought together"
        )
    return CheckpointError(f"{path}: not found; the folder is incomplete")


def resolve(folder: str | Path, adapter: bool = False, layers: bool = False) -> Path:
    """Find the folder with the model: this one, or the newest checkpoint of a run.

    Args:
        adapter: whether an adapter without its base will do.
        layers: whether a script's own layers, which are no language model, will do.

    Raises:
        CheckpointError: there is no such folder, it holds an adapter or a script's layers, or `latest` names none in
            it.
    """
    path = _newest(folder)
    is_adapter, is_model = (path / ADAPTER).is_file(), (path / "config.json").is_file()
    if (path / RECORD).is_file() and not (is_adapter or is_model or layers):
        raise CheckpointError(
            f"{path}: layers of a script, which have no HuggingFace layout; expected load_trained (docs/api.md)"
        )
    if is_adapter and not adapter:
        raise CheckpointError(
            f"{path}: an adapter ({ADAPTER}), no whole model; expected its base, or both merged: "
            "convert_model.py pp_to_hg --merge for a run's, merge_and_unload of peft for others"
        )
    return path


def _newest(folder: str | Path) -> Path:
    path = Path(folder)
    with reading(path):
        if path.is_file():
            raise CheckpointError(f"{path}: a file; expected a model folder")
        if not path.is_dir():
            fetch = f", or first: python convert_model.py download --model-name {folder} --save-path DIR"
            fetch *= hub_name(str(folder)) is not None
            raise CheckpointError(f"{path}: not found; expected a model folder{fetch}")
        latest = path / LATEST
        if not latest.is_file() or (path / "config.json").is_file():
            return path
        try:
            newest = path / _in_the_folder(latest.read_text(encoding="utf-8").strip())
        except ValueError:
            raise CheckpointError(f"{latest}: expected the name of a folder in {path}") from None
        if not newest.is_dir():
            raise CheckpointError(f"{newest}: not found, but {latest} names it")
        return newest


def layout_of(folder: Path) -> Layout:
    """Detect the layout of a resolved folder; CheckpointError if it has neither, or no config.json."""
    if not (folder / "config.json").is_file():
        if revisions := sorted(folder.glob("snapshots/*")):  # of the hub's cache
            names = ", ".join(f"{folder.name}/snapshots/{each.name}" for each in revisions)
            raise CheckpointError(f"{folder}: a folder of the hub's cache; expected one of its models: {names}")
        raise CheckpointError(f"{folder}: no config.json; expected a HuggingFace or a pipeline-layout folder")
    if any(folder.glob("layer_*-model_states.pt")):
        return Layout.PIPELINE
    if has_huggingface_weights(folder):
        return Layout.HUGGINGFACE
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin") and path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path}: a link to {path.readlink()}, which is not there; fetch the file again")
    expected = "*.safetensors, pytorch_model*.bin or layer_*-model_states.pt"
    raise CheckpointError(f"{folder}: no weights; expected {expected}")


def has_huggingface_weights(folder: Path) -> bool:
    """Test whether a folder has weights; training from scratch needs none."""
    return any((folder / index).is_file() for index in _INDEXES) or bool(weight_files(folder))


def weight_index(folder: Path) -> dict[str, str] | None:
    """Read a sharded folder's index (tensor -> file); None for a single file.

    Raises:
        CheckpointError: the index cannot be read, or the files that it lists lie beside a single one.
    """
    found = weight_files(folder)
    bins = not found or found[0].suffix == ".bin"
    paths = [folder / name for name in _INDEXES[: 1 + bins]]  # a .bin index beside safetensors is a leftover
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return None
    with reading(path):
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files = {str(tensor): _in_the_folder(str(file).removeprefix("./")) for tensor, file in weight_map.items()}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise CheckpointError(f"{path}: expected a weight_map, of files in its folder") from None
    single = folder / path.name.removesuffix(".index.json")
    if single.name in files.values() or not single.is_file():
        return files
    if all((folder / file).is_file() for file in files.values()):
        raise CheckpointError(f"{single}: beside the weights of {path.name}; expected one of the two")
    return None  # with some of its files gone the index is a leftover


def weight_files(folder: Path) -> list[Path]:
    """List a HuggingFace folder's weight files: safetensors if there are any, else .bin.

    Only transformers' own names count: repositories also ship other files with tensors in them.
    """
    patterns = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
    return next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])


class Manifest(BaseModel):
    """The HuggingFace folder that a pipeline folder came from.

    Attributes:
        files: weight files in order, each with its tensors' names on disk in order.
        dtypes: of each tensor, under its name on disk, as safetensors spells it ("BF16").
        side_files: that were copied byte for byte.
        origin: the folder itself; None in a run's checkpoint, whose weights are others.
    """

    model_config = ConfigDict(extra="forbid")

    files: dict[FileName, list[str]]
    dtypes: dict[str, str]
    side_files: list[FileName]
    origin: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a pipeline folder's manifest; None if another tool wrote the folder."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            with reading(path):
                return cls.model_validate_json(path.read_bytes())
        except ValidationError:
            raise CheckpointError(f"{path}: damaged; expected the manifest that hg_to_pp writes") from None

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")


def side_files(folder: Path) -> list[str]:
    """List the files to copy byte for byte.

    Of a HuggingFace folder all but weights (config, tokenizer, chat templates, licence); else those of the manifest.
    """
    if manifest := Manifest.read(folder):
        return manifest.side_files
    own = (*_INDEXES, MANIFEST, LATEST, ADAPTER, RECORD)
    paths = [*sorted(folder.iterdir()), *sorted((folder / TEMPLATES).glob("*.jinja"))]
    found = (path for path in paths if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES)
    names = (path.relative_to(folder).as_posix() for path in found if not path.name.startswith("."))
    return [name.replace(f"{TEMPLATES}.", f"{TEMPLATES}/") for name in names if name not in own]


def flat(name: str) -> str:
    """Flatten a side file's name for a run's checkpoint, which has no folders."""
    return name.replace("/", ".")
