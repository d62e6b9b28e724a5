"""The GPU benchmarks as far as a CPU can show them: how much is trained, what kernels count as, and whole runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpus
from benchmarks.gpu_checks import CHECKS, require
from benchmarks.gpu_models import (
    MODELS,
    ROOM,
    TINY,
    WHOLE,
    Measurement,
    config_of,
    fit,
    planned_peak,
    samples_of,
    write_model,
)
from benchmarks.gpu_worker import AUTO, KERNELS, TOLERANCE, against
from benchmarks.kernel_classes import REST, Span, kind, shares
from benchmarks.unattended import LOG, TABLE
from benchmarks.unattended import ROWS as ROWS_FILE
from models.api import read_spec
from models.attention.kernels import ALL
from options.planner.utilization import ModelFlops
from tests.launching import run
from training.batches import build_loader
from training.metrics.devices import parse_devices

ROWS = ("full", "packed")


def layers_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])


@pytest.mark.parametrize(
    ("device_name", "asked", "free"),
    [
        ("H200", 8, None),
        ("H100", 8, 30e9),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("H100", 8, None), ("A100-40G", 8, None))),
        pytest.param("H200", None, None, marks=pytest.mark.slow),
    ],
)
def test_as_many_layers_as_fit_with_room(
    device_name: str, asked: int | None, free: float | None, tmp_path: Path
) -> None:
    """Of the memory that others leave free."""
    _, device = parse_devices(device_name)
    assert device.memory
    available = int(free or device.memory)
    measurement = Measurement(layers=asked)
    samples = samples_of(measurement, MODELS["7b"]["vocab_size"], WHOLE)
    config, planned = fit(measurement, tmp_path, samples, WHOLE, device, available, half=True)
    layers, limit = layers_of(tmp_path), (1 - ROOM) * available
    assert planned == planned_peak(config, samples, device) <= limit
    most = asked or MODELS["7b"]["num_hidden_layers"]
    if layers < most:
        write_model(tmp_path, MODELS["7b"], layers + 1, WHOLE.length)
        assert planned_peak(config, samples, device) > limit
    assert (layers == most) == (asked is not None and free is None and device_name != "A100-40G")
    with pytest.raises(SystemExit, match="not one layer fits"):
        fit(measurement, tmp_path, samples, WHOLE, device, 2 * 10**9, half=True)


def test_packed_rows_hold_as_many_tokens_as_full_ones(tmp_path: Path) -> None:
    measurement = Measurement(rows="packed", layers=1)
    samples = samples_of(measurement, 512, WHOLE)
    write_model(tmp_path, MODELS["tiny"], 1, WHOLE.length)
    config = config_of(measurement, tmp_path, len(samples.samples), WHOLE, half=True)
    batch = build_loader(samples, config).batch(0)
    assert batch.tokens == WHOLE.rows * WHOLE.length
    assert any(len(row) > 1 for rows in batch.micro_batches[0] for row in rows)
    flops = ModelFlops(read_spec(tmp_path))
    whole = flops.by_layer([WHOLE.length] * WHOLE.rows, batch.supervised)
    assert flops.by_layer(batch.lengths, batch.supervised)[1] < whole[1]  # documents do not see each other


def test_every_way_makes_a_config(tmp_path: Path) -> None:
    tables = (*gpu.jobs(full=False, cpu=False), *gpu.jobs(full=True, cpu=False), *gpus.jobs(4))
    ways = [job.command for job in tables if "--measurement" in job.command]
    checks = {job.command[-1] for job in tables if "benchmarks.gpu_checks" in job.command}
    assert checks == CHECKS.keys()
    for command in ways:
        measurement = Measurement(**json.loads(command[command.index("--measurement") + 1]))
        samples = samples_of(measurement, 512, TINY)
        config = config_of(measurement, tmp_path, len(samples.samples), TINY, half=not measurement.exact)
        assert config.model_topo.processes == math.prod(measurement.dims)


def test_every_kernel_has_a_way() -> None:
    """Of full rows, the one that `auto` takes among them; of packed ones those that are made for documents."""
    assert set(KERNELS.values()) == set(ALL)
    measured = [way.measurement for way in gpu.WAYS if isinstance(way.measurement, Measurement)]
    tried = {rows: {each.attention for each in measured if each.rows == rows} for rows in ROWS}
    assert tried["full"] >= {*KERNELS, AUTO}
    assert tried["packed"] >= KERNELS.keys() - {"cudnn"}


def test_launched_ways_keep_to_the_gpus_that_their_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert all("--num_gpus" in job.command for job in gpus.jobs(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    for job, way in zip(gpus.jobs(3), gpus.WAYS, strict=True):
        assert isinstance(way.measurement, Measurement)
        processes = math.prod(way.measurement.dims)
        chosen = "localhost:" + ",".join("527"[:processes])
        assert "--num_gpus" not in job.command and job.command[job.command.index("--include") + 1] == chosen
        assert bool(job.obstacle) == (processes > 3)
    assert all("--num_gpus" in job.command for job in gpus.jobs(None))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("triton_poi_fused__to_copy_mul_silu_3", REST),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", REST),
    ],
)
def test_kernels_are_known_by_their_names(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_shares_of_a_step_with_what_is_idle() -> None:
    gemm, copy = "nvjet_hsh", "Memcpy DtoD"
    found = shares([Span(gemm, 100, 400), Span(copy, 300, 500), Span(gemm, 700, 800)], seconds=1e-3)
    assert found["classes"]["idle"] == pytest.approx(0.5)  # 100 to 500 and 700 to 800 of 1,000 microseconds
    assert sum(found["classes"].values()) == pytest.approx(1)
    assert found["classes"]["matrix products"] == pytest.approx(2 * found["classes"]["copies"])
    assert list(found["longest"]) == [gemm, copy]


def test_losses_are_held_to_those_of_another_way(tmp_path: Path) -> None:
    reference = tmp_path / "result.json"
    assert against([6.0], reference)["compared"].startswith("with nothing")
    reference.write_text(json.dumps({"losses": [6.0, 5.0]}))
    assert against([6.0, 5.0 * (1 + TOLERANCE / 2)], reference)["difference"] == pytest.approx(TOLERANCE / 2)
    for losses in ([6.0, 5.0 * (1 + 2 * TOLERANCE)], [6.0, math.nan]):
        with pytest.raises(SystemExit, match="error: losses"):
            against(losses, reference)


def rows_of(module: str, out: Path, *names: str) -> list[dict[str, Any]]:
    """Run some ways of a benchmark on this CPU; their rows."""
    found = run(sys.executable, "-m", module, "--device", "cpu", "--out", out, "--minutes", "60", "--only", *names)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = [json.loads(line) for line in (out / ROWS_FILE).read_text(encoding="utf-8").splitlines()]
    assert [row["way"] for row in rows] == [*names]
    table = (out / TABLE).read_text(encoding="utf-8")
    assert table in found.stdout and [line.split()[1] for line in table.splitlines()] == ["ok"] * len(names)
    assert all(f"---- {name}\n" in (out / LOG).read_text(encoding="utf-8") for name in names)
    return rows


@pytest.mark.launched
@pytest.mark.slow
def test_a_way_runs_on_a_cpu(tmp_path: Path) -> None:
    (row,) = rows_of("benchmarks.gpu", tmp_path / "out", "profile")
    assert row["tokens_per_s"] > 0 and row["planned_bytes"] > 0 and row["measured_bytes"] > 0
    assert row["losses"] == sorted(row["losses"], reverse=True)  # it learns its rows by heart
    assert set(row["profile"]["classes"]) >= {"matrix products", "attention", "optimizer", REST, "idle"}


@pytest.mark.longest
@pytest.mark.launched
def test_ways_of_every_kind_run_on_a_cpu(tmp_path: Path) -> None:
    names = ["offload-off", "offload-on", "host-sums-off", "host-sums-on", "trainer", "packed-sdpa", "full-auto"]
    names += ["micro-batch-4", "sums-bf16", "lion"]
    rows = rows_of("benchmarks.gpu", tmp_path / "out", *names)
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.longest
@pytest.mark.launched
def test_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    names = (gpus.REFERENCE, "exact-pipeline", "exact-dualpipev", "exact-replicas")
    _, *others = rows_of("benchmarks.gpus", tmp_path / "out", *names)
    assert all(row["difference"] <= TOLERANCE for row in others)


def test_goals_that_a_row_misses_are_named() -> None:
    row = {"way": "eager", "mfu": 0.5, "planned_bytes": 100, "measured_bytes": 105, "tokens_per_s": 100.0}
    assert gpu.missed(row, []) == ""
    assert gpu.missed(row | {"mfu": 0.4}, []) == "MFU below 45%"
    assert gpu.missed(row | {"measured_bytes": 120}, []) == "plan beyond 10% of memory"
    assert gpu.missed(row | {"profile": {"classes": {"idle": 0.06}}}, []) == "idle above 5%"
    liger = {"way": "trainer-liger", "mfu": 0.5, "tokens_per_s": 95.0}
    assert gpu.missed(liger, [row]) == "eager below 1.1 times this"
    assert gpu.missed(liger | {"tokens_per_s": 90.0}, [row]) == ""
    assert gpu.missed({"way": "eager", "mfu": None, "planned_bytes": 1, "measured_bytes": 9}, []) == ""  # a CPU


def test_a_check_fails_by_its_limit() -> None:
    assert require({"error": 1e-6}, {"error": 1e-5}) == {"error": 1e-6}
    for error in (1e-4, math.nan):
        with pytest.raises(SystemExit, match=r"^error: error: .* \(limit 1e-05\)$"):
            require({"error": error}, {"error": 1e-5})


@pytest.mark.launched
@pytest.mark.slow
def test_exactness_checks_hold_on_a_cpu(tmp_path: Path) -> None:
    rows = rows_of("benchmarks.gpu", tmp_path / "out", "attention", "race")
    assert rows[0]["sdpa_by_document window"] < 1e-5 and rows[1]["wrong"] == 0


@pytest.mark.longest
@pytest.mark.launched
def test_runs_and_stages_hold_on_a_cpu(tmp_path: Path) -> None:
    """A killed run, the ZeRO entry point, and ranks whose messages pass through host memory as on one shared GPU."""
    _, resumed, zero, stages = rows_of("benchmarks.gpu", tmp_path / "out", "parity", "resume", "stages", "zero")
    assert resumed["weights unlike"] == resumed["losses unlike"] == 0
    assert {"fp32 4 dualpipev", "bf16 2 1f1b"} <= zero.keys() | stages.keys()
