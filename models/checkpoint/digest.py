"""Know a model again: by every number of all its weights, and by what config.json says of it.

What is computed with a model and kept (a reference's log-probabilities, a teacher's) or belongs to it (an adapter) must
not be taken for that of another one, which may differ in a single block, in the head or in a setting. So all weights
are read, once: a note in the cache remembers the digest as long as the files stay the same (`common.digests`).

Cost: a pass over the files, from which the layers are loaded next, and a second for 3 GB of 16-bit weights and core.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from common.digests import Digests
from models.checkpoint.source import HuggingFaceSource, PipelineSource
from models.checkpoint.tensor_io import byte_bar, in_parallel
from models.family import EYES
from models.spec import ModelSpec

DIGEST = "base_digest"  # in a checkpoint's ADAPTER, and in the metadata of weights for peft, which it passes over
SCHEME = "1"  # of digests of weights; notes of another one do not count
FILES = (".safetensors", ".bin", ".pt", ".json")
CHUNK = 2**17  # numbers widened at a time, which stay in a core's cache
# What config.json says of itself and of its files, and nothing of what the model computes.
ABOUT_FILES = ("architectures", "auto_map", "dtype", "quantization_config", "transformers_version", "use_cache")
SHOWN = 2**30  # bytes from which reading is worth a line

Source = HuggingFaceSource | PipelineSource


def model_digest(source: Source, notes: Path | None = None) -> str:
    """Digest a model's weights and config: the same in any layout, and in a wider dtype.

    Args:
        notes: a folder that remembers digests of weights.

    Returns:
        `WEIGHTS-CONFIG`, both in hex.
    """
    eyes = " with eyes" if source.spec.family.sees else ""
    kind = f"weights {SCHEME} {source.spec.labels} {source.spec.is_part}{eyes}"
    weights = _noted(source, notes, kind, partial(_digest_weights, source))
    return f"{weights}-{_digest_config(source.spec)}"


def eyes_digest(source: Source, notes: Path | None = None) -> str:
    """Digest the weights of a model's tower of images alone, as `model_digest` does."""
    return _noted(source, notes, f"eyes {SCHEME}", partial(_digest_eyes, source))


def _noted(source: Source, notes: Path | None, kind: str, digest: Callable[[], str]) -> str:
    if notes is None:
        return digest()
    digests = Digests(notes, kind)
    files = sorted(path for path in source.folder.iterdir() if path.suffix in FILES and path.is_file())
    return digests.known(files) or digests.take(files, digest)


def _digest_eyes(source: Source) -> str:
    whole = xxhash.xxh3_128()
    for name, tensor in sorted(source.read_layer(0).items()):
        if name.startswith(f"{EYES}."):
            whole.update(f"{name} {list(tensor.shape)} {_digest_tensor(tensor)}\n".encode())
    return whole.hexdigest()


def _digest_weights(source: Source) -> str:
    shapes = map(source.spec.shapes, range(source.spec.n_layers))
    sizes = [2 * sum(map(torch.Size.numel, layer.values())) for layer in shapes]
    whole = xxhash.xxh3_128()

    with byte_bar(f"reading {source.folder} to know it again", sum(sizes), shown=sum(sizes) > SHOWN) as bar:
        for layer, size in enumerate(sizes):
            state = sorted(source.read_layer(layer).items())
            found = in_parallel(_digest_tensor, [tensor for _, tensor in state])
            for (name, tensor), digest in zip(state, found, strict=True):
                whole.update(f"{layer} {name} {list(tensor.shape)} {digest}\n".encode())
            bar.update(size)

    return whole.hexdigest()


def _digest_tensor(tensor: Tensor) -> str:
    """Digest a tensor's numbers, widened to fp32 at least."""
    widened = tensor.is_floating_point() and tensor.itemsize < 4
    digest = xxhash.xxh3_128()
    for part in tensor.detach().reshape(-1).split(CHUNK):
        digest.update((part.to(torch.float32) if widened else part).numpy())
    return digest.hexdigest()


def _digest_config(spec: ModelSpec) -> str:
    """Digest what config.json says that is not transformers' default, so that writing defaults out changes nothing."""
    said = spec.config.to_diff_dict()
    told = {name: value for name, value in said.items() if not name.startswith("_") and name not in ABOUT_FILES}
    return xxhash.xxh3_64(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
