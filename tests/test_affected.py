"""`make test-for` runs the tests that reach a change by imports, or by what they start, and says what none reaches."""

from __future__ import annotations

import pytest

from tests.affected import affected


@pytest.mark.parametrize(
    ("changed", "reached", "not_reached"),
    [
        ("data/chat/loss_mask.py", "tests/data/chat/test_masks.py", "tests/models/test_router.py"),
        ("models/__init__.py", "tests/models/parallel/test_shard.py", "tests/common/test_quantities.py"),
        ("tests/models/conftest.py", "tests/models/parallel/test_shard.py", "tests/data/chat/test_masks.py"),
        ("tests/workers/zero.py", "tests/training/engine/test_zero.py", "tests/training/engine/test_steps.py"),
        ("tests/workers/fp8.py", "tests/training/test_fp8_runs.py", "tests/training/engine/test_steps.py"),
        ("tests/workers/slow_disk.py", "tests/training/checkpoint/test_background.py", "tests/data/chat/test_masks.py"),
        ("tests/data/chat/test_masks.py", "tests/data/chat/test_masks.py", "tests/data/chat/test_chat.py"),
        ("docs/data.md", "tests/docs", "tests/data/chat/test_masks.py"),
    ],
)
def test_a_change_runs_the_tests_that_reach_it(changed: str, reached: str, not_reached: str) -> None:
    tests, unknown = affected([changed])
    assert reached in tests
    assert not_reached not in tests
    assert unknown == []


def test_what_imports_do_not_know_is_said() -> None:
    assert affected(["train_ds.py", "data/samples/faq.json", "data/gone.py"]) == (
        [],
        ["train_ds.py", "data/samples/faq.json", "data/gone.py"],
    )
