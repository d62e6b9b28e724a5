"""Processes that share layers train as one process does, and their checkpoints are those of any topology.

Steps are clipped, so each loss after the first rests on the norm of the gradient over all processes and on the update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models import load_model
from tests.cases import tiered
from tests.launching import OFFLOAD
from tests.ranks import Ranks, write_random_samples
from tests.workers.tensor_axis import SAVED_AT, STEPS
from training.checkpoint.folder import step_folder

pytestmark = pytest.mark.launched

AXES = ("pipe", "data", "model")
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
UNEVEN = HEADS | {"intermediate_size": 97, "vocab_size": 515}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "uneven": ("llama", UNEVEN | {"tie_word_embeddings": True}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "baichuan2": ("baichuan", {"max_position_embeddings": 256}),
    "chatglm3": ("chatglm", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}
PARTS = {1: [5], 2: [4, 1], 4: [1, 2, 1, 1]}  # by chunks; the head alone has nothing that DeepSpeed counts on a peer
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PLAIN: dict[str, Any] = {"zero_optimization": {"stage": 0}}
CLIPPING = 0.25
SPREAD = {"experts": "spread"}
ROWS = {"sequence": 2}  # replicas that share their rows


class Case(NamedTuple):
    """A run: from the beginning, or from the checkpoint of another case."""

    model: str
    dims: tuple[int, int, int]  # stages, replicas, processes to a layer
    kind: str = ""
    keys: dict[str, Any] = {}
    topo: dict[str, Any] = {}
    axes: tuple[str, ...] = AXES
    source: Any = None

    @property
    def name(self) -> str:
        came = f"from-{self.source.name}-to-" if self.source else ""
        return f"{came}{self.model}-{'x'.join(map(str, self.dims))}{self.kind and '-'}{self.kind}"

    @property
    def section(self) -> dict[str, Any]:
        """Of the config."""
        sizes = dict(zip(AXES, self.dims, strict=True))
        axes = [axis for axis in self.axes if axis != "model" or sizes[axis] > 1]
        chunks = self.dims[0] * (2 if "schedule" in self.keys else 1)
        grid = {"axes": axes, "dims": [sizes[axis] for axis in axes]}
        return {"process_topology": grid, "parts": PARTS[chunks]} | self.topo


OTHER_ORDER = ("model", "data", "pipe")
WHOLE = {kind: Case("tied", (2, 2, 1), kind, keys) for kind, keys in (("", {}), ("bf16", BF16), ("plain", PLAIN))}
RUNS = [
    *(Case(model, (1, 1, 2)) for model in ("tied", "bloom", "baichuan2", "chatglm3", "mixtral")),
    *(Case(model, (2, 1, 2)) for model in ("tied", "uneven", "mixtral")),
    *(Case(model, (2, 1, 2)) for model in ("untied", "bloom", "baichuan2", "chatglm3", "qwen3")),
    Case("mixtral", (1, 1, 2), "spread", topo=SPREAD),
    Case("tied", (2, 1, 2), "order", axes=OTHER_ORDER),
    Case("untied", (1, 2, 2), "order", axes=OTHER_ORDER),
    Case("tied", (1, 2, 2)),
    Case("tied", (2, 1, 2), "plain", PLAIN),
    Case("tied", (2, 1, 2), "bf16", BF16),
    Case("tied", (1, 2, 2), "bf16-sums", BF16 | {"communication_data_type": "fp32"}),
    Case("tied", (2, 1, 2), "bf16-plain", BF16 | PLAIN),
    Case("tied", (1, 1, 2), "offload", OFFLOAD),
    Case("uneven", (2, 1, 2), "dualpipev", {"schedule": "dualpipev"}),
    Case("bloom", (2, 1, 2), "dualpipev", {"schedule": "dualpipev"}),
    Case("mixtral", (1, 1, 2), "recompute", {"use_grad_ckpt": True}, SPREAD),
    Case("untied", (1, 1, 2), "padded", {"packing": False}),
    Case("tied", (1, 2, 2), "rows", topo=ROWS),
    Case("bloom", (1, 2, 2), "rows", {"use_grad_ckpt": True}, ROWS),
    Case("mixtral", (1, 2, 2), "rows", topo=ROWS | SPREAD),
    Case("chatglm3", (1, 2, 2), "rows", BF16, ROWS),
]
SHARED_ROWS = Case("tied", (1, 4, 1), "rows", topo=ROWS)
MOVES = [
    Case("tied", (1, 1, 2), source=WHOLE[""]),
    Case("tied", (1, 2, 2), source=Case("tied", (1, 1, 2))),
    Case("tied", (2, 1, 1), source=Case("tied", (1, 1, 2))),
    SHARED_ROWS._replace(source=Case("tied", (1, 1, 2))),
    Case("tied", (4, 1, 1), source=SHARED_ROWS),
    Case("uneven", (1, 2, 1), source=Case("uneven", (2, 1, 2))),
    Case("mixtral", (1, 1, 2), "columns", source=Case("mixtral", (1, 1, 2), "spread", topo=SPREAD)),
    Case("mixtral", (2, 1, 1), source=Case("mixtral", (1, 1, 2), "spread", topo=SPREAD)),
    Case("chatglm3", (2, 1, 1), source=Case("chatglm3", (1, 1, 2))),
    Case("bloom", (2, 1, 1), source=Case("bloom", (1, 1, 2))),
    Case("tied", (1, 1, 2), "bf16", BF16, source=WHOLE["bf16"]),
    Case("tied", (1, 2, 1), "bf16", BF16, source=Case("tied", (2, 1, 2), "bf16", BF16)),
    Case("tied", (2, 1, 2), "plain", PLAIN, source=WHOLE["plain"]),
    Case("tied", (2, 1, 1), "plain", PLAIN, source=Case("tied", (2, 1, 2), "plain", PLAIN)),
    Case("tied", (1, 2, 2), "order", axes=OTHER_ORDER, source=Case("tied", (2, 1, 2), "order", axes=OTHER_ORDER)),
]


# The others: each axis and kind of update once; tests/models/parallel/test_tensor.py has each family.
SLOW = ["uneven-2x1x2", "tied-2x1x2-bf16", "tied-1x2x2-rows", "bloom-1x1x2", "tied-2x1x2-order", "tied-1x2x2"]
SLOW += ["tied-2x1x2-plain", "tied-1x1x2-offload", "uneven-2x1x2-dualpipev", "mixtral-1x2x2-rows"]
SLOW += ["from-tied-2x2x1-to-tied-1x1x2", "from-tied-1x1x2-to-tied-1x4x1-rows", "from-tied-1x4x1-rows-to-tied-4x1x1"]
SLOW += ["from-tied-2x2x1-plain-to-tied-2x1x2-plain", "from-tied-2x2x1-bf16-to-tied-1x1x2-bf16"]
SLOW += ["from-mixtral-1x1x2-spread-to-mixtral-1x1x2-columns"]
UNDER_TEST = tiered([*RUNS, *MOVES], quick=["tied-1x1x2", "mixtral-1x1x2-spread"], slow=SLOW)


def params(cases: Iterable[Case]) -> list[Any]:
    names = {case.name for case in cases}
    return [param for param in UNDER_TEST if param.id in names]


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {name: make_checkpoint(family, **changes) for name, (family, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def folder(ranks: Ranks, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> Path:
    """Where all cases that this session asks for have left their outcomes, and one process's for each of them."""
    folder = tmp_path_factory.mktemp("tensor-axis")
    write_random_samples(folder, 32, longest=59)
    moves = [case for case in MOVES if case.name in asked]
    known = {case.name: case for case in RUNS}
    sources = [known.get(case.source.name, case.source) for case in moves]
    runs = [case for case in RUNS if case.name in asked] + sources
    runs += [alone(case) for case in (*runs, *moves)]
    for each in (runs, moves):
        unique = {case.name: case for case in each}.values()
        ranks.run_all("tensor_axis", [described(case, models, folder) for case in unique], folder)
    return folder


