"""Checks of exactness for a GPU: `python -m benchmarks.gpu_checks NAME`, each a line of `benchmarks.gpu`.

A check leaves its figures and ends with code 0 where they hold, else with a line that says which one does not. On a
CPU each runs in whatever form there is, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_models import MODELS, Measurement, write_model
from benchmarks.workers import RESULT, ROOT, environment, write_figures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Figures = dict[str, Any]
RACES = 1000
STEPS, KILLED_AFTER = 6, 3


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of a difference, relative to what was wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def require(figures: Figures, limits: dict[str, float]) -> Figures:
    """Give back figures that are within their limits.

    Raises:
        SystemExit: some are not, NaN among them; it names all of them.
    """
    beyond = [
        f"{name}: {figures[name]:.2e} (limit {limit:g})" for name, limit in limits.items() if not figures[name] <= limit
    ]
    if beyond:
        sys.exit("error: " + ", ".join(beyond))
    return figures


# ---- attention


def attention(folder: Path) -> Figures:
    """Compare each kernel that can run here with fp64 attention: packed rows, grouped queries, a window.

    A kernel passes with at most three times the error of torch's own kernel in the same precision.
    """
    from models.attention.kernels import TORCH, candidates

    half = DEVICE.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    figures: Figures = {}
    for kernel in candidates(dtype):
        for window in (None, 100):
            figures[f"{kernel}{'' if window is None else ' window'}"] = kernel_error(kernel, dtype, window)
    usual = {window: figures[TORCH + window] for window in ("", " window")}
    limits = {name: 3 * usual[" window" if name.endswith(" window") else ""] + 1e-6 for name in figures}
    return require(figures, limits)


def kernel_error(kernel: str, dtype: torch.dtype, window: int | None) -> float:
    """Return the largest relative error of a kernel's output and three gradients."""
    from models.attention import flex
    from models.attention.packed import ALL_ATTENTION_FUNCTIONS, Documents

    torch.manual_seed(0)
    lengths = [[300, 1, 150, 61], [512]]
    shapes = ((2, 8, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64))
    inputs = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]
    weight = torch.randn(2, 512, 8, 64, device=DEVICE, dtype=dtype)
    documents = Documents(lengths)
    positions = torch.stack([torch.cat(list(map(torch.arange, row))) for row in lengths]).to(DEVICE)
    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 4
    mask: Any = flex.scope(positions, window) if kernel == flex.FLEX else None
    extra: dict[str, Any] = {} if window is None else {"sliding_window": window}
    output, _ = ALL_ATTENTION_FUNCTIONS[kernel](
        module, *inputs, mask, scaling=0.125, documents=documents, document_window=window,
        **documents.flash_arguments(DEVICE), **extra,
    )  # fmt: skip
    wanted_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = plain_attention(wanted_inputs, positions, window)
    (output * weight).sum().backward()
    (wanted * weight.double()).sum().backward()
    pairs = [(output, wanted), *((one.grad, other.grad) for one, other in zip(inputs, wanted_inputs, strict=True))]
    return max(distance(found, right) for found, right in pairs if found is not None and right is not None)


def plain_attention(inputs: Sequence[Tensor], positions: Tensor, window: int | None) -> Tensor:
    """Compute torch's attention under a mask: queries, keys and values [B, heads, S, D] to [B, S, heads, D]."""
    document = torch.nn.functional.pad((positions.diff(dim=1) != 1).cumsum(dim=1), (1, 0))
    place = torch.arange(positions.shape[1], device=DEVICE)
    back = place[:, None] - place
    seen = (document[:, :, None] == document[:, None]) & (back >= 0) & (back < (window or len(place)))
    query, key, value = inputs
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None], scale=0.125, enable_gqa=True
    )
    return output.transpose(1, 2)


# ---- whole models against transformers

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
}


