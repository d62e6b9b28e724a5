"""Every parameter's gradient through the real launcher equals that of one process without Pipetune's engine.

The reference runs each sample by itself, without padding, micro-batches or DeepSpeed, and divides by the number of
trained tokens. The workers run samples that differ much in length, packed into rows, in several micro-batches. The
router loss of mixture-of-experts is that of each micro-batch, so the reference adds up the sums of its samples.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from data.loader import Loader
from data.sample_set import InMemory, Sample
from models import load_model
from models.attention.kernels import FLEX
from models.causal_lm import CausalLM
from models.router import router_loss
from tests.cases import tiered
from tests.closeness import assert_near
from tests.launching import topology
from tests.ranks import Ranks, write_samples

pytestmark = pytest.mark.launched

ROW = 64  # tokens: the samples are packed into four rows
PARTS = {1: [5], 2: [3, 2], 4: [1, 2, 1, 1], 8: [1, 2, 1, 1, 1, 1, 2, 1]}  # by stages, or chunks
DIMS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
OFFLOAD = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_BIAS = {"enable_bias": False}  # the gradient of a key's is rounding alone where nothing rotates
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-no-router-loss": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "few_key_heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "baichuan2-7b": ("baichuan", {"max_position_embeddings": 256}),
    "baichuan2-13b": ("baichuan", {"hidden_size": 80, "num_attention_heads": 5}),
    "baichuan2-13b-even": ("baichuan", {"hidden_size": 96, "num_attention_heads": 6}),
    "chatglm3": ("chatglm", {}),
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("opt", {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False} | NO_BIAS),
    "deep": ("llama", {"num_hidden_layers": 8, "tie_word_embeddings": True}),
}


ROUTER_WEIGHT = {"mixtral": 0.5, "qwen3_moe": 0.5}  # of the router loss


class Case(NamedTuple):
    model: str
    variant: str
    dims: tuple[int, int]

    @property
    def dualpipev(self) -> bool:
        return self.variant.startswith("dualpipev_")

    @property
    def kernel(self) -> str | None:
        """Of the attention; None for the usual one."""
        return FLEX if "flex" in self.variant else None

    @property
    def keys(self) -> dict[str, Any]:
        """Of the config."""
        own = VARIANTS[self.variant]
        return {"train_micro_batch_size_per_gpu": 2 * own.get("sequence", 1) // self.dims[1], "pack_len": ROW} | own

    @property
    def name(self) -> str:
        return f"{self.model}-{self.variant}-{self.dims[0]}x{self.dims[1]}"


CASES = [Case(model, "fp32", dims) for model in ("tied", "untied", "bloom", "mixtral") for dims in DIMS]
CASES += [Case(model, "fp32", (2, 2)) for model in ("gpt2", "opt")]
CASES += [Case(model, "fp32", dims) for model in MODELS if model != "deep" for dims in ((1, 1), (2, 1), (4, 1))]
CASES += [
    Case(model, variant, (2, 1))
    for model in ("tied", "untied")
    for variant in VARIANTS
    if variant.removeprefix("dualpipev_") not in ("fp32", *ROUTED, *SHARED, *COMPILED)
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
CASES = list(dict.fromkeys(CASES))
# Every kind of layer and every way to cut the model; all families and whatever else is alike in `make test-all`.
QUICK = ["tied-fp32-2x1", "tied-fp32-1x2", "tied-recompute-2x1", "tied-bf16-2x1", "tied-dualpipev_fp32-2x1"]
QUICK += ["tied-sequence-1x2", "mixtral-fp32-2x1"]
SLOW = ["tied-fp32-2x2", "gemma2-fp32-2x1", "chatglm3-fp32-2x1", "tied-bf16-1x2", "tied-bf16_without_zero-2x1"]
SLOW += ["tied-dualpipev_recompute-2x1", "tied-dualpipev_bf16-2x1", "tied-dualpipev_fp32-2x2"]
SLOW += ["mixtral-dualpipev_fp32-2x1", "deep-dualpipev_fp32-4x1", "mixtral-uneven-2x1"]
SLOW += ["tied-sequence_bf16-2x2", "mixtral-sequence-2x2", "few_key_heads-sequence_4-1x4"]


class Outcome(NamedTuple):
    loss: float
    gradients: dict[str, torch.Tensor]


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
def references(checkpoints: dict[str, Path], samples: list[Sample]) -> Callable[[Case], Outcome]:
    """One process's outcome for a case; made once for all cases that must have the same."""
    made: dict[tuple[str, int, int | None], Outcome] = {}

    def get(case: Case) -> Outcome:
        weight = ROUTER_WEIGHT.get(case.model)
        micro_batch, row = (case.keys["train_micro_batch_size_per_gpu"], case.keys["pack_len"]) if weight else (2, ROW)
        key = (case.model, micro_batch, row)
        if key not in made:
            made[key] = reference(checkpoints[case.model], samples, micro_batch, row, weight)
        return made[key]

    return get


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    folder: Path,
    checkpoints: dict[str, Path],
    samples: list[Sample],
    asked: set[str],
) -> dict[str, Outcome]:
    """All cases that this session asks for."""
    del samples  # already on disk
    chosen = [case for case in CASES if case.name in asked]
    for compiled in (False, True):
        cases = [case for case in chosen if (case.variant in COMPILED) == compiled]
        for processes in sorted({math.prod(case.dims) for case in cases}):
            described = [
                {
                    "name": case.name,
                    "kind": "pipeline",
                    "kernel": case.kernel,
                    "config": config(case, checkpoints[case.model], folder),
                }
                for case in cases
                if math.prod(case.dims) == processes
            ]
            with Ranks(folder) if compiled else nullcontext(ranks) as processes_of_their_own:  # compiled code stays
                processes_of_their_own.run(processes, "gradients", described, folder)
    return {case.name: read(folder, case) for case in chosen}


