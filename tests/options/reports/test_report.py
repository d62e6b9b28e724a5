"""`python -m options.reports.report`: a picture is really drawn, and everything that was measured is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from options.reports import report
from options.reports.report import draw_run
from tests.conftest import ROOT

WIDTH, HEIGHT = 1440, 960
Line = dict[str, Any]


def step(number: int, **changes: Any) -> Line:
    line = {
        "step": number,
        "loss": 3.0 / number,
        "lr": 1e-4 * number,
        "tokens_per_s": 2000.0 + number,
        "mfu": None,
        "peak_memory": [number * 250_000_000, number * 125_000_000],
    }
    return line | changes


def evaluation(number: int) -> Line:
    return {
        "step": number,
        "eval_loss": 3.5 / number,
        "eval_loss/instruct": 3.4 / number,
        "eval_loss/ref_qa": 3.6 / number,
    }


def write(folder: Path, lines: list[Line]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def pixels(path: Path) -> NDArray[numpy.uint8]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (WIDTH, HEIGHT)
        return numpy.asarray(image.convert("RGB"))


def quarters(path: Path) -> list[NDArray[numpy.uint8]]:
    """Loss, learning rate, throughput, memory."""
    picture = pixels(path)
    top, bottom = numpy.array_split(picture, 2)
    return [part for half in (top, bottom) for part in numpy.array_split(half, 2, axis=1)]


def coloured(picture: NDArray[numpy.uint8]) -> int:
    """Pixels that are neither white, gray nor black: curves, not axes."""
    spread = picture.max(axis=2).astype(int) - picture.min(axis=2)
    return int((spread > 60).sum())


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, to look at what is in them."""
    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            drawn.append(self)

    monkeypatch.setattr(report, "Figure", Kept)
    return drawn


def test_all_four_panels_have_a_curve(tmp_path: Path) -> None:
    picture = draw_run(write(tmp_path, [step(number) for number in range(1, 101)]))
    assert picture == tmp_path / "report.png"
    assert all(coloured(quarter) > 500 for quarter in quarters(picture))


def test_the_curves_are_the_numbers(tmp_path: Path, figure: list[Figure]) -> None:
    lines = [step(1), evaluation(1), step(2, mfu=0.4), step(3, mfu=0.5), evaluation(3)]
    draw_run(write(tmp_path / "run", lines))
    loss, lr, throughput, memory, mfu = figure[0].axes
    curves = {
        str(curve.get_label()): numpy.asarray(curve.get_xydata()).tolist()
        for axes in figure[0].axes
        for curve in axes.lines
    }
    assert curves["training"] == [[1, 3.0], [2, 1.5], [3, 1.0]]
    assert curves["evaluation"] == [[1, 3.5], [3, 3.5 / 3]]
    assert curves["evaluation: instruct"] == [[1, 3.4], [3, 3.4 / 3]]
    assert curves["evaluation: ref_qa"] == [[1, 3.6], [3, 3.6 / 3]]
    assert numpy.asarray(lr.lines[0].get_ydata()) == pytest.approx([1e-4, 2e-4, 3e-4])
    assert curves["tokens/s"] == [[1, 2001], [2, 2002], [3, 2003]]
    assert numpy.isnan(curves["MFU"][0][1])
    assert curves["MFU"][1:] == [[2, 0.4], [3, 0.5]]
    assert numpy.allclose(curves["stage 0"], [[1, 0.25], [2, 0.5], [3, 0.75]])
    assert numpy.allclose(curves["stage 1"], [[1, 0.125], [2, 0.25], [3, 0.375]])
    assert [axes.get_title() for axes in (loss, lr, throughput, memory)] == [
        "loss",
        "learning rate",
        "throughput",
        "peak memory of each stage",
    ]
    assert figure[0].get_suptitle() == "run: 3 steps"
    draw_run(tmp_path / "run", title="quickstart")
    assert figure[1].get_suptitle() == "quickstart: 3 steps"
    assert mfu.get_ylim() == (0, 1)


