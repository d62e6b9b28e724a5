"""The prediction of weight streaming: every layer is in a slot, and it pays where a pipeline waits or does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from common.quantities import GIGA
from models.api import read_spec
from options.planner.command import plan_run
from options.planner.costs import CASTS_EAGER, layer_times
from options.planner.flags import FLAGS
from options.planner.measurements import Measured
from options.planner.plan import Plan
from options.planner.shapes import shape_of
from options.row_chunks.cuts import RowCuts
from options.weight_streaming.drawing import lanes
from options.weight_streaming.plan import OF_COPIES, OF_ROWS, Streaming, passes
from options.weight_streaming.products import last_product
from options.weight_streaming.schedule import Slot
from options.weight_streaming.streamed_plan import ALIKE, StreamedPlan
from tests.options.planner.helpers import basis_of, config_of, llama
from tests.options.planner.test_command import arguments
from training.errors import ConfigError
from training.metrics.devices import HOST_LINK
from training.option import EntryPoint

KEYS: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "packing": False,
}

FEW = KEYS | {"train_batch_size": 64}
ROWS = "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize("gpus", [1, 8])
def test_all_layers_are_computed_and_gpus_hardly_wait(gpus: int, tmp_path: Path) -> None:
    spec = llama(tmp_path)
    basis = basis_of(spec, config_of(tmp_path, gpus, train_batch_size=64, **KEYS), "RTX4090")
    streaming, pipeline = Streaming(basis, gpus), Plan.make(basis)
    plan = streaming.best()
    assert plan is not None and sum(plan.slots.forward) == sum(plan.slots.backward) == spec.n_layers - 1
    work = 64 * (sum(streaming.forward) + sum(streaming.backward))
    assert plan.step.work == pytest.approx(work) and plan.seconds * gpus > work
    # Few micro-batches: the update alone, for which all wait, is a tenth of the step of eight GPUs.
    assert plan.bubble < (0.04 if gpus == 1 else 0.22)
    assert plan.peak <= (basis.device.memory or 0)
    assert gpus == 1 or (pipeline.fits and plan.tokens_per_s > 1.05 * pipeline.tokens_per_s)
    assert pipeline.fits == (gpus == 8)  # one such GPU does not hold 16-bit weights and sums of 7 billion parameters


def test_neither_gpus_nor_measurements_change_how_many_turns_share_the_head(tmp_path: Path) -> None:
    """As each has sums of its own, a resumed run would have other last bits."""
    spec = llama(tmp_path)
    counts = set()
    for gpus in (1, 8):
        basis = basis_of(spec, config_of(tmp_path, gpus, train_batch_size=64, **KEYS), "RTX4090")
        layers = spec.n_layers
        measured = Measured(
            conditions={},
            steps=(1, 2),
            parts=[layers],
            seconds=[1],
            peaks=[1],
            layers=[1] * (layers - 1) + [9],
            beyond=[0],
        )
        counts |= {Streaming(each, gpus).heads for each in (basis, replace(basis, measured=measured))}
    assert len(counts) == 1


def test_a_block_is_computed_again_but_for_its_last_product(tmp_path: Path) -> None:
    """A llama's last product has 11008 of 4 x 4096 + 3 x 11008 parts of the work; a norm behind it needs all of it."""
    spec = llama(tmp_path, num_hidden_layers=2)
    basis = basis_of(spec, config_of(tmp_path, 1, **KEYS, use_flash_attn=True, compile=True), "RTX4090")
    whole, part = layer_times(basis), passes(basis)
    assert part[0] == [time.forward.total for time in whole]
    spared = (whole[1].backward.total - part[1][1]) / whole[1].forward.total
    assert 0.8 < spared / (11008 / (4 * 4096 + 3 * 11008)) <= 1
    assert part[1][::3] == [whole[layer].backward.total for layer in (0, 3)]
    normed = replace(basis, known={(last_product, 1): None})  # as of a family that normalises what it ends in
    assert passes(normed)[1][1] == whole[1].backward.total


