"""ZeRO against the pipeline: same data, same losses, whatever the stage; and what a rank holds under stage 3.

The samples differ much in length, and an epoch's last batch is smaller, so that one replica has a micro-batch without
samples. All cases of a number of processes share one launch (tests/workers/zero.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

import train_ds_zero
from models import load_model
from models.api import read_spec
from models.checkpoint.side_files import copy_side_files
from models.conversion.to_huggingface import pp_to_hg
from tests.cases import tiered
from tests.closeness import assert_near
from tests.conftest import FAQ
from tests.launching import metrics, supervised, topology, write_config
from tests.models.helpers import assert_same_bits, joined, read_weights
from tests.ranks import Ranks, write_random_samples
from training.config.deepspeed_config import check_device
from training.config.keys import TrainConfig
from training.distributed.processes import ProcessInfo
from training.errors import ConfigError

pytestmark = pytest.mark.launched

STEPS, RESUME_AT = 10, 7  # as in tests/workers/zero.py
PROCESSES = 2
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "linear": ("qwen3_next", LINEAR | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
    "linear-experts": ("qwen3_next", LINEAR | {"num_experts": 8, "num_experts_per_tok": 1, "mlp_only_layers": []}),
    "baichuan": ("baichuan", {"max_position_embeddings": 256}),  # its head uses the weight without calling its layer
}
BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SHARD_ALL = {"stage3_param_persistence_threshold": 0}  # DeepSpeed would keep small weights whole: all of a tiny model


class Case(NamedTuple):
    """A run by ZeRO: the keys of `zero_optimization`, and others."""

    name: str
    model: str
    zero: dict[str, Any]
    keys: dict[str, Any] = {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in self.keys else torch.float32

    @property
    def reference(self) -> str:
        return "pipeline-bf16" if "bf16" in self.keys else f"pipeline-{self.model}"


def stage(number: int, **keys: Any) -> dict[str, Any]:
    return {"stage": number} | (SHARD_ALL if number == 3 else {}) | keys


SHARED_ROWS = {"model_topo": topology((1, PROCESSES)) | {"sequence": PROCESSES}}
SLOW_ADAM = {"zero_force_ds_cpu_optimizer": False}  # torch's, which needs no compiling
CASES = [
    *(Case(f"tied-{number}", "tied", stage(number)) for number in range(4)),
    Case("untied-3", "untied", stage(3)),
    Case("mixtral-3-recompute", "mixtral", stage(3), {"use_grad_ckpt": True}),
    # Linear attention is called once a document, on each rank another number of times.
    Case("linear-3", "linear", stage(3)),
    Case("linear-3-recompute", "linear", stage(3), {"use_grad_ckpt": True}),
    Case("linear-experts-3", "linear-experts", stage(3)),
    Case("baichuan-3", "baichuan", stage(3)),
    Case("offload-2", "tied", stage(2, **OFFLOAD), SLOW_ADAM),
    Case("offload-3", "tied", stage(3, offload_param={"device": "cpu"}, **OFFLOAD), SLOW_ADAM),
    Case("hpz-3", "tied", stage(3, zero_hpz_partition_size=2)),
    *(Case(f"bf16-{number}", "tied", stage(number), BF16) for number in (0, 2, 3)),
    Case("shared-rows-1", "untied", stage(1), SHARED_ROWS),
    Case("shared-rows-3", "mixtral", stage(3), SHARED_ROWS | {"use_grad_ckpt": True}),
]
# Stages 0 to 3 are in each run of test_exactness.
SLOW = ["tied-2", "linear-3-recompute", "bf16-3", "shared-rows-1"]
UNDER_TEST = tiered(CASES, quick=["tied-3"], slow=SLOW)
RESUMED = ("shared-rows-1", "tied-3", "offload-3", "bf16-0")  # tests/training/test_starts.py has 2, and 3 in bf16
REFERENCES = [Case(f"pipeline-{model}", model, stage(1)) for model in MODELS]
REFERENCES += [Case("pipeline-bf16", "tied", stage(1), BF16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def checkpoints(make_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {model: make_checkpoint(family, **changes) for model, (family, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks, folder: Path, checkpoints: dict[str, Path], asked: set[str]) -> dict[str, dict[str, Any]]:
    """What every case that this session asks for gave, and its reference."""
    chosen = [case for case in CASES if case.name in asked]
    write_random_samples(folder, 37, longest=89)  # 4 batches of 8 and one of 5
    references = [each for each in REFERENCES if each.name in {case.reference for case in chosen}]
    described = [
        {
            "name": case.name,
            "kind": kind,
            "config": config(case, processes, checkpoints[case.model], folder),
            "resume": case.name in RESUMED,
        }
        for kind, processes, cases in (("pipeline", 1, references), ("zero", PROCESSES, chosen))
        for case in cases
    ]
    ranks.run_all("zero", described, folder)
    return {case.name: json.loads((folder / f"{case.name}.json").read_text()) for case in (*references, *chosen)}


def config(case: Case, processes: int, model_path: Path, folder: Path) -> dict[str, Any]:
    return {
        "model_path": str(model_path),
        "data_path": str(folder / "samples.json"),
        "save_path": str(folder),
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "eps": 1.0e-6}},
        "aux_router_loss": {"weight": 0.5 if case.model == "mixtral" else None},
        "aux_max_z_loss": {"weight": 1.0e-2},
        # The router loss is that of each micro-batch, and packing makes others for two replicas than for one.
        "packing": False if case.model == "mixtral" else "batch",
        "zero_optimization": case.zero,
        "model_topo": topology((1, processes)),
        **case.keys,
    }


@pytest.mark.parametrize("case", UNDER_TEST)
def test_losses_are_the_pipelines(case: Case, outcomes: dict[str, dict[str, Any]]) -> None:
    found, expected = outcomes[case.name], outcomes[case.reference]
    assert len(found["loss"]) == STEPS
    assert min(expected["grad_norm"]) > 0.5, "nothing was clipped"
    for quantity in ("loss", "eval"):
        assert_near(found[quantity], expected[quantity], case.dtype, "means", quantity)
    assert_near(found["grad_norm"], expected["grad_norm"], case.dtype, "norms", "grad_norm")


@pytest.mark.parametrize("name", tiered(RESUMED, quick=["tied-3"], slow=["shared-rows-1"]))
def test_a_resumed_run_repeats_the_losses_bit_for_bit(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[name]["resumed"] == outcomes[name]["loss"][RESUME_AT:]


@pytest.mark.parametrize("case", UNDER_TEST)
def test_evaluation_is_the_cross_entropy_alone(case: Case, outcomes: dict[str, dict[str, Any]]) -> None:
    """The first step's loss is that of the same weights and samples, with the weighted terms on top."""
    least = 0.5 if case.model == "mixtral" else 0.1  # the routers' loss is on top
    for found in (outcomes[case.name], outcomes[case.reference]):
        assert found["loss"][0] - found["eval"][0] > least


