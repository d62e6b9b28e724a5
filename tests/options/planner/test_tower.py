"""What a tower computes and keeps, counted on fake tensors, against a real pass; and what plans make of it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from data.images.image import Image
from data.sample_set import InMemory
from models.images import frozen
from models.images.embedding import SeeingEmbedding
from models.spec import ModelSpec
from options.planner.command import plan_run
from options.planner.costs import layer_times
from options.planner.inputs import Basis, Images, Workload
from options.planner.layer_costs import OperationRecorder
from options.planner.measurements import TOWER
from options.planner.memory import MemoryModel
from options.planner.plan import Plan, best_parts
from options.planner.timing import calibrate
from options.planner.tower import LiveBytes, TowerCase, go_back, memory_of, work_of
from tests.models.helpers import saved_tensors
from tests.models.images.conftest import golden, golden_of
from tests.models.images.golden import Golden
from tests.options.planner.helpers import basis_of, config_of
from tests.options.planner.test_command import arguments
from tests.options.planner.test_layer_costs import flops, sizes

__all__ = ["golden"]  # a fixture

CASE = TowerCase(images=3, tokens=30, dtype=torch.float32)
AGAIN = replace(CASE, recompute=True)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
IMAGES = Images(number=4.0, tokens=30.0, most=120)


@pytest.fixture(scope="module")
def llava(shared: Path) -> Golden:
    return golden_of(shared, "llava-tiny")


def real_tower(golden: Golden, spec: ModelSpec) -> tuple[SeeingEmbedding, list[Tensor]]:
    """A real tower, and real tensors of the images that are counted."""
    torch.manual_seed(0)
    tower = spec.build(0)
    assert isinstance(tower, SeeingEmbedding)
    return tower.train(), golden.sees.pictures(CASE.images, CASE.tokens, torch.randn)


def at_rest(spec: ModelSpec) -> ModelSpec:
    """A model of whose tower nothing is trained."""
    return spec.training(replace(spec.trained, freeze=frozen(spec, "nothing")))


@pytest.mark.parametrize("case", [CASE, AGAIN], ids=["once", "recomputed"])
def test_kernels_are_those_of_a_real_pass(case: TowerCase, golden: Golden) -> None:
    tower, images = real_tower(golden, golden.spec)
    tower.recompute = case.recompute
    with FlopCounterMode(display=False) as counter:
        with OperationRecorder() as forward:
            features = tower.features(images)
        with OperationRecorder() as backward:
            go_back(features)
    found = work_of(golden.spec, case)
    assert found.tokens == len(features[0])

    both = [*found.kernels.forward, *found.kernels.backward]
    by_torch = counter.get_flop_counts()["Global"]
    assert flops(both, "products") == sum(count for name, count in by_torch.items() if name.__name__ in PRODUCTS)
    for real, counted in ((forward.noted, found.kernels.forward), (backward.noted, found.kernels.backward)):
        assert flops(counted, "attention") == pytest.approx(flops(real, "attention"), rel=0.05)
        kinds = [[each.kind for each in noted].count("attention") for noted in (real, counted)]
        assert kinds[0] == kinds[1] > 0


@pytest.mark.parametrize("train", ["all", "recomputed", "nothing"])
def test_bytes_are_those_of_a_real_pass(train: str, golden: Golden) -> None:
    spec = golden.spec if train != "nothing" else at_rest(golden.spec)
    case = AGAIN if train == "recomputed" else CASE
    tower, images = real_tower(golden, spec)
    tower.recompute = case.recompute
    for weight in (each for each in tower.parameters() if each.requires_grad):
        weight.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with LiveBytes() as live:
        features = tower.features([each.clone() for each in images])  # as a stage's engine does
        kept = live.now if train != "nothing" else 0
        go_back(features)
    found, tokens = memory_of(spec, case)
    assert (tokens, found.pixels) == (len(features[0]), sum(each.nbytes for each in images))
    # At rest, what several calls of attention give is there until their block is done; in a block that is computed
    # again a fake kernel's result may be one hidden state more, which it copies.
    assert found.peak == pytest.approx(live.most, rel=0.02 if train == "all" else 0.1)
    assert found.kept == pytest.approx(kept, rel=0.02)
    if train == "recomputed":
        before = memory_of(spec, CASE)[0]
        assert found.kept < 0.6 * before.kept and found.peak < before.peak
        return

    # The features themselves are there besides.
    with saved_tensors() as saved:
        features = tower.features([each.clone() for each in images])
    given = sizes([*tower.parameters()])
    own = sum(size for storage, size in sizes([*saved, *features]).items() if storage not in given)
    if golden.folder.name == "llava-tiny":  # of whose last block nobody needs the result
        assert own >= kept
    else:
        assert own == pytest.approx(kept, rel=0.02) if train == "all" else not saved


def test_a_tower_at_rest_goes_forward_alone(llava: Golden) -> None:
    spec = at_rest(llava.spec)
    assert work_of(spec, CASE).kernels.backward == ()
    assert flops(work_of(spec, CASE).kernels.forward, "products") == flops(
        work_of(llava.spec, CASE).kernels.forward, "products"
    )


def seen(golden: Golden, folder: Path, images: Images, stages: int = 2, **keys: Any) -> Basis:
    """A plan's inputs for a model whose micro-batches have these images."""
    config = config_of(folder, stages, max_seq_len=128, use_grad_ckpt=False, **keys)
    basis = basis_of(golden.spec, config, "8xH100-80G")
    return replace(basis, workload=replace(basis.workload, images=images))


