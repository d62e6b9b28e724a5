"""`--prove` as a user starts it: a sound run is proved, a faulty one is not, and nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from options.proof.command import CERTIFICATE
from tests.conftest import FAQ
from tests.launching import error_lines, eventually, run, start, topology, write_config
from training.metrics.run_info import machine

LAUNCHED = pytest.mark.launched
LORA = {"r": 8, "alpha": 16, "start_from": "elsewhere"}
AHEAD: dict[str, Any] = {"init": "copy", "depth": 2, "weight": 0.5}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
OFFLOAD = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


def grid(*dims: int) -> dict[str, Any]:
    """The `model_topo` section of stages and replicas whose processes share layers."""
    return {"process_topology": {"axes": ["pipe", "data", "model"], "dims": list(dims)}}


SHARED = grid(2, 1, 2)


class Proofs:
    """Makes the models and configs of proofs and runs them, in a folder with a temporary one of its own."""

    def __init__(self, folder: Path, make_checkpoint: Callable[..., Path]) -> None:
        self.folder, self.temporary, self._make = folder, folder / "temporary", make_checkpoint
        self.temporary.mkdir()

    def config(self, family: str = "llama", model: dict[str, Any] | None = None, **keys: Any) -> Path:
        sizes = {"num_hidden_layers": 6, "tie_word_embeddings": True} | (model or {})
        defaults = {
            "model_path": str(self._make(family, **sizes)),
            "data_path": str(FAQ),
            "save_path": str(self.folder / "run"),
            "train_batch_size": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}, "no_wd_kws": ["norm"]},
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20}},
            "model_topo": topology((2, 1), [5, 3]),
        }
        return write_config(self.folder / "run.yml", **(defaults | keys))

    def judged(self, classes: bool = False, **keys: Any) -> Path:
        """The config of a run on pairs, or on texts with a class."""
        numbers = range(1, 41)
        pairs = [
            {"prompt": f"How many has {n}?", "chosen": f"It has {n}." * (n % 3 + 1), "rejected": "No" * (n % 5 + 1)}
            for n in numbers
        ]
        texts = [{"text": f"{'What a day it is. ' * (n % 4)}Day {n}", "label": n % 3} for n in numbers]
        path = self.folder / "judged.json"
        path.write_text(json.dumps(texts if classes else pairs))
        return self.config(**({"model_topo": topology((2, 1), [5, 3]), "data_path": str(path)} | keys))

    def prove(self, config: Path, script: str = "train_ds.py", **environment: str) -> subprocess.CompletedProcess[str]:
        result = run(sys.executable, script, "--config", config, "--prove", TMPDIR=str(self.temporary), **environment)
        assert not [path for path in self.temporary.iterdir() if path.name.startswith("pipetune-proof-")]
        return result

    def certificate(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "run" / CERTIFICATE).read_text(encoding="utf-8"))
        return content

    def failed(self) -> dict[str, str]:
        """What does not hold, and where."""
        return {row["what"]: row["where"] for row in self.certificate()["rows"] if not row["holds"]}


@pytest.fixture
def proofs(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Proofs:
    return Proofs(tmp_path, make_checkpoint)


@LAUNCHED
@pytest.mark.slow
def test_a_sound_run_is_proved_beside_its_checkpoints(proofs: Proofs) -> None:
    """Of two stages, whose layers two processes each share."""
    config = proofs.config(model_topo=SHARED | {"parts": [5, 3]})
    checkpoint = proofs.folder / "run" / "step-000007" / "layer_00-model_states.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"weights")
    result = proofs.prove(config)
    assert result.returncode == 0, result.stdout + result.stderr
    assert proofs.failed() == {} and proofs.certificate()["proved"]
    rows = {row["what"]: row["count"] for row in proofs.certificate()["rows"]}
    assert rows["gradients"] == rows["gradients that say nothing"] == rows["updates of the weights"]
    assert rows["loss"] == 4 and rows["loss of the evaluation"] == rows["loss after kill and resume"] == 2
    assert min(rows.values()) > 0 and str(proofs.folder / "run" / CERTIFICATE) in result.stdout
    assert proofs.certificate()["machine"] == machine() and proofs.certificate()["seconds"] > 0
    small = proofs.certificate()["small_config"]
    assert small["model_topo"]["parts"] == [3, 2] and small["max_steps"] == 4
    assert sorted(path.name for path in (proofs.folder / "run").iterdir()) == [CERTIFICATE, "step-000007"]
    assert checkpoint.read_bytes() == b"weights"


@LAUNCHED
@pytest.mark.longest
@pytest.mark.parametrize(
    ("fault", "what", "where"),
    [
        ("ends_apart", "gradients", "4.lm_head.weight: layer 4, stage 1"),
        ("no_decay", "updates of the weights", "stage"),
        ("moments_lost", "weights after kill and resume", "stage"),
        ("padding_counts", "loss", "step"),
        ("documents_meet", "gradients", "layer"),
        ("other_scale", "loss", "step"),
        ("neighbours_adapter", "gradients", "experts.gate_up_proj_lora_A: layer"),
        ("parts_swapped", "gradients", "layer"),
        ("readers_alone", "gradients", "layer"),
        ("left_out", "logits of the exported model", "text"),
        ("other_alpha", "logits of the exported adapter", "text"),
        ("targets_near", "loss of the layers ahead", "step"),
        ("stale_embedding", "gradients", ".ahead."),
        ("another_prefix", "loss", "step"),
        ("keys_left_behind", "loss", "step"),
        ("values_unlearnt", "gradients", "v_proj.weight: layer"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, what: str, where: str, proofs: Proofs) -> None:
    keys: dict[str, Any] = {"model_topo": topology((2, 1), [5, 3])}
    if fault in ("parts_swapped", "readers_alone"):
        keys = {"model_topo": SHARED}
    if adapted := fault in ("other_scale", "neighbours_adapter", "other_alpha"):
        keys |= {"lora": LORA}
    if fault in ("another_prefix", "keys_left_behind", "values_unlearnt"):
        keys |= {"row_chunk": 64, "train_micro_batch_size_per_gpu": 2}
    if fault in ("targets_near", "stale_embedding"):
        keys |= {"mtp": AHEAD, "model": {"tie_word_embeddings": False}}
    config = proofs.config("mixtral", MIXTRAL, **keys) if adapted else proofs.config(**keys)
    result = proofs.prove(config, "tests/workers/unproved.py", FAULT=fault)
    assert result.returncode == 1, result.stdout + result.stderr
    assert where in proofs.failed()[what]
    assert f"{what}: " in result.stdout and "NOT proved" in result.stdout


@LAUNCHED
@pytest.mark.longest
@pytest.mark.parametrize(
    ("family", "model", "keys"),
    [
        ("llama", {}, {"bf16": {"enabled": True}, "model_topo": topology((2, 2)), "schedule": "dualpipev"}),
        ("llama", {}, {"fp16": {"enabled": True}, "model_topo": topology((1, 2))}),
        ("llama", {}, {"zero_optimization": {"stage": 0}, "use_grad_ckpt": True, "model_topo": topology((2, 2))}),
        ("llama", {}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "gradient_clipping": 0}),
        ("llama", {}, {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False, "packing": False}),
        ("llama", {"tie_word_embeddings": False}, {"packing": "dataset", "aux_max_z_loss": {"weight": 0.01}}),
        ("mixtral", MIXTRAL, {"bf16": {"enabled": True}, "aux_router_loss": {"weight": 0.5}}),
        ("bloom", {}, {"bf16": {"enabled": True}, "use_grad_ckpt": {"every": 2}, "offload_activations": True}),
        ("gemma2", {"sliding_window": 16}, {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}),
        (
            "baichuan",
            {"max_position_embeddings": 256, "tie_word_embeddings": False},
            {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}},
        ),
        ("chatglm", {"num_layers": 6}, {"bf16": {"enabled": True}, "schedule": "dualpipev", "compile": True}),
        ("llama", {}, {"schedule": "weight_streaming"}),
        ("mixtral", MIXTRAL, {"schedule": "weight_streaming", "bf16": {"enabled": True}, "lora": LORA}),
        ("qwen3", {}, {"model_topo": topology((8, 2)), "stream_gb": 1, "max_steps": 50}),
        # Adapters, and a part of the weights.
        ("llama", {}, {"lora": LORA | {"rslora": True}, "model_topo": topology((2, 1), [1, 7])}),
        (
            "llama",
            {},
            {"lora": LORA, "bf16": {"enabled": True}, "schedule": "dualpipev", "model_topo": topology((2, 2))},
        ),
        ("llama", {}, {"lora": LORA | {"targets": ["layers.5.mlp.up_proj"], "dropout": 0.1}, "model_topo": SHARED}),
        ("llama", {}, {"lora": LORA | {"base": "nf4", "modules_to_save": ["embed_tokens", "lm_head"]}}),
        ("mixtral", MIXTRAL, {"lora": LORA | {"base": "nf4"}, "use_grad_ckpt": True, "model_topo": SHARED}),
        ("gpt_oss", GPT_OSS, {"lora": LORA}),
        ("llama", {}, {"freeze": ["embed_tokens", r"layers\.5\."]}),
        ("llama", {}, {"freeze": ["embed_tokens", r"layers\.1\."]}),
        # Layers ahead.
        ("llama", {"tie_word_embeddings": False}, {"mtp": AHEAD, "gradient_clipping": 0.5, "bf16": {"enabled": True}}),
        ("mixtral", MIXTRAL, {"mtp": AHEAD | {"detach": False}, "model_topo": SHARED}),
        ("llama", {}, {"mtp": AHEAD | {"only": True}, "schedule": "dualpipev"}),
        # Layers that processes share.
        ("llama", {}, {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "model_topo": grid(1, 2, 2)}),
        ("llama", {}, {"schedule": "dualpipev", "use_grad_ckpt": True, "model_topo": grid(2, 2, 4)}),
        ("mixtral", MIXTRAL, {"model_topo": SHARED | {"experts": "spread"}}),
        ("bloom", {}, {"zero_optimization": OFFLOAD, "model_topo": SHARED}),
        ("chatglm", {"num_layers": 6}, {"packing": False, "model_topo": SHARED}),
        ("baichuan", {"max_position_embeddings": 256, "tie_word_embeddings": False}, {"model_topo": SHARED}),
        ("gemma2", {"sliding_window": 16}, {"model_topo": grid(1, 2, 2) | {"sequence": 2}}),
        # Rows in chunks.
        ("llama", {}, {"row_chunk": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}),
        ("gemma2", {"sliding_window": 16}, {"row_chunk": "auto", "use_grad_ckpt": True, "packing": False}),
        ("mixtral", MIXTRAL, {"row_chunk": 64, "lora": LORA, "model_topo": SHARED}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "defaults",
)
def test_every_way_to_train_is_proved(family: str, model: dict[str, Any], keys: dict[str, Any], proofs: Proofs) -> None:
    result = proofs.prove(proofs.config(family, model, **({"model_topo": topology((2, 1))} | keys)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert proofs.failed() == {}


@LAUNCHED
@pytest.mark.slow
def test_a_stop_leaves_nothing_behind(proofs: Proofs) -> None:
    launch = start(sys.executable, "train_ds.py", "--config", proofs.config(), "--prove", TMPDIR=str(proofs.temporary))
    launch.until(lambda: any(proofs.temporary.glob("pipetune-proof-*/run-notes/output")))
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.end().returncode == 143
    eventually(lambda: not any(proofs.temporary.glob("pipetune-proof-*")))
    assert not (proofs.folder / "run" / CERTIFICATE).exists()


@LAUNCHED
@pytest.mark.slow
def test_a_run_that_cannot_start_says_so_in_a_line(proofs: Proofs) -> None:
    result = proofs.prove(proofs.config(fp16={"enabled": True}, zero_optimization={"stage": 0}))
    assert result.returncode == 2
    (line,) = error_lines(result)
    assert "zero_optimization.stage: 0 does not scale the loss" in line


@pytest.mark.parametrize(
    ("script", "words", "environment", "error"),
    [
        ("train_ds.py", ["--plan"], {}, ": expected one of them"),
        ("train_ds.py", ["--inspect", "1"], {}, ": expected one of them"),
        ("train_ds_zero.py", [], {}, "error: --prove: proves pipelines; expected train_ds.py"),
        ("train_ds.py", [], {"RANK": "0", "WORLD_SIZE": "1"}, "on this machine; expected python train_ds.py"),
    ],
)
def test_prove_is_the_pipelines_alone_and_starts_by_itself(
    script: str, words: list[str], environment: dict[str, str], error: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yml", model_path="m", data_path="d")
    result = run(sys.executable, script, "--config", config, "--prove", *words, **environment)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].partition(" (")[0].endswith(error)
