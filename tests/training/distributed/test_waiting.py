"""A rank that fails while it waits for another is likely to fail because of it."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import pytest

from training.distributed.communication_wait import wait
from training.distributed.rank_monitor import failure_of


class Broken:
    """Fails outside of Python, as `Work.wait` does where a connection breaks."""

    wait = partial(operator.truediv, 1, 0)


def test_a_failure_of_what_is_waited_for_is_one_of_communication() -> None:
    work: Any = Broken()
    with pytest.raises(ZeroDivisionError) as failed:
        wait(work)
    assert failure_of(failed.value).waiting
    with pytest.raises(ZeroDivisionError) as failed:
        work.wait()
    assert not failure_of(failed.value).waiting
    wait(None)