def test_time_grows_with_the_images_of_a_micro_batch(llava: Golden, tmp_path: Path) -> None:
    few, many = (layer_times(seen(llava, tmp_path, replace(IMAGES, number=number))) for number in (0.5, 1.0))
    assert few[0].forward.tower > 0 and few[0].backward.tower > 0
    assert many[0].forward.tower == pytest.approx(2 * few[0].forward.tower)
    assert many[0].backward.tower == pytest.approx(2 * few[0].backward.tower)
    assert {each.forward.tower for each in many[1:]} == {0.0}
    assert {each.forward.tower for each in layer_times(seen(llava, tmp_path, Images()))} == {0.0}


@pytest.mark.slow
def test_blocks_move_off_the_stage_with_the_tower(golden: Golden, tmp_path: Path) -> None:
    blind, sees = (seen(golden, tmp_path, images) for images in (Images(), Images(64.0, 30.0, 1920)))
    before, after = best_parts(blind), best_parts(sees)
    least = golden.spec.first_layers
    assert least <= after[0] <= before[0] and (after[0] < before[0] or before[0] == least)
    plan = Plan(sees, after)
    assert plan.stages[0].spent.tower > 0 == plan.stages[1].spent.tower


def test_the_first_stage_keeps_pixels_and_what_the_tower_saves(llava: Golden, tmp_path: Path) -> None:
    parts = [2, llava.spec.n_layers - 2]
    blind, sees = (Plan(seen(llava, tmp_path, images), parts) for images in (Images(), IMAGES))
    before, after = ([stage.memory.activations for stage in plan.stages] for plan in (blind, sees))
    found, tokens = memory_of(llava.spec, TowerCase(8, 30, torch.float16))
    in_flight = 2  # on the first of two stages
    share = IMAGES.most / tokens
    assert after[0] - before[0] >= in_flight * share * (found.pixels + found.kept) * 0.99
    assert after[1] == before[1]


