"""Compare a family with transformers, on a small model with the traits of the large one.

transformers writes a model with random weights, and the family's own table reads it. Compared are the round trip of
every weight, logits, loss, every gradient, two stages with one, packed documents with each alone, padded rows, rows
that two processes share, rows in chunks, and tokens that come one by one through the cache. A family that fails in one
of them is refused, with the figure and the bound, or does without what it fails in.

Cost: some seconds on a CPU, in fp32.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, model_validator
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from typing_extensions import Self

from models.attention.cache import KeyValueCache
from models.attention.chunks import chunks_of
from models.attention.kernels import ALL, EAGER, TORCH
from models.attention.packed import Documents
from models.attention.positions import LINEAR, attention_kind
from models.attention.rope import depends_on_length
from models.causal_lm import CausalLM
from models.checkpoint.source import HuggingFaceSource, same_bytes
from models.config_json import model_fields
from models.derived.derive import check_rotation, derive, small_model
from models.derived.inside import decoder_class
from models.derived.outline import Underivable
from models.family import Family
from models.parallel.sequence import Folded, share_attention
from models.router import router_loss, top_k
from models.spec import ModelSpec
from models.weight_map import WeightMap

LENGTH = 40  # longer than the windows of a small model
CUTS = (17, 25)  # where the second document of each packed row begins
CHUNKED = (16, 1, 23)  # tokens of each chunk: a document of row 0 begins with the last one
STEPS = 6  # tokens that come one by one
PADDED = 31  # from where on a row is padded
BOUND = 2e-5  # of what is compared, beside its largest number
RECURRENT = 2e-4  # where there are recurrent states, which make rounding larger
ROUGHLY = 1e-3  # of tokens one by one, for the same reason; mistakes are larger
CPU = torch.device("cpu")

GRADIENTS = "gradients"
GENERATION, ROUTING = "tokens one by one", "losses of the router"
PARTS, CHUNKS = "shared rows", "rows in chunks"
OPTIONAL = {GENERATION, ROUTING, PARTS, CHUNKS}  # which training can do without

Figures = dict[str, float]  # the largest difference of each comparison, as a share of the largest number in it


class Compared(BaseModel):
    """The result of a comparison with transformers that holds.

    Attributes:
        linear: whether there is linear attention, which sees the documents of a packed row one by one.
    """

    figures: Figures
    linear: bool
    seconds: float

    @model_validator(mode="after")
    def _check_figures(self) -> Self:
        """Refuse a kept proof that shows nothing, whatever its checksum."""
        within = all(figure <= bound(name, self.linear) for name, figure in self.figures.items())  # not so for a NaN
        if not self.figures or not within:
            raise ValueError("expected figures within their bounds")
        return self

    def __str__(self) -> str:
        worst = max(self.figures, key=lambda name: self.figures[name])
        text = f"compared with transformers in {len(self.figures)} ways"
        return f"{text}; largest difference: {self.figures[worst]:.0e} ({worst})"


class Proof(Compared):
    """The result of a family's comparison.

    Attributes:
        attention: the kernels with which the family is exact, the default first.
        generates: whether tokens may come one by one.
        routes: whether the loss of its router is transformers', where it has one.
        shares_rows: whether tokens meet in attention only, so that several processes may share rows.
        chunks_rows: whether rows may come in chunks, as all that joins tokens can be handed on.
    """

    attention: tuple[str, ...]
    generates: bool
    routes: bool
    shares_rows: bool
    chunks_rows: bool

    @model_validator(mode="after")
    def _check_kernels(self) -> Self:
        if self.attention not in (ALL, (EAGER,)):
            raise ValueError("expected known kernels")
        return self

    def __str__(self) -> str:
        text = super().__str__()
        if self.attention[0] == EAGER:
            text += "; attention is the layer's own arithmetic, as torch's kernels do not compute it"
        if self.linear:
            text += "; linear attention sees packed documents one by one"
        return text if self.generates else text + "; no generation here, as tokens one by one are not transformers'"


def prove(config: PreTrainedConfig, fields: dict[str, Any], family: Family | None = None) -> Proof:
    """Compare the family of a config with transformers.

    Args:
        family: what a file declares; derived where absent.

    Raises:
        Underivable: it does not hold with any kernel; the text says in what it differs.
    """
    begin = time.perf_counter()
    with apart_from_callers(config), tempfile.TemporaryDirectory() as name:
        check_rotation(config, fields)
        torch.manual_seed(0)
        model, folder = small_model(config, fields), Path(name)
        roughen(model)
        write_checkpoint(model, folder)
        _, raw = model_fields(folder / "config.json")
        small = type(config).from_dict(raw)

        kernels = family.attention[:1] if family else (TORCH, EAGER)
        family = family or derive(small, raw)
        linear = LINEAR in [attention_kind(small, block) for block in range(small.num_hidden_layers)]

        failed = ""
        for kernel in kernels:
            try:
                figures = compare_models(small_spec(family, small, raw, kernel), model, folder)
                if {name for name in figures if not figures[name] <= bound(name, linear)} == {GRADIENTS}:
                    # Rounding may cross the kink of a ReLU, as OPT's; with other tokens hardly once more.
                    figures = compare_models(small_spec(family, small, raw, kernel), model, folder)
            except Exception as error:  # whatever a block makes of arguments that it does not know
                failed = " ".join(f"{type(error).__name__}: {error}".split())
                continue
            wrong = {name for name in figures if not figures[name] <= bound(name, linear)}
            if wrong <= OPTIONAL:
                return Proof(
                    attention=ALL if kernel == TORCH else (EAGER,),
                    figures={name: figure for name, figure in figures.items() if name not in wrong},
                    generates=GENERATION not in wrong,
                    routes=ROUTING not in wrong,
                    shares_rows=PARTS not in wrong,
                    chunks_rows=CHUNKS not in wrong,
                    linear=linear,
                    seconds=time.perf_counter() - begin,
                )
            worst = max(wrong - OPTIONAL, key=lambda name: figures[name])
            most = bound(worst, linear)
            failed = f"{worst} differ by {figures[worst]:.0e} of their size; expected at most {most:.0e}"
        raise Underivable(f"{config.model_type} is not what transformers has: {failed}")


def bound(comparison: str, linear: bool) -> float:
    """Get the largest difference that counts as rounding."""
    if comparison == GENERATION:
        return ROUGHLY
    return RECURRENT if linear else BOUND


@contextmanager
def apart_from_callers(config: PreTrainedConfig) -> Iterator[None]:
    """Isolate a proof: CPU, one thread, own gradients and random numbers.

    Products as small as these are slower with several, and many times so on a busy machine. Kernels that an installed
    package has for GPUs (causal_conv1d, flash-linear-attention) give way to the functions that they stand for.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module = sys.modules[decoder_class(config).__module__]
    kernels = {name: each for name, each in vars(module).items() if _is_kernel(each)}
    vars(module).update({name: kernel.__wrapped__ for name, kernel in kernels.items()})
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        vars(module).update(kernels)
        torch.set_num_threads(threads)