def alone(case: Case) -> Case:
    """The same in one process."""
    keys = {key: value for key, value in case.keys.items() if key in ("bf16", "packing")}
    kind = "-".join(["alone", *keys])
    if case.keys.get("zero_optimization") == PLAIN["zero_optimization"]:
        keys, kind = keys | PLAIN, f"{kind}-plain"
    return Case(case.model, (1, 1, 1), kind, keys)


def described(case: Case, models: dict[str, Path], folder: Path) -> dict[str, Any]:
    config = {
        "model_path": str(models[case.model]),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder / "elsewhere"),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 * case.topo.get("sequence", 1) // case.dims[1],
        "pack_len": 64,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-4}, "no_wd_kws": ["norm"]},
        "aux_router_loss": {"weight": 0.1 if case.model == "mixtral" else None},
        "model_topo": case.section,
    }
    source = case.source.name if case.source else None
    return {"name": case.name, "source": source, "config": config | case.keys}


def losses(folder: Path, case: Case) -> dict[str, Tensor]:
    return {key: torch.tensor(each) for key, each in json.loads((folder / f"{case.name}.json").read_text()).items()}


def state(folder: Path, case: Case) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stage in range(case.dims[0]):
        found |= load_file(folder / f"{case.name}.stage{stage}.safetensors")
    return found


@pytest.mark.parametrize("case", params([*RUNS, *MOVES]))
def test_it_trains_as_one_process_does(case: Case, folder: Path) -> None:
    found, expected = losses(folder, case), losses(folder, alone(case))
    tolerance = 1e-2 if "bf16" in case.keys else 1e-5
    for key, wanted in expected.items():
        torch.testing.assert_close(found[key], wanted[-len(found[key]) :], rtol=tolerance, atol=0, msg=key)
    assert expected["norms"].min() > 2 * CLIPPING, "little was clipped"
    assert len(found["losses"]) == STEPS - (SAVED_AT if case.source else 0)
    if "bf16" not in case.keys and not case.source:
        kept = state(folder, case)
        for name, whole in state(folder, alone(case)).items():
            error = (kept[name] - whole).norm() / whole.norm()
            assert error < 1e-4, (name, error)


@pytest.mark.parametrize("case", params(MOVES))
def test_what_is_taken_up_is_what_was_saved(case: Case, folder: Path) -> None:
    saved, taken = state(folder, case.source), state(folder, case)
    twins = {"4.lm_head.weight": "0.embed_tokens.weight"}
    for name, tensor in taken.items():
        weight, _, key = name.partition(":")
        kept = saved.get(name, saved.get(f"{twins.get(weight)}:{key}"))
        assert kept is not None
        assert torch.equal(tensor, kept), name


@pytest.mark.parametrize("case", params(case for case in RUNS if case.model in ("tied", "mixtral")))
def test_layer_files_are_those_of_one_process(case: Case, folder: Path) -> None:
    checkpoint = step_folder(folder / case.name, SAVED_AT)
    other = step_folder(folder / alone(case).name, SAVED_AT)
    names = sorted(path.name for path in checkpoint.glob("layer_*"))
    assert names == sorted(path.name for path in other.glob("layer_*"))
    weights, whole = (load_model(each).state_dict() for each in (checkpoint, other))
    kept = state(folder, case)
    for name, weight in weights.items():
        assert weight.shape == whole[name].shape
        own = kept.get(f"{name.removeprefix('layers.')}:", weight)
        assert torch.equal(weight, own), name
