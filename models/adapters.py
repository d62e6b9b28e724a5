"""Low-rank adapters (LoRA, arXiv:2106.09685), and which weights of a model are trained at all.

An adapted weight W of shape [out, in] stays as it is, and the layer computes with W + scale * B A, where only A [r, in]
and B [out, r] are trained. A linear layer gets the two as parameters `lora_A` and `lora_B` beside its `weight`, so all
other names stay: checkpoints of the base, tensor plans and weight maps need not know of adapters. A weight of experts,
[experts, out, in], gets an A and a B for each expert, named after it (`gate_up_proj_lora_A`); `LowRankSum` is what the
experts see in its place.

Meanings, defaults and names in an export are those of peft 0.21 (`models.conversion.to_peft`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import regex
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models.errors import CheckpointError

ALL_LINEAR = "all-linear"
FACTORS = ("lora_A", "lora_B")
IDLE = "idle"
PATIENCE = 1.0  # seconds for a name and a regular expression, which may be a stranger's, and one without an end
GROUPED_BYTES = 16  # torch's grouped product wants rows of a multiple of it


@dataclass(frozen=True)
class Lora:
    """The adapters of a model, in peft's words.

    Attributes:
        targets: `all-linear`, ends of the names of modules, or one regular expression for whole names.
        experts: whether weights of experts are adapted too, which `targets` names as it does modules.
        modules_to_save: ends of the names of modules that are trained in full.
        base: `nf4` or `fp8` where the weights under the adapters are 4 or 8 bits (`models.quantized_base`).
        beside: how the names of modules beside the decoder begin, as of a tower of images, that may be adapted, too.
    """

    r: int = 8
    alpha: float = 8
    dropout: float = 0.0
    rslora: bool = False
    targets: str | tuple[str, ...] = ALL_LINEAR
    experts: bool = True
    modules_to_save: tuple[str, ...] = ()
    base: str | None = None
    beside: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def takes(self, path: str) -> bool:
        """Return whether `targets` names a module or a weight of experts, apart from `all-linear`."""
        if isinstance(self.targets, str):
            return _matches(self.targets, path)
        return ends_with(path, self.targets)


@dataclass(frozen=True)
class Trained:
    """Which weights are trained: all, all but some, or adapters.

    Attributes:
        lora: the adapters; without them the weights themselves are trained.
        freeze: regular expressions; weights whose names match one are not trained.
    """

    lora: Lora | None = None
    freeze: tuple[str, ...] = ()

    def prepare(
        self,
        module: nn.Module,
        is_end: Callable[[str], bool],
        path: Callable[[str], list[str]],
        is_beside: Callable[[str], bool],
    ) -> None:
        """Add adapters to a layer, and take all else that is not trained out of the backward pass.

        Args:
            is_end: says of a module whether it is embedding or head, which get no adapters.
            path: gives the names in transformers' model of a module or a weight of the layer: two for the ends of a
                tied model.
            is_beside: says of a module or a weight whether it is of a part beside the decoder, as a tower of images.
        """
        if not (self.lora or self.freeze):
            return

        def is_left(name: str) -> bool:
            return self.lora is not None and is_beside(name) and not f"{name}.".startswith(self.lora.beside)

        if self.lora:
            for name, part in list(module.named_modules()):
                if is_end(name):
                    _check_end(part, self.lora, path(name))
                elif not is_left(name):
                    _adapt(part, self.lora, path(name)[0], has_experts=not is_beside(name))
        for name, weight in module.named_parameters():
            if is_left(name) or not self._trains(name, path(name)):
                weight.requires_grad_(False)

    def _trains(self, name: str, paths: list[str]) -> bool:
        if self.lora is None:
            return not any(re.search(pattern, path) for pattern, path in product(self.freeze, paths))
        owners = (path.rpartition(".")[0] for path in paths)
        return is_factor(name) or any(ends_with(owner, self.lora.modules_to_save) for owner in owners)


ALL = Trained()


def save_trained_only(layer: nn.Module) -> None:
    """Make a layer's state dict that of its trained weights, where some are adapters."""

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        kept = {f"{prefix}{name}" for name, weight in module.named_parameters() if weight.requires_grad}
        for name in [each for each in state if each.startswith(prefix) and each not in kept]:
            del state[name]

    layer.register_state_dict_post_hook(drop)


