"""What becomes of a test whose environment pip cannot fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import environment


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_it_is_skipped_and_fails_where_all_tests_were_asked_for(
    asked: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPETUNE_TEST_ALL", asked)
    with pytest.raises(BaseException, match="pip cannot install") as raised:
        environment(tmp_path / "environment", str(tmp_path / "no-such-package"))
    assert raised.type is outcome
