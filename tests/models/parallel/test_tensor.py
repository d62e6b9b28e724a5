"""Processes that share each layer compute what one process computes: loss, gradient of every weight, tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from models.parallel.tensor import obstacle
from tests.cases import tiered
from tests.closeness import assert_near, bound
from tests.launching import torchrun
from tests.models.cases import CASES, EXPERTS, Case
from tests.models.helpers import change_weights, fill_biases, spec_of

Make = Callable[..., Path]


class Shared(NamedTuple):
    """A model, what is asked of it, and how many processes share it."""

    model: str
    asked: dict[str, Any] = {}
    processes: int = 2
    changes: dict[str, Any] = {}


BF16 = {"dtype": "bfloat16"}
# Its plan says nothing of the norms of a head's queries and keys.
GLM4_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}
MODELS = CASES | {"glm4_moe": Case("glm4_moe", GLM4_MOE)}
UNEVEN = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 97, "head_dim": 8}
WHOLE = ("gpt2", "opt")  # transformers has no plan by which to cut them
SHARED = {name: Shared(name) for name in CASES if not name.startswith(("baichuan-", "llama-dynamic", *WHOLE))}
SHARED["baichuan2-13b"] = Shared("baichuan2-13b", processes=3)
SHARED |= {
    "biases": Shared("llama-untied", changes={"attention_bias": True, "mlp_bias": True}),
    "uneven": Shared("llama-tied", {"z_loss": 0.1}, 3, UNEVEN),
    "uneven-untied": Shared("llama-untied", {"z_loss": 0.1}, 3, UNEVEN),
    "uneven-bloom": Shared("bloom", {}, 3, {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "uneven-experts": Shared("mixtral", {}, 3, UNEVEN),
    "uneven-grouped": Shared("mixtral", {"grouped": True}, 3, UNEVEN | {"intermediate_size": 104}),
    "uneven-spread": Shared("mixtral", {"spread": True}, 3, UNEVEN),
    "spread": Shared("mixtral", {"spread": True}),
    # In one block no token comes to any expert of one process.
    "spread-short": Shared("mixtral", {"spread": True, "short": True}, changes={"num_experts_per_tok": 1}),
    "spread-recomputed": Shared("qwen3_moe-some-dense", {"spread": True, "recompute": True}),
    "head-norms": Shared("glm4_moe"),
    "head-norms-spread": Shared("glm4_moe", {"spread": True}),
    "recomputed": Shared("llama-tied", {"recompute": True}),
    "own-loss": Shared("baichuan2-7b", {"own": True}, 3, {"num_attention_heads": 4}),
    "z-loss": Shared("gemma2", {"z_loss": 0.1}),
    "bf16": Shared("llama-tied", BF16),
    "bf16-bloom": Shared("bloom", BF16),
    "bf16-mixtral": Shared("mixtral", BF16),
}
ADAPTED = {"adapted": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
SHARED |= {
    "adapted-biases": Shared("llama-untied", ADAPTED, changes=BIASES),
    "adapted-uneven": Shared("llama-tied", ADAPTED, 3, UNEVEN),
    "adapted-mixtral": Shared("mixtral", ADAPTED),
    "adapted-spread": Shared("mixtral", ADAPTED | {"spread": True}),
    **{f"adapted-{name}": Shared(name, ADAPTED) for name in ("bloom", "chatglm3", "phi3", "gemma2")},
}
SHARED |= {f"dropout-{model}": Shared(model, {"dropout": True}) for model in ("bloom", "llama-tied")}
FAULTS = {"copy": "llama-untied", "norm": "qwen3", "head": "llama-tied"}
SHARED |= {f"fault-{fault}": Shared(model, {"fault": fault}) for fault, model in FAULTS.items()}
SHARED["fault-factor"] = Shared("llama-untied", ADAPTED | {"fault": "factor"})
# tests/training/engine/test_tensor_axis.py has a dense model and one of experts in each `make test`.
SLOW = (
    *("bloom", "llama-untied", "baichuan2-7b", "chatglm3", "mixtral", "spread", "spread-short", "biases", "head-norms"),
    *("adapted-biases", "adapted-spread", "adapted-mixtral"),
    *("baichuan2-13b", "uneven-bloom", "uneven-grouped", "own-loss", "phi3", "qwen3", "gemma2", "bf16", "recomputed"),
)
FULLY_CUT = ("bloom", "llama-untied", "baichuan2-7b", "chatglm3", "mixtral")


def run_shared(
    cases: dict[str, Shared], make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory, asked: set[str]
) -> dict[str, Any]:
    """Run those of the cases that tests ask for; by name what they were and gave."""
    found: dict[str, Any] = {}
    for processes in (2, 3):
        chosen = [name for name, case in cases.items() if case.processes == processes and name in asked]
        if not chosen:
            continue
        described = []
        for name in chosen:
            model_type, changes = MODELS[cases[name].model]
            folder = make_checkpoint(model_type, **changes | cases[name].changes)
            change_weights(folder, fill_biases)
            described.append({"folder": str(folder)} | cases[name].asked)
        path = tmp_path_factory.mktemp("shares") / "cases.json"
        path.write_text(json.dumps(described))
        ended = torchrun(processes, "tests/workers/tensor_shares.py", path)
        assert ended.returncode == 0, ended.stderr[:4000]
        outcomes = json.loads((path.parent / "outcomes.json").read_text())
        found |= {name: case | outcome for name, case, outcome in zip(chosen, described, outcomes, strict=True)}
    return found


@pytest.fixture(scope="module")
def outcomes(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory, asked: set[str]) -> dict[str, Any]:
    """By name of a case."""
    return run_shared(SHARED, make_checkpoint, tmp_path_factory, asked)


@pytest.mark.launched
@pytest.mark.parametrize(
    "name",
    tiered([name for name in SHARED if not name.startswith(("fault", "dropout"))], quick=(), slow=SLOW),
)
def test_shares_give_the_loss_and_gradients_of_the_whole_model(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    assert_near(outcome["loss"], outcome["expected"], dtype, "means")
    assert {weight: far for weight, far in outcome["far"].items() if not far <= bound(dtype)} == {}
    if name in FULLY_CUT:
        assert outcome["held"] < 0.51


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("name", [f"fault-{fault}" for fault in (*FAULTS, "factor")])
def test_a_planted_fault_is_found(name: str, outcomes: dict[str, Any]) -> None:
    assert any(far > 1e-2 for far in outcomes[name]["far"].values())


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-untied", "bloom", "chatglm3", "mixtral"])
def test_a_block_makes_two_sums_in_each_direction(name: str, outcomes: dict[str, Any]) -> None:
    blocks = 3
    forward, backward = outcomes[name]["sums"]
    # Of the embedding one; of the loss the largest logit, what comes of it, and the gradient of its input.
    assert forward == 2 * blocks + 1 + 3
    assert backward == (3 if name == "mixtral" else 2) * blocks  # of experts one more, for how much each counts


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout-bloom", "dropout-llama-tied"])
def test_heads_drop_apart_and_all_else_alike(name: str, outcomes: dict[str, Any]) -> None:
    (losses, drawn, same), (other_losses, other_drawn, other_same) = outcomes[name]["ranks"]
    assert losses == other_losses
    assert losses[0] == losses[1]
    assert same
    assert other_same
    assert drawn != other_drawn


@pytest.mark.parametrize(
    ("model", "changes", "size", "spread", "told"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, False, "1 heads of keys (num_key_value_heads) are not enough for 2"),
        ("mixtral", {"num_local_experts": 3, "num_key_value_heads": 4}, 4, True, "3 experts cannot be spread over 4"),
        ("qwen3_moe", EXPERTS, 2, True, None),
        ("llama", {}, 1, False, None),
        ("cohere", {"use_qk_norm": True}, 2, False, "it is not known how to cut block.self_attn.q_norm.weight"),
        ("cohere", {"use_qk_norm": False}, 2, False, None),
        ("olmo2", {}, 2, False, None),
        ("glm4_moe", GLM4_MOE, 2, False, None),
        ("glm4_moe", GLM4_MOE | {"use_qk_norm": False}, 2, False, None),
        ("gpt2", {}, 2, False, "gpt2 has no plan by which layers are cut; expected 1 process to a layer"),
        ("cohere", {"use_qk_norm": True}, 2, False, "of cohere; expected 1 process to a layer (no axis model"),
    ],
)
def test_what_cannot_be_shared_is_told(
    model: str, changes: dict[str, Any], size: int, spread: bool, told: str | None
) -> None:
    reason = obstacle(spec_of(model, **changes), size, spread)
    assert (reason is None) if told is None else (reason is not None and told in reason)
