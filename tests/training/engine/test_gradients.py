"""Every parameter's gradient through the real launcher equals that of one process without Pipetune's engine.

The reference runs each sample by itself, without padding, micro-batches or DeepSpeed, and divides by the number of
trained tokens. The workers run samples that differ much in length, packed into rows, in several micro-batches. The
router loss of mixture-of-experts is that of each micro-batch, so the reference adds up the sums of its samples.

Adapters begin where B is not zero, so that A has gradients too; tests/models/test_adapters.py compares the one process
with peft.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from data.loader import Loader
from data.sample_set import InMemory, Sample
from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.attention.kernels import FLEX
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates, PeftFolder
from models.checkpoint.source import open_source
from models.router import router_loss
from tests.cases import tiered
from tests.launching import OFFLOAD
from tests.matrix import MODELS, ROW, Outcome, alone, assert_same, step, take
from tests.models.adapters import save_adapter
from tests.ranks import Ranks, write_samples

pytestmark = pytest.mark.launched

DIMS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
# What the gradients must not depend on.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "unpacked": {"packing": False},
    "recompute": {"use_grad_ckpt": True},
    "every_second_offloaded": {"use_grad_ckpt": {"every": 2}, "offload_activations": True},
    "auto": {"use_grad_ckpt": "auto"},
    "flex": {},
    "flex_recompute": {"use_grad_ckpt": True},
    "without_zero": {"zero_optimization": {"stage": 0}},
    "offload": OFFLOAD,
    "bf16": {"bf16": {"enabled": True}},
    "bf16_offload": {"bf16": {"enabled": True}} | OFFLOAD,
    "bf16_without_zero": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
}
DUALPIPEV = {"schedule": "dualpipev"}
SHARED: dict[str, dict[str, Any]] = {  # n replicas that share their rows
    "sequence": {"sequence": 2},
    "sequence_4": {"sequence": 4},
    "sequence_unpacked": {"sequence": 2, "packing": False},
    "sequence_recompute": {"sequence": 2, "use_grad_ckpt": True, "offload_activations": True},
    "sequence_without_zero": {"sequence": 2, "zero_optimization": {"stage": 0}},
    "sequence_bf16": {"sequence": 2, "bf16": {"enabled": True}},
    "sequence_flex": {"sequence": 2},
}
ROUTED = {  # how the samples share micro-batches must be the same on every topology, if nothing but dims changes
    "default_packing": {"pack_len": None, "train_micro_batch_size_per_gpu": 1},
    "uneven": {"pack_len": None, "train_micro_batch_size_per_gpu": 3, "train_batch_size": 12},
}
VARIANTS |= ROUTED | SHARED
VARIANTS |= {f"dualpipev_{name}": keys | DUALPIPEV for name, keys in VARIANTS.items()}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "compiled_recompute": {"compile": True, "use_grad_ckpt": {"every": 2}, "offload_activations": True},
}
COMPILED |= {f"dualpipev_{name}": keys | DUALPIPEV for name, keys in COMPILED.items()}
VARIANTS |= COMPILED
ZERO: dict[str, dict[str, Any]] = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (2, 3)}
VARIANTS |= ZERO
ROUTER_WEIGHT = {"mixtral": 0.5, "qwen3_moe": 0.5}  # of the router loss

LORA: dict[str, Any] = {"r": 2, "alpha": 6}
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}}
ADAPTERS["few"] = {"targets": ["q_proj", "down_proj"]}
ADAPTERS["whole"] = {"modules_to_save": ["embed_tokens", "lm_head"]}
ADAPTERS["nf4"] = {"base": "nf4"}
FROZEN = ["embed_tokens", r"layers\.0\."]  # both ends of a tied model


class Case(NamedTuple):
    """
    Attributes:
        trains: all weights where empty, adapters of a kind, or what is not `frozen`.
    """

    model: str
    variant: str = "fp32"
    dims: tuple[int, int] = (2, 1)
    parts: tuple[int, ...] = ()
    trains: str = ""

    @property
    def dualpipev(self) -> bool:
        return self.variant.startswith("dualpipev")

    @property
    def kernel(self) -> str | None:
        """Of the attention; None for the usual one."""
        return FLEX if "flex" in self.variant else None

    @property
    def router_weight(self) -> float | None:
        if self.trains:
            return 0.0 if "mixtral" in self.model or "moe" in self.model else None
        return ROUTER_WEIGHT.get(self.model)

    @property
    def keys(self) -> dict[str, Any]:
        """Of the config."""
        keys = VARIANTS[self.variant] | {"aux_router_loss": {"weight": self.router_weight}}
        return keys | ({"freeze": FROZEN} if self.trains == "frozen" else {})

    @property
    def name(self) -> str:
        words = self.trains, self.model, self.variant, f"{self.dims[0]}x{self.dims[1]}", "+".join(map(str, self.parts))
        return "-".join(filter(None, words))


CASES = [Case(model, "fp32", dims) for model in ("tied", "untied", "bloom", "mixtral") for dims in DIMS]
CASES += [Case(model, "fp32", (2, 2)) for model in ("gpt2", "opt")]
CASES += [Case(model, "fp32", dims) for model in MODELS if model != "deep" for dims in ((1, 1), (2, 1), (4, 1))]
CASES += [
    Case(model, variant, (2, 1))
    for model in ("tied", "untied")
    for variant in VARIANTS
    if variant.removeprefix("dualpipev_") not in ("fp32", *ROUTED, *SHARED, *COMPILED, *ZERO)
]
CASES += [Case("tied", variant, (2, 1)) for variant in COMPILED]
CASES += [Case(model, "dualpipev_fp32", (2, 1)) for model in MODELS if model != "deep"]
CASES += [Case(model, "dualpipev_fp32", (2, 2)) for model in ("tied", "mixtral")] + [
    Case("deep", "dualpipev_fp32", (4, 1))
]
CASES += [Case("mixtral", "dualpipev_recompute", (2, 1)), Case("bloom", "dualpipev_flex_recompute", (2, 1))]
CASES += [Case("mixtral", "recompute", (2, 1)), Case("gemma2", "recompute", (4, 1))]
CASES += [Case("mixtral", variant, dims) for variant in ROUTED for dims in ((1, 1), (2, 1), (1, 2), (2, 2))]
CASES += [Case("mixtral", f"dualpipev_{variant}", (2, 1)) for variant in ROUTED]
CASES += [Case("tied", "bf16", dims) for dims in ((1, 2), (2, 2))]
CASES += [Case("tied", "bf16_without_zero", (1, 2)), Case("tied", "bf16_offload", (2, 2))]
# Not the model with an odd number of heads.
CASES += [Case(model, "sequence", (1, 2)) for model in MODELS if model not in ("baichuan2-13b", "deep")]
CASES += [Case(model, variant, (2, 2)) for model in ("tied", "bloom") for variant in SHARED if variant != "sequence_4"]
CASES += [Case("mixtral", variant, (2, 2)) for variant in ("sequence", "sequence_recompute")]
CASES += [Case(model, "sequence_4", (1, 4)) for model in ("few_key_heads", "mixtral", "bloom")]
CASES += [Case(model, "dualpipev_sequence_recompute", (2, 2)) for model in ("tied", "mixtral")]
CASES += [
    Case("tied", dims=(1, 1), trains="lora"),
    Case("tied", dims=(2, 2), trains="lora"),
    Case("tied", parts=(1, 4), trains="lora"),  # an embedding alone, which has nothing to train
    Case("tied", "bf16", parts=(1, 4), trains="lora"),
    Case("tied", "without_zero", parts=(4, 1), trains="lora"),
    Case("tied", "offload", parts=(1, 4), trains="lora"),
    Case("tied", "dualpipev_fp32", trains="lora"),
    Case("tied", "sequence", (1, 2), trains="lora"),
    Case("tied", "zero2", (1, 2), trains="lora"),
    Case("tied", "zero3", (1, 2), trains="lora"),
    Case("mixtral", trains="lora"),
    Case("mixtral", "dualpipev_fp32", trains="lora"),
    Case("mixtral", "recompute", trains="lora"),
    Case("mixtral", "zero3", (1, 2), trains="lora"),
    Case("tied", "compiled", trains="lora"),
    Case("mixtral", "compiled", trains="lora"),
    Case("untied", "recompute", trains="nf4"),
    Case("mixtral", "recompute", trains="nf4"),
    Case("bloom", dims=(2, 2), trains="lora"),
    Case("phi3", trains="lora"),
    Case("gemma2", dims=(4, 1), trains="lora"),
    Case("qwen3_moe", trains="lora"),
    Case("chatglm3", trains="lora"),
    Case("untied", trains="few"),
    Case("untied", trains="whole"),
    Case("tied", trains="whole"),
    Case("tied", trains="frozen"),
    Case("untied", "dualpipev_fp32", trains="frozen"),
    Case("tied", "bf16", parts=(2, 3), trains="frozen"),  # a stage of frozen layers
]
CASES = list(dict.fromkeys(CASES))
# Every kind of layer and every way to cut the model; all families and whatever else is alike in `make test-all`.
QUICK = ["tied-fp32-2x1", "tied-fp32-1x2", "tied-recompute-2x1", "tied-bf16-2x1", "tied-dualpipev_fp32-2x1"]
QUICK += ["tied-sequence-1x2", "mixtral-fp32-2x1"]
QUICK += ["lora-tied-fp32-2x1-1+4", "lora-tied-dualpipev_fp32-2x1", "lora-mixtral-fp32-2x1"]
SLOW = ["tied-fp32-2x2", "gemma2-fp32-2x1", "chatglm3-fp32-2x1", "tied-bf16-1x2", "tied-bf16_without_zero-2x1"]
SLOW += ["tied-dualpipev_recompute-2x1", "tied-dualpipev_bf16-2x1", "tied-dualpipev_fp32-2x2"]
SLOW += ["mixtral-dualpipev_fp32-2x1", "deep-dualpipev_fp32-4x1", "mixtral-uneven-2x1"]
SLOW += ["tied-sequence_bf16-2x2", "mixtral-sequence-2x2", "few_key_heads-sequence_4-1x4"]
SLOW += ["lora-tied-fp32-1x1", "lora-tied-fp32-2x2", "lora-tied-bf16-2x1-1+4", "lora-tied-zero3-1x2"]
SLOW += ["nf4-untied-recompute-2x1", "whole-untied-fp32-2x1", "frozen-tied-fp32-2x1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return write_samples(folder)


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {model: make_checkpoint(family, **changes) for model, (family, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def adapters(checkpoints: dict[str, Path]) -> Callable[[Case], tuple[CausalLM, Path]]:
    """What one process trains of a case, and the folder that its adapters begin from."""
    made: dict[tuple[str, str], Path] = {}

    def get(case: Case) -> tuple[CausalLM, Path]:
        model, settings = checkpoints[case.model], ADAPTERS.get(case.trains)
        lora, frozen = None, tuple(FROZEN)
        if settings is not None:
            many = {name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()}
            lora, frozen = Lora(**(LORA | many)), ()
        spec = read_spec(model).training(Trained(lora, frozen))
        states: Any = open_source(model, spec.base)
        if lora:
            key = case.model, case.trains
            made[key] = made.get(key) or save_adapter(spec, model)
            states = AdaptedStates(states, spec, PeftFolder(made[key], spec))
        trained = CausalLM(spec, states, torch.float32, torch.device("cpu")).eval()
        return trained, made.get((case.model, case.trains), model)

    return get


@pytest.fixture(scope="module")
def references(
    checkpoints: dict[str, Path], samples: list[Sample], adapters: Callable[[Case], tuple[CausalLM, Path]]
) -> Callable[[Case], Outcome]:
    """One process's outcome for a case; made once for all cases that must have the same."""
    made: dict[tuple[str, str, int, int | None], Outcome] = {}

    def get(case: Case) -> Outcome:
        micro_batch, row = 2, ROW
        if case.router_weight:
            config = described(case, checkpoints[case.model], Path())["config"]
            micro_batch, row = config["train_micro_batch_size_per_gpu"], config["pack_len"]
        key = (case.trains, case.model, micro_batch, row)
        if key not in made:
            model = adapters(case)[0] if case.trains else load_model(checkpoints[case.model], torch.float32)
            made[key] = outcome_of(model, samples, micro_batch, row, case.router_weight)
        return made[key]

    return get


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    folder: Path,
    checkpoints: dict[str, Path],
    adapters: Callable[[Case], tuple[CausalLM, Path]],
    samples: list[Sample],
    asked: set[str],
) -> dict[str, Outcome]:
    """All cases that this session asks for."""
    del samples  # already on disk
    steps: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for case in CASES:
        if case.name in asked:
            start = adapters(case)[1] if case.trains in ADAPTERS else None
            steps[case.variant in COMPILED].append(described(case, checkpoints[case.model], folder, start))
    found = take(ranks, steps[False], folder)
    if steps[True]:
        with Ranks(folder) as processes_of_their_own:  # compiled code stays
            found |= take(processes_of_their_own, steps[True], folder)
    return found


