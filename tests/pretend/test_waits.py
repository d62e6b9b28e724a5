"""On the pretend device nothing mixes places, NCCL refuses nothing, and the host waits for what is allowed alone.

Each case trains two steps of several micro-batches and evaluates around them; what is counted is the second step and
the second evaluation, as tables may go to the device once.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from models.attention.flex import FLEX
from models.attention.packed import VARLEN
from tests.cases import tiered
from tests.conftest import FAQ
from tests.launching import topology
from tests.models.cases import CASES
from tests.pretend.allowed import unexpected
from tests.pretend.conftest import MakeCase, Run
from tests.pretend.run_cases import STEPS

pytestmark = pytest.mark.launched

AT_ONCE = 30  # cases for one process, which keeps some 10 MB of each, or 140 where there are 64,000 words

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ON_CPU = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
SUMS_ON_CPU = {"zero_optimization": ON_CPU, "zero_force_ds_cpu_optimizer": False, "offload_gradients": True}
RECOMPUTED = {"use_grad_ckpt": True}
OFFLOADED = {"offload_activations": True}
REPLICAS: dict[str, Any] = {"model_topo": topology((1, 2)), "packing": False, "pack_len": None}


ROWS: dict[str, Any] = {"model_topo": topology((1, 2)) | {"sequence": 2}}
GRID: dict[str, Any] = {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}
LAYERS: dict[str, Any] = {"model_topo": GRID}


def zero(stage: int) -> dict[str, Any]:
    return {"work": "zero", "zero_optimization": {"stage": stage}}


# Of one process, for every model.
CELLS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},  # at which no first step overflows
    "recomputed": RECOMPUTED,
    "offloaded": OFFLOADED,
    "offloaded-recomputed": OFFLOADED | RECOMPUTED,
    "unsharded": {"zero_optimization": {"stage": 0}},
    "unsharded-clipped": {"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0},
    "optimizer-on-cpu": {"zero_optimization": ON_CPU, "zero_force_ds_cpu_optimizer": False},
    "z-loss": {"aux_max_z_loss": {"weight": 0.01}},
    "unpacked": {"packing": False, "pack_len": None},
    "zero-0": zero(0),
    "zero-1": zero(1) | BF16,
    "zero-2": zero(2),
    "zero-3": zero(3),
    "generation": {"work": "generation"},
}
# Of two processes, for every model.
PAIRED: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b-bf16-recomputed": BF16 | RECOMPUTED,
    "dualpipev": {"schedule": "dualpipev"},
    "dualpipev-offloaded": {"schedule": "dualpipev"} | OFFLOADED,
    "replicas": REPLICAS,
    "replicas-bf16": BF16 | REPLICAS,
}
# Of two processes that share something, for every model that they can share.
SHARED: dict[str, dict[str, Any]] = {
    "rows": ROWS,
    "rows-bf16-recomputed": ROWS | BF16 | RECOMPUTED | OFFLOADED,
    "layers": LAYERS,
    "layers-bf16-recomputed": LAYERS | BF16 | RECOMPUTED | OFFLOADED,
}
ODD_HEADS = "baichuan2-13b"
ROUTED = {"aux_router_loss": {"weight": 0.5}}
LORA: dict[str, Any] = {"lora": {"r": 8, "alpha": 16}}
IN_FP8 = "qwen2-eight-bits"
EIGHT_BITS: dict[str, Any] = BF16 | {"fp8": {"enabled": True}}
STREAMED: dict[str, Any] = {"schedule": "weight_streaming"}
NF4: dict[str, Any] = RECOMPUTED | {"lora": {"r": 8, "base": "nf4"}}
FP8: dict[str, Any] = RECOMPUTED | {"lora": {"r": 8, "base": "fp8"}}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-router-loss": ("mixtral", ROUTED),
    "llama-tied-varlen": ("llama-tied", BF16 | {"kernel": VARLEN}),
    "mistral-window-varlen": ("mistral-window", BF16 | {"kernel": VARLEN}),
    "bloom-flex": ("bloom", BF16 | {"kernel": FLEX}),
    "baichuan2-13b-flex": ("baichuan2-13b", BF16 | {"kernel": FLEX}),
    "gemma2-flex": ("gemma2", BF16 | {"kernel": FLEX}),
    "llama-tied-adafactor": (
        "llama-tied",
        {"zero_optimization": {"stage": 0}, "optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}},
    ),
    "llama-tied-lora": ("llama-tied", BF16 | LORA),
    "llama-tied-lora-clipped": ("llama-tied", LORA | {"gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}),
    "llama-tied-lora-dropout": ("llama-tied", RECOMPUTED | {"lora": {"r": 8, "dropout": 0.1}}),
    "llama-tied-lora-zero-3": ("llama-tied", zero(3) | LORA),
    "llama-tied-frozen": ("llama-tied", {"freeze": ["embed_tokens"]}),
    "llama-tied-nf4": ("llama-tied", BF16 | NF4),
    "llama-tied-fp8": ("llama-tied-fp8", BF16 | FP8),
    "mixtral-lora": ("mixtral", LORA),
    "mixtral-nf4": ("mixtral", NF4),
    "llama-tied-sums-on-cpu": ("llama-tied", BF16 | SUMS_ON_CPU),
    "llama-tied-sums-on-cpu-fp32": ("llama-tied", SUMS_ON_CPU | {"gradient_clipping": 1.0}),
    "llama-tied-lora-sums-on-cpu": ("llama-tied", BF16 | LORA | SUMS_ON_CPU),
    "llama-tied-weight-streaming": ("llama-tied", BF16 | STREAMED),
    "mixtral-weight-streaming": ("mixtral", ROUTED | STREAMED),
    "mixtral-weight-streaming-chunks": ("mixtral", ROUTED | STREAMED | {"row_chunk": 16, "max_seq_len": 64}),
    IN_FP8: ("qwen2", EIGHT_BITS),
    f"{IN_FP8}-streamed": ("qwen2", EIGHT_BITS | STREAMED),
    "llama-tied-lion": ("llama-tied", {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}),
}
OF_ONE = {f"{model}-{cell}": (model, keys) for model in CASES for cell, keys in CELLS.items()} | OTHERS
SHALLOW = [model for model, case in CASES.items() if case.changes.get("num_hidden_layers") == 1]  # for four stages
OF_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model}-{cell}": (model, keys)
    for model in CASES
    for cell, keys in PAIRED.items()
    if "schedule" not in keys or model not in SHALLOW
} | {
    "qwen3_moe-router-loss": ("qwen3_moe", ROUTED | {"schedule": "dualpipev"}),
    "llama-tied-dualpipev-bf16": ("llama-tied", BF16 | {"schedule": "dualpipev"}),
    "llama-tied-lora-1f1b": ("llama-tied", LORA | {"model_topo": topology((2, 1), [1, 4])}),
    "llama-tied-lora-dualpipev": ("llama-tied", BF16 | LORA | {"schedule": "dualpipev"}),
    "llama-tied-lora-replicas": ("llama-tied", LORA | REPLICAS),
    "llama-tied-lora-layers": ("llama-tied", LORA | LAYERS),
    "mixtral-spread": ("mixtral", ROUTED | {"model_topo": GRID | {"experts": "spread"}}),
    "mixtral-rows-router-loss": ("mixtral", ROUTED | ROWS),
    "llama-tied-1f1b-sums-on-cpu": ("llama-tied", BF16 | SUMS_ON_CPU),
    "llama-tied-dualpipev-sums-on-cpu": ("llama-tied", BF16 | SUMS_ON_CPU | {"schedule": "dualpipev"}),
    "llama-tied-replicas-sums-on-cpu": ("llama-tied", BF16 | SUMS_ON_CPU | REPLICAS),
    "llama-tied-layers-sums-on-cpu": ("llama-tied", BF16 | SUMS_ON_CPU | LAYERS),
    "llama-tied-weight-streaming-two": ("llama-tied", BF16 | STREAMED | {"model_topo": topology((2, 1))}),
    f"{IN_FP8}-streamed-two": ("qwen2", EIGHT_BITS | STREAMED | {"model_topo": topology((2, 1))}),
    "llama-tied-rows-flex": ("llama-tied", BF16 | ROWS | {"kernel": FLEX}),
    "llama-tied-rows-varlen": ("llama-tied", BF16 | ROWS | {"kernel": VARLEN}),
}
OF_TWO |= {
    f"{model}-{cell}": (model, keys)
    for model in CASES
    for cell, keys in SHARED.items()
    if "layers" in cell or model != ODD_HEADS
}
# One of each kind; all others take minutes.
SLOW = [
    *(f"llama-tied-{cell}" for cell in ("fp16", "offloaded-recomputed", "zero-3", "varlen", "weight-streaming")),
    *("bloom-fp32", "llama-dynamic-bf16", "mixtral-router-loss", "llama-tied-dualpipev-bf16"),
    *(
        "llama-tied-sums-on-cpu",
        "llama-tied-lora",
        "llama-tied-rows-bf16-recomputed",
        "mixtral-spread",
        f"{IN_FP8}-streamed",
    ),
]


@pytest.fixture(scope="module")
def found(run_pretended: Run, make_case: MakeCase, asked: set[str]) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every case found, and of the pipeline that weight streaming in fp8 is compared with."""
    if any(name.startswith(IN_FP8) for name in asked):
        asked = asked | {IN_FP8}
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for processes, named in ((1, OF_ONE), (2, OF_TWO)):
        made = [make_case(name, model, **keys) for name, (model, keys) in named.items() if name in asked]
        for first in range(0, len(made), AT_ONCE):
            outcomes |= run_pretended(made[first : first + AT_ONCE], processes)
    return outcomes