def test_in_fp8_a_turn_rounds_its_weights_once(tmp_path: Path) -> None:
    spec = llama(tmp_path, num_hidden_layers=8)
    keys = FEW | {"use_flash_attn": True, "compile": True, "fp8": {"enabled": True}}
    bases = [basis_of(spec, config_of(tmp_path, 1, **each), "RTX4090") for each in (keys | {"fp8": {}}, keys)]
    plain, faster = (Streaming(basis, 1) for basis in bases)
    pipeline = layer_times(bases[1])
    assert plain.forward[1] > pipeline[1].forward.total > faster.forward[1], "in a pipeline each pass rounds weights"
    assert (plain.forward[0], plain.forward[-1]) == (faster.forward[0], faster.forward[-1])

    numel = 4 * 4096 * 4096 + 3 * 11008 * 4096
    seconds = numel * sum(CASTS_EAGER) / bases[1].device.bandwidth
    begins = [slot.begins for slot in faster.slots([2, 1, 6], [2, 2, 5])]
    assert begins == pytest.approx([seconds * count for count in (1, 1, 6, *[0] * faster.heads, 5, 2, 1)])
    assert not any(slot.begins for slot in plain.slots([9], [9]))
    assert faster.memory([2, 1, 6], [2, 2, 5])[OF_COPIES] == 6 * numel
    best = plain.best(), faster.best()
    assert best[0] and best[1] and best[1].seconds < 0.85 * best[0].seconds and OF_COPIES not in best[0].of_device


def test_a_small_host_gets_what_fits_it(tmp_path: Path) -> None:
    """Rounds become smaller, and the head's turns fewer where their sums leave nothing for the inputs of blocks."""
    spec = llama(tmp_path, num_hidden_layers=8, vocab_size=128_000)
    basis = basis_of(spec, config_of(tmp_path, 2, **KEYS), "RTX4090")
    held = 16 * sum(basis.parameters)
    roomy, tight, none = (Streaming(replace(basis, main_memory=held + more), 2) for more in (10**11, 10**9, -1))
    plans = roomy.best(), tight.best()
    assert plans[0] and plans[1] and roomy.heads > tight.heads == 1
    assert plans[1].host <= held + 10**9 < plans[0].host
    assert plans[1].slots.a_round < plans[0].slots.a_round
    assert none.best() is None and none.smallest()


def test_of_plans_that_are_as_fast_the_one_with_the_least_host_memory_is_taken(tmp_path: Path) -> None:
    basis = basis_of(llama(tmp_path, num_hidden_layers=8), config_of(tmp_path, 2, **FEW), "RTX4090")
    streaming = Streaming(basis, 2)
    taken, fitting = streaming.best(), [plan for plan in streaming.plans if plan.fits]
    fastest = min(plan.seconds for plan in fitting)
    assert taken and taken.seconds <= fastest / ALIKE
    assert taken.host == min(plan.host for plan in fitting if plan.seconds <= fastest / ALIKE)
    assert taken.host < min(fitting, key=lambda plan: plan.seconds).host


def test_what_fits_no_gpu_in_turns_either_has_no_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8, train_micro_batch_size_per_gpu=32, **KEYS)
    assert Streaming(basis_of(llama(tmp_path, "llama-65b"), config, "T4"), 8).best() is None


LONG = KEYS | {"train_batch_size": 8, "use_flash_attn": True}


