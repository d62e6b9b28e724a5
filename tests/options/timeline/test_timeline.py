"""The timeline of recorded steps: what waiting is, what the figures are, and whole runs that write one.

The simulator is held to a measured run here: with its mean times it has to give its step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
from matplotlib.figure import Figure

from common.quantities import duration
from models.checkpoint.layout import layer_file
from options.planner.simulation import simulate
from options.timeline.drawing import draw_timeline, trace
from options.timeline.recorder import Record
from options.timeline.session import Figures, add_idle_spans, describe_drawn
from tests.conftest import write_records
from tests.launching import metrics, supervised, topology, write_config
from training.schedule.instructions import WORK, Transfer, read_schedule
from training.schedule.walk import TimeSpan

PNG = b"\x89PNG\r\n\x1a\n"


def steps_of(events: list[dict[str, Any]]) -> dict[int, list[list[TimeSpan]]]:
    """The spans by step and rank of a trace of two ranks."""
    steps: dict[int, list[list[TimeSpan]]] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        about, begin, end = event["args"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        span = TimeSpan(event["pid"], event["cat"], about["micro_batch"], begin, end, about["stage"])
        steps.setdefault(about["step"], [[], []])[span.rank].append(span)
    return steps


# By case the spans of each rank as recorded, all for one message, and with their waiting apart. A fourth number is when
# the message was started, if before the span.
WAITING: dict[str, tuple[list[list[tuple[Any, ...]]], list[list[tuple[str, float, float]]]]] = {
    "an early receiver": (
        [[("forward", 0, 3), ("send", 3, 4)], [("receive", 1, 4), ("forward", 4, 6)]],
        [[("forward", 0, 3), ("send", 3, 4), ("idle", 4, 6)], [("idle", 0, 3), ("receive", 3, 4), ("forward", 4, 6)]],
    ),
    "an early sender": (
        [[("send", 0, 5)], [("forward", 0, 4), ("receive", 4, 5)]],
        [[("idle", 0, 4), ("send", 4, 5)], [("forward", 0, 4), ("receive", 4, 5)]],
    ),
    "replicas, which do not wait for each other": (
        [[("send", 0, 2)], [("receive", 0, 2)], [("send", 1, 2)], [("receive", 1, 2)]],
        [[("send", 0, 2)], [("receive", 0, 2)], [("idle", 0, 1), ("send", 1, 2)], [("idle", 0, 1), ("receive", 1, 2)]],
    ),
    "work after the start of a message": (
        [[("weights", 1, 3), ("send", 3, 5, 1)], [("receive", 0, 4.5)]],
        [[("idle", 0, 1), ("weights", 1, 3), ("send", 3, 5)], [("idle", 0, 1), ("receive", 1, 4.5), ("idle", 4.5, 5)]],
    ),
    "clocks that differ a little": (
        [[("send", 3.1, 3.2)], [("receive", 1, 3)]],
        [[("idle", 1, 3.1), ("send", 3.1, 3.2)], [("idle", 1, 3), ("receive", 3, 3), ("idle", 3, 3.2)]],
    ),
}


@pytest.mark.parametrize("case", WAITING)
def test_waiting_is_separated_from_work(case: str) -> None:
    rows, expected = WAITING[case]
    message = Transfer("activation", 0, 0, frozenset({0, 1}))
    records = [
        [
            Record(
                TimeSpan(rank, kind, 0, begin, end, rank), (message,) if kind in ("send", "receive") else (), *posted
            )
            for kind, begin, end, *posted in ((*span, span[1]) if len(span) == 3 else span for span in spans)
        ]
        for rank, spans in enumerate(rows)
    ]
    filled = add_idle_spans(records, [rank % 2 for rank in range(len(rows))])
    assert [[(span.kind, span.begin, span.end) for span in spans] for spans in filled] == expected


def test_reading_a_dualpipev_schedule_finds_both_ends_of_every_message() -> None:
    from deepspeed.runtime.pipe.schedule import DualPipeVSchedule

    ranks = 3
    sent: list[Transfer] = []
    received: list[Transfer] = []
    for rank in range(ranks):
        for _, meaning in read_schedule(DualPipeVSchedule(7, ranks, rank)):
            if meaning and meaning.message:
                assert rank in meaning.message.ends
                (sent if meaning.kind == "send" else received).append(meaning.message)
    assert len(sent) == len(set(sent)) == 2 * 7 * (2 * ranks - 2)  # the border in the middle lies inside a rank
    assert set(sent) == set(received)


def measured(schedule: Any, forward: list[float], backward: list[float], micro_batches: int) -> list[list[TimeSpan]]:
    """A simulated step as if it had been measured, with an optimizer after it."""
    simulation = simulate(schedule, forward, backward, micro_batches)
    rows = [[span for span in simulation.spans if span.rank == rank] for rank in range(simulation.ranks)]
    end = simulation.seconds
    return [[*spans, TimeSpan(rank, "optimizer", None, end, end + 5, rank)] for rank, spans in enumerate(rows)]


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("dualpipev", 4)])
def test_figures_give_back_what_was_measured(schedule: Any, stages: int) -> None:
    forward, backward = [1.0, 2.0, 1.5, 0.5][:stages], [2.0, 3.0, 2.5, 1.5][:stages]
    figures = Figures.from_spans([measured(schedule, forward, backward, 6)] * 2)
    simulation = simulate(schedule, forward, backward, 6)
    assert figures.passes["forward"] == pytest.approx(forward)
    if schedule == "dualpipev":
        halves = pytest.approx([seconds / 2 for seconds in backward])
        assert figures.passes["weights"] == figures.passes["backward"] == halves
    else:
        assert figures.passes["backward"] == pytest.approx(backward)
        assert "weights" not in figures.passes
    assert figures.seconds == pytest.approx(simulation.seconds)
    assert figures.bubble == pytest.approx(simulation.bubble)
    ends = (0, 3) if schedule == "dualpipev" else (0,)  # the stages of rank 0
    first = sum(forward[stage] + backward[stage] for stage in ends)
    assert figures.by_rank(2) == pytest.approx([first, sum(forward + backward) - first])


def test_the_slowest_stage_is_named() -> None:
    figures = Figures.from_spans([measured("1f1b", [4.0, 6.0], [8.0, 12.0], 8)])
    assert figures.by_rank(2) == pytest.approx([12.0, 18.0])
    assert figures.describe(2).endswith("stage 1 is the slowest, 18 s a micro-batch, 20.0% above the mean")


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw_timeline(measured("1f1b", [1.0, 2.0], [2.0, 3.0], 4), ["rank 0", "rank 1"], "a step", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)


def test_the_title_says_what_is_drawn_and_of_what_the_figures_are() -> None:
    rows = measured("1f1b", [4.0, 6.0], [8.0, 12.0], 8)
    figures = Figures.from_spans([rows]).describe(2)
    whole = describe_drawn(6, rows, "steps 5 to 6", figures)
    work = [[span for span in spans if span.kind != "optimizer"] for spans in rows]
    seconds = max(span.end for span in chain(*work))
    assert whole == (
        f"step 6: {duration(seconds + 5)} with the optimizer\nmean of steps 5 to 6 without the optimizer: {figures}"
    )
    alone = f"step 6: {duration(seconds)} without the optimizer\nstep 6 without the optimizer: {figures}"
    assert describe_drawn(6, work, "step 6", figures) == alone
    assert f"of {duration(seconds)}; " in figures


@pytest.mark.parametrize(
    ("shortest", "rotation"), [(0.5, {0.0}), (0.1, {90.0}), (0.01, set())], ids=["level", "upright", "none"]
)
def test_a_row_has_all_its_numbers_or_none(
    shortest: float, rotation: set[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row with a narrow bar they all stand upright, and where even that does not fit there is none."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    draw_timeline(measured("1f1b", [shortest, 2.0], [1.0, 2.0], 2), ["", ""], "a step", tmp_path / "chart.png")
    texts = drawn[0].axes[0].texts
    first, second = ([text for text in texts if round(text.get_position()[1]) == row] for row in (0, 1))
    assert {text.get_rotation() for text in first} == rotation and len(first) in (0, 4)
    assert [text.get_text() for text in second] == ["0", "0", "1", "1"]


def test_the_trace_counts_in_microseconds() -> None:
    steps = {3: [[TimeSpan(0, "forward", 2, 1.5, 1.75, 0)]]}
    made = trace(steps, ["rank 0"])
    event = next(event for event in made["traceEvents"] if event["ph"] == "X")
    assert (event["ts"], event["dur"], event["name"], event["pid"]) == (1_500_000, 250_000, "forward 2", 0)
    assert event["args"] == {"step": 3, "stage": 0, "micro_batch": 2}
    assert steps_of(made["traceEvents"])[3][0] == steps[3][0]


class Finished(NamedTuple):
    """A run with a timeline."""

    output: str
    events: list[dict[str, Any]]
    picture: bytes
    folder: Path

    def spans(self, rank: int, step: int, kind: str | None = None) -> list[dict[str, Any]]:
        """The trace's spans in order."""
        found = [event for event in self.events if event["ph"] == "X" and event["pid"] == rank]
        found = [event for event in found if event["args"]["step"] == step and kind in (None, event["cat"])]
        return sorted(found, key=lambda event: event["ts"])

    def steps(self) -> set[int]:
        return {event["args"]["step"] for event in self.events if event["ph"] == "X"}