def test_a_tower_is_recomputed_where_the_config_says_so(llava: Golden, tmp_path: Path) -> None:
    parts = [2, llava.spec.n_layers - 2]
    basis = seen(llava, tmp_path, IMAGES)
    plain, again = (Plan(replace(basis, recompute=frozenset(layers)), parts) for layers in ([], [0]))
    assert again.stages[0].memory.activations < plain.stages[0].memory.activations
    assert again.times[0].backward.tower > 1.1 * plain.times[0].backward.tower
    assert again.times[0].forward == plain.times[0].forward and again.stages[1].spent == plain.stages[1].spent

    every, blocks = frozenset(range(llava.spec.n_blocks + 1)), frozenset(range(1, llava.spec.n_blocks + 1))
    for key, found in ((True, every), ("auto", every), ({"every": 1}, blocks), (False, frozenset())):
        assert basis.changed(use_grad_ckpt=key).computed_again == found
    assert replace(basis.changed(use_grad_ckpt=True), spec=at_rest(llava.spec), known={}).computed_again == blocks


def test_auto_recomputes_the_tower_first(llava: Golden, tmp_path: Path) -> None:
    asked = seen(llava, tmp_path, Images(64.0, 30.0, 1920)).changed(use_grad_ckpt="auto")
    parts, plain = [1, llava.spec.n_layers - 1], replace(asked, recompute=frozenset())
    most = Plan(plain, parts).stages[0].memory.peak
    short = replace(asked, device=replace(asked.device, memory=most - 1))
    held = Plan(short, parts).held[0]
    assert MemoryModel(short).fewest_recomputed(0, held) == {0}
    assert MemoryModel(replace(short, device=asked.device)).fewest_recomputed(0, held) == frozenset()


def test_images_are_counted_by_micro_batch() -> None:
    image = Image("", "", 0, 0, tokens=10)
    rows: list[Any] = [{"input_ids": [0] * 30, "labels": [0] * 30, "images": [image] * count} for count in (2, 0, 1, 0)]
    found = Images.measured(InMemory(rows), [[0, 1], [2], [3]])
    assert (found.number, found.tokens, found.most) == (1.0, 10.0, 20)
    assert Images.measured(InMemory(rows), [[1], [3]]).most == 20  # another batch may have it
    assert Images.measured(InMemory([rows[1]]), [[0]]) == Images()
    assert found.times(2.5) == Images(2.5, 10.0, 50)


def test_more_rows_have_more_images(llava: Golden, tmp_path: Path) -> None:
    basis = seen(llava, tmp_path, IMAGES)
    found = basis.changed(train_micro_batch_size_per_gpu=4).workload
    assert (found.rows, found.images.number) == (4 * basis.workload.rows, 4 * IMAGES.number)


def test_a_calibration_has_the_tower_too(llava: Golden, tmp_path: Path) -> None:
    config = config_of(tmp_path, 1, max_seq_len=32, fp16={"enabled": False}, use_grad_ckpt=False)
    workload = replace(Workload.assumed(config), images=IMAGES)
    found = calibrate(config, llava.spec, workload, rounds=1)
    assert all(math.isfinite(factor) and factor > 0 for factor in found.layers[TOWER])
    assert TOWER not in calibrate(config, llava.spec.blind, workload, rounds=1).layers

    plain = seen(llava, tmp_path, IMAGES, fp16={"enabled": False})
    slower = found.model_copy(update={"layers": found.layers | {TOWER: (3.0, 5.0)}})
    same = found.model_copy(update={"layers": found.layers | {TOWER: (1.0, 1.0)}})
    once, more = (layer_times(replace(plain, calibration=each))[0] for each in (same, slower))
    assert more.forward.tower == pytest.approx(3 * once.forward.tower)
    assert more.backward.tower == pytest.approx(5 * once.backward.tower)


def test_a_plan_of_records_with_images_has_the_tower(
    llava: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = llava.folder / "records.json"
    keys: dict[str, Any] = {"train_batch_size": 4, "max_seq_len": 256, "vision": {"train": "all"}}
    keys |= {"model_path": str(llava.folder), "data_path": str(data), "cache_dir": str(tmp_path / "cache")}
    config = config_of(tmp_path, 2, **keys)
    plan_run(config, arguments(devices="2xA100-40G"))
    said = capsys.readouterr().out
    assert re.search(r"│ +tower │|┃ +tower ┃", said)
    assert "images: 1 a micro-batch, of 16 tokens each; at most" in said
