"""`--plan`: names of devices, what it prints, draws and refuses."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import train_ds_zero
from models.adapters import Lora, Trained
from models.api import read_spec
from models.errors import CheckpointError
from options.planner.command import plan_run
from options.planner.drawing import draw_plan
from options.planner.inputs import Basis, Workload
from options.planner.plan import Plan
from tests.conftest import FAQ, ROOT
from tests.launching import write_config
from tests.models.adapters import save_adapter
from tests.options.planner.helpers import config_of, llama
from training.errors import ConfigError
from training.metrics.devices import GIB, KNOWN, OWN, TERA, USABLE, parse_devices, peak_flops, this_device


def arguments(**given: Any) -> Namespace:
    return Namespace(**dict.fromkeys("devices host_memory links per_host search calibrate".split()) | given)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("8xA100", "A100-40G, A100-80G, such as 8xA100-40G"),
        ("8xA100-41G", "A100-40G, A100-80G"),
        ("4xv100", "V100-16G, V100-32G"),
        ("A100-40G-8", "A100-40G"),
        ("RTX409", "RTX4090-24G"),
        ("0xH100", "H100-80G"),
        ("8xB300-288G", "B300-268G"),
    ],
)
def test_a_device_that_is_not_known_is_answered_with_those_like_it(text: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert str(caught.value).startswith(f"--devices: {text!r}: expected a number and one of {near}")
    by_numbers = str(caught.value).endswith(f"; or the numbers of another GPU, such as '{OWN}'")
    assert by_numbers == (text in ("A100-40G-8", "RTX409", "8xA100-41G", "8xB300-288G"))


@pytest.mark.parametrize("text", ["8", "8xZ9000", "", "0x{tflops: 1}"])
def test_a_device_like_no_other_is_answered_with_where_they_are_and_with_its_numbers(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    expected = f"a name that --help lists, such as 8xH100; or the numbers of another GPU, such as '{OWN}'"
    assert str(caught.value) == f"--devices: {text!r}: expected a number and {expected}"


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("4090x8", "8xRTX4090"), ("RTX4090 x 8", "8xRTX4090"), ("A800x4", "4xA800-40G or 4xA800-80G")],
)
def test_a_number_behind_the_device_is_answered_with_it_in_front(text: str, spelled: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert str(caught.value) == f"--devices: {text!r}: expected the number first, {spelled}"


def test_a_device_by_its_numbers_is_planned_as_one_by_its_name() -> None:
    text = "8x{tflops: 165.2, memory_gib: 24, bandwidth_gb_s: 1008, link_gb_s: 25}"
    count, found = parse_devices(text)
    _, known = parse_devices("RTX4090")
    assert (count, found.name, found.known) == (8, "GPU-24G", True)
    for name in ("memory", "half", "bandwidth", "link"):
        assert getattr(found, name) == getattr(known, name)
    assert parse_devices("{tflops: 165.2, memory_gib: 24, bandwidth_gb_s: 1008}") == (1, found)
    assert parse_devices(OWN)[0] == 8


@pytest.mark.parametrize(
    "numbers",
    [
        "{tflops: 119}",
        "{tflops: 119, memory_gib: 24, bandwidth_gb_s: 864, watts: 450}",
        "{tflops: 0, memory_gib: 24, bandwidth_gb_s: 864}",
        "{tflops: .inf, memory_gib: 24, bandwidth_gb_s: 864}",
        "{tflops: yes, memory_gib: 24, bandwidth_gb_s: 864}",
        "{tflops: 119, memory_gib: 24 GB, bandwidth_gb_s: 864}",
        "{tflops: 119",
    ],
)
def test_numbers_that_describe_no_device_are_refused(numbers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(f"2x{numbers}")
    assert str(caught.value) == f"--devices: '2x{numbers}': expected numbers above 0, such as {OWN}"


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4x4090", 4, "RTX4090-24G"),
        ("3090", 1, "RTX3090-24G"),
        ("h100", 1, "H100-80G"),
        ("2 x v100-32", 2, "V100-32G"),
        ("Tesla V100-SXM2-32GB", 1, "V100-32G"),
        ("8xA100-SXM4-80GB", 8, "A100-80G"),
        ("RTX 4090", 1, "RTX4090-24G"),
        ("8XA6000", 8, "RTXA6000-48G"),
        ("H200NVL", 1, "H200NVL-141G"),
        ("8xRTX 5090", 8, "RTX5090-32G"),
        ("5080", 1, "RTX5080-16G"),
        ("RTX PRO 6000", 1, "RTXPRO6000-96G"),
        ("8xB300", 8, "B300-268G"),
        ("4xGB200", 4, "GB200-186G"),
        ("8xH20", 8, "H20-96G"),
        ("H800", 1, "H800-80G"),
        ("8xA800-80G", 8, "A800-80G"),
        ("A800-40G", 1, "A800-40G"),
        ("L20", 1, "L20-48G"),
        ("8x4090D", 8, "RTX4090D-24G"),
        ("RTX 4090 D", 1, "RTX4090D-24G"),
        ("3080", 1, "RTX3080-10G"),
        ("3080 Ti", 1, "RTX3080Ti-12G"),
        ("2080Ti", 1, "RTX2080Ti-11G"),
    ],
)
def test_devices_go_by_the_names_that_people_use(text: str, count: int, name: str) -> None:
    found, device = parse_devices(text)
    assert (found, device.name) == (count, name)
    if name == "A100-80G":
        assert device.memory == int(80 * GIB * USABLE) and device.half == 312e12


@pytest.mark.parametrize(
    ("named", "half"),
    [
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 147.1),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA L20", 119.5),
        ("NVIDIA GeForce RTX 3080", 59.5),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(named: str, half: float | None) -> None:
    assert peak_flops(named) == (half and half * TERA)


@pytest.mark.parametrize("page", ["parallelism.md", "parallelism_CN.md"])
def test_the_page_lists_every_gpu(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (paragraph,) = re.findall(r"^- `--devices`.*?(?=^- )", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"(?<![\w-])([A-Z][A-Z0-9]*\d[A-Za-z0-9]*)(?![\w-])", paragraph, re.ASCII)
    assert sorted(named) == sorted(KNOWN)


def test_what_the_numbers_of_a_gpu_say_of_each_other_is_right() -> None:
    """Products in 8 bits are twice as fast, and sums in fp32 never faster than in bf16; a wrong digit shows here."""
    for name, gpu in KNOWN.items():
        assert gpu.get("fp8", 2 * gpu["half"]) == pytest.approx(2 * gpu["half"], rel=0.02), name
        assert gpu["single"] < gpu["half"] and gpu.get("best", 0) < 1.1 * gpu["half"], name
        assert all(100 < bandwidth <= 8000 for bandwidth in gpu["memory"].values()), name


@pytest.mark.parametrize(
    ("keys", "devices", "line"),
    [
        ({"bf16": True, "fp16": False}, "2xV100-32G", "bf16.enabled: V100-32G does not compute in bf16; expected fp16"),
        ({"bf16": True, "fp16": False}, "2xT4", "bf16.enabled: T4-16G does not compute in bf16; expected fp16"),
        ({"tf32": True, "fp16": False}, "2xV100-16G", "tf32: V100-16G does not have it; expected false"),
        ({"fp8": True, "bf16": True, "fp16": False}, "2xA100-80G", "fp8.enabled: A100-80G is older than Ada and Hopp"),
        (
            {"zero_optimization": {"stage": 0}},
            "2xA100-80G",
            "zero_optimization.stage: 0 does not scale the loss, which",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            "2xA100-80G",
            "zero_optimization.reduce_bucket_size: ex",
        ),
    ],
)
def test_a_device_that_the_run_would_refuse_is_no_plan(
    keys: dict[str, Any], devices: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path)
    with pytest.raises(ConfigError) as caught:
        plan_run(config_of(tmp_path, 2, **keys), arguments(devices=devices))
    assert str(caught.value).startswith(line)
    assert "fits" not in capsys.readouterr().out


def test_plan_needs_neither_weights_nor_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path, "llama-13b")
    plan_run(config_of(tmp_path, 14), arguments(devices="14xV100-32G"))
    printed = capsys.readouterr().out
    assert "memory: fits" in printed and "data: assumed" in printed and "bubble" in printed and "MFU" in printed
    assert "attention" in printed and "waiting" in printed and "replicas" not in printed  # of which there is one
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as leaving:
        plan_run(config_of(tmp_path, 4), arguments(devices="4xV100-32G"))
    assert leaving.value.code == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "offload_optimizer: {device: cpu}" in printed
    with pytest.raises(ConfigError, match="--devices: 8 of them"):
        plan_run(config_of(tmp_path, 4), arguments(devices="8xV100-32G"))


@pytest.mark.parametrize(
    ("devices", "keys", "texts"),
    [
        ("8xV100-32G", {}, ["llama, 8 stages of", "memory: fits: at most ", "s a step, ", " tokens/s, "]),
        ("4xV100-32G", {}, ["memory: does not fit: at most ", " GB of tensors of 32.99 GB usable"]),
        (None, {"fp16": {"enabled": False}}, ["GB of tensors and kernels a process, which holds", "no known limit"]),
    ],
)
def test_the_picture_says_what_the_lines_say(
    devices: str | None, keys: dict[str, Any], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []

    def savefig(figure: Figure, path: Path, **_: Any) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    config = config_of(tmp_path, int(devices[0]) if devices else 2, **keys)
    device = parse_devices(devices)[1] if devices else this_device()
    plan = Plan.make(Basis(config, llama(tmp_path), Workload.assumed(config), device))
    draw_plan(plan, tmp_path / "plan.png")
    (figure,) = drawn
    title = figure.get_suptitle()
    assert all(text in title for text in texts) and ("tokens/s" in title) == plan.knows_seconds
    memory, time = figure.axes
    heights = [0.0] * len(plan.stages)
    for bar in memory.patches:
        assert isinstance(bar, Rectangle)
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights == pytest.approx([stage.memory.peak / 1e9 for stage in plan.stages])
    assert memory.get_ylim()[1] > max(heights)
    for panel in (memory, time):
        legend = panel.get_legend()
        assert legend and legend.get_window_extent().x0 >= panel.get_window_extent().x1, "nothing is hidden"


def test_a_picture_makes_no_folders_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lies in save_path where that is in this folder, or where the folder around it is there; else here."""
    (here := tmp_path / "clone").mkdir()
    monkeypatch.chdir(here)
    llama(tmp_path)
    for save_path, place, says in (
        ("runs/a", here / "runs" / "a", "drawn: runs/a/plan.png\n"),
        ("../run", tmp_path / "run", "drawn: ../run/plan.png\n"),
        ("../llm/run", here, "drawn: plan.png in this folder, as ../llm is not there yet\n"),
    ):
        plan_run(config_of(tmp_path, 2, save_path=save_path), arguments(devices="2xA100-80G"))
        assert says in capsys.readouterr().out
        assert (place / "plan.png").is_file()
    assert not (tmp_path / "llm").exists()


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        (
            {"r": 2, "alpha": 6, "start_from": "runs/nope"},
            r"lora\.start_from: runs/nope: not found; expected an adapter",
        ),
        ({"r": 8, "alpha": 6, "start_from": "adapter"}, r"lora\.r: 8, but the adapter in adapter .* has 2"),
        ({"r": 2, "alpha": 6, "start_from": "adapter"}, ""),
    ],
)
def test_an_adapter_to_start_from_that_the_run_would_refuse_is_no_plan(
    lora: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_checkpoint: Any
) -> None:
    folder = make_checkpoint("llama")
    monkeypatch.chdir(tmp_path)
    save_adapter(read_spec(folder).training(Trained(Lora(r=2, alpha=6))), folder).rename("adapter")
    config = config_of(folder, 2, fp16={"enabled": False}, lora=lora, save_path="run")
    with pytest.raises(ConfigError, match=line) if line else nullcontext():
        plan_run(config, arguments(devices="2xA100-80G"))