def plan_of(folder: Path, gpus: int, length: int, row_chunk: int | None) -> StreamedPlan | None:
    """Plan Qwen3-8B, one row a micro-batch."""
    found = shape_of("Qwen3-8B")
    assert found
    (folder / "config.json").write_text(json.dumps(found[1]))
    config = config_of(folder, gpus, max_seq_len=length, row_chunk=row_chunk, **LONG)
    return Streaming(basis_of(read_spec(folder), config, "RTX4090"), gpus).best()


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_chunks_let_rows_grow(gpus: int, tmp_path: Path) -> None:
    """Whole rows of Qwen3-8B do not fit a GPU of 24 GB from 40,960 tokens on."""
    assert plan_of(tmp_path, gpus, 40_960, row_chunk=None) is None
    short, long = (plan_of(tmp_path, gpus, length, row_chunk=4096) for length in (40_960, 131_072))
    assert short and long
    assert short.of_device[OF_ROWS] == 40_960 * 3 * 4096 * 2, "what is there, comes and leaves, in bf16"
    assert long.of_device[OF_ROWS] == 131_072 * 3 * 4096 * 2


def test_turns_of_blocks_keep_keys_and_values_of_whole_rows(tmp_path: Path) -> None:
    """Of a token 32 keys and values of 128 numbers: in bf16, fp32 sums of their gradients, twice what is added."""
    spec = llama(tmp_path, num_hidden_layers=2, vocab_size=64)  # so the head takes less
    config = config_of(tmp_path, 1, max_seq_len=65_536, row_chunk=1024, **KEYS)
    streaming = Streaming(basis_of(spec, config, "RTX4090"), 1)
    found = streaming.memory([2, 1], [2, 1])["activations of a turn"]
    longest = max(RowCuts(spec, 1024, 65_536)([[65_536]], 65_536))
    chunk = Streaming(basis_of(spec, config_of(tmp_path, 1, max_seq_len=longest, **KEYS), "RTX4090"), 1)
    kept = 65_536 * 2 * 32 * 128 * (2 + 4 + 2 * 2)
    assert found == chunk.memory([2, 1], [2, 1])["activations of a turn"] + kept


def test_chunks_cost_a_forward_pass_of_one_and_the_sums(tmp_path: Path) -> None:
    spec = llama(tmp_path, num_hidden_layers=8)
    whole, chunks = (
        Streaming(basis_of(spec, config_of(tmp_path, 1, max_seq_len=8192, row_chunk=size, **KEYS), "RTX4090"), 1)
        for size in (None, 1024)
    )
    assert chunks.forward == whole.forward
    sums = 7 * 10 / whole.basis.device.bandwidth
    for layer in range(1, 9):
        more = chunks.backward[layer] - whole.backward[layer]
        assert more == pytest.approx(whole.forward[layer] / 8 + sums * whole.basis.trained[layer])
    assert chunks.heads == whole.heads


@pytest.mark.parametrize(
    ("precision", "weight", "beside"),
    [
        ({"bf16": {"enabled": True}}, 2, 2 + 8),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, 2, 2 + 4),
        ({"bf16": {}, "fp16": {"enabled": True}}, 2, 4 + 8),
        ({"bf16": {}}, 4, 8),
    ],
)
def test_memory_has_parts_of_which_the_sums_decide(
    precision: dict[str, Any], weight: int, beside: int, tmp_path: Path
) -> None:
    """Bytes of a host's weights, of what an update needs beside them, of sums, and of what blocks wait for."""
    spec = llama(tmp_path, num_hidden_layers=8)
    plan = Streaming(basis_of(spec, config_of(tmp_path, 8, **FEW | precision), "RTX4090"), 8).best()
    assert plan is not None
    weights, states, sums, inputs = plan.of_host.values()
    head, numel = 32000 * 4096 + 4096, weights // weight
    assert states == beside * numel and sums == 4 * numel + 4 * (plan.slots.heads - 1) * head
    blocks = sum(plan.slots.forward)
    assert inputs == plan.slots.a_round * blocks * 2048 * 4096 * weight
    assert plan.peak == sum(plan.of_device.values()) and plan.host == weights + states + sums + inputs


def test_a_turn_has_three_lanes() -> None:
    turn = Slot(2.0, weights=3 * HOST_LINK, sums=HOST_LINK, enters=0.5 * HOST_LINK, leaves=0.25 * HOST_LINK)
    assert list(lanes(turn, 4, rounds=1).values()) == [8.0, 5.0, 2.0]
    assert list(lanes(turn, 4, rounds=2).values()) == [8.0, 6.0, 2.0], "sums so far come back"
    assert list(lanes(replace(turn, share=(1, 2)), 4, rounds=1).values()) == [4.0, 4.0, 1.5]