def test_preferences_have_panels_of_their_own(tmp_path: Path, figure: list[Figure]) -> None:
    lines = [step(number, **{"rewards/accuracies": 0.5, "rewards/margins": 0.1 * number}) for number in (1, 2)]
    lines.append(evaluation(2) | {"eval_rewards/accuracies": 0.75, "eval_rewards/margins": 0.3})
    draw_run(write(tmp_path / "run", lines))
    panels = {axes.get_title(): axes for axes in figure[0].axes}
    for title, trained, evaluated in (("accuracy", [0.5, 0.5], 0.75), ("margin of the rewards", [0.1, 0.2], 0.3)):
        training, evaluating = panels[title].lines
        assert numpy.asarray(training.get_ydata()).tolist() == trained
        assert numpy.asarray(evaluating.get_ydata()).tolist() == [evaluated]
        legend = panels[title].get_legend()
        assert legend and [text.get_text() for text in legend.get_texts()] == ["training", "evaluation"]


@pytest.mark.parametrize(
    "lines",
    [
        [step(1)],
        [step(1, loss=None, peak_memory=[])],
        [{"step": number, "loss": 1.0, "lr": 0.0, "tokens_per_s": 1.0} for number in (1, 2)],
        [step(number, peak_memory=[2**30] * (1 if number < 5 else 16)) for number in range(1, 10)],
    ],
    ids=["one step", "a loss that was not finite", "a run of an older Pipetune", "resumed with more stages"],
)
@pytest.mark.filterwarnings("error")
def test_odd_runs_are_drawn_too(lines: list[Line], tmp_path: Path) -> None:
    assert coloured(pixels(draw_run(write(tmp_path, lines)))) > 0


@pytest.mark.parametrize("first", [1, 20_000])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 400])
def test_steps_are_whole_and_no_curve_lies_on_a_frame(
    count: int, first: int, tmp_path: Path, figure: list[Figure]
) -> None:
    draw_run(write(tmp_path, [step(number, tokens_per_s=7.0) for number in range(first, first + count)]))
    for panel in figure[0].axes:
        left, right = panel.get_xlim()
        ticks = [tick for tick in panel.get_xticks() if left <= tick <= right]
        labels = [label.get_text() for label in panel.get_xticklabels()]
        assert ticks and all(tick == round(tick) and f"{tick:.0f}" in labels for tick in ticks)
        (bottom, top), data = panel.get_ylim(), panel.dataLim
        assert left < data.x0 and data.x1 < right
        assert bottom <= data.y0 and data.y1 + 0.02 * (top - bottom) < top
    memory = figure[0].axes[3]
    legend = memory.get_legend()
    assert legend and legend.get_window_extent().x0 >= memory.get_window_extent().x1, "beside the curves"


@pytest.mark.parametrize("name", ["$x_1", "a^b $", "\\frac", "第一次"])
@pytest.mark.filterwarnings("error")
def test_a_folder_s_name_is_no_formula(name: str, tmp_path: Path) -> None:
    assert coloured(pixels(draw_run(write(tmp_path / name, [step(1)])))) > 0


def test_the_command_draws_where_it_is_told(tmp_path: Path) -> None:
    write(tmp_path / "run", [step(1), step(2), evaluation(2)])
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "los')  # the run is still writing
    command = [sys.executable, "-m", "options.reports.report", str(tmp_path / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == f"{tmp_path / 'run' / 'report.png'}\n"
    subprocess.run([*command, "--output", str(tmp_path / "here.png")], cwd=ROOT, capture_output=True, check=True)
    assert (pixels(tmp_path / "here.png") == pixels(tmp_path / "run" / "report.png")).all()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (None, ": no run here; expected a run's save_path"),
        ([{"step": 0, "eval_loss": 2.0}], "/metrics.jsonl: no step is done yet"),
    ],
)
def test_a_folder_without_a_run_is_one_line(lines: list[Line] | None, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if lines:
        write(folder, lines)
    command = [sys.executable, "-m", "options.reports.report", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, f"error: {folder}{reason}\n")