@pytest.mark.parametrize("case", [each for each in UNDER_TEST if "-3" in str(each.id)])
def test_no_rank_ever_holds_the_model_in_stage_3(
    case: Case, outcomes: dict[str, dict[str, Any]], checkpoints: dict[str, Path]
) -> None:
    spec = read_spec(checkpoints[case.model])
    sizes = [sum(shape.numel() for shape in spec.shapes(layer).values()) for layer in range(spec.n_layers)]
    model = sum(sizes) - (sizes[0] if spec.tied else 0)
    for held, most in zip(outcomes[case.name]["held"], outcomes[case.name]["held_while_reading"], strict=True):
        assert held == pytest.approx(model / PROCESSES, rel=0.01)
        assert most <= model / PROCESSES + max(sizes) < model


@pytest.mark.parametrize(
    "name", tiered(["tied-2", "tied-3", "untied-3", "mixtral-3-recompute", "bf16-3"], ["tied-3"], ["tied-2"])
)
def test_the_layer_files_are_a_pipelines(
    name: str, folder: Path, outcomes: dict[str, dict[str, Any]], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    del outcomes  # already on disk
    original = checkpoints[next(case.model for case in CASES if case.name == name)]
    copy_side_files(original, folder / name, read_spec(original))
    pp_to_hg(folder / name, tmp_path / "hg")
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        trained = load_model(folder / name)
        assert trained.embedding.embed_tokens.weight.dtype == (torch.bfloat16 if "bf16" in name else torch.float32)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hg", dtype=torch.float32)(ids).logits
        torch.testing.assert_close(exported, trained.float()(ids), atol=1e-5, rtol=0)
        assert (exported - load_model(original)(ids)).abs().max() > 1e-2


@pytest.mark.slow
def test_both_entry_points_take_one_config(folder: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    records = folder / "records.json"
    records.write_text(json.dumps(json.loads(FAQ.read_text(encoding="utf-8"))[::5][:20]), encoding="utf-8")
    path = write_config(
        tmp_path / "run.yml", model_path=str(checkpoints["tied"]), data_path=str(records), export_hf=True
    )
    losses = {}
    for script, processes, *words in (
        ("train_ds.py", 1),
        ("train_ds_zero.py", PROCESSES, "zero_optimization.stage=3"),
    ):
        save_path = tmp_path / script
        result = supervised(processes, script, "--config", path, f"save_path={save_path}", *words)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        losses[script] = torch.tensor([line["loss"] for line in metrics(save_path)])
        pp_to_hg(save_path, tmp_path / f"{script}.hg")
        exported = read_weights(save_path / "hf")
        assert len(exported) == processes
        assert_same_bits(joined(exported), joined(read_weights(tmp_path / f"{script}.hg")))
    torch.testing.assert_close(losses["train_ds_zero.py"], losses["train_ds.py"], atol=1e-5, rtol=0)


def test_the_processes_are_the_replicas_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    keys = {"model_path": "m", "data_path": "d", "train_batch_size": 8}
    path = str(write_config(tmp_path / "run.yml", **keys))
    process = ProcessInfo(rank=0, world_size=4, local_rank=0, local_size=4)
    assert train_ds_zero.load_spread_config(path, [], process).model_topo.replicas == 4
    assert train_ds_zero.load_spread_config(path, [], None).model_topo.replicas == max(1, torch.cuda.device_count())
    path = str(write_config(tmp_path / "topo.yml", **keys, model_topo=topology((1, 2))))
    assert train_ds_zero.load_spread_config(path, [], process).model_topo.replicas == 2


@pytest.mark.parametrize(("steps", "processes", "expected"), [(2, 2, 1), (1, 4, None), (4, None, None), (1, 1, 4)])
def test_accumulation_is_judged_by_the_processes_that_there_are(
    steps: int, processes: int | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_ds_zero, "gpus", lambda: 1)
    keys = {"model_path": "m", "data_path": "d", "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    path = str(write_config(tmp_path / "run.yml", **keys | {"train_batch_size": 4 if processes == 2 else 8}))
    process = processes and ProcessInfo(rank=0, world_size=processes, local_rank=0, local_size=processes)
    words = [f"gradient_accumulation_steps={steps}"]
    if expected is None:
        assert train_ds_zero.load_spread_config(path, words, process or None).gradient_accumulation_steps == steps
        return
    with pytest.raises(ConfigError, match=rf"gradient_accumulation_steps: {steps} .*; expected {expected}, or leave"):
        train_ds_zero.load_spread_config(path, words, process or None)


@pytest.mark.slow
def test_two_processes_take_the_one_right_accumulation(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "max_steps": 1, "max_seq_len": 64}
    keys |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    path = write_config(tmp_path / "run.yml", **keys)
    wrong = supervised(PROCESSES, "train_ds_zero.py", "--config", path, "gradient_accumulation_steps=2")
    assert wrong.returncode and "gradient_accumulation_steps: 2 contradicts train_batch_size 4; expected 1" in (
        wrong.stdout + wrong.stderr
    )
    right = supervised(PROCESSES, "train_ds_zero.py", "--config", path, "gradient_accumulation_steps=1")
    assert right.returncode == 0, right.stdout[-3000:] + right.stderr[-3000:]
    assert len(metrics(tmp_path / "run")) == 1


def test_a_config_with_stages_is_refused() -> None:
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8}
    optimizer = {"params": {"lr": 1e-5}}
    staged = TrainConfig.model_validate(keys | {"model_topo": topology((2, 1)), "optimizer": optimizer})
    with pytest.raises(ConfigError, match=r"^model_topo.process_topology.dims: \[2, 1\] asks for 2 stages"):
        staged.check_entry_point(in_stages=False)


def test_fp16_is_refused_where_the_loss_would_not_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True)
    keys = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8, "fp16": {"enabled": True}}
    check_device(TrainConfig.model_validate(keys))
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage: 0"):
        check_device(TrainConfig.model_validate(keys | {"zero_optimization": {"stage": 0}}))