def add_idle_weight(stage: nn.Module, dtype: torch.dtype) -> None:
    """Give a stage without trained weights one that does nothing, as DeepSpeed's optimizers need some."""
    idle: Any = nn.Parameter(torch.zeros(1, dtype=dtype, device=next(stage.parameters()).device))
    idle.ds_pipe_replicated, idle.model_parallel = True, False  # what DeepSpeed asks of the weights in a norm
    stage.register_parameter(IDLE, idle)  # not of a layer, whose file it would be in


def ends_with(path: str, names: tuple[str, ...]) -> bool:
    """Return whether the last parts of a dotted name are one of `names`."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def is_factor(name: str) -> bool:
    """Return whether a weight is a factor of an adapter."""
    return name.endswith(FACTORS)


def base_of(name: str) -> str:
    """Name the weight that a factor adapts."""
    owner, _, leaf = name.rpartition(".")
    weight = leaf.removesuffix("lora_A").removesuffix("lora_B").removesuffix("_")
    return f"{owner}.{weight or 'weight'}"


def fresh_factors(shapes: dict[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """Draw the factors of a layer: A as `nn.Linear` draws its weight, B zero, so that a run begins with the base."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(shapes.items()):
        bound = 1 / math.sqrt(shape[-1])
        drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        state[name] = drawn if name.endswith("lora_A") else torch.zeros(shape)
    return state


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Add an adapter to its weight, in fp32.

    Args:
        transposed: whether the weights of experts are stored as [in, out].
    """
    delta = b.float() @ a.float()
    return (weight.float() + scale * (delta.mT if transposed else delta)).to(weight.dtype)


class Adapted(nn.Module):
    """A linear layer with an adapter; mixed into the class that it had."""

    lora: Lora

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = super().forward(inputs)
        output += self.low_rank(inputs)  # in place, which spares a pass over fresh memory
        return output

    def low_rank(self, inputs: Tensor) -> Tensor:
        """Compute what the adapter adds for `inputs` [..., in]."""
        dropped = F.dropout(inputs, self.lora.dropout, self.training)
        a, b = map(self.get_parameter, FACTORS)
        return F.linear(F.linear(dropped, a) * self.lora.scale, b)


class AdaptedExperts(nn.Module):
    """Experts with adapters; mixed into the class that they had."""

    lora: Lora

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if widen := vars(self).get("packed", {}).get(name):  # packed (`models.quantized_base`)
            value = widen(value)
        a = self._parameters.get(f"{name}_lora_A")
        if a is None:
            return value
        b = self._parameters[f"{name}_lora_B"]
        assert b is not None
        return LowRankSum(value, *((a.mT, b.mT) if is_transposed(self) else (b, a)), self.lora.scale)


class LowRankSum:
    """`base + scale * left @ right` for each expert, which takes the place of the weight [experts, rows, columns].

    A grouped product with tokens multiplies with the three one after the other; all else sees the sum.
    """

    def __init__(self, base: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        self._base, self._left, self._right, self._scale = base, left, right, scale

    def whole(self) -> Tensor:
        """Compute the sum."""
        return torch.baddbmm(self._base, self._left, self._right, alpha=self._scale)

    def transpose(self, *sides: int) -> LowRankSum:
        assert {side % 3 for side in sides} == {1, 2}, "experts stay the first dimension"
        return LowRankSum(self._base.mT, self._right.mT, self._left.mT, self._scale)

    def __getitem__(self, expert: Any) -> Tensor:
        return self._base[expert] + self._scale * (self._left[expert] @ self._right[expert])

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "shape", "ndim", "data_ptr", "size", "dim"):
            return getattr(self._base, name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in (torch._grouped_mm, torch.bmm) and isinstance(args[1], cls):
            tokens, weight = args[0], args[1]
            if function is torch.bmm or weight._left.shape[-1] * tokens.itemsize % GROUPED_BYTES == 0:
                inner = function(tokens, weight._left.contiguous(), **named)
                low_rank = function(inner, weight._right.contiguous(), **named)
                return function(tokens, weight._base, **named) + weight._scale * low_rank
        return function(*map(_whole, args), **{name: _whole(value) for name, value in named.items()})


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, LowRankSum) else value


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's weights are stored as [in, out], as those of some experts and GPT-2's are."""
    return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


