"""Weight streaming: what must come out where it is plain, and what a simulation event by event gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest

from options.weight_streaming.schedule import Slot, Streamed, simulate_turns

FREE = 1e30  # bytes/s


def bubble(found: Streamed, gpus: int) -> float:
    return 1 - found.work / (gpus * found.seconds)


def test_without_dependence_or_transfers_gpus_wait_only_for_the_first_and_last_turns() -> None:
    found = simulate_turns([Slot(1.0)] * 8, gpus=4, micro_batches=64, a_round=16, link=FREE)
    assert found.work == 8 * 64
    assert found.seconds == 8 * 64 / 4 + 3  # the last GPU begins when three have had the first micro-batch


@pytest.mark.parametrize("a_round", [1, 4, 16])
def test_one_gpu_never_waits_for_another(a_round: int) -> None:
    slots = [Slot(seconds) for seconds in (1.0, 3.0, 0.5)]
    found = simulate_turns(slots, 1, 16, a_round, FREE)
    assert found.seconds == pytest.approx(found.work)


def test_slots_that_share_the_micro_batches_are_as_fast_as_one_that_takes_no_longer_than_the_others() -> None:
    """Three slots of 3 s, each for a third, hold nobody up, as a single one does."""
    slots = [Slot(1.0)] * 5
    alone = simulate_turns([*slots, Slot(3.0), *slots], 4, 96, 24, FREE)
    shared = simulate_turns([*slots, *(Slot(3.0, share=(part, 3)) for part in range(3)), *slots], 4, 96, 24, FREE)
    assert shared.work == alone.work == 13 * 96
    assert bubble(shared, 4) < 0.05 and bubble(alone, 4) > 0.2


def test_too_few_micro_batches_a_round_wait_for_each_other() -> None:
    """A GPU's turn of two is over two micro-batches before what it needs for its next has come through three others."""
    bubbles = [bubble(simulate_turns([Slot(1.0)] * 8, 4, 64, a_round, FREE), 4) for a_round in (2, 4, 16)]
    assert bubbles[0] == pytest.approx(1 / 2, abs=0.03) and bubbles[1] == bubbles[2] < 0.03


def test_where_transfers_take_longest_the_link_sets_the_speed() -> None:
    """12 bytes a turn come and 8 go; the first turn of a step has no sums to fetch, and one after it goes on alone."""
    slots = [Slot(0.01, weights=4.0, sums=8.0)] * 5
    found = simulate_turns(slots, 1, 32, 4, link=2.0)
    turns, first = 40, 5
    assert found.moved == turns * 4 + (turns - first) * 8 + turns * 8
    comes = (turns * 4 + (turns - first) * 8) / 2.0
    assert comes < found.seconds < 2 * comes  # the two ways are used at once, but for a turn's sums that wait
    more = simulate_turns(slots, 1, 64, 4, link=2.0)
    assert more.seconds > 1.9 * found.seconds


def test_weights_come_while_the_turn_before_computes() -> None:
    """The first ones alone are waited for, and a piece that is on its way when a micro-batch wants to come."""
    slots, computing = [Slot(1.0, weights=3.0)] * 4, 4 * 16 / 2
    assert 0 <= simulate_turns(slots, 2, 16, 4, link=1.0).seconds - (3 + computing + 1) <= 3 / 4
    assert simulate_turns(slots, 2, 16, 4, link=0.5).seconds >= 8 * 3 / 0.5 > computing


def test_a_step_begins_when_all_layers_are_updated() -> None:
    slots = [Slot(1.0, update=2.0), Slot(1.0, update=20.0), Slot(1.0), Slot(1.0)]
    plain = simulate_turns([Slot(1.0)] * 4, 1, 8, 8, FREE).seconds
    assert simulate_turns(slots, 1, 8, 8, FREE).seconds == 22 + plain