def described(case: Case, model: Path, folder: Path, start: Path | None = None) -> dict[str, Any]:
    kind = "zero" if case.variant in ZERO else "pipeline"
    keys = case.keys
    if case.trains in ADAPTERS:
        keys["lora"] = LORA | {"start_from": str(start)} | ADAPTERS[case.trains]
    return step(case.name, case.dims, model, folder, keys, list(case.parts), kind, kernel=case.kernel)


def outcome_of(
    model: CausalLM, samples: list[Sample], micro_batch: int, row_length: int | None, router_weight: float | None = None
) -> Outcome:
    """Loss and gradients of one process that runs the samples one by one."""
    supervised = sum(label != -100 for sample in samples for label in sample["labels"][1:])
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    total = torch.zeros(())
    length = row_length or max(len(sample["input_ids"]) for sample in samples)
    loader = Loader(InMemory(samples), 8, micro_batch, 1, 42, packing="batch", row_length=length, same_everywhere=True)
    for rows in (group for replica in loader.batch(0).micro_batches for group in replica):
        numbers = [number for row in rows for number in row]
        sums = torch.zeros(())
        for sample in (samples[number] for number in numbers):
            hidden, _, *routed = model.activations(torch.tensor([sample["input_ids"]]))
            logits = model.head.project(model.head.norm(hidden))[0, :-1]
            total = total + F.cross_entropy(logits, torch.tensor(sample["labels"][1:]), reduction="sum") / supervised
            sums = sums + sum(routed, torch.zeros(()))
        if router_weight:
            share = sum(len(samples[number]["input_ids"]) for number in numbers) / tokens
            total = total + router_weight * share * router_loss(sums, model.spec.config.num_experts_per_tok)
    return alone(total, model)


