"""Turns at all layers give what a pipeline gives, and the same bits whatever the number of processes and the slots."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from options.row_chunks.cuts import RowCuts
from options.weight_streaming.pieces import PAGE, piece_of
from tests.closeness import assert_near
from tests.models.helpers import spec_of
from tests.models.test_adapters import DEEPSEEK
from tests.ranks import Ranks, write_samples

pytestmark = pytest.mark.slow

STEPS, NORM = 6, 0.5
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "weight_decay": 0.1}}, "gradient_clipping": NORM}
BF16 = {"bf16": {"enabled": True}}
FP8 = BF16 | {"fp8": {"enabled": True}}
STATES = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "two-kinds": ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "latent": ("deepseek_v3", DEEPSEEK | {"head_dim": 8, "num_key_value_heads": 4}),
    "dropout": ("llama", {"attention_dropout": 0.5}),
    "head": ("llama", {"tie_word_embeddings": False, "vocab_size": 2048}),  # the planner gives it several turns
}
PLAIN = "plain"
PACKED: dict[str, Any] = {"packing": "batch", "pack_len": 64, "max_seq_len": 64}
PACKED["optimizer"] = {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}}  # sums over chunks round otherwise
EACH = ([1, 1, 1, 1], [1, 1, 1, 1], 1)  # a layer a slot, a micro-batch a round
UNEVEN = ([3, 1], [1, 2, 1], 3)  # of 4 micro-batches, so the last round has one
ONE = ([4], [4], 4)
EACH_KEPT, UNEVEN_KEPT = (*EACH, 1, 2), (*UNEVEN, 1, 1)  # with two products of each block kept, or one
UNEVEN_OF_3_KEPT = (*UNEVEN, 3, 2)
EACH_OF_3, UNEVEN_OF_3, ONE_OF_3 = (*EACH, 3), (*UNEVEN, 3), (*ONE, 3)  # of 4 micro-batches, with 3 turns of the head


class Case(NamedTuple):
    """
    Attributes:
        runs: dims (stages, replicas) and slots, of runs with the same bits.
        compared: whether 1f1b gives the same numbers too; it draws other ones for dropout.
        chunk: tokens of a row's chunk, in turns; 1f1b has whole rows, and so has a run PLAIN.
    """

    model: str
    keys: dict[str, Any]
    runs: dict[str, tuple[tuple[int, int], Any]]
    compared: bool = True
    chunk: int | None = None


CASES = {
    "tied-fp32": Case("tied", {}, {"one": ((1, 1), UNEVEN), "two": ((2, 1), EACH_KEPT)}),
    "planned": Case("head", BF16, {"one": ((1, 1), None), "two": ((2, 1), None)}),
    "shared-head": Case(
        "tied", {}, {"one": ((1, 1), ONE_OF_3), "two": ((2, 1), UNEVEN_OF_3), "each": ((2, 1), EACH_OF_3)}
    ),
    "mixtral-bf16": Case(
        "mixtral", BF16 | {"aux_router_loss": {"weight": 0.5}}, {"one": ((1, 1), ONE), "two": ((2, 1), UNEVEN_KEPT)}
    ),
    "lora": Case(
        "tied", {"lora": {"r": 2, "dropout": 0.0}}, {"one": ((1, 1), ONE_OF_3), "two": ((2, 1), UNEVEN_OF_3_KEPT)}
    ),
    "frozen": Case("untied", {"freeze": ["embed_tokens", "layers\\.[01]\\."]}, {"two": ((2, 1), UNEVEN)}),
    "dropout": Case("dropout", {}, {"one": ((1, 1), ONE), "two": ((2, 1), EACH_KEPT)}, compared=False),
    "replicas": Case("tied", {}, {"two": ((1, 2), UNEVEN)}),
    "four": Case("tied", BF16, {"one": ((1, 1), EACH_OF_3), "four": ((4, 1), UNEVEN_OF_3), "replicas": ((2, 2), ONE)}),
    # The first scale is too large, so the first steps change nothing; the others' scale is what DeepSpeed's would be.
    "fp16": Case("tied", FP16, {"one": ((1, 1), ONE_OF_3), "two": ((2, 1), UNEVEN_OF_3)}),
    "states": Case("tied", STATES, {"one": ((1, 1), ONE), "two": ((2, 1), UNEVEN)}),
    "fp8": Case("untied", FP8, {"one": ((1, 1), ONE_OF_3), "two": ((2, 1), UNEVEN_OF_3_KEPT)}),
    "two-kinds": Case("two-kinds", BF16, {"one": ((1, 1), ONE), "two": ((2, 1), UNEVEN_KEPT)}),
    "latent": Case("latent", {}, {"two": ((2, 1), UNEVEN)}),
    "chunks": Case("tied", PACKED, {"one": ((1, 1), ONE_OF_3), "two": ((2, 1), UNEVEN_OF_3)}, chunk=16),
    "chunks-of-experts": Case(
        "mixtral",
        {"aux_router_loss": {"weight": 0.5}, "max_seq_len": 64},
        {"one": ((1, 1), ONE), "two": ((2, 1), UNEVEN)},
        chunk=16,
    ),
    "chunks-bf16": Case("tied", PACKED | BF16, {"one": ((1, 1), ONE), "two": ((2, 1), UNEVEN)}, chunk=16),
    "chunks-fp16": Case("tied", PACKED | FP16, {"two": ((2, 1), UNEVEN_OF_3)}, chunk=16),
    "chunks-two-kinds": Case("two-kinds", PACKED, {"two": ((2, 1), UNEVEN)}, chunk=16),
    "chunks-latent": Case("latent", PACKED, {"two": ((2, 1), UNEVEN)}, chunk=16),
    "chunks-lora": Case("tied", PACKED | {"lora": {"r": 2, "dropout": 0.0}}, {"two": ((2, 1), UNEVEN)}, chunk=16),
    "chunks-frozen": Case(
        "untied", PACKED | {"freeze": ["embed_tokens", "layers\\.[01]\\."]}, {"two": ((2, 1), UNEVEN)}, chunk=16
    ),
    "chunks-replicas": Case("tied", PACKED, {"two": ((1, 2), UNEVEN)}, chunk=16),
    "chunks-dropout": Case("dropout", PACKED, {"one": ((1, 1), ONE), "two": ((2, 1), EACH)}, compared=False, chunk=16),
    "chunks-of-tokens": Case("tied", PACKED, {"two": ((2, 1), UNEVEN)}, chunk=1),
    "whole-rows": Case("tied", PACKED, {PLAIN: ((2, 1), UNEVEN), "two": ((2, 1), UNEVEN)}, compared=False, chunk=999),
}
LONGEST = {name for name in CASES if name.startswith("chunks-") and name != "chunks-of-experts"}
COMPARED = [name for name, case in CASES.items() if case.compared]
SEVERAL = [name for name, case in CASES.items() if len(case.runs) > 1]


def by_tier(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.longest if name in LONGEST else ()) for name in names]


def config(model: Path, samples: Path, dims: tuple[int, int], keys: dict[str, Any]) -> dict[str, Any]:
    # Without packing a row is a sample, whatever the number of processes.
    return {
        "model_path": str(model),
        "data_path": str(samples),
        "save_path": str(samples.parent),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 // dims[1],
        "n_epoches": 9,
        "packing": False,
        "model_topo": {"process_topology": {"axes": ["data", "pipe"], "dims": [dims[1], dims[0]]}},
    } | (ADAMW | keys)


Outcomes = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> Outcomes:
    """What all ranks of a run saved, joined."""
    folder = tmp_path_factory.mktemp("streaming")
    write_samples(folder, 14)
    by_size: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for name in asked & CASES.keys():
        case = CASES[name]
        model = make_checkpoint(MODELS[case.model][0], **MODELS[case.model][1])
        runs: dict[str, tuple[tuple[int, int], Any, dict[str, Any]]] = {}
        for run, (dims, slots) in case.runs.items():
            chunk = None if run == PLAIN else case.chunk
            runs[run] = dims, slots, {"schedule": "weight_streaming", "row_chunk": chunk}
        if case.compared:
            runs["1f1b"] = ((1, 1), None, BF16 if "bf16" in case.keys else {})  # which has no states in bf16
        for run, (dims, slots, keys) in runs.items():
            about = {"name": f"{name}-{run}", "slots": slots, "steps": STEPS}
            made = config(model, folder / "samples.json", dims, case.keys | keys)
            by_size[math.prod(dims)].append(about | {"config": made})
    found: Outcomes = {}
    for processes, cases in sorted(by_size.items()):
        ranks.run(processes, "streaming", cases, folder)
        for each in cases:
            files = [load_file(folder / f"{each['name']}.{rank}.safetensors") for rank in range(processes)]
            pieces: dict[str, dict[str, Tensor]] = defaultdict(dict)
            for name, tensor in (piece for file in files for piece in file.items()):
                pieces[name.partition("@")[0]][name] = tensor
            found[each["name"]] = {
                name: torch.cat([of[piece].view(-1) for piece in sorted(of)]) for name, of in pieces.items()
            }
    return found


@pytest.mark.launched
@pytest.mark.parametrize("name", by_tier(COMPARED))
def test_losses_norms_and_weights_are_those_of_a_pipeline(name: str, outcomes: Outcomes) -> None:
    expected = outcomes[f"{name}-1f1b"]
    dtype = torch.bfloat16 if {"bf16", "fp16"} & CASES[name].keys.keys() else torch.float32
    for run in CASES[name].runs:
        found = outcomes[f"{name}-{run}"]
        taken = expected["norms"].isfinite()
        assert torch.equal(found["norms"].isfinite(), taken) and taken.any()
        assert_near(found["norms"][taken], expected["norms"][taken], dtype, "norms", "norms")
        for key in ("losses", "evaluated"):
            assert_near(found[key], expected[key], dtype, "means", key)
        weights = expected.keys() - {"losses", "norms", "evaluated"}
        assert weights <= found.keys()
        for each in weights:
            # AdamW divides by the size of a gradient, so a rounding of a small one is one of a step.
            atol = 1e-3 * STEPS * (1e-3 if dtype == torch.float32 else 1)
            torch.testing.assert_close(found[each], expected[each], atol=atol, rtol=1e-5)
    assert len(expected["losses"]) == STEPS and expected["losses"].diff().abs().min() > 0


@pytest.mark.launched
@pytest.mark.parametrize("name", by_tier(SEVERAL))
def test_neither_processes_nor_slots_change_a_bit(name: str, outcomes: Outcomes) -> None:
    runs = {run: outcomes[f"{name}-{run}"] for run in CASES[name].runs if run != "replicas"}
    first, *others = runs.values()
    for other in others:
        for each in first:
            torch.testing.assert_close(other[each], first[each], atol=0, rtol=0, equal_nan=True, msg=each)


def test_rows_of_these_cases_have_several_uneven_chunks() -> None:
    for case in CASES.values():
        if case.chunk and case.chunk < 64:
            cut = RowCuts(spec_of(MODELS[case.model][0], **MODELS[case.model][1]), case.chunk, 64)
            cuts = cut([[40, 24], [64]], 64)
            assert len(cuts) > 4 and (case.chunk == 1 or len(set(cuts)) > 1)


@pytest.mark.parametrize("numel", [1, PAGE - 1, PAGE, 5 * PAGE + 7, 8 * PAGE, 100_003])
@pytest.mark.parametrize("processes", [1, 3, 8])
def test_pieces_are_even_and_cut_between_pages(numel: int, processes: int) -> None:
    pieces = [piece_of(numel, process, processes) for process in range(processes)]
    assert [each.start for each in pieces[1:]] == [each.stop for each in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, numel)
    assert all(each.start % PAGE == 0 for each in pieces if each.start < each.stop)
    sizes = [each.stop - each.start for each in pieces]
    assert max(sizes) - min(sizes) <= PAGE