@pytest.mark.parametrize(
    ("rows", "main_memory", "says"),
    [
        (1, 10**11, "memory: fits: at most "),
        (1, 10**10, "memory: does not fit: at most "),
        pytest.param(64, None, "memory: does not fit: at most ", marks=pytest.mark.slow),
    ],
    ids=["all fits", "the host has too little", "a device has too little"],
)
def test_the_picture_shows_the_parts_beside_what_is_there_and_the_lanes_of_every_turn(
    rows: int, main_memory: int | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []

    def savefig(figure: Figure, path: Path, **_: Any) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    spec, config = llama(tmp_path, num_hidden_layers=8), config_of(tmp_path, 8, **FEW, **{ROWS: rows})
    streaming = Streaming(replace(basis_of(spec, config, "RTX4090"), main_memory=main_memory), 8)
    plan = streaming.best() or streaming.smallest()
    assert plan is not None
    plan.draw(tmp_path / "plan.png")
    (figure,) = drawn
    title = figure.get_suptitle()
    assert says in title and "tokens/s" in title and f"8 x {plan.basis.device.name}" in title
    device, host, turns = figure.axes
    for panel, parts, there in ((device, plan.of_device, plan.basis.device.memory), (host, plan.of_host, main_memory)):
        bars = [bar.get_width() * GIGA for bar in panel.patches if isinstance(bar, Rectangle)]
        assert bars == pytest.approx(list(parts.values()))
        assert [numpy.asarray(line.get_xdata())[0] for line in panel.lines] == (
            [pytest.approx(there / GIGA)] if there else []
        )
        assert panel.get_xlim()[1] * GIGA > max(sum(bars), there or 0)
    stairs = [patch for patch in turns.patches if isinstance(patch, StepPatch)]
    assert [len(patch.get_data()[0]) for patch in stairs] == [len(plan.turns)] * 3
    for panel in figure.axes:
        legend = panel.get_legend()
        assert legend and legend.get_window_extent().x0 >= panel.get_window_extent().x1, "nothing is hidden"


@pytest.mark.parametrize(
    ("blocks", "rows", "search", "code"),
    [
        (8, 1, False, 0),
        pytest.param(8, 64, False, 1, marks=pytest.mark.slow),
        pytest.param(40, 64, True, 1, marks=pytest.mark.slow),
    ],
    ids=["fits", "does not", "nothing does"],
)
def test_a_plan_is_drawn_whether_it_fits_or_not(
    blocks: int, rows: int, search: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a search where no pipeline fits, which would have its own picture."""
    llama(tmp_path, "llama-65b", num_hidden_layers=blocks)
    keys = FEW | {"zero_optimization": {"stage": 1}, "schedule": "1f1b" if search else "weight_streaming"}
    with pytest.raises(SystemExit) as left:
        plan_run(config_of(tmp_path, 8, **keys, **{ROWS: rows}), arguments(devices="8xRTX4090", search=search))
    printed = capsys.readouterr().out
    assert left.value.code == code and printed.count("drawn: ") == 1
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_for_a_host_of_the_memory_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path, num_hidden_layers=8)
    config = config_of(tmp_path, 8, **FEW, schedule="weight_streaming")
    for gigabytes, code, says in ((40.0, 0, "40.00"), (20.0, 1, "weight streaming: does not fit")):
        with pytest.raises(SystemExit) as left:
            plan_run(config, arguments(devices="8xRTX4090", host_memory=gigabytes))
        assert left.value.code == code and says in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^--host-memory: expected gigabytes above 0, found -5$"):
        FLAGS.prepare(arguments(devices="8xRTX4090", host_memory=-5.0), cast(EntryPoint, None))
