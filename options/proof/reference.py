"""Compute the same training in one process: one module, fp32, one sample at a time, torch's optimizer.

There are no stages, replicas, micro-batches, packing, padding, recomputation and no DeepSpeed, and the loss is the
objective's formula over all logits (`training.objective`): torch's cross-entropy for fine-tuning. Adapters are added to
the weights under them. Each step is checked by itself. Loss and gradients are computed from the reference's own
weights, rounded to the run's precision. The update uses the run's gradients, as Adam turns rounding errors of a tiny
gradient into full steps. The first weights are those of the file, so if each step's gradients and update are right, the
whole run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from lion_pytorch import Lion
from torch import Tensor, nn

from data.images.pictures import Pictures
from data.loader import GlobalBatch
from data.sample_set import InMemory, Sample, documents
from models.adapters import base_of, is_transposed, merged
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.source import open_source
from models.quantized_base import round_to_nf4
from models.router import router_loss, top_k
from training.batches import build_loader, training_loader
from training.config.deepspeed_config import router_loss_weight
from training.config.keys import TrainConfig
from training.config.precision import training_dtype
from training.errors import ConfigError
from training.objective import NOTHING_ALONG, Along, Parts
from training.option import model_for
from training.trained import initial_states, with_trained


@dataclass(frozen=True)
class Step:
    """The results of a step.

    Attributes:
        gradients, before, weights: `<layer>.<name>` -> gradient, weight before and after the update; a tied model has
            only those of the embedding.
        noted: further means over the samples, as metrics name them (`Formula.noted`).
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    weights: dict[str, Tensor]
    noted: dict[str, float]