@pytest.mark.parametrize(("slots", "gpus", "micro_batches", "a_round"), [(4, 4, 8, 8), (5, 2, 8, 3)])
def test_what_it_cannot_do_is_refused(slots: int, gpus: int, micro_batches: int, a_round: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots, {gpus} GPUs"):
        simulate_turns([Slot(1.0)] * slots, gpus, micro_batches, a_round, FREE)


@pytest.mark.parametrize("seed", range(40))
def test_event_by_event_the_same_comes_out(seed: int) -> None:
    chance = random.Random(seed)
    gpus, a_round, rounds = chance.randint(1, 4), chance.randint(1, 6), chance.randint(1, 4)

    def any_slot() -> Slot:
        names = "seconds weights sums enters leaves update begins".split()
        numbers: dict[str, Any] = {name: chance.choice([0, 0.1, 1, 1, 5]) * chance.random() for name in names}
        return Slot(**numbers)

    slots = [any_slot() for _ in range(gpus + chance.randint(1, 6))]
    parts, first = chance.randint(1, min(a_round, len(slots))), chance.randint(0, len(slots))
    for part in range(min(parts, len(slots) - first)):
        slots[first + part] = replace(slots[first + part], share=(part, min(parts, len(slots) - first)))
    found = simulate_turns(slots, gpus, a_round * rounds, a_round, link=2.0)
    assert found.seconds == pytest.approx(by_events(slots, gpus, a_round, rounds, 2.0), rel=1e-9)


def by_events(slots: list[Slot], gpus: int, a_round: int, rounds: int, link: float) -> float:
    """Take, again and again, the action of any GPU that may begin first; the end of the last."""
    events = Events(slots, gpus, a_round, rounds, link)
    while options := [option for gpu in range(gpus) for option in events.options(gpu)]:
        # At the same moment a piece comes last, as what else the link could bring may just be done.
        begin, action = min(options, key=lambda option: (option[0], option[1].func == events.piece))
        assert begin < inf, "nothing may begin any more"
        action(begin)
    return max(events.ends.values())


class Events:
    """What was done so far.

    Attributes:
        ends: when; of ("update",), ("weights", turn), ("come", turn, micro-batch), ("compute", turn, micro-batch),
            ("go", turn, micro-batch) and ("sums", turn); micro-batches are counted from the round's first, and what a
            turn computes before them is -1.
    """

    def __init__(self, slots: list[Slot], gpus: int, a_round: int, rounds: int, link: float) -> None:
        self._slots, self._gpus, self._a_round, self._link = slots, gpus, a_round, link
        self._turns = len(slots) * rounds
        self.ends: dict[tuple[str | int, ...], float] = {("update",): sum(slot.update for slot in slots)}
        self._free = {(kind, gpu): 0.0 for kind in ("in", "core", "out") for gpu in range(gpus)}
        # What core and outgoing link do is in a fixed order; the incoming link chooses.
        turns = [range(gpu, self._turns, gpus) for gpu in range(gpus)]
        self._core = [[(turn, m) for turn in own for m in (-1, *self._lanes(turn))] for own in turns]
        self._out = [[(turn, m) for turn in own for m in (*self._lanes(turn), a_round)] for own in turns]  # and sums
        self._incoming = [(gpu, 0, 0) for gpu in range(gpus)]  # turn; micro-batches and pieces for the next that came

    def options(self, gpu: int) -> Iterator[tuple[float, partial[None]]]:
        """What a GPU's links and core may do next, and when."""
        if self._incoming[gpu][0] < self._turns:
            yield self._comes(gpu)
        if self._core[gpu]:
            turn, m = self._core[gpu][0]
            ready = self._after(("weights", turn) if m < 0 else ("come", turn, m))
            yield max(self._free["core", gpu], ready), partial(self._compute, gpu)
        if self._out[gpu]:
            turn, m = self._out[gpu][0]
            ready = self._after(("compute", turn, m if m < self._a_round else self._lanes(turn)[-1]))
            yield max(self._free["out", gpu], ready), partial(self._go, gpu)

    def _comes(self, gpu: int) -> tuple[float, partial[None]]:
        (turn, came, pieces), now = self._incoming[gpu], self._free["in", gpu]
        if turn == gpu and ("weights", gpu) not in self.ends:
            return max(now, self._after(("update",))), partial(self._weights, gpu)
        piece = come = inf
        lanes = self._lanes(turn)
        if turn + self._gpus < self._turns and pieces < len(lanes):
            piece = max(now, self._allowed(turn + self._gpus))
        if came < len(lanes):  # the turn that had it before has handed it on, and left its place
            before = next((each for each in range(turn - 1, -1, -1) if lanes[came] in self._lanes(each)), None)
            come = now if before is None else max(now, self._after(("go", before, lanes[came])))
        if piece < come or (pieces < came and piece <= now):
            return piece, partial(self.piece, gpu)
        return come, partial(self._come, gpu)

    def _after(self, *things: tuple[str | int, ...]) -> float:
        return max(self.ends.get(thing, inf) for thing in things)

    def _slot(self, turn: int) -> Slot:
        return self._slots[turn % len(self._slots)]

    def _lanes(self, turn: int) -> list[int]:
        """The micro-batches of a turn."""
        begin, (part, parts) = turn // len(self._slots) * self._a_round, self._slot(turn).share
        return [lane for lane in range(self._a_round) if (begin + lane) % parts == part]

    def _allowed(self, turn: int) -> float:
        """When weights of a turn may begin to come: their buffer is free, and the host has what comes."""
        again = turn >= len(self._slots)
        needs: list[tuple[str | int, ...]] = [("sums", turn - len(self._slots)) if again else ("update",)]
        if (older := turn - 2 * self._gpus) >= 0:
            needs.append(("compute", older, self._lanes(older)[-1]))
            needs += [("sums", older)] if self._slot(older).sums else []
        return self._after(*needs)

    def _weights(self, gpu: int, begin: float) -> None:
        self.ends["weights", gpu] = self._free["in", gpu] = begin + self._slot(gpu).weights / self._link

    def piece(self, gpu: int, begin: float) -> None:
        turn, came, pieces = self._incoming[gpu]
        slot = self._slot(turn + self._gpus)
        size = slot.weights + (slot.sums if turn + self._gpus >= len(self._slots) else 0.0)
        self._free["in", gpu] = begin + size / len(self._lanes(turn)) / self._link
        if pieces + 1 == len(self._lanes(turn)):
            self.ends["weights", turn + self._gpus] = self._free["in", gpu]
        self._arrived(gpu, turn, came, pieces + 1)

    def _come(self, gpu: int, begin: float) -> None:
        turn, came, pieces = self._incoming[gpu]
        lane = self._lanes(turn)[came]
        self.ends["come", turn, lane] = self._free["in", gpu] = begin + self._slot(turn).enters / self._link
        self._arrived(gpu, turn, came + 1, pieces)

    def _arrived(self, gpu: int, turn: int, came: int, pieces: int) -> None:
        most = len(self._lanes(turn))
        whole = came == most and (pieces == most or turn + self._gpus >= self._turns)
        self._incoming[gpu] = (turn + self._gpus, 0, 0) if whole else (turn, came, pieces)

    def _compute(self, gpu: int, begin: float) -> None:
        turn, m = self._core[gpu].pop(0)
        slot = self._slot(turn)
        self.ends["compute", turn, m] = self._free["core", gpu] = begin + (slot.begins if m < 0 else slot.seconds)

    def _go(self, gpu: int, begin: float) -> None:
        turn, m = self._out[gpu].pop(0)
        size = self._slot(turn).leaves if m < self._a_round else self._slot(turn).sums
        thing: tuple[str | int, ...] = ("go", turn, m) if m < self._a_round else ("sums", turn)
        self.ends[thing] = self._free["out", gpu] = begin + size / self._link