@pytest.fixture(scope="module")
def train(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """A function that trains with two processes on a model that is large enough to be timed."""
    folder = tmp_path_factory.mktemp("timeline")
    model = make_checkpoint("llama", hidden_size=192, intermediate_size=512, num_hidden_layers=4, head_dim=48)
    data = folder / "records.json"
    write_records(data, 24)

    def run(name: str, *words: str, script: str = "train_ds.py", **keys: Any) -> Finished:
        keys = {"packing": False, "model_path": str(model), "data_path": str(data)} | keys
        path = write_config(folder / f"{name}.yml", **keys)
        result = supervised(2, script, "--config", path, *words)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        written = path.with_suffix("")
        if "profile_steps" not in keys:
            return Finished(result.stdout, [], b"", written)
        events = json.loads((written / "timeline.json").read_text())["traceEvents"]
        return Finished(result.stdout, events, (written / "timeline.png").read_bytes(), written)

    return run


@pytest.fixture(scope="module")
def finished(train: Callable[..., Finished]) -> Finished:
    """Three steps of which the last two are asked for, and more that never come."""
    return train("run", model_topo=topology([2, 1], [3, 3]), profile_steps=[2, 9])


@pytest.mark.launched
@pytest.mark.slow
class TestRun:
    def test_it_records_the_steps_that_were_asked_for(self, finished: Finished) -> None:
        assert finished.steps() == {2, 3}
        assert finished.picture.startswith(PNG)
        assert "timeline of steps 2 to 3: bubble" in finished.output
        assert "is the slowest" in finished.output

    def test_every_rank_runs_every_micro_batch_in_order(self, finished: Finished) -> None:
        for step in (2, 3):
            for rank in (0, 1):
                for kind in ("forward", "backward"):
                    numbers = [event["args"]["micro_batch"] for event in finished.spans(rank, step, kind)]
                    assert numbers == list(range(8))
                assert len(finished.spans(rank, step, "optimizer")) == 3  # tied gradients, all gradients, the update
                assert finished.spans(rank, step, "data")

    def test_spans_follow_each_other_and_fill_the_step(self, finished: Finished) -> None:
        for step in (2, 3):
            rows = [finished.spans(rank, step) for rank in (0, 1)]
            begin = min(event["ts"] for row in rows for event in row)
            end = max(event["ts"] + event["dur"] for row in rows for event in row)
            for row in rows:
                assert all(first["ts"] + first["dur"] <= second["ts"] + 1 for first, second in pairwise(row))
                assert sum(event["dur"] for event in row) == pytest.approx(end - begin, rel=0.02)

    def test_a_micro_batch_goes_from_rank_to_rank(self, finished: Finished) -> None:
        """Also across the two clocks, which are compared as well as a busy machine allows."""
        for step in (2, 3):
            there, back = ([finished.spans(rank, step, kind) for rank in (0, 1)] for kind in ("forward", "backward"))
            for first, second in [*zip(*there, strict=True), *zip(*reversed(back), strict=True)]:
                assert second["ts"] > first["ts"] + first["dur"] - max(1000, first["dur"] / 2)

    def test_rows_are_named_after_their_stage(self, finished: Finished) -> None:
        names = {event["pid"]: event["args"]["name"] for event in finished.events if event["name"] == "process_name"}
        assert names == {0: "rank 0: stage 0, layers 0-2", 1: "rank 1: stage 1, layers 3-5"}

    @pytest.mark.longest  # a busy machine may take any time
    def test_the_simulator_agrees_with_the_run(self, finished: Finished) -> None:
        """In one of its steps at least: who else uses the machine makes single passes longer."""
        ratios = []
        for rows in steps_of(finished.events).values():
            figures = Figures.from_spans([rows])
            transfer = mean(s.end - s.begin for row in rows for s in row if s.kind in ("send", "receive"))
            passes = figures.passes
            ratios.append(
                simulate("1f1b", passes["forward"], passes["backward"], 8, transfer).seconds / figures.seconds
            )
        assert any(0.6 < ratio < 1.1 for ratio in ratios), ratios

    @pytest.mark.longest
    def test_a_run_that_goes_on_records_the_steps_that_are_left(
        self, finished: Finished, train: Callable[..., Finished]
    ) -> None:
        again = train(
            "run", "n_epoches=2", "profile_steps=[2, 5]", model_topo=topology([2, 1], [3, 3]), profile_steps=[2, 9]
        )
        assert "resumed:" in again.output
        assert again.steps() == {4, 5}


@pytest.mark.launched
@pytest.mark.slow
def test_a_timeline_changes_no_number(finished: Finished, train: Callable[..., Finished]) -> None:
    plain = train("plain", model_topo=topology([2, 1], [3, 3]))
    found, expected = metrics(finished.folder), metrics(plain.folder)
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    for layer in range(6):
        one, other = (next(each.folder.glob(f"step-*/{layer_file(layer)}")) for each in (finished, plain))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.launched
@pytest.mark.longest
def test_dualpipev_has_a_timeline(train: Callable[..., Finished]) -> None:
    parts = [2, 1, 1, 2]
    run = train("dual", model_topo=topology([2, 1], parts), schedule="dualpipev", profile_steps=[2, 3])
    names = {event["pid"]: event["args"]["name"] for event in run.events if event["name"] == "process_name"}
    assert names == {0: "rank 0: stage 0, layers 0-1 and 4-5", 1: "rank 1: stage 1, layers 2-2 and 3-3"}
    for rank, stages in ((0, (0, 3)), (1, (1, 2))):
        for kind in ("forward", "backward", "weights"):
            for stage in stages:
                mine = [event["args"] for event in run.spans(rank, 3, kind) if event["args"]["stage"] == stage]
                assert [arguments["micro_batch"] for arguments in mine] == list(range(8))
        assert all(first["ts"] + first["dur"] <= second["ts"] + 1 for first, second in pairwise(run.spans(rank, 3)))


@pytest.mark.launched
@pytest.mark.slow
def test_weight_streaming_has_a_timeline(train: Callable[..., Finished]) -> None:
    """Every turn of a round has the micro-batches once, whichever process takes it; the head's turns share them."""
    run = train("turns", model_topo=topology([2, 1]), schedule="weight_streaming", profile_steps=[2, 3])
    assert run.steps() == {2, 3}
    assert "timeline of steps 2 to 3: bubble" in run.output and "is the slowest" not in run.output
    names = {event["pid"]: event["args"]["name"] for event in run.events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    rows = [run.spans(rank, 3) for rank in (0, 1)]
    for row in rows:
        assert all(first["ts"] + first["dur"] <= second["ts"] + 1 for first, second in pairwise(row))
    taken: dict[tuple[str, int], list[int]] = {}
    for span in sorted(chain(*rows), key=lambda span: span["ts"]):
        arguments = span["args"]
        taken.setdefault((span["cat"], arguments["stage"] * (span["cat"] != "head")), []).append(
            arguments["micro_batch"]
        )
    turns = {key: numbers for key, numbers in taken.items() if key[0] in WORK}
    assert {kind for kind, _ in turns} == {"forward", "head", "backward"}
    assert all(sorted(numbers) == list(range(8)) for numbers in turns.values())


@pytest.mark.launched
@pytest.mark.longest
def test_zero_has_a_timeline(train: Callable[..., Finished]) -> None:
    run = train(
        "zero",
        script="train_ds_zero.py",
        model_topo=topology([1, 2]),
        profile_steps=[2, 2],
        zero_optimization={"stage": 3},
    )
    assert run.steps() == {2}
    for rank in (0, 1):
        for kind in ("forward", "backward"):
            assert [event["args"]["micro_batch"] for event in run.spans(rank, 2, kind)] == list(range(4))
        assert len(run.spans(rank, 2, "optimizer")) == 1
    assert "timeline of step 2: bubble" in run.output
