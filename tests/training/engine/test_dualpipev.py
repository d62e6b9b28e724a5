"""DualPipeV around its engine: the plan with filled waits, which layers a stage holds, what a config may ask for,
enough micro-batches from any batch, and a whole run.

Its gradients are in test_gradients.py, resuming in tests/training/checkpoint/test_resharding.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from data.loader import Loader
from data.sample_set import InMemory
from data.settings import Packing
from tests.conftest import write_records
from tests.launching import metrics, topology, write_config
from tests.ranks import Ranks
from training.config.keys import TrainConfig
from training.errors import ConfigError
from training.schedule.instructions import InstructionReader, Transfer
from training.schedule.zero_bubble import FilledSchedule
from training.topology import Topology

KEYS = {"model_path": "m", "data_path": "d", "save_path": "s", "train_batch_size": 8, "schedule": "dualpipev"}


def config(stages: int, parts: list[int] | None = None, **keys: Any) -> TrainConfig:
    return TrainConfig.model_validate(KEYS | keys | {"model_topo": topology((stages, 1), parts)})


def plan(micro_batches: int, stages: int, rank: int) -> list[PipeInstruction]:
    """What a rank does in a step."""
    return [each for step in FilledSchedule(micro_batches, stages, rank).steps() for each in step]


def seconds(micro_batches: int, stages: int) -> int:
    """How long the plan takes where a chunk's forward pass, backward pass and weight gradients take one each.

    Ranks go on as far as they can; a plan that waits for what never comes fails here.
    """
    plans = [plan(micro_batches, stages, rank) for rank in range(stages)]
    clocks, places = [0] * stages, [0] * stages
    posted: dict[tuple[Transfer, int], int] = {}
    queued: list[list[Transfer]] = [[] for _ in range(stages)]
    readers = [InstructionReader(rank, stages) for rank in range(stages)]
    while any(place < len(instructions) for place, instructions in zip(places, plans, strict=True)):
        before = list(places)
        for rank, instructions in enumerate(plans):
            while places[rank] < len(instructions):
                instruction = instructions[places[rank]]
                if instruction.name in ("LaunchP2P", "CommitP2P"):
                    for message in queued[rank]:
                        posted.setdefault((message, rank), clocks[rank])
                    others = [(message, peer) for message in queued[rank] for peer in message.ends - {rank}]
                    if instruction.name == "CommitP2P":
                        if any(other not in posted for other in others):
                            break
                        clocks[rank] = max([clocks[rank], *(posted[other] for other in others)])
                        queued[rank] = []
                elif instruction.name == "WeightPass":
                    clocks[rank] += 1
                else:
                    meaning = readers[rank](instruction.name, getattr(instruction, "phase", 0))
                    assert meaning is not None
                    queued[rank] += [meaning.message] if meaning.message else []
                    clocks[rank] += meaning.kind in ("forward", "backward")
                places[rank] += 1
        assert places != before, "all wait"
    return max(clocks)


@pytest.mark.parametrize(("stages", "micro_batches", "gain"), [(2, 4, 1.2), (4, 8, 1.24), (8, 16, 1.26), (3, 11, 1.1)])
def test_the_plan_fills_the_bubble(stages: int, micro_batches: int, gain: float) -> None:
    one_forward_one_backward = 6 * (micro_batches + stages - 1)  # a stage has two chunks, of three passes each
    assert one_forward_one_backward / seconds(micro_batches, stages) >= gain


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 7), (4, 9)])
def test_each_backward_pass_is_completed_once_and_soon(stages: int, micro_batches: int) -> None:
    for rank in range(stages):
        left: Counter[int] = Counter()
        done: Counter[tuple[str, int]] = Counter()
        for instruction in plan(micro_batches, stages, rank):
            phase = getattr(instruction, "phase", 0)
            done[instruction.name, phase] += 1
            left[phase] += (instruction.name == "BackwardPass") - (instruction.name == "WeightPass")
            assert left[phase] >= 0
            assert left.total() <= 3
            if instruction.name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"):
                assert left.total() == 0
        for name in ("ForwardPass", "BackwardPass", "WeightPass"):
            assert (done[name, 0], done[name, 1]) == (micro_batches, micro_batches)


def test_a_stage_holds_two_chunks() -> None:
    dualpipev = Topology(stages=2, replicas=1, zero_stage=1, parts=[1, 2, 3, 4])
    assert [dualpipev.layers(stage, 10) for stage in (0, 1)] == [[0, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    assert dualpipev.description == "in 2 stages of [1, 2, 3, 4], V schedule"


def test_parts_count_chunks() -> None:
    assert config(2, [1, 2, 1, 1]).parts_for(5) == [1, 2, 1, 1]
    assert config(1, [5]).parts_for(5) == [5]  # one stage has nothing to wait for
    with pytest.raises(ValueError, match="expected one entry for each of 4 chunks, two a stage with dualpipev, found"):
        config(2, [3, 2])
    with pytest.raises(ConfigError, match=r"4 stages of two chunks \(schedule: dualpipev\) for a model of 7 layers"):
        config(4).parts_for(7)


@pytest.mark.parametrize("packing", ["batch", "dataset", False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_batch_has_enough_micro_batches(packing: Packing, size: int, replicas: int) -> None:
    lengths = [5, 60, 17, 8, 41, 23, 55, 12, 30, 9, 44]
    data = InMemory([{"input_ids": [3] * length, "labels": [3] * length} for length in lengths])
    plain, dualpipev = (
        Loader(data, 8, size, replicas, 0, packing=packing, row_length=64, least_micro_batches=least)
        for least in (0, 4)
    )
    for step in range(dualpipev.steps_per_epoch):
        batch, usual = dualpipev.batch(step), plain.batch(step)
        assert batch.n_micro_batches >= 4
        assert sorted(batch.samples) == sorted(usual.samples)
        assert (batch.tokens, batch.supervised) == (usual.tokens, usual.supervised)
        sizes = [len(rows) for replica in batch.micro_batches for rows in replica]
        assert max(sizes) <= size
        if usual.n_micro_batches < 4:
            assert max(sizes) - min(sizes) <= 1
        for replica in range(replicas):
            tensors = [tuple(ids.shape) for (ids, _), *_ in dualpipev.tensors(batch, replica)]
            assert tensors == dualpipev.shapes(batch, replica)


@pytest.mark.launched
@pytest.mark.slow
def test_a_run_with_evaluation_and_export(ranks: Ranks, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its losses are those of one process, in training and in evaluation; batches of one sample are enough."""
    records = tmp_path / "records.json"
    write_records(records, 9)
    keys: dict[str, Any] = {
        "model_path": str(make_checkpoint("llama", tie_word_embeddings=True)),
        "data_path": str(records),
    }
    keys |= {"eval_data_path": str(records), "from_scratch": True, "export_hf": True, "n_epoches": 2}
    single = write_config(tmp_path / "single.yml", **keys)
    dualpipev = write_config(tmp_path / "dualpipev.yml", **keys, schedule="dualpipev", model_topo=topology((2, 1)))
    for processes, path in ((1, single), (2, dualpipev)):
        assert ranks.train(processes, path)["error"] is None
        assert (path.with_suffix("") / "hf" / "config.json").is_file()
    expected, found = (metrics(path.with_suffix("")) for path in (single, dualpipev))
    for name in ("loss", "eval_loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (expected, found)]
        assert values[1] == pytest.approx(values[0], rel=1e-5)
        assert values[0]