def parity(folder: Path) -> Figures:
    """Compare loss and gradients with transformers', on this device, in fp32 and bf16.

    In fp32 both must agree. In bf16 both round: ours may be at most twice as far from fp32 as transformers'.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: Figures = {}
    limits: dict[str, float] = {}
    for name, shape in SHAPES.items():
        loss, gradients, oracle = both_in(folder / name, name, shape, torch.float32)
        figures |= {f"{name} fp32 loss": loss, f"{name} fp32": distance(gradients, oracle)}
        limits |= {f"{name} fp32 loss": 1e-5, f"{name} fp32": 1e-4}
        loss, found, theirs = both_in(folder / name, name, shape, torch.bfloat16)
        figures |= {f"{name} bf16 loss": loss, f"{name} bf16": distance(found, oracle)}
        limits |= {f"{name} bf16 loss": 1e-2, f"{name} bf16": 2 * distance(theirs, oracle) + 1e-3}
    return require(figures, limits)


def both_in(folder: Path, name: str, shape: dict[str, Any], dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    """Return the relative difference of the losses; our gradients and transformers', each as one vector [weights]."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from models import load_model

    if not folder.exists():
        sizes = MODELS["tiny"] | {"eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.05}
        torch.manual_seed(0)
        fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | shape), dtype=torch.bfloat16)
        fresh.save_pretrained(folder)  # values that both precisions can hold
    ids = torch.randint(3, 512, (2, 64), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    model = load_model(folder, dtype, DEVICE).train()
    loss = mean_loss(model(ids), ids)
    loss.backward()
    ours: dict[str, Tensor] = {}
    for number, layer in enumerate(model.layers):
        grads = {each: weight.grad for each, weight in layer.named_parameters() if weight.grad is not None}
        ours |= model.spec.weight_map.on_disk(number, grads)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).train()
    expected = mean_loss(oracle(ids, use_cache=False).logits, ids)
    expected.backward()
    for weight in oracle.parameters():
        weight.data = weight.grad
    oracle.save_pretrained(folder / "gradients")  # under the names that weights have on disk
    from safetensors.torch import load_file

    theirs = load_file(folder / "gradients" / "model.safetensors")
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    found = torch.cat([ours[name].flatten().float().cpu() for name in sorted(ours)])
    wanted = torch.cat([theirs[name].flatten().float().cpu() for name in sorted(ours)])
    return abs(float(loss / expected) - 1), found, wanted


def mean_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Next-token cross-entropy in fp32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


# ---- offloading


def race(folder: Path) -> Figures:
    """Bring offloaded tensors back that nobody asks for, and fill the memory that they leave at once."""
    from models.offload import HostCopy

    wrong = 0
    for turn in range(RACES if DEVICE.type == "cuda" else 20):
        tensors = [torch.full((1 << 20,), float(turn + number), device=DEVICE) for number in range(2)]
        copies = [HostCopy(tensor) for tensor in tensors]
        del tensors
        for copy in copies:
            copy.start_back()
        right = bool((copies[0].back() == turn).all())
        del copies  # the second comes back to memory that is free from here on
        fresh = [torch.full((1 << 20,), -1.0, device=DEVICE) for _ in range(2)]
        wrong += not right or not all(bool((tensor == -1).all()) for tensor in fresh)
    return require({"wrong": wrong}, {"wrong": 0})


# ---- whole runs


def run_config(folder: Path, **keys: Any) -> dict[str, Any]:
    """Write a tiny model and records into `folder`; a run's config with whatever keys."""
    import yaml

    from benchmarks.tokenizing import make_tokenizer

    model = folder / "model"
    if not model.exists():
        make_tokenizer(model)
        write_model(model, MODELS["tiny"] | {"vocab_size": 32_768}, 2, 128)
        records = [{"type": "pretrain", "text": f"{n} times two is {2 * n}."} for n in range(64)]
        (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")
    name = keys.pop("name")
    config = {
        "model_path": str(model),
        "data_path": str(folder / "records.json"),
        "save_path": str(folder / name),
        "cache_dir": str(folder / "cache"),
        "from_scratch": True,
        "deterministic": True,
        "max_seq_len": 64,
        "train_batch_size": 8,
        "max_steps": STEPS,
        "save_interval": 1,
        "keep_last": STEPS,
        "bf16": {"enabled": DEVICE.type == "cuda"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3}},
        "model_topo": {"process_topology": {"dims": [1, 1]}},
    } | keys
    (folder / f"{name}.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return config


def start_run(script: str, config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, script, "--config", str(config)], cwd=ROOT, env=environment())


def losses_of(run: Path) -> list[float]:
    """Return the training loss of each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def weights_of(run: Path) -> list[Tensor]:
    """Return the weights of a run's last checkpoint."""
    layers = sorted((run / f"step-{STEPS:06}").glob("layer_*"))
    weights: list[Tensor] = []
    for layer in layers:
        state = torch.load(layer, map_location="cpu", weights_only=True)
        weights += [state[name] for name in sorted(state)]
    return weights