def config(case: Case, model_path: Path, folder: Path) -> dict[str, Any]:
    stages, keys = case.dims[0], dict(case.keys)
    shared = {"sequence": keys.pop("sequence", 1)}
    return {
        "model_path": str(model_path),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "train_batch_size": 8,
        "gradient_clipping": 0.0,
        "model_topo": topology(case.dims, PARTS[2 * stages if case.dualpipev else stages]) | shared,
        "aux_router_loss": {"weight": ROUTER_WEIGHT.get(case.model)},
        **keys,
    }


def read(folder: Path, case: Case) -> Outcome:
    gradients: dict[str, torch.Tensor] = {}
    for stage in range(case.dims[0]):
        gradients |= load_file(folder / f"{case.name}.stage{stage}.safetensors")
    return Outcome(json.loads((folder / f"{case.name}.json").read_text())["loss"], gradients)


def reference(
    path: Path, samples: list[Sample], micro_batch: int, row_length: int | None, router_weight: float | None = None
) -> Outcome:
    return outcome_of(load_model(path, torch.float32), samples, micro_batch, row_length, router_weight)


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
    total.backward()
    gradients = {name.removeprefix("layers."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(total.item(), gradients)


@pytest.mark.parametrize("case", tiered(CASES, QUICK, SLOW))
def test_every_gradient_equals_one_process(
    case: Case, outcomes: dict[str, Outcome], references: Callable[[Case], Outcome]
) -> None:
    expected, found = references(case), outcomes[case.name]
    dtype = torch.bfloat16 if "bf16" in case.variant else torch.float32
    assert_near(found.loss, expected.loss, dtype, "means")
    together = case.dims[0] == 1 or case.dualpipev  # the ends of a tied model
    tied_copy = set() if together else {"4.lm_head.weight"} - expected.gradients.keys()
    assert found.gradients.keys() == expected.gradients.keys() | tied_copy
    for name, gradient in found.gradients.items():
        # The two copies of a tied weight on different stages both hold the whole gradient.
        twin = expected.gradients["0.embed_tokens.weight" if name in tied_copy else name]
        assert_near(gradient, twin, dtype, name=name)


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
    model, case, row = make_checkpoint("llama", **NARROW), Case("untied", "sequence", dims), LONG
    keys = config(case, model, tmp_path) | {"train_batch_size": 2, "max_seq_len": row, "pack_len": row}
    keys |= {"train_micro_batch_size_per_gpu": 2, "model_topo": topology(dims) | {"sequence": 2}}
    ranks.run(math.prod(dims), "gradients", [{"name": case.name, "kind": "pipeline", "config": keys}], tmp_path)
    found, expected = read(tmp_path, case), reference(model, samples, 2, row)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        assert (gradient - expected.gradients[name]).norm() < 1e-5 * expected.gradients[name].norm(), name
