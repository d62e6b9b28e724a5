"""Dequantize checkpoints with weights of 4 or 8 bits to the dtype that config.json names.

fp8 (DeepSeek-V3, Qwen3, MiniMax-M2) has a scale for each block of a matrix: a weight is its 8-bit number times its
block's scale. mxfp4 (gpt-oss) has 4-bit numbers, two a byte, and an exponent for each 32 of them, and stores the
matrices of experts transposed. Both are a product in fp32, rounded once, as in transformers. All weights are trained,
so a converted or exported checkpoint is no longer quantized.

Cost: the dequantized tensor, and one of an expert's size in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.checkpoint.tensor_files import TensorInfo
from models.config_json import QUANTIZATION
from models.errors import CheckpointError
from models.quantized_base import FP8, Fp8

MXFP4 = "mxfp4"
SCALE, UNUSED = "_scale_inv", (".activation_scale", ".input_scale")  # the latter are for products in 8 bits
BLOCKS, EXPONENTS = "_blocks", "_scales"
BIAS = 127  # of an exponent in 8 bits
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP's E2M1

Read = Callable[[str], Tensor]


class Quantized(NamedTuple):
    """A tensor stored as two tensors on disk: numbers and scales."""

    numbers: str
    scales: str
    dtype: torch.dtype  # dequantized
    block: tuple[int, int] | None  # rows and columns that share a scale; None for mxfp4
    folder: object  # for messages

    def info(self, numbers: TensorInfo, scales: TensorInfo) -> TensorInfo:
        """Get dtype and shape of the dequantized tensor; CheckpointError where the scales do not fit the numbers."""
        if self.block:
            self._sizes(numbers.shape, scales.shape)
            return TensorInfo(self.dtype, numbers.shape)
        if len(numbers.shape) < 4 or scales.shape != numbers.shape[:-1]:
            raise self._misfit(numbers.shape, scales.shape)
        *outer, rows, groups, width = numbers.shape
        return TensorInfo(self.dtype, torch.Size((*outer, groups * width * 2, rows)))

    def read(self, read: Read) -> Tensor:
        """Multiply the numbers with their scales."""
        if self.block:
            numbers, scales, columns = self.read_fp8(read)
            return Fp8(scales, columns, self.dtype).widen(numbers)
        return self._from_mxfp4(read(self.numbers), read(self.scales))

    def read_fp8(self, read: Read) -> tuple[Tensor, Tensor, int]:
        """Read the numbers as they are, each row's scales, and how many columns share one."""
        numbers, scales = read(self.numbers), read(self.scales)
        grid, (rows, columns) = self._sizes(numbers.shape, scales.shape)

        # A row's scales stand as often as it has rows; what the last block has too many is cut off.
        factors = _powers(scales) if scales.dtype == torch.uint8 else scales.float()
        factors = factors.reshape(*numbers.shape[:-2], *grid).repeat_interleave(rows, dim=-2)
        return numbers, factors.narrow(-2, 0, numbers.shape[-2]), columns

    def _sizes(self, numbers: torch.Size, scales: torch.Size) -> tuple[torch.Size, list[int]]:
        """Get the rows and columns of scales, and those of the numbers that share a scale.

        With another number of scales than config.json's blocks, each has an equal share, as in transformers.
        """
        assert self.block is not None
        outer, matrix, grid = numbers[:-2], numbers[-2:], scales[-2:] if len(scales) > 1 else torch.Size((1, 1))
        if len(matrix) < 2 or prod(scales) != prod(outer) * prod(grid) or not prod(grid):
            raise self._misfit(numbers, scales)
        sizes = []
        for length, count, size in zip(matrix, grid, self.block, strict=True):
            if count != ceil(length / size) and length % count:
                raise self._misfit(numbers, scales)
            sizes.append(size if count == ceil(length / size) else length // count)
        return grid, sizes

    def _misfit(self, numbers: torch.Size, scales: torch.Size) -> CheckpointError:
        blocks = f" in blocks of {list(self.block)}" if self.block else ""
        what = f"scales {list(scales)} do not fit {list(numbers)}{blocks}"
        return CheckpointError(f"{self.folder}: {self.numbers}: {what}")

    def _from_mxfp4(self, numbers: Tensor, scales: Tensor) -> Tensor:
        pairs = torch.tensor([[FP4[byte & 15], FP4[byte >> 4]] for byte in range(256)])
        *outer, rows, groups, width = numbers.shape
        made = torch.empty(*outer, groups * width * 2, rows, dtype=self.dtype)
        for expert, bytes_, exponents in zip(made, numbers, scales, strict=True):
            values = pairs[bytes_.long()].flatten(-2) * _powers(exponents)[..., None]
            expert.copy_(values.flatten(-2).T)
        return made


def quantized_tensors(config: dict[str, Any], names: Iterable[str], where: object) -> dict[str, Quantized]:
    """Find the quantized tensors among `names` on disk, by the names they are read under."""
    settings = config.get(QUANTIZATION)
    if not settings:
        return {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where}: {QUANTIZATION}: expected an object, found {settings!r}")
    known, method = set(names), settings.get("quant_method")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = getattr(torch, stored, torch.bfloat16)

    if method == FP8:
        block = settings.get("weight_block_size")
        sizes = block if isinstance(block, list) else []
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            what = f"fp8 with weight_block_size {block}; expected the rows and columns that share a scale"
            raise CheckpointError(f"{where}: {QUANTIZATION}: {what}")
        weights = [name.removesuffix(SCALE) for name in known if name.endswith(SCALE)]
        both = [name for name in weights if name in known]
        return {name: Quantized(name, name + SCALE, dtype, (sizes[0], sizes[1]), where) for name in both}

    if method == MXFP4:
        weights = [name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS)]
        both = [name for name in weights if name + EXPONENTS in known]
        return {name: Quantized(name + BLOCKS, name + EXPONENTS, dtype, None, where) for name in both}

    asked = ", ".join(name for name, value in settings.items() if name.startswith("load_in_") and value)
    described = method or asked or "a method that it does not name"
    raise CheckpointError(
        f"{where}: {QUANTIZATION}: the weights are quantized by {described}; expected 16 or 32 bits, {FP8} or {MXFP4}"
    )


def without_parts(names: Iterable[str], quantized: dict[str, Quantized]) -> list[str]:
    """Replace the parts of quantized tensors by the tensors' own names."""
    own = {each.numbers: name for name, each in quantized.items()}
    scales = {each.scales for each in quantized.values()}
    rest = (name for name in names if name not in scales and not (quantized and name.endswith(UNUSED)))
    return [own.get(name, name) for name in rest]


def _powers(exponents: Tensor) -> Tensor:
    return (exponents.float() - BIAS).exp2()
