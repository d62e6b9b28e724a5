"""What `use_flash_attn: auto` and `compile: auto` choose, on this machine and where torch says that there is a GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from common.whole_files import read_checked
from models.api import read_spec
from models.attention.kernels import EAGER, FLASH, TORCH, VARLEN
from options.planner import kernels
from options.planner.kernels import KERNELS_FILE, fastest
from tests.conftest import FAQ
from tests.launching import run, topology, write_config
from training.config.keys import TrainConfig
from training.launch.agent import free_port

KNOWN = {"device": "H100-80G", "torch": "2.11.0"}
TIMES = {TORCH: 12.0, FLASH: 9.5, VARLEN: 9.0}

# A run that ends with the first block that it times: what torch and cuBLAS were set to by then.
TIMED = """
import os
import sys
from unittest.mock import patch
import torch
import train_ds
from models.attention.kernels import EAGER, TORCH

def report(*_):
    print("timed:", torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    sys.exit()

with patch.multiple("options.planner.kernels", candidates=lambda *_: [TORCH, EAGER], time_layer=report):
    train_ds.main()
"""


def config_of(folder: Path, **keys: Any) -> TrainConfig:
    fields = {"model_path": "m", "data_path": "d", "save_path": str(folder), "train_batch_size": 8, "max_seq_len": 64}
    return TrainConfig.model_validate(fields | keys)


def be(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def untried() -> str:
    raise AssertionError("nothing is compiled on trial here")


def test_the_fastest_attention_is_taken_and_kept(tmp_path: Path) -> None:
    taken, reason = fastest(list(TIMES), TIMES.__getitem__, tmp_path / KERNELS_FILE, KNOWN)
    assert taken == VARLEN
    assert "torch's varlen_attn 9.0 ms, flash-attn 9.5 ms, torch's scaled_dot_product_attention 12.0 ms" in reason
    later = {TORCH: 1.0, FLASH: 2.0, VARLEN: 3.0}
    again = fastest(list(TIMES), later.__getitem__, tmp_path / KERNELS_FILE, KNOWN)[0]
    assert again == VARLEN, "a run goes on as it began"
    assert fastest(list(TIMES), later.__getitem__, tmp_path / KERNELS_FILE, KNOWN | {"torch": "2.13.0"})[0] == TORCH
    (tmp_path / KERNELS_FILE).write_text("{", encoding="utf-8")
    assert fastest(list(TIMES), TIMES.__getitem__, tmp_path / KERNELS_FILE, KNOWN)[0] == VARLEN


@pytest.mark.parametrize(
    "spoilt", ["{", "[]", '"milliseconds": {}', '"milliseconds": {"magic": 1.0}', '"milliseconds": {"sdpa": NaN}']
)
def test_a_damaged_choice_is_made_anew_and_named(spoilt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = f'{{"known": {json.dumps(KNOWN)}, "failures": {{}}, {spoilt}}}' if ":" in spoilt else spoilt
    (tmp_path / KERNELS_FILE).write_text(whole, encoding="utf-8")
    assert fastest(list(TIMES), TIMES.__getitem__, tmp_path / KERNELS_FILE, KNOWN)[0] == VARLEN
    assert caplog.messages == [f"warning: {tmp_path / KERNELS_FILE}: ignored: damaged"]
    assert (
        "as measured when the run began" in fastest(list(TIMES), TIMES.__getitem__, tmp_path / KERNELS_FILE, KNOWN)[1]
    )


def test_a_kernel_that_cannot_run_the_rows_is_left_out(tmp_path: Path) -> None:
    def milliseconds(kernel: str) -> float:
        if kernel == TORCH:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if kernel == FLASH:
            raise ImportError("flash_attn_2_cuda.so: undefined symbol:\n _ZN3c105ErrorC2E")
        return TIMES[kernel]

    kernels = [TORCH, FLASH, VARLEN]
    for _ in range(2):  # measured, and found again
        taken, reason = fastest(kernels, milliseconds, tmp_path / KERNELS_FILE, KNOWN)
        assert (
            taken == VARLEN and "flash-attn failed (flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E)" in reason
        )
        assert "torch's scaled_dot_product_attention failed (CUDA out of memory)" in reason
    assert json.loads(read_checked(tmp_path / KERNELS_FILE))["milliseconds"] == {VARLEN: 9.0}
    with pytest.raises(torch.OutOfMemoryError):
        fastest([TORCH], milliseconds, tmp_path / "other.json", KNOWN)


def test_blocks_are_really_run(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(make_checkpoint("llama"))
    monkeypatch.setattr(kernels, "candidates", lambda *_: [TORCH, EAGER])
    taken, reason = kernels._attention(config_of(tmp_path), spec, None)
    times = json.loads(read_checked(tmp_path / KERNELS_FILE))["milliseconds"]
    assert times.keys() == {TORCH, EAGER} and min(times.values()) > 0 and taken == min(times, key=times.__getitem__)
    assert "the fastest of a block" in reason


@pytest.mark.launched
@pytest.mark.slow
def test_kernels_are_timed_as_the_run_computes(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """cuBLAS reads its variable once, at the first product, and torch refuses all of them without it."""
    keys = {"model_path": str(make_checkpoint("llama")), "data_path": str(FAQ), "deterministic": True}
    config = write_config(tmp_path / "run.yml", **keys)
    (script := tmp_path / "timed.py").write_text(TIMED, encoding="utf-8")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    result = run(sys.executable, script, "--config", config, **alone, MASTER_PORT=str(free_port()))
    assert "timed: True :4096:8" in result.stdout, result.stdout + result.stderr


def test_without_a_gpu_auto_is_the_usual_kernel_and_nothing_is_compiled(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    spec = read_spec(make_checkpoint("llama"))
    config = config_of(tmp_path)
    assert (config.use_flash_attn, config.compile) == ("auto", "auto")
    assert kernels._attention(config, spec, None) == (TORCH, "torch's scaled_dot_product_attention")
    assert kernels._compilation(config, False, untried) == (False, [])
    assert kernels._compilation(config_of(tmp_path, compile=True), False, untried) == (True, [])
    assert not (tmp_path / KERNELS_FILE).exists()


@pytest.mark.parametrize(
    ("capability", "keys", "trial", "message"),
    [
        ((9, 0), {}, None, "blocks: compiled"),
        ((9, 0), {}, "no C compiler", "blocks: not compiled: no C compiler"),
        ((7, 0), {}, None, "blocks: not compiled: a GPU is older"),
        ((9, 0), {"zero_optimization": {"stage": 3}}, None, "blocks: not compiled: ZeRO stage 3"),
        ((9, 0), {"schedule": "dualpipev", "model_topo": topology((2, 1))}, None, "blocks: compiled"),
        ((9, 0), {"compile": False}, None, None),
    ],
)
def test_blocks_are_compiled_where_that_is_known_to_help(
    capability: tuple[int, int],
    keys: dict[str, Any],
    trial: str | None,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, "a GPU", capability)
    compiles, lines = kernels._compilation(config_of(tmp_path, **keys), False, lambda: trial)
    assert compiles == (message == "blocks: compiled")
    assert len(lines) == (message is not None)
    assert message is None or re.match(message, lines[0])


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        pytest.param(None, None, marks=pytest.mark.slow),
        ("forward", "out of shared memory"),
        pytest.param("backward", "out of shared memory", marks=pytest.mark.slow),
    ],
)
def test_the_trial_compiles_both_passes_of_a_block(
    failing: str | None,
    message: str | None,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler in the place of torch's own, which may fail at one of them."""
    made: list[str] = []

    def compiler(which: str) -> Callable[..., Any]:
        def make(graph: Any, _: Any) -> Any:
            made.append(which)
            if which == failing:
                raise RuntimeError("triton: out of shared memory")
            return make_boxed_func(graph.forward)

        return make

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compile_module, backend=backend))
    spec = read_spec(make_checkpoint("llama"))
    reason = kernels._compile_trial(config_of(tmp_path), spec, None)
    torch._dynamo.reset()
    assert set(made) == {"forward", "backward"} if failing != "forward" else {"forward"}
    assert reason is None if message is None else message in (reason or "")


def test_blocks_with_experts_are_compiled_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "a GPU", (9, 0))
    compiles, (line,) = kernels._compilation(config_of(tmp_path), True, untried)
    assert not compiles and "how many tokens an expert gets" in line
    assert kernels._compilation(config_of(tmp_path, compile=True), True, untried) == (True, [])


@pytest.mark.parametrize("compiled", [True, False])
def test_fp8_is_warned_of_where_blocks_are_not_compiled(
    compiled: bool, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(kernels, "gather", lambda chosen: [chosen])
    spec = read_spec(make_checkpoint("llama"))
    config = config_of(tmp_path, bf16={"enabled": True}, fp8={"enabled": True}, compile=compiled)
    report = kernels.choose_kernels(config, spec, None).report
    assert any(line.startswith("warning: fp8 without compiled blocks") for line in report) is not compiled