@pytest.mark.parametrize("case", tiered(CASES, QUICK, SLOW))
def test_every_gradient_equals_one_process(
    case: Case, outcomes: dict[str, Outcome], references: Callable[[Case], Outcome]
) -> None:
    dtype = torch.bfloat16 if "bf16" in case.variant else torch.float32
    assert_same(outcomes[case.name], references(case), dtype, apart=case.dims[0] > 1 and not case.dualpipev)


LONG = 131_072
NARROW: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": LONG,
}


@pytest.mark.longest
@pytest.mark.parametrize("dims", [(1, 2), (2, 2)])
def test_a_row_of_131072_tokens_that_processes_share(
    dims: tuple[int, int], ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    generator, samples = random.Random(0), []
    for length in (98_304, 32_768):  # packed into one row
        ids = [generator.randrange(3, 64) for _ in range(length)]
        samples.append(Sample(input_ids=ids, labels=[-100] * (length // 2) + ids[length // 2 :]))
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    model, parts = make_checkpoint("llama", **NARROW), [3] if dims[0] == 1 else [2, 1]
    keys = {"sequence": 2, "train_batch_size": 2, "max_seq_len": LONG, "pack_len": LONG}
    keys["train_micro_batch_size_per_gpu"] = 2
    found = take(ranks, [step("long", dims, model, tmp_path, keys, parts)], tmp_path)["long"]
    expected = outcome_of(load_model(model, torch.float32), samples, 2, LONG)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        assert (gradient - expected.gradients[name]).norm() < 1e-5 * expected.gradients[name].norm(), name
