"""Convert the pipeline layout to a HuggingFace folder, one layer at a time, as safetensors.

`layout="original"` restores the folder that the layers came from: names, dtypes, division into files, tokenizer and
config byte for byte. `layout="native"` writes families that shipped with code of their own under the names of
transformers' classes, so that any server loads them without that code. At most one layer is in memory.

Several processes may share an export (`training.checkpoint.exporting`): each plans the same files from the layers'
headers, then reads and writes its own layers. A file has one writer, as network file systems need it; a file that two
would share is split between them. Nothing else in the result depends on their number.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from models.ahead.names import copies_of
from models.api import adapted_spec, base_source, read_spec
from models.checkpoint.adapter import LayerFiles, MergedStates, base_folder, check_base, check_eyes
from models.checkpoint.adapter_settings import SAW
from models.checkpoint.layout import ADAPTER, CARRIED, MANIFEST, Layout, Manifest, layout_of, resolve, side_files
from models.checkpoint.publish import publish_folder
from models.checkpoint.side_files import copy_files, paths_of
from models.checkpoint.source import PipelineSource, check_range, compare_bytes, forget_cached, open_source, warn_of_nan
from models.checkpoint.tensor_files import DTYPES, SafetensorsFile, SafetensorsWriter, TensorInfo
from models.checkpoint.tensor_io import byte_bar, in_parallel
from models.config_json import read_json, write_json
from models.conversion.check import odd_prefix, write_compat
from models.conversion.to_peft import write_adapter
from models.errors import CheckpointError
from models.images.seeing import seeing
from models.scores import padding_problem
from models.weight_map import WeightMap

logger = logging.getLogger("pipetune")

MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
# Files of remote code, which a native folder replaces; its tokenizer files too, unless there is a tokenizer.json.
REMOTE_CODE = ("*.py", "config.json")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json")

ExportLayout = Literal["original", "native"]


@dataclass(frozen=True)
class ExportOptions:
    """How an export differs from the folder that the layers came from.

    Attributes:
        dtype: to cast every weight to; as in the original where absent.
        max_shard_bytes: to divide the weights into new files; as in the original where absent, else 5 GB.
        verify: read every tensor back and compare it before the folder appears.
        compat: let transformers 4 read config and tokenizer too, as in a native layout.
        merge: of a run that trained an adapter, add it to its base and write the whole model.
        add_tokenizer: called with source, target, and whether the layout is native.
        add_card: called with source and target when everything else is written.
    """

    layout: ExportLayout = "original"
    dtype: torch.dtype | None = None
    max_shard_bytes: int | None = None
    verify: bool = False
    compat: bool = False
    merge: bool = False
    add_tokenizer: Callable[[Path, Path, bool], None] | None = None
    add_card: Callable[[Path, Path], None] | None = None


def pp_to_hg(
    input_path: str | Path, save_path: str | Path, overwrite: bool = False, options: ExportOptions | None = None
) -> None:
    """Write the HuggingFace folder of a pipeline-layout folder or of a run's checkpoint.

    Raises:
        CheckpointError: as `Export`, or the target cannot be written.
    """
    folder, options = resolve(input_path, adapter=True), options or ExportOptions()
    if layout_of(folder) is not Layout.PIPELINE:
        raise CheckpointError(f"{folder}: not in the pipeline layout; pp_to_hg expects layer_*-model_states.pt files")

    adapter = (folder / ADAPTER).is_file()
    if options.merge and not adapter:
        raise CheckpointError(f"{folder}: no adapter, as all weights were trained; expected no --merge")
    if adapter and not options.merge:
        plain = replace(ExportOptions(), add_tokenizer=options.add_tokenizer, add_card=options.add_card)
        if options != plain:
            what = "layout, dtype, verify, compat and max-shard-size have no effect on an adapter"
            raise CheckpointError(f"{folder}: {what}; expected them with --merge, or none of them")
        with publish_folder(Path(save_path), overwrite, [folder]) as target:
            write_adapter(folder, target)
            if options.add_card:
                options.add_card(folder, target)
        return

    export = Export(folder, options)
    with publish_folder(Path(save_path), overwrite, [folder]) as target:
        export.write_weights(target)
        export.write_side_files(target)
        if export.options.verify:
            export.verify(target)


class Export:
    """One export of a pipeline folder, planned before the first byte is written.

    Args:
        writers: the layers of each writer, where there are several; each layer has one.

    Raises:
        CheckpointError: the folder is damaged or unknown, or the family has no native layout.
    """

    def __init__(self, folder: Path, options: ExportOptions, writers: Sequence[Sequence[int]] | None = None) -> None:
        self.folder = folder
        self.options = options
        self.spec = read_spec(folder)
        self.native = self.spec.family.native if options.layout == "native" else None
        if options.layout == "native" and self.spec.family.translate and not self.native:
            problem = f"{self.spec.family.name} has no layout without remote code, as transformers has no such model"
            raise CheckpointError(f"{folder}: {problem}; expected --layout original")
        self.source = merged_source(folder) if options.merge else PipelineSource(folder, self.spec)
        if self.source.spec.family.sees:  # a tower in the layers of an adapter's base is none of the adapter's own
            self.spec = self.source.spec
        paths_of(folder, side_files(folder))  # or the end of the export would refuse them
        self.manifest = Manifest.read(folder)
        self.carried = SafetensorsFile(folder / CARRIED) if (folder / CARRIED).is_file() else None
        carried = {name: self.carried.info(name) for name in self.carried} if self.carried else {}
        self.weight_map = self.spec.weight_map.for_names(self.manifest.dtypes if self.manifest else ())
        listed = self.manifest.dtypes.keys() - carried.keys() if self.manifest else set()
        self.copies = copies_of(self.weight_map, listed, self.spec.tied)
        self.infos = original_infos(self.source, self.weight_map, self.manifest, carried, self.copies)
        if self.native:
            original, self.weight_map = self.weight_map, replace(self.weight_map, family=self.native.family)
            self.infos = native_infos(self.source, original, self.weight_map, self.infos)
        if options.dtype:
            self.infos = cast(self.infos, options.dtype, carried)
        self.writers = writers or [range(self.spec.n_layers)]
        self.writer_of = self._assign()
        if self.manifest and not self.native and not options.max_shard_bytes:  # as the original was divided
            files = self.manifest.files
        else:
            files = divide_into_files(self.infos, options.max_shard_bytes or MAX_SHARD_BYTES)
        self.files = files if len(self.writers) == 1 else cut_between(files, self.writer_of)

    def write_weights(self, target: Path, writer: int = 0) -> None:
        """Write the weight files of one writer; the first one shows its progress."""
        own = {name for name, its_writer in self.writer_of.items() if its_writer == writer}
        files = {file: names for file, names in self.files.items() if own.issuperset(names)}
        total = sum(self.infos[name].nbytes for name in chain.from_iterable(files.values()))
        with byte_bar("pp_to_hg", total, shown=writer == 0) as bar, SafetensorsWriter(target, files, self.infos) as out:
            for tensors in self._layers(writer):
                in_parallel(lambda item: out.write(*item), tensors.items())
                out.write_behind()
                bar.update(sum(self.infos[name].nbytes for name in tensors))
                tensors.clear()  # or this layer would stay in memory while the next one is read

    def write_side_files(self, target: Path) -> None:
        """Write the index, config, tokenizer and the other files of the original."""
        padding = padding_problem(self.spec.config) if self.spec.labels else None
        for problem in filter(None, (odd_prefix(self.weight_map), padding)):
            logger.warning("warning: %s: %s", self.folder, problem)
        if list(self.files) != [SINGLE_FILE]:
            total = sum(info.nbytes for info in self.infos.values())
            weight_map: dict[str, str] = {}
            for file, contained in self.files.items():
                weight_map.update(dict.fromkeys(contained, file))
            write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, sort_keys=True)

        names = side_files(self.folder)
        if self.native:
            replaced = REMOTE_CODE if "tokenizer.json" in names else (*REMOTE_CODE, *TOKENIZER)
            names = [name for name in names if not any(Path(name).match(pattern) for pattern in replaced)]
        copy_files(self.folder, target, names)

        if self.native or self.options.dtype:
            write_json(target / "config.json", self._config())
        if self.options.add_tokenizer:
            self.options.add_tokenizer(self.folder, target, self.native is not None)
        if self.native or self.options.compat:
            write_compat(target)
        if self.options.add_card:
            self.options.add_card(self.folder, target)

    def verify(self, target: Path) -> None:
        """Read every tensor back and compare it with the layers."""
        written: dict[str, SafetensorsFile] = {}
        for file in self.files:
            forget_cached(target / file)
            opened = SafetensorsFile(target / file)
            written |= dict.fromkeys(opened, opened)
        with byte_bar("verify", sum(info.nbytes for info in self.infos.values())) as bar:
            for tensors in self._layers(writer=0):
                for name, tensor in tensors.items():
                    expected = {name: tensor.to(self.infos[name].dtype)}
                    bar.update(compare_bytes(written[name].path, expected, {name: written[name].read(name)}))
                tensors.clear()

    def _assign(self) -> dict[str, int]:
        """Assign each tensor to a writer; what belongs to no layer goes to the first."""
        assigned = dict.fromkeys(self.carried or (), 0)
        for writer, layers in enumerate(self.writers):
            for layer in layers:
                for binding in self.weight_map.bindings(layer, self.spec.shapes(layer)):
                    assigned |= dict.fromkeys(binding.disk, writer)
        return assigned | {copy: assigned[of] for copy, of in self.copies.items()}

    def _layers(self, writer: int) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of a writer under their names on disk, layer by layer."""
        for layer in self.writers[writer]:
            yield self._layer(layer)
        if self.carried and not self.native and writer == 0:
            yield {name: self.carried.read(name) for name in self.carried}

    def _layer(self, layer: int) -> dict[str, Tensor]:
        state = self.source.read_layer(layer)
        warn_of_nan(state, partial(self.source.describe, layer))
        if self.native and layer == self.weight_map.head_layer:
            state |= {name: change(state[name]) for name, change in self.native.changes.items()}
        found = self.weight_map.on_disk(layer, state)
        found = {name: tensor for name, tensor in found.items() if name in self.infos}  # a tied head may stay out
        found |= {copy: found[of] for copy, of in self.copies.items() if of in found and copy in self.infos}
        for name, tensor in found.items():
            check_range(name, tensor, self.infos[name].dtype)
        return found

    def _config(self) -> dict[str, Any]:
        """Make the config.json of changed weights."""
        config = raw = self.spec.raw
        if self.native:
            named = {"architectures": [self.native.architecture]}
            config = named | self.spec.fields | {"torch_dtype": raw.get("torch_dtype")}
        return with_dtype(config, self.options.dtype) if self.options.dtype else config


