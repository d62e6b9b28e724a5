"""Every gradient of adapters through the real launcher equals that of one process without Pipetune's engine.

`tests.models.test_adapters` compares that one process with peft. The adapters begin where B is not zero, so that A has
gradients too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from data.sample_set import Sample
from models.adapters import Lora, Trained
from models.api import read_spec
from models.causal_lm import CausalLM
from models.checkpoint.adapter import AdaptedStates, PeftFolder
from models.checkpoint.source import open_source
from models.spec import ModelSpec
from tests.cases import tiered
from tests.closeness import assert_near
from tests.launching import topology
from tests.models.adapters import save_adapter
from tests.ranks import Ranks
from tests.training.engine.test_gradients import (  # noqa: F401
    MODELS,
    OFFLOAD,
    PARTS,
    ROW,
    Outcome,
    folder,
    outcome_of,
    samples,
)

pytestmark = pytest.mark.launched

LORA: dict[str, Any] = {"r": 2, "alpha": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "recompute": {"use_grad_ckpt": True},
    "without_zero": {"zero_optimization": {"stage": 0}},
    "offload": OFFLOAD,
    "dualpipev": {"schedule": "dualpipev"},
    "sequence": {"model_topo": {"sequence": 2}},
    "compiled": {"compile": True},
    "nf4": {"use_grad_ckpt": True},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
}


class Case(NamedTuple):
    model: str
    variant: str = "fp32"
    dims: tuple[int, int] = (2, 1)
    parts: tuple[int, ...] = ()
    changes: dict[str, Any] = {}

    @property
    def name(self) -> str:
        parts = "+".join(map(str, self.parts))
        dims = f"{self.dims[0]}x{self.dims[1]}"
        return "-".join(word for word in (self.model, self.variant, dims, parts, *self.changes) if word)


FEW = {"targets": ["q_proj", "down_proj"]}
FROZEN = {"freeze": ["embed_tokens", r"layers\.0\."]}  # both ends of a tied model
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES = [
    Case("tied", dims=(1, 1)),
    Case("tied", dims=(2, 2)),
    Case("tied", parts=(1, 4)),  # an embedding alone, which has nothing to train
    Case("tied", "bf16", parts=(1, 4)),
    Case("tied", "without_zero", parts=(4, 1)),
    Case("tied", "offload", parts=(1, 4)),
    Case("tied", "dualpipev"),
    Case("tied", "sequence", dims=(1, 2)),
    Case("tied", "zero2", dims=(1, 2)),
    Case("tied", "zero3", dims=(1, 2)),
    Case("mixtral"),
    Case("mixtral", "dualpipev"),
    Case("mixtral", "recompute"),
    Case("mixtral", "zero3", dims=(1, 2)),
    Case("tied", "compiled"),
    Case("mixtral", "compiled"),
    Case("untied", "nf4", changes={"base": "nf4"}),
    Case("mixtral", "nf4", changes={"base": "nf4"}),
    Case("bloom", dims=(2, 2)),
    Case("phi3"),
    Case("gemma2", dims=(4, 1)),
    Case("qwen3_moe"),
    Case("chatglm3"),
    Case("untied", changes=FEW),
    Case("untied", changes=WHOLE),
    Case("tied", changes=WHOLE),
    Case("tied", changes=FROZEN),
    Case("untied", "dualpipev", changes=FROZEN),
    Case("tied", "bf16", parts=(2, 3), changes=FROZEN),  # a stage of frozen layers
]
QUICK = ["tied-fp32-2x1-1+4", "tied-dualpipev-2x1", "mixtral-fp32-2x1"]
SLOW = ["tied-fp32-1x1", "tied-fp32-2x2", "tied-bf16-2x1-1+4", "tied-zero3-1x2", "untied-nf4-2x1-base"]
SLOW += ["untied-fp32-2x1-modules_to_save", "tied-fp32-2x1-freeze"]


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> Callable[[Case], tuple[ModelSpec, Path, Path]]:
    """The model of a case with its adapters, and the folders of both."""
    made: dict[str, tuple[ModelSpec, Path, Path]] = {}

    def get(case: Case) -> tuple[ModelSpec, Path, Path]:
        key = f"{case.model}{case.changes}"
        if key not in made:
            family, changes = MODELS[case.model]
            model = make_checkpoint(family, **changes)
            settings = {name: tuple(each) if name != "base" else each for name, each in case.changes.items()}
            lora = None if "freeze" in settings else Lora(**(LORA | settings))
            spec = read_spec(model).training(Trained(lora, settings.get("freeze", ())))
            made[key] = spec, model, save_adapter(spec, model) if lora else model
        return made[key]

    return get


@pytest.fixture(scope="module")
def outcomes(
    ranks: Ranks,
    folder: Path,  # noqa: F811
    models: Callable[[Case], tuple[ModelSpec, Path, Path]],
    samples: list[Sample],  # noqa: F811
    asked: set[str],
) -> dict[str, Outcome]:
    """All cases that this session asks for."""
    del samples  # already on disk
    chosen = [case for case in CASES if case.name in asked]
    for processes in sorted({case.dims[0] * case.dims[1] for case in chosen}):
        cases = [case for case in chosen if case.dims[0] * case.dims[1] == processes]
        described = [
            {
                "name": case.name,
                "kind": "zero" if case.variant in ("zero2", "zero3") else "pipeline",
                "config": config(case, *models(case)[1:], folder),
            }
            for case in cases
        ]
        ranks.run(processes, "gradients", described, folder)
    return {case.name: read(folder, case) for case in chosen}


def config(case: Case, model: Path, adapter: Path, folder: Path) -> dict[str, Any]:  # noqa: F811
    keys = dict(VARIANTS[case.variant])
    parts = list(case.parts) or PARTS[case.dims[0] * (2 if case.variant == "dualpipev" else 1)]
    places = topology(case.dims, parts) | keys.pop("model_topo", {})
    sharing = places.get("sequence", 1)
    return {
        "model_path": str(model),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 * sharing // case.dims[1],
        "pack_len": ROW,
        "gradient_clipping": 0.0,
        "aux_router_loss": {"weight": 0.0 if "mixtral" in case.model or "moe" in case.model else None},
        **(case.changes if "freeze" in case.changes else {"lora": LORA | {"start_from": str(adapter)} | case.changes}),
        "model_topo": places
        if case.variant not in ("zero2", "zero3")
        else {"process_topology": {"axes": ["pipe", "data"], "dims": [1, case.dims[1]]}},
        **keys,
    }


def read(folder: Path, case: Case) -> Outcome:  # noqa: F811
    gradients: dict[str, torch.Tensor] = {}
    for stage in range(case.dims[0]):
        gradients |= load_file(folder / f"{case.name}.stage{stage}.safetensors")
    return Outcome(json.loads((folder / f"{case.name}.json").read_text())["loss"], gradients)


@pytest.mark.parametrize("case", tiered(CASES, QUICK, SLOW))
def test_every_gradient_of_adapters_equals_one_process(
    case: Case,
    outcomes: dict[str, Outcome],
    models: Callable[[Case], tuple[ModelSpec, Path, Path]],
    samples: list[Sample],  # noqa: F811
) -> None:
    spec, model, adapter = models(case)
    states: Any = open_source(model, spec.base)
    if spec.trained.lora:
        states = AdaptedStates(states, spec, PeftFolder(adapter, spec))
    alone = CausalLM(spec, states, torch.float32, torch.device("cpu")).eval()
    expected, found = outcome_of(alone, samples, 2, ROW), outcomes[case.name]
    dtype = torch.bfloat16 if case.variant == "bf16" else torch.float32
    assert_near(found.loss, expected.loss, dtype, "means")
    twins = {"4.lm_head.weight": "0.embed_tokens.weight"} if case.model == "tied" and case.changes == WHOLE else {}
    assert found.gradients.keys() - twins.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        assert_near(gradient, expected.gradients[twins.get(name, name)], dtype, name=name)
