"""The answers before and after, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from rich.markup import escape
from rich.table import Table

from common.terminal import safe_line
from quickstart.questions import Question

AS_TRAINED, OTHERWISE = "as in training", "in other words"
RIGHT = "✓: has all that was asked for, and nothing that the records on it do not say; else what is wrong"


def comparison(
    questions: Sequence[Question], before: Sequence[str], after: Sequence[str], judged: bool
) -> tuple[Table, str, bool]:
    """Return the table, one line that sums it up, and whether the training had the effect that it should have.

    Args:
        judged: each question has a judge; else the record's answer stands beside the others, which are as good as they
            are like it.
    """
    make = _judged if judged else _beside_the_records
    return make(questions, before, after)


def _judged(questions: Sequence[Question], before: Sequence[str], after: Sequence[str]) -> tuple[Table, str, bool]:
    table = _table("question", "asked", "before", "after")
    table.caption = RIGHT
    for question, *answers in zip(questions, before, after, strict=True):
        faults = map(question.fault, answers)
        marks = [f"[red]✗ {_short(fault)}[/]\n" if fault else "[green]✓[/] " for fault in faults]
        cells = [mark + _short(each) for mark, each in zip(marks, answers, strict=True)]
        table.add_row(_short(question.shown), AS_TRAINED if question.trained else OTHERWISE, *cells)
    right = [_count_right(zip(questions, told, strict=True)) for told in (before, after)]
    by_wording = []
    for trained, name in ((True, AS_TRAINED), (False, OTHERWISE)):
        asked = [(each, answer) for each, answer in zip(questions, after, strict=True) if each.trained == trained]
        by_wording.append(f"{_count_right(asked)} of {len(asked)} asked {name}")
    summary = f"right answers: {right[0]} of {len(questions)} before, {right[1]} after: {', '.join(by_wording)}"
    return table, summary, right[1] > max(right[0], len(questions) // 2)


def _count_right(asked: Iterable[tuple[Question, str]]) -> int:
    """Count the shipped questions whose answers have no fault."""
    return sum(not question.fault(answer) for question, answer in asked)


def _beside_the_records(
    questions: Sequence[Question], before: Sequence[str], after: Sequence[str]
) -> tuple[Table, str, bool]:
    table = _table("question", "the record's answer", "before", "after")
    for question, *answers in zip(questions, before, after, strict=True):
        cells = [f"{question.likeness(each):.0%} {_short(each)}" for each in answers]
        table.add_row(_short(question.shown), _short(question.answer), *cells)
    first = mean(each.likeness(answer) for each, answer in zip(questions, before, strict=True))
    last = mean(each.likeness(answer) for each, answer in zip(questions, after, strict=True))
    summary = (
        f"like the records' own answers: {first:.0%} before, {last:.0%} after; all {len(questions)} are trained, so "
        "this shows what was remembered: eval_data_path measures the rest"
    )
    return table, summary, True


def _table(*columns: str) -> Table:
    table = Table(title="before and after fine-tuning", show_lines=True)
    for heading in columns:
        table.add_column(heading, overflow="fold", ratio=1 if heading == "asked" else 2)
    return table


def _short(text: str, most: int = 160) -> str:
    """Return the beginning of a text on one line, safe to print in a table."""
    return escape(safe_line(" ".join(text.split()), most))
