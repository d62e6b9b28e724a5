"""1F1B over rows in chunks: no stage waits for ever, no chunk goes back before those behind it, and the bubble."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from options.row_chunks.schedule import ChunkSchedule
from training.schedule.instructions import WORK, Meaning, read_schedule
from training.schedule.walk import Program, Simulation, walk

CUTS = [[1, 1, 1, 1], [4, 4], [3, 1, 2], [7], [1], [1, 5, 1, 1], [2] * 9]


def passes(schedule: object) -> list[tuple[str, int | None]]:
    found = (meaning for _, meaning in read_schedule(schedule) if meaning and meaning.kind in WORK)
    return [(meaning.kind, meaning.micro_batch) for meaning in found]


def program(schedule: ChunkSchedule) -> Program:
    """Do what a rank does: each message waits for its other end."""
    for _, meaning in read_schedule(schedule):
        if meaning and meaning.message:
            yield [meaning.message]
            yield None
        elif meaning and meaning.kind in WORK:
            yield meaning


def simulated(chunks: Sequence[int], stages: int) -> Simulation:
    seconds = {"forward": [1.0] * stages, "backward": [2.0] * stages}
    return walk([program(ChunkSchedule(chunks, stages, stage)) for stage in range(stages)], seconds)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", CUTS, ids=str)
def test_every_stage_does_every_pass_in_time(chunks: list[int], stages: int) -> None:
    found = simulated(chunks, stages)
    assert len(found.spans) == 2 * sum(chunks) * stages
    end = {(span.kind, span.micro_batch, span.stage): span.end for span in found.spans}
    for (kind, unit, stage), ended in end.items():
        begin = ended - (1 if kind == "forward" else 2)
        if kind == "forward" and stage:
            assert end["forward", unit, stage - 1] <= begin
        if kind == "backward":
            assert end["forward", unit, stage] <= begin
            assert stage == stages - 1 or end["backward", unit, stage + 1] <= begin


@pytest.mark.parametrize("chunks", CUTS, ids=str)
def test_a_row_goes_back_from_its_last_chunk(chunks: list[int]) -> None:
    first = 0
    order = ChunkSchedule(chunks, 4, 1).backward_order
    for count in chunks:
        assert order[first : first + count] == list(range(first + count - 1, first - 1, -1))
        first += count


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_whole_rows_are_done_as_by_deepspeed(rows: int, stages: int) -> None:
    for stage in range(stages):
        own = passes(ChunkSchedule([1] * rows, stages, stage))
        assert own == passes(TrainSchedule(rows, stages, stage))


@pytest.mark.parametrize(("stages", "rows", "count"), [(8, 8, 1), (8, 8, 4), (8, 8, 8), (4, 2, 7)])
def test_the_bubble_shrinks_with_chunks_of_equal_work(stages: int, rows: int, count: int) -> None:
    bubble = simulated([count] * rows, stages).bubble
    assert bubble == pytest.approx((stages - 1) / (rows * count + stages - 1))


@pytest.mark.parametrize("chunks", CUTS, ids=str)
def test_a_buffer_is_free_before_it_is_filled(chunks: list[int]) -> None:
    schedule = ChunkSchedule(chunks, 3, 0)
    held: dict[int, Meaning] = {}
    for instruction, meaning in read_schedule(schedule):
        if meaning and meaning.kind == "forward":
            assert instruction.buffer_id not in held
            held[instruction.buffer_id] = meaning
        if meaning and meaning.kind == "backward":
            assert held.pop(instruction.buffer_id).micro_batch == meaning.micro_batch
    assert not held