def expert_weights(module: nn.Module) -> list[str]:
    """List a module's weights [experts, ., .]; a convolution's have three dimensions too, and are none."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3]


@cache
def _matches(pattern: str, path: str) -> bool:
    try:
        return regex.fullmatch(pattern, path, timeout=PATIENCE) is not None
    except TimeoutError:
        problem = f"does not end within {PATIENCE:g} s with {path}; expected a simpler one"
    except (regex.error, RecursionError) as error:
        problem = f"{error}; expected {ALL_LINEAR}, a list of names, or a regular expression"
    raise CheckpointError(f"lora.targets: {pattern!r:.200}: {problem}")


def _check_end(module: nn.Module, lora: Lora, paths: list[str]) -> None:
    """Refuse an adapter of embedding or head, whose weights are used without the modules that hold them."""
    path = next(filter(lora.takes, paths), None) if lora.targets != ALL_LINEAR else None
    if path and isinstance(module, (nn.Linear, nn.Embedding)):
        expected = f"{path.rpartition('.')[2]} in modules_to_save alone, which trains it in full"
        raise CheckpointError(f"lora.targets: {path}: embedding and head get no adapters; expected {expected}")


def _adapt(module: nn.Module, lora: Lora, path: str, has_experts: bool) -> None:
    """Add adapters to a module's own weights where `lora` takes them.

    Args:
        has_experts: a tower of images has none: what has three dimensions there are positions, or a token.
    """
    everything = lora.targets == ALL_LINEAR
    if ends_with(path, lora.modules_to_save):
        return
    if isinstance(module, (nn.Linear, Conv1D)) and isinstance(module.weight, nn.Parameter):
        if everything or lora.takes(path):
            rows, columns = module.weight.shape
            _add_factors(module, "", [columns, rows] if is_transposed(module) else [rows, columns], lora, path)
            module.__class__ = mixed(Adapted, module.__class__)
        return

    for name in expert_weights(module):
        if has_experts and lora.experts and (everything or lora.takes(f"{path}.{name}")):
            if lora.dropout:
                raise CheckpointError(
                    f"lora.dropout: {lora.dropout}, but {path}.{name} is a weight of experts, to which dropout cannot "
                    "be applied apart from its adapter; expected 0, or lora.experts: false"
                )
            experts, *sides = module.get_parameter(name).shape
            if is_transposed(module):
                sides.reverse()
            _add_factors(module, f"{name}_", sides, lora, f"{path}.{name}", (experts,))
            if not isinstance(module, AdaptedExperts):
                module.__class__ = mixed(AdaptedExperts, module.__class__)


def _add_factors(
    module: Any, prefix: str, shape: list[int], lora: Lora, path: str, experts: tuple[int, ...] = ()
) -> None:
    rows, columns = shape
    if lora.r > min(rows, columns):
        raise CheckpointError(
            f"lora.r: {lora.r}, but {path} is {rows} x {columns}; expected at most {min(rows, columns)}"
        )
    module.register_parameter(f"{prefix}lora_A", nn.Parameter(torch.empty(*experts, lora.r, columns)))
    module.register_parameter(f"{prefix}lora_B", nn.Parameter(torch.empty(*experts, rows, lora.r)))
    module.lora = lora


_CLASSES: dict[tuple[type, type], Any] = {}


def mixed(mixin: type, kind: type) -> Any:
    """Make a class of both, once for all layers, as torch.compile looks at classes."""
    if (mixin, kind) not in _CLASSES:
        _CLASSES[mixin, kind] = type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})
    return _CLASSES[mixin, kind]