def merged_source(folder: Path) -> MergedStates:
    """Open the adapter in a run's checkpoint, and its base, as one model."""
    where = base_folder(folder)
    base = open_source(where, read_spec(where))
    check_base(folder, base)
    if read_json(folder / ADAPTER).get(SAW):
        check_eyes(folder, open_source(where, seeing(base.spec)))
    spec = adapted_spec(folder, base.spec)
    return MergedStates(base_source(base, spec), spec, LayerFiles(folder))


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Set the dtype of a config.json."""
    keys = config.keys() & {"dtype", "torch_dtype"} or {"torch_dtype"}  # transformers 5's name, the one before
    return config | dict.fromkeys(sorted(keys), str(dtype).removeprefix("torch."))


SINGLE_FILE = "model.safetensors"

Infos = dict[str, TensorInfo]  # by name on disk
Files = dict[str, list[str]]  # file name -> its tensors, in order


def original_infos(
    source: PipelineSource | MergedStates,
    weight_map: WeightMap,
    manifest: Manifest | None,
    carried: Mapping[str, TensorInfo],
    copies: Mapping[str, str],
) -> Infos:
    """Plan the tensors of the original folder, layer by layer.

    The manifest's dtypes count: a run may have trained in another one. Layers without a manifest, which another tool
    wrote, keep their own, and a tied head stays out.
    """
    spec = source.spec
    infos: Infos = {}
    for layer in range(spec.n_layers):
        stored = source.infos(layer)
        shapes = {name: info.shape for name, info in stored.items()}
        for binding in weight_map.bindings(layer, shapes):
            dtype = stored[binding.names[0]].dtype
            infos |= {name: TensorInfo(dtype, shape) for name, shape in binding.disk_shapes(shapes).items()}
    infos |= carried
    infos |= {copy: infos[of] for copy, of in copies.items()}
    spare = {weight_map.tied_head} if spec.tied else set()
    if manifest is None:
        return {name: info for name, info in infos.items() if name not in spare}

    path = source.folder / MANIFEST
    counts = Counter(chain.from_iterable(manifest.files.values()))
    if spec.tied and weight_map.tied_head in counts:
        spare = {weight_map.tied_embedding}  # which some store as the head alone
    wrong = (counts.keys() ^ infos.keys()) - (spare - counts.keys())
    wrong |= {name for name, count in counts.items() if count > 1 or manifest.dtypes.get(name) not in DTYPES}
    if wrong:
        raise CheckpointError(f"{path}: {min(wrong)}: expected once, with a dtype, if a layer or {CARRIED} has it")
    return {
        name: TensorInfo(DTYPES[manifest.dtypes[name]], info.shape) for name, info in infos.items() if name in counts
    }


def native_infos(source: PipelineSource | MergedStates, original: WeightMap, native: WeightMap, infos: Infos) -> Infos:
    """Plan the tensors of the native layout, with the dtypes of the originals."""
    renamed: Infos = {}
    for layer in range(source.spec.n_layers):
        shapes = source.spec.shapes(layer)
        for binding in native.bindings(layer, shapes):
            stored_as = original.binding_of(layer, binding.names[0]).disk[0]
            if stored_as in infos:
                dtype = infos[stored_as].dtype
                renamed |= {name: TensorInfo(dtype, shape) for name, shape in binding.disk_shapes(shapes).items()}
    return renamed


def cast(infos: Infos, dtype: torch.dtype, exceptions: Mapping[str, object]) -> Infos:
    """Change the planned dtype; integers and carried tensors stay."""
    return {
        name: TensorInfo(dtype, info.shape) if info.dtype.is_floating_point and name not in exceptions else info
        for name, info in infos.items()
    }


def divide_into_files(infos: Infos, max_shard_bytes: int) -> Files:
    """Divide tensors into files of at most `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if filled and filled + info.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        filled += info.nbytes
        shards[-1].append(name)
    return _numbered(shards)


def cut_between(files: Files, writers: Mapping[str, int]) -> Files:
    """Split files that several writers would share."""
    pieces = []
    for names in files.values():
        by_writer: dict[int, list[str]] = {}
        for name in names:
            by_writer.setdefault(writers[name], []).append(name)
        pieces += [by_writer[writer] for writer in sorted(by_writer)]
    return files if pieces == list(files.values()) else _numbered(pieces)


def _numbered(shards: list[list[str]]) -> Files:
    """Name files as transformers does."""
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(shards, start=1)}