def _is_kernel(value: Any) -> bool:
    """Return whether a function of transformers replaces itself by a package's kernel."""
    made_by = getattr(getattr(value, "__code__", None), "co_qualname", "")
    return made_by.startswith(f"{use_kernel_func_from_hub_with_fallback.__name__}.<locals>")


def write_checkpoint(model: Any, folder: Path) -> None:
    """Save config and weights as transformers does."""
    model.config.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    save_file(revert_weight_conversion(model, state), folder / "model.safetensors")


def small_spec(family: Family, config: PreTrainedConfig, raw: dict[str, Any], kernel: str) -> ModelSpec:
    config._experts_implementation = "eager"
    spec = ModelSpec(family, config, raw, raw)
    spec.set_attention(kernel)
    return spec


@torch.no_grad()
def roughen(model: Any) -> None:
    """Randomise all weights, so that no two are equal and hide a mistake."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def compare_models(spec: ModelSpec, model: Any, folder: Path) -> Figures:
    """Compare our model with transformers', whose checkpoint lies in `folder`."""
    source = HuggingFaceSource(folder, spec)
    check_names(source)
    ours = CausalLM(spec, source, torch.float32, CPU)
    ids = torch.randint(3, int(spec.config.vocab_size), (2, LENGTH))
    wanted = alone(model, ids)
    found = ours(ids)

    model.zero_grad()
    losses = [F.cross_entropy(each[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for each in (wanted, found)]
    for loss in losses:
        loss.backward()

    figures = {"logits": apart(found, wanted), "losses": apart(losses[1], losses[0])}
    gradients = revert_weight_conversion(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    figures[GRADIENTS] = max(apart(gradient, gradients[name]) for name, gradient in gradients_of(ours))

    if spec.family.router:
        its = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
        figures[ROUTING] = apart(router_loss(ours.activations(ids)[2], top_k(spec.config)), its)
    with torch.inference_mode():
        figures["stages"] = apart(in_stages(spec, source, ids), found)
        figures["documents in a packed row"] = packed(ours, model, ids)
        figures |= {"padded rows": padded(ours, model, ids), GENERATION: torch.inf, PARTS: torch.inf}
        with suppress(Exception):  # a cache of a kind of its own: a family without generation
            figures[GENERATION] = one_by_one(ours, model, ids)
        with suppress(Exception):  # attention that does not know of parts
            figures[PARTS] = rows_in_parts(ours, ids)
    figures[CHUNKS] = torch.inf
    with suppress(Exception):  # whatever joins tokens, asked for what it does not know
        figures[CHUNKS] = rows_in_chunks(ours, ids)
    return figures


@torch.no_grad()
def apart(found: Tensor, wanted: Tensor) -> float:
    """Get the largest difference, as a share of the largest number."""
    difference = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
    return float(difference.nan_to_num(torch.inf))


def check_names(source: HuggingFaceSource) -> None:
    """Check that every weight goes back under its name, bit for bit."""
    spec = source.spec
    for layer in range(spec.n_layers):
        for name, tensor in source.weight_map.on_disk(layer, source.read_layer(layer)).items():
            spare = spec.tied and name == source.weight_map.tied_head
            if not spare and not same_bytes(tensor, source.read(name)):
                raise Underivable(f"{name} does not come back as it was read")


def gradients_of(model: CausalLM, names: WeightMap | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every gradient under its name on disk; a tied weight's once.

    Args:
        names: in the spelling of a checkpoint; the family's own where absent.
    """
    names, tied = names or model.spec.weight_map, model.spec.tied
    for number, layer in enumerate(model.layers):
        found = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
        for name, gradient in names.on_disk(number, found).items():
            yield names.tied_embedding if tied and name == names.tied_head else name, gradient


def in_stages(spec: ModelSpec, source: HuggingFaceSource, ids: Tensor) -> Tensor:
    """Compute logits in two stages."""
    middle = spec.n_layers // 2
    parts = [range(middle), range(middle, spec.n_layers)]
    first, second = (CausalLM(spec, source, torch.float32, CPU, part) for part in parts)
    hidden, positions, *_ = first.activations(ids)
    return second(hidden, positions)


def two_documents() -> Tensor:
    """Make position ids of two documents in each row."""
    return torch.stack([torch.cat([torch.arange(each), torch.arange(LENGTH - each)]) for each in CUTS])


def alone(model: Any, ids: Tensor) -> Tensor:
    """Compute transformers' logits of a text alone."""
    if depends_on_length(model.config.get_text_config()):
        model(input_ids=ids[:, :1], use_cache=False)  # dynamic scaling remembers the length before, but for short texts
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def packed(ours: CausalLM, model: Any, ids: Tensor) -> float:
    """Compare two documents in each row with each alone."""
    positions = two_documents()
    together = ours(ids, positions)
    differences = []
    for row, end in enumerate(CUTS):
        for part in (slice(0, end), slice(end, LENGTH)):
            differences.append(apart(together[row, part], alone(model, ids[row : row + 1, part])[0]))
    return max(differences)


def rows_in_parts(ours: CausalLM, ids: Tensor) -> float:
    """Compare rows shared by two processes with whole ones."""
    positions = two_documents()
    whole = ours(ids, positions)
    share_attention()
    ours.positions.part = parts = Folded(2)
    try:
        found = ours(parts.own(ids, -1), positions.clone())
    finally:
        ours.positions.part = None
    return apart(found.view_as(whole), whole)


def rows_in_chunks(ours: CausalLM, ids: Tensor) -> float:
    """Compare packed rows in chunks with whole ones, by logits and every gradient."""
    positions = two_documents()
    weights = dict(ours.named_parameters())
    whole = ours(ids, positions)
    directions = torch.randn_like(whole) / ids.numel() / whole.shape[-1] ** 0.5  # as large as of a mean cross-entropy

    def gradients(outputs: list[Tensor]) -> dict[str, Tensor]:
        """Differentiate a sum over all logits, from the last chunk to the first."""
        ours.zero_grad()
        begins = accumulate((each.shape[1] for each in outputs), initial=0)
        for begin, output in reversed([*zip(begins, outputs, strict=False)]):
            (output * directions[:, begin : begin + output.shape[1]]).sum().backward()
        return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}

    wanted = gradients([whole])

    ours.positions.expect([Documents.of(positions)] * len(CHUNKED), chunks_of(CHUNKED))
    try:
        chunks = [ours(each, positions.clone()) for each in ids.split(CHUNKED, dim=1)]
    finally:
        ours.positions.expect([])
    found = gradients(chunks)
    if found.keys() != wanted.keys():
        return torch.inf
    return max(apart(torch.cat(chunks, dim=1), whole), *(apart(found[name], wanted[name]) for name in wanted))


def padded(ours: CausalLM, model: Any, ids: Tensor) -> float:
    """Compare padded rows with rows without padding."""
    positions = torch.arange(LENGTH).repeat(2, 1)
    positions[:, PADDED:] = -1 - positions[:, PADDED:]
    return apart(ours(ids, positions)[:, :PADDED], alone(model, ids[:, :PADDED]))


def one_by_one(ours: CausalLM, model: Any, ids: Tensor) -> float:
    """Compare tokens one by one through the cache with transformers' own."""
    cache, wanted, differences = KeyValueCache(rows=0), [], []
    for row, end in enumerate(CUTS):
        own, its = KeyValueCache(), None
        found = ours(ids[row : row + 1, :end], cache=own)
        cache.append(own)
        steps = []
        for piece in ids[row, : end + STEPS].split([end, *[1] * STEPS]):
            output = model(input_ids=piece[None], past_key_values=its, use_cache=True)
            its = output.past_key_values
            steps.append(output.logits[0, -1])
        differences.append(apart(found[0, -1], steps[0]))
        wanted.append(torch.stack(steps[1:]))
    for step in range(STEPS):
        found = ours(ids[torch.arange(2), [end + step for end in CUTS]][:, None], cache=cache)
        differences.append(apart(found[:, 0], torch.stack(wanted)[:, step]))
    return max(differences)