def test_a_plan_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "file").touch()
    config = config_of(tmp_path, 2, save_path=str(tmp_path / "file/run"))
    with pytest.raises(CheckpointError, match=r"file/run: cannot be written: Not a directory; nothing was changed$"):
        plan_run(config, arguments(devices="2xA100-80G"))


def test_plan_measures_the_records(tmp_path: Path, make_checkpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("llama")
    keys: dict[str, Any] = {
        "data_path": str(FAQ),
        "save_path": str(tmp_path / "run"),
        "max_seq_len": 256,
        "train_batch_size": 16,
    }
    config = config_of(folder, 2, fp16={"enabled": False}, **keys)
    plan_run(config, arguments(calibrate=True))
    printed = capsys.readouterr().out
    assert "batches of data_path" in printed and "measured on CPU" in printed and "the whole run: 7 steps" in printed


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (
            "--devices 8xA100-40G zero_optimization.stage=3",
            None,
            ["stage 3, 8 processes share", "gathers 13.5 GB twice"],
        ),
        ("--devices 2xA100-40G", 1, ["no pipeline", "zero_optimization.stage: 2", "zero_optimization.stage: 3"]),
        ("--devices 3xA100-40G", 2, ["train_batch_size: 8 is not a multiple of 3"]),
        ("--devices 2xA100-40G --search", 2, ["--search: proposes pipelines; expected train_ds.py"]),
        (
            "--devices 8xH100 zero_optimization.stage=3 zero_optimization.offload_param.device=cpu",
            None,
            ["not in the plan: zero_optimization.offload_param"],
        ),
    ],
)
def test_zero_is_planned_for_the_devices_asked_for(
    words: str,
    code: int | None,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llama(tmp_path)
    keys = {"fp16": {"enabled": True}, "optimizer": {"params": {"lr": 1e-5}}}
    path = write_config(tmp_path / "config.yml", model_path=str(tmp_path), data_path="x", **keys)
    monkeypatch.setattr(sys, "argv", ["train_ds_zero.py", "--config", str(path), "--plan", *words.split()])
    try:
        train_ds_zero.main()
        left = None
    except SystemExit as end:
        left = end.code
    assert left == code
    printed = " ".join("".join(capsys.readouterr()).split())
    assert all(text in printed for text in texts), printed
