"""What the pretence notes is the work of one thread, whatever others do meanwhile."""

from __future__ import annotations

import threading

import torch

from tests.pretend.places import Place, put
from tests.pretend.watch import Watch


def test_a_wait_goes_by_its_own_name_after_threads_asked_for_numbers_side_by_side() -> None:
    watch, both = Watch(), threading.Barrier(2)
    first_has_left = threading.Event()

    def first() -> None:
        with watch.asked("bool"), watch.silent():
            both.wait()
        first_has_left.set()

    def second() -> None:
        both.wait()
        with watch.asked("item"):
            first_has_left.wait()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mask = torch.ones(3, dtype=torch.bool)
    put([mask], Place.DEVICE)
    with watch:
        mask.nonzero()
    assert [(found.kind, found.what) for found in watch.found] == [("wait", "nonzero")]
