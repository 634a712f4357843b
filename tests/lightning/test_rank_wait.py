"""Tests the timing of ranks waiting in Lightning's broadcast, and that its method is restored."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lightning_modelprof.lightning.rank_wait import BROADCAST, RANK_WAIT, time_broadcast
from lightning_modelprof.measure.steps.ledger import OTHER, PhaseLedger
from tests.support.bench import FakeClock


class Loop:
    """The part of Lightning's epoch loop that we patch."""

    def __init__(self, clock):
        self.clock = clock

    def _broadcast_sigterm_tensor(self):
        self.clock.advance(30)


class Ranges:
    """Records the ranges of a trace."""

    def __init__(self):
        self.seen = []

    def push(self, phase):
        self.seen.append(phase)

    def pop(self):
        self.seen.append("end")


@pytest.fixture
def measured():
    clock, steps = FakeClock(), []
    ledger = PhaseLedger(clock, steps.append, lambda: None)
    ledger.next_boundary = 1_000
    loop = Loop(clock)
    trainer = SimpleNamespace(world_size=2, fit_loop=SimpleNamespace(epoch_loop=loop))
    return SimpleNamespace(clock=clock, steps=steps, ledger=ledger, loop=loop, trainer=trainer)


def test_rank_wait_has_own_phase(measured):
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        measured.clock.advance(5)
        measured.loop._broadcast_sigterm_tensor()
        measured.clock.advance(7)
        measured.ledger.charge()
    assert (measured.ledger.self_ns[RANK_WAIT], measured.ledger.self_ns[OTHER]) == (30, 12)


def test_rank_wait_has_range_in_trace(measured):
    ranges = measured.ledger.ranges = Ranges()
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        measured.loop._broadcast_sigterm_tensor()
    assert ranges.seen == [RANK_WAIT, "end"]


def test_failing_wait_ends_its_phase(measured):
    measured.loop._broadcast_sigterm_tensor = lambda: 1 / 0
    measured.ledger.ranges = Ranges()
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        with pytest.raises(ZeroDivisionError):
            measured.loop._broadcast_sigterm_tensor()
    assert measured.ledger.current == OTHER
    assert measured.ledger.ranges.seen == [RANK_WAIT, "end"]


def test_lightnings_method_is_restored(measured):
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        assert BROADCAST in vars(measured.loop)
        twin = copy.copy(vars(measured.loop)[BROADCAST])
        assert twin == vars(measured.loop)[BROADCAST].original, "a copy measures nothing"
    assert BROADCAST not in vars(measured.loop)


def test_users_method_is_restored(measured):
    """The user patched the loop before us."""
    measured.loop._broadcast_sigterm_tensor = own = lambda: None
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        assert measured.loop._broadcast_sigterm_tensor is not own
    assert measured.loop._broadcast_sigterm_tensor is own


def test_later_patch_is_kept(measured):
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        measured.loop._broadcast_sigterm_tensor = own = lambda: None
    assert measured.loop._broadcast_sigterm_tensor is own


def test_single_rank_is_not_patched(measured):
    measured.trainer.world_size = 1
    with ExitStack() as cleanup:
        time_broadcast(measured.trainer, measured.ledger, cleanup)
        assert BROADCAST not in vars(measured.loop)