class Reference:
    """Trains like the run in `config`, in this process.

    Args:
        samples, evaluated: to train on, and to evaluate on.
    """

    def __init__(self, config: TrainConfig, samples: Sequence[Sample], evaluated: Sequence[Sample] = ()) -> None:
        folder, dtype, cpu = Path(config.model_path), training_dtype(config), torch.device("cpu")
        spec = with_trained(read_spec(folder), config)
        spec = model_for(config, spec, [InMemory(samples), InMemory(evaluated)])
        self._pictures = Pictures(folder, *config.pixels) if spec.family.sees else None
        spec.config._experts_implementation = "eager"
        self._config, self._samples, self._evaluated = config, samples, evaluated
        self._formula = config.objective.formula()
        self._router_weight = router_loss_weight(config, spec)
        self._loader = training_loader(InMemory(samples), config, spec)
        begin = CausalLM(spec, initial_states(config, spec, folder), dtype, cpu)
        model = CausalLM(spec.base, open_source(folder, spec.base), dtype, cpu) if spec.trained.lora else begin
        own, values = _named(model.named_parameters()), _named(begin.named_parameters())
        trained = {name: value.detach().float() for name, value in values.items() if value.requires_grad}
        self.fixed = _named(model.named_buffers())
        for name in own.keys() - trained.keys():
            self.fixed[name] = own[name].requires_grad_(False)
        if spec.tied_names and spec.tied_names[0] in self.fixed:
            self.fixed[spec.tied_names[1]] = self.fixed[spec.tied_names[0]]
        self.fixed = {name: tensor.detach().clone() for name, tensor in self.fixed.items()}
        if spec.trained.lora and spec.trained.lora.base:
            for block in model.blocks:
                round_to_nf4(block)
        self._model, self._lora = model.float(), spec.trained.lora
        own = _named(self._model.named_parameters())
        self._weights = {name: own.get(name, value.clone()).requires_grad_() for name, value in trained.items()}
        self._adapted = [self._take_out(name) for name in self._weights if name.endswith("lora_A")]
        self._masters = {name: value.clone().requires_grad_() for name, value in trained.items()}
        self._optimizer = own_optimizer(config, self._masters, spec.tied_names)
        self._round()
        with torch.no_grad():  # what the model finds before the first step
            self._begin = [self._noted(samples), self._noted(evaluated)]

    def step(self, number: int, gradients: dict[str, Tensor]) -> Step:
        """Compute step `number`, from 1.

        Args:
            gradients: the run's, for the update.
        """
        self._round()
        loss, noted, along = self._loss(self._loader.batch(number - 1), self._samples, self._begin[0])
        own = _gradients(loss, self._weights)
        if self._formula.along_as:
            learning = {name: weight for name, weight in self._weights.items() if self._formula.learns_along(name)}
            more = _gradients(self._formula.along_weight * along.mean, learning)
            own |= {name: own[name] + gradient for name, gradient in more.items()}
        counted = [gradient for name, gradient in own.items() if self._formula.in_norm(name)]
        norm = torch.stack([gradient.square().sum() for gradient in counted]).sum().sqrt()
        before = {name: weight.detach().clone() for name, weight in self._masters.items()}
        for name, weight in self._masters.items():
            weight.grad = gradients.get(name, torch.zeros_like(weight)).clone()  # a missing one fails its row
        if self._config.gradient_clipping:
            clipped = [weight.grad for name, weight in self._masters.items() if self._formula.in_norm(name)]
            total = torch.nn.utils.get_total_norm(each for each in clipped if each is not None)
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._config.gradient_clipping, total)
        for group in self._optimizer.param_groups:
            group["lr"] = own_rate(self._config, number) * group.get("lr_ratio", 1.0)
        self._optimizer.step()
        after = {name: weight.detach().clone() for name, weight in self._masters.items()}
        means = dict(zip(self._formula.noted, noted.tolist(), strict=True))
        if self._formula.along_as:
            means[self._formula.along_as] = along.mean.item()
        return Step(loss.item(), norm.item(), own, before, after, means)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of what is evaluated on.

        They are one batch here, so how the run cuts them must not matter.
        """
        self._round()
        everything = build_loader(InMemory(self._evaluated), self._config).batch_of(range(len(self._evaluated)))
        return self._loss(everything, self._evaluated, self._begin[1], auxiliary=False)[0].item()

    @torch.no_grad()
    def logits(self) -> Iterator[tuple[Sample, Tensor]]:
        """Yield each document that is evaluated, and what an export has to find of its logits [S, V]."""
        for sample in self._evaluated:
            for document in documents(sample):
                yield document, self._formula.compared_logits(self._document(document)[0])

    def images(self, document: Sample) -> dict[str, Tensor]:
        """Decode a document's images, and name the tensors that the model takes of them."""
        images, sees = document.get("images"), self._model.spec.family.sees
        if not images:
            return {}
        assert self._pictures is not None and sees is not None, "images, and a model without eyes"
        tensors = self._pictures.tensors(images)
        return {name: tensors[name] for name in sees.inputs}

    def _loss(
        self, batch: GlobalBatch, samples: Sequence[Sample], begin: Tensor, auxiliary: bool = True
    ) -> tuple[Tensor, Tensor, Along]:
        """Return the loss of a global batch, the means of what the formula notes, [noted], and what is learnt along."""
        total, noted, along = torch.zeros(()), torch.zeros(len(self._formula.noted)), NOTHING_ALONG
        first_documents = [documents(samples[number])[0] for number in batch.samples]
        supervised, n_samples = _supervised(first_documents), len(batch.samples)
        for rows in chain(*batch.micro_batches):
            numbers = list(chain(*rows))
            routed = torch.zeros(())
            for number in numbers:
                parts, its_routed, its_along = self._sample(samples[number], begin[number], auxiliary)
                along = its_along + along if len(along.sums) else its_along
                total = total + parts.of_sample / n_samples + parts.of_tokens / supervised
                routed, noted = routed + its_routed, noted + parts.noted.detach() / n_samples
            if auxiliary and self._router_weight and numbers:  # the router loss is one of a micro-batch
                share = sum(len(samples[number]["input_ids"]) for number in numbers) / batch.tokens
                chosen = top_k(self._model.spec.config)
                total = total + self._router_weight * share * router_loss(routed, chosen)
        return total, noted, along

    def _sample(self, sample: Sample, begin: Tensor, auxiliary: bool) -> tuple[Parts, Tensor, Along]:
        """Return the parts of a sample's loss, its router sums, and what is learnt along of its first document."""
        found = [self._document(each) for each in documents(sample)]
        routed = sum((each for _, _, each, _ in found), torch.zeros(()))
        return self._formula.parts(sample, [each[:2] for each in found], begin, auxiliary), routed, found[0][3]

    def _document(self, document: Sample) -> tuple[Tensor, Tensor, Tensor, Along]:
        """Return a document's logits [S, V], what all tokens but the last should predict [S - 1], and more sums.

        These are of the router, and of what is learnt along.
        """
        images = [*self.images(document).values()]
        hidden, _, *routed = self._model.activations(torch.tensor([document["input_ids"]]), images=images)
        logits = self._model.head.project(self._model.head.norm(hidden))[0]
        along = self._formula.along(self._model, document, hidden)
        return logits, torch.tensor(document["labels"][1:]), sum(routed, torch.zeros(())), along

    def _noted(self, samples: Sequence[Sample]) -> Tensor:
        """Compute what the formula notes of each sample, [samples, noted]."""
        nothing = torch.zeros(len(self._formula.noted))
        if not (self._formula.noted and samples):
            return nothing.expand(len(samples), -1)
        return torch.stack([self._sample(each, nothing, False)[0].noted for each in samples])

    def _take_out(self, factor: str) -> tuple[nn.Module, str, Tensor, str]:
        """Make the weight under an adapter a plain tensor, in whose place sums can be set."""
        owner, _, name = base_of(factor).rpartition(".")
        module = self._model.layers.get_submodule(owner)
        return module, name, module._parameters.pop(name), factor  # type: ignore[return-value]

    def _round(self) -> None:
        """Set the weights to the masters, rounded to the run's precision, and add the adapters."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name].to(training_dtype(self._config)))
        for module, name, weight, factor in self._adapted:
            assert self._lora is not None
            a, b = self._weights[factor], self._weights[f"{factor[:-1]}B"]
            setattr(module, name, merged(weight, a, b, self._lora.scale, is_transposed(module)))


def _gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the gradients of a loss, zeros where it does not depend on a weight."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def _named(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name.removeprefix("layers."): tensor for name, tensor in tensors}


def _supervised(samples: Sequence[Sample]) -> int:
    labels = chain.from_iterable(sample["labels"][1:] for sample in samples)
    return sum(label >= 0 for label in labels)


# A mistake in `training.optimizer` must not affect the reference too, so the code below does not use it.
def own_optimizer(
    config: TrainConfig, weights: Mapping[str, Tensor], tied: tuple[str, str] | None
) -> torch.optim.Optimizer:
    """Build torch's optimizer with a group for each weight.

    Raises:
        ConfigError: the optimizer has no such parameter.
    """
    kind, params = config.optimizer.type, config.optimizer.params
    if config.zero_optimization.offloads and config.zero_force_ds_cpu_optimizer:  # DeepSpeed's have another default
        params = {"weight_decay": 0.0} | params
    groups = []
    for name, weight in weights.items():
        names = tied if tied and name in tied else (name,)
        exempt = any(pattern.search(each) for pattern, each in product(config.optimizer.no_wd_kws, names))
        group: dict[str, Any] = {"params": [weight]} | ({"weight_decay": 0.0} if exempt else {})
        if config.lora and name.endswith("lora_B"):
            group["lr_ratio"] = config.lora.lr_ratio
        groups.append(group)
    try:
        made: torch.optim.Optimizer = (Lion if kind == "Lion" else getattr(torch.optim, kind))(groups, **params)
        return made
    except TypeError as error:
        raise ConfigError(f"optimizer.params: {kind} of torch does not have all of them: {error}") from None


def own_rate(config: TrainConfig, step: int) -> float:
    """Compute the learning rate of a step, counted from 1, by the formulas of docs/configuration.md."""
    rate = float(config.optimizer.params["lr"])
    if config.scheduler is None:
        return rate
    kind, params, total = config.scheduler.type, config.scheduler.params.model_dump(), config.max_steps or 1
    top = start = max(1, params["warmup_num_steps"] or math.ceil(params["warmup_ratio"] * total))
    if step < top:
        rise = step / top if params["warmup_type"] == "linear" else math.log(step + 1, top + 1)
        rate *= params["warmup_min_ratio"] * (1 - rise) + rise
    if kind == "WSD":
        start = max(top, total - max(1, round(params["decay_ratio"] * total)))
    fallen = 0.0
    if step > start:
        fallen = min(1.0, (step - start) / (total - start)) if total > start else 1.0
    left = {
        "WarmupCosineLR": math.cos(math.pi * fallen / 2) ** 2,
        "linear": 1 - fallen,
        "WSD": 1 - fallen**0.5,
        "constant": 1.0,
    }[kind]
    least = params.get("cos_min_ratio", params.get("min_ratio", 0.0))
    return rate * (least * (1 - left) + left)
