"""Plans of rows in chunks: the bubble, what stages keep, what is proposed, and what `row_chunk: auto` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from models.spec import ModelSpec
from options.planner.chunk_sizes import choose_chunk
from options.planner.costs import layer_times
from options.planner.drawing import draw_plan
from options.planner.inputs import Basis, Workload
from options.planner.layer_costs import LayerCase
from options.planner.memory import MemoryModel
from options.planner.plan import Plan, fitting_plan
from options.planner.planning import Planning
from options.planner.row_chunks import carried_by, cut, sizes_of
from options.planner.saved import BACKWARD, block_peaks, carried_numbers, saved_tensors
from options.planner.search import advise, candidates, cheaper
from options.planner.simulation import chunks_in_flight, simulate
from options.planner.tables import plan_summary
from options.row_chunks.keys import KEY
from tests.conftest import write_records
from tests.launching import metrics, supervised, topology, write_config
from tests.models import helpers
from tests.options.planner.helpers import basis_of, config_of, llama, spec_of
from training.config.changes import compare

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
}
STAGES, ROWS, LENGTH = 8, 8, 32768
# As computed by hand when chunks were tried first: of rows of so many tokens in 8 stages, with a block's products and
# pairs alone, the bubble, and the tokens of which the first stage keeps activations.
TRIED = {1: (0.467, 262_144), 4: (0.180, 96_367), 8: (0.099, 68_022), 16: (0.052, 52_766)}
OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


def basis(folder: Path, length: int, rows: int, stages: int = STAGES, devices: str = "RTX4090", **keys: Any) -> Basis:
    """Qwen3-8B in bf16, all weights, its optimizer in host memory; all blocks recompute."""
    usual: dict[str, Any] = {
        "bf16": {"enabled": True},
        "fp16": {},
        "zero_optimization": OFFLOADED,
        "train_batch_size": rows,
    }
    config = config_of(folder, stages, max_seq_len=length, **usual | keys)
    return basis_of(spec_of(folder, QWEN3_8B), config, devices)


@pytest.mark.parametrize("chunks", [1, 2, 7])
@pytest.mark.parametrize(("stages", "rows"), [(1, 3), (4, 2), (8, 8)])
def test_the_bubble_is_that_of_as_many_units(stages: int, rows: int, chunks: int) -> None:
    found = simulate("1f1b", [1.0] * stages, [2.0] * stages, rows, chunks=chunks)
    assert found.bubble == pytest.approx((stages - 1) / (rows * chunks + stages - 1))
    assert len(found.spans) == 2 * stages * rows * chunks


@pytest.mark.parametrize("chunks", TRIED)
def test_bubble_and_tokens_in_flight_are_those_of_the_first_try(chunks: int) -> None:
    bubble, held = TRIED[chunks]
    found = simulate("1f1b", [1.0] * STAGES, [2.0] * STAGES, ROWS, chunks=chunks)
    assert found.bubble == pytest.approx(bubble, abs=0.001)
    pairs, product = 4 * 4096, 2 * 193e6

    def work(tokens: float) -> float:
        return product * tokens + pairs * tokens**2 / 2

    ends = [next(t for t in range(LENGTH + 1) if work(t) >= work(LENGTH) * n / chunks) for n in range(1, chunks + 1)]
    cuts = tuple(end - begin for begin, end in pairwise([0, *ends]))
    of_stages = chunks_in_flight(cuts, STAGES, ROWS)
    assert max(tokens for tokens, *_ in of_stages[0]) == pytest.approx(held, rel=0.001)
    most = [max(tokens for tokens, *_ in moments) for moments in of_stages]
    assert most == sorted(most, reverse=True)


def test_a_row_is_kept_until_its_first_chunk_is_back() -> None:
    """Two rows of two chunks of 5 and 3 tokens, in one stage, step by step."""
    # F0 F1 B1 F2 B0 F3 B3 B2: each backward pass has what it frees, and one row or two.
    assert chunks_in_flight((5, 3), 1, 2) == [[(5, 1, 0), (8, 1, 0), (8, 1, 1), (10, 2, 1), (5, 1, 1)]]
    last = [max(rows for _, rows, _ in moments) for moments in chunks_in_flight((5, 3), 4, 9)]
    assert last == sorted(last, reverse=True) and last[-1] == 2


def test_attention_hands_on_what_its_heads_have() -> None:
    def numbers(layer: int, spec: ModelSpec, **case: Any) -> int:
        return carried_by(spec, LayerCase(layer, 1, 1, torch.float32, **case))

    grouped = helpers.spec_of("llama")  # two heads of keys and values of 16
    assert [numbers(layer, grouped) for layer in (0, 1, 4)] == [0, 2 * 2 * 16, 0]
    assert numbers(1, grouped, tensor=2) == 2 * 16
    assert numbers(1, helpers.spec_of("bloom")) == 2 * 64, "all heads have keys, and no kernel but the layer's own"
    windowed = helpers.spec_of("gemma2", sliding_window=4)
    assert numbers(1, windowed) == numbers(2, windowed) > 0, "a window's layers keep whole rows too"


@pytest.mark.slow
def test_a_stage_keeps_what_can_be_counted_by_hand(tmp_path: Path) -> None:
    """The last but one of eight stages, four blocks that recompute, two rows of 16 chunks."""
    whole = basis(tmp_path, LENGTH, 2)
    found = whole.in_chunks_of(2048)
    cuts = found.longest_chunks
    assert len(cuts) == 16 and sum(cuts) == LENGTH and cuts[0] > 1.2 * cuts[-1]
    assert carried_numbers(found) == [0, *[LENGTH * 2 * 8 * 128] * 36, 0] and not any(carried_numbers(whole))

    memory, layers = MemoryModel(found), ((30, 34),)
    keys = 4 * LENGTH * 2 * 8 * 128
    hidden, angles = 4096 * 2, 2 * 128 * 2 + 8
    positions = 2 * 8 * 16  # each chunk has those of the whole row, as they came and as they were passed on
    a_token = 4 * hidden + 2 * hidden + angles + positions  # inputs of blocks, what comes and goes
    moments = chunks_in_flight(cuts, STAGES, 2)[6]
    kept = max(tokens * a_token + rows * keys * 2 + back * keys * 4 for tokens, rows, back in moments)
    temporary = memory._temporary(*layers[0])
    update = 4096 * 12288 * 2  # of the largest weight, on its way from host memory
    assert memory.rank(6, layers).activations == pytest.approx(kept + temporary + update, rel=0.001)
    assert memory.rank(6, layers).weights == MemoryModel(whole).rank(6, layers).weights
    plain = MemoryModel(replace(found, recompute=frozenset()))
    assert plain.rank(6, layers).activations > 2 * memory.rank(6, layers).activations


@pytest.mark.slow
def test_a_chunk_goes_back_beside_what_can_be_counted_by_hand(tmp_path: Path) -> None:
    """Of 32 heads that share 8; the last chunk has the longest mask, by the kernel that needs one."""
    alone = saved_tensors(basis(tmp_path, 2048, 1))[1]  # of all kernels that have no scores
    flash, masked = (basis(tmp_path, LENGTH, 2, use_flash_attn=each).in_chunks_of(2048) for each in (True, False))
    cuts, numbers = flash.longest_chunks, LENGTH * 2 * 8 * 128
    first, last = cuts[0] / 2048, cuts[-1] / 2048
    blocks = frozenset(range(1, 37))

    behind = first * (alone.inside + BACKWARD * alone.largest)
    attention = last * (alone.inside - BACKWARD * alone.largest) + numbers * 2
    assert block_peaks(flash, blocks)[1] == pytest.approx(max(behind, attention), rel=0.02)
    assert block_peaks(flash, frozenset())[1] == pytest.approx(
        max(first * BACKWARD * alone.largest, numbers * 2), rel=0.02
    )

    repeated, mask = 4 * numbers * 2, cuts[-1] * LENGTH * 2
    pieces = -(-cuts[-1] // 1024)
    assert block_peaks(masked, blocks)[1] == pytest.approx(attention + (pieces + 1) * repeated + mask, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [LENGTH, 2 * LENGTH])
def test_rows_of_one_chunk_are_planned_as_whole_rows(chunk: int, tmp_path: Path) -> None:
    whole = basis(tmp_path, LENGTH, ROWS)
    plans = [Plan(each, [5, 5, 5, 5, 5, 5, 5, 3]) for each in (whole, whole.in_chunks_of(chunk))]
    assert plans[0].seconds == plans[1].seconds and plans[0].stages == plans[1].stages
    assert plan_summary(plans[0]) == plan_summary(plans[1])


@pytest.mark.slow
def test_small_chunks_cost_kernels_and_sums(tmp_path: Path) -> None:
    """All pairs and products stay; a tile or a launch more, and a sum of gradients a chunk."""
    whole = basis(tmp_path, LENGTH, ROWS)
    times = {size: layer_times(whole.in_chunks_of(size)) for size in (None, 8192, 1024)}
    block = {size: found[1] for size, found in times.items()}
    for size, count in ((8192, 4), (1024, 32)):
        found, plain = block[size], block[None]
        assert found.forward.attention == pytest.approx(plain.forward.attention, rel=0.02)
        assert plain.forward.products <= found.forward.products < 1.25 * plain.forward.products
        assert found.backward.sums == pytest.approx(count * plain.backward.sums)
        assert found.update == plain.update
    assert block[1024].forward.total > block[8192].forward.total > block[None].forward.total
    assert times[1024][-1].backward.loss > 20 * times[None][-1].backward.loss, "the head's gradient, once a chunk"
    window = llama(tmp_path, model_type="mistral", sliding_window=4096, num_key_value_heads=32)
    windowed = basis_of(window, config_of(tmp_path, 8, max_seq_len=LENGTH, bf16={"enabled": True}, fp16={}), "H100")
    of_rows, small = (layer_times(each)[1].forward.attention for each in (windowed, windowed.in_chunks_of(1024)))
    assert small == pytest.approx(of_rows, rel=0.05), "a chunk shorter than the window sees as much"


def test_documents_shorter_than_a_chunk_make_fewer_chunks(tmp_path: Path) -> None:
    long = basis(tmp_path, LENGTH, ROWS).in_chunks_of(2048)
    packed = replace(long, workload=replace(long.workload, attended=1000.0))
    assert packed.row_chunks < long.row_chunks == 16
    assert packed.longest_chunks == long.longest_chunks, "a longest document may still come"
    spec = long.spec
    assert len(cut(spec, 2048, LENGTH, 2, LENGTH, LENGTH)) == 32, "of two rows, chunks have half as many columns"


@pytest.mark.slow
def test_chunks_of_eight_rows_leave_a_bubble_of_an_eighth_at_most(tmp_path: Path) -> None:
    whole = basis(tmp_path, LENGTH, ROWS)
    plans = {size: Plan.make(whole.in_chunks_of(size)) for size in (None, 1024)}
    assert plans[None].bubble > 0.4 and plans[1024].bubble < 0.12 and plans[1024].fits
    assert plans[1024].peak < 0.7 * plans[None].peak and plans[1024].tokens_per_s > 1.7 * plans[None].tokens_per_s
    lines = plan_summary(plans[1024])
    cuts = plans[1024].basis.longest_chunks
    assert f"rows: at most 32,768 tokens, in 32 chunks of {min(cuts):,} to {max(cuts):,}" in lines


@pytest.mark.longest
def test_a_long_row_fits_in_chunks_alone(tmp_path: Path) -> None:
    """131,072 tokens on eight RTX 4090, sums of gradients in host memory as well."""
    whole = basis(tmp_path, 131_072, 1, offload_gradients=True)
    chunk, line = choose_chunk(whole.config, whole.spec, whole.device, Workload.assumed, in_stages=True)
    assert chunk and line.startswith(f"row chunk: auto, {chunk:,} tokens, bubble ")
    assert line.endswith("; whole rows do not fit")
    plan = fitting_plan(whole.in_chunks_of(chunk))
    assert plan and plan.bubble < 0.25 and plan.tokens_per_s > 2700


@pytest.mark.slow
def test_auto_takes_chunks_for_long_rows_and_whole_ones_for_short(tmp_path: Path) -> None:
    chosen = {}
    for length, rows in ((4096, ROWS), (1024, 128)):
        asked = basis(tmp_path, length, rows, devices="H200", row_chunk="auto")
        chosen[length], line = choose_chunk(asked.config, asked.spec, asked.device, Workload.assumed, in_stages=True)
        mine, whole = (fitting_plan(asked.in_chunks_of(size)) for size in (chosen[length], None))
        assert mine and whole and mine.seconds <= whole.seconds / 0.995
        words = "whole rows, bubble"
        if size := chosen[length]:
            words = f"{size:,} tokens, bubble {mine.bubble:.1%} in place of"
        assert line == f"row chunk: auto, {words} {whole.bubble:.1%}"
    assert chosen[4096] in sizes_of(4096) and chosen[1024] is None


def test_auto_leaves_rows_whole_where_chunks_cannot_be(tmp_path: Path) -> None:
    asked = basis(tmp_path, LENGTH, ROWS, row_chunk="auto")
    apart = replace(asked.spec, family=replace(asked.spec.family, chunks_rows=False))
    chunk, line = choose_chunk(asked.config, apart, asked.device, Workload.assumed, in_stages=True)
    assert chunk is None and "no chunk can hand on" in line
    whole = replace(basis(tmp_path, LENGTH, ROWS), spec=apart)
    assert not any(key.startswith(KEY) for key in cheaper(whole))
    assert {each.config.model_dump()[KEY] for each in candidates(whole, 2, ())} == {None}


def test_a_run_that_resumes_keeps_its_chunks(tmp_path: Path) -> None:
    config = basis(tmp_path, LENGTH, ROWS, row_chunk="auto").config
    planning = Planning(SimpleNamespace(spec=None, in_stages=True))
    for settings, words in (({KEY: 4096}, "4,096 tokens"), ({}, "whole rows")):
        known: Any = SimpleNamespace(settings=settings)
        choice = planning._chunk(config, known)
        assert choice.keys == {KEY: settings.get(KEY)}
        assert choice.report == [f"row chunk: auto, {words}, as at the checkpoint"]


def test_auto_is_no_change_of_what_a_checkpoint_has(tmp_path: Path) -> None:
    rules = config_of(tmp_path, 2).rules
    assert compare({KEY: 4096}, {KEY: "auto"}, "", rules) == []
    (line,) = compare({KEY: 4096}, {KEY: 2048}, "", rules)
    assert line.startswith(f"changed since the checkpoint: {KEY} 4096 -> 2048")


def test_what_does_not_fit_is_advised_to_pass_in_chunks(tmp_path: Path) -> None:
    asked = basis(tmp_path, LENGTH, ROWS, use_grad_ckpt=False, zero_optimization={"stage": 1})
    changes = list(cheaper(asked))
    assert changes.index(f"{KEY}: 2048") < changes.index("use_grad_ckpt: true")
    chunked = cheaper(asked.in_chunks_of(2048))
    assert "offload_activations: true" not in chunked and f"{KEY}: 2048" not in chunked
    assert f"{KEY}: 2048" in cheaper(asked.in_chunks_of(8192)), "smaller ones"
    assert not any(change.startswith(KEY) for change in cheaper(basis(tmp_path, 4096, ROWS)))
    shared = asked.changed(offload_activations=True)
    assert not any(change.startswith(KEY) for change in cheaper(shared)), "they do not go together"


@pytest.mark.longest
def test_advice_adds_up_with_chunks(tmp_path: Path) -> None:
    advice = advise(basis(tmp_path, 65_536, ROWS, zero_optimization={"stage": 1}))
    changes = [each.change for each in advice]
    assert changes == [f"{KEY}: 4096", "zero_optimization.offload_optimizer: {device: cpu}"]
    assert advice[-1].best.fits and not advice[0].best.fits


def test_a_search_tries_chunks_of_long_rows(tmp_path: Path) -> None:
    asked = basis(tmp_path, LENGTH, ROWS)
    fixed = ("use_grad_ckpt", "model_topo")
    tried = [each.config.model_dump() for each in candidates(asked, 8, fixed)]
    assert {config[KEY] for config in tried} == {None, 16384, 4096, 1024}
    in_chunks = [config for config in tried if config[KEY]]
    assert {config["schedule"] for config in in_chunks} == {"1f1b"}
    assert {config["train_micro_batch_size_per_gpu"] for config in in_chunks} == {1}
    short = basis(tmp_path, 4096, ROWS)
    assert {each.config.model_dump()[KEY] for each in candidates(short, 8, fixed)} == {None}
    assert {each.config.model_dump()[KEY] for each in candidates(asked, 8, (*fixed, KEY))} == {None}


@pytest.mark.slow
def test_the_picture_draws_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plan = Plan(basis(tmp_path, LENGTH, 2, stages=2).in_chunks_of(8192), [20, 18])
    draw_plan(plan, tmp_path / "plan.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    units, memory, _ = figure.axes
    bars = [len(bars.get_paths()) for bars in units.collections]
    assert bars == [4] * 2 * 2 * 2  # chunks: forward and backward, of each stage and row
    assert "2 micro-batches, each in 4 chunks" in units.get_xlabel()
    assert memory.get_ylabel() == "peak of a process, GB"


@pytest.mark.launched
@pytest.mark.slow
def test_a_checkpoint_made_with_auto_goes_on_with_the_same_chunks(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, data = make_checkpoint("llama"), tmp_path / "records.json"
    write_records(data, 40)
    keys: dict[str, Any] = {"model_path": str(model), "data_path": str(data), "model_topo": topology((2, 1))}
    keys |= {KEY: "auto", "train_batch_size": 1, "packing": "dataset", "pack_len": 2048, "max_seq_len": 256}
    path = write_config(tmp_path / "run.yml", **keys, max_steps=1)
    first = supervised(2, "train_ds.py", "--config", path)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    chunk = yaml.safe_load((tmp_path / "run" / "config.yml").read_text(encoding="utf-8"))[KEY]
    assert first.stdout.count(f"row chunk: auto, {chunk:,} tokens, bubble ") == 1
    write_config(tmp_path / "run.yml", **keys, max_steps=2)
    second = supervised(2, "train_ds.py", "--config", path)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert f"row chunk: auto, {chunk:,} tokens, as at the checkpoint" in second.stdout
    assert "changed since the checkpoint: row_chunk" not in second.stdout
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]