@pytest.mark.parametrize("name", tiered(OF_ONE | OF_TWO, quick=(), slow=SLOW))
def test_nothing_waits_or_is_refused(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found[name]:
        assert not unexpected(rank)
        if "losses" in rank:
            assert rank["micro_batches"] > 2
            assert all(map(math.isfinite, rank["losses"])) and rank["losses"][-1] < rank["losses"][0]
            assert rank["events"] == 0, "CUDA events that nobody reads"
            assert all(0 < seconds < rank["seconds"] for seconds in rank["stage_seconds"])


@pytest.mark.parametrize("name", tiered([f"{IN_FP8}-streamed", f"{IN_FP8}-streamed-two"], quick=(), slow=["*streamed"]))
def test_weight_streaming_in_fp8_learns_what_a_pipeline_does(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    (pipeline,) = found[IN_FP8]
    for rank in found[name]:
        assert rank["losses"] == pytest.approx(pipeline["losses"], rel=1e-6)


@pytest.mark.slow
def test_all_that_a_run_does_for_a_step(run_pretended: Run, make_case: MakeCase) -> None:
    """The whole job, with evaluation, checkpoint and export."""
    keys = {"eval_data_path": str(FAQ), "max_steps": STEPS, "export_hf": True, "max_seq_len": 256, "pack_len": None}
    case = make_case("job", "llama-tied", "job", **BF16, **keys)
    ((phases,),) = run_pretended([case], 1).values()
    assert {"warm-up", "step", "rest"} <= set(phases)
    assert not unexpected(phases)