def resume(folder: Path) -> Figures:
    """Kill a run after step 3, resume it, and compare losses and weights with those of one run, bit by bit."""
    for name in ("whole", "killed"):
        run_config(folder, name=name)
    if code := start_run("train_ds.py", folder / "whole.yml").wait():
        sys.exit(f"error: the run that nobody kills ends with code {code}")
    run = start_run("train_ds.py", folder / "killed.yml")
    while not (folder / "killed" / f"step-{KILLED_AFTER:06}").is_dir() and run.poll() is None:
        time.sleep(0.02)
    from benchmarks.unattended import kill_all

    kill_all(run)
    saved = len(list((folder / "killed").glob("step-*")))
    if code := start_run("train_ds.py", folder / "killed.yml").wait():
        sys.exit(f"error: the resumed run ends with code {code}")
    whole, killed = (losses_of(folder / name) for name in ("whole", "killed"))
    unlike = sum(
        not torch.equal(one, other)
        for one, other in zip(*(weights_of(folder / name) for name in ("whole", "killed")), strict=True)
    )
    figures = {"steps before the kill": saved, "losses unlike": sum(a != b for a, b in zip(whole, killed, strict=True))}
    write_figures(folder, figures | {"losses": whole})  # the ZeRO entry point is compared with them
    return require(figures | {"weights unlike": unlike, "losses": whole}, {"losses unlike": 0, "weights unlike": 0})


def zero(folder: Path) -> Figures:
    """Train the same by the ZeRO entry point."""
    other = folder.parent / "resume"
    if not (other / "whole").is_dir():
        sys.exit("error: nothing to compare with: run `resume` too")
    run_config(folder, name="zero", zero_optimization={"stage": 2})
    if code := start_run("train_ds_zero.py", folder / "zero.yml").wait():
        sys.exit(f"error: train_ds_zero.py ends with code {code}")
    pairs = zip(losses_of(folder / "zero"), losses_of(other / "whole"), strict=True)
    return require({"loss": max(abs(one / wanted - 1) for one, wanted in pairs)}, {"loss": 1e-3})


# ---- several stages on one GPU


def stages(folder: Path) -> Figures:
    """Train a tiny model in two and four stages that share the GPU, by both schedules; losses against one process."""
    precisions: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
    figures: Figures = {}
    limits: dict[str, float] = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        for (name, keys), limit in zip(precisions.items(), (1e-4, 1e-2), strict=True):
            ways = [(name, (1, 1), keys)]
            for dims, schedule in product(((2, 1), (4, 1)), ("1f1b", "dualpipev")):
                ways.append((f"{name} {dims[0]} {schedule}", dims, keys | {"schedule": schedule}))
            one, *others = pool.map(partial(losses_in_stages, folder), *zip(*ways, strict=True))
            for (way, *_), losses in zip(ways[1:], others, strict=True):
                figures[way] = max(abs(a / b - 1) for a, b in zip(losses, one, strict=True)) if losses else float("nan")
                limits[way] = limit
    return require(figures, limits)


def losses_in_stages(folder: Path, name: str, dims: tuple[int, int], keys: dict[str, Any]) -> list[float]:
    """Return the losses of a run; none where it fails. What it prints goes to this check's own output."""
    place = folder / name.replace(" ", "-")
    place.mkdir()
    way = Measurement("tiny", None if dims[0] < 3 else 6, attention="sdpa", dims=dims, keys=keys, exact=True)
    words = ["-m", "benchmarks.gpu_worker", "--folder", str(place), "--measurement", json.dumps(asdict(way))]
    if subprocess.run([sys.executable, *words, "--share", str(dims[0])], cwd=ROOT, check=False).returncode:
        return []
    losses: list[float] = json.loads((place / RESULT).read_text(encoding="utf-8"))["losses"]
    return losses


CHECKS: dict[str, Callable[[Path], Figures]] = {
    check.__name__: check for check in (attention, parity, race, resume, stages, zero)
}


def said(figures: Figures) -> str:
    """Figures in a line; losses are for other checks."""
    return ", ".join(f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in figures.items() if name != "losses")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_checks")
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--folder", type=Path, required=True)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures = CHECKS[chosen.check](chosen.folder)
    write_figures(chosen.folder, figures | {"said": said(figures)})


if __name__ == "__main__":
    main()
