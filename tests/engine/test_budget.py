"""Tests the overhead budget to the nanosecond, with a fake clock and made-up costs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine import budget, inspection_control, plan, windows
from lightning_modelprof.engine import session as sessions
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.instrument import Instrument
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.session import Session
from lightning_modelprof.measure.steps.ledger import LOGGING
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.measure.window.schedule import Schedule
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.run.steps import StepTag

pytestmark = [pytest.mark.slow, pytest.mark.short]

MS = 1_000_000
S = 1_000 * MS
FREE_NS = 100 * MS


class Clock:
    """A clock that tests move forward, partly as time without a CPU."""

    def __init__(self):
        self.now = 7 * S
        self.waited = 0

    def __call__(self):
        return self.now


def budget_of(clock, **options):
    """Budget of a loop that starts now, without explicit requests."""
    made = Budget(clock, ProfileConfig(), **options)
    made.begin_loop()
    return made


def test_first_100_ms_are_free_then_5_percent():
    clock = Clock()
    allowed = budget_of(clock)
    assert allowed.wait_ns(0.1 * S) == 0
    assert allowed.wait_ns(0.25 * S) == 5 * S
    clock.now += 3 * S
    assert allowed.wait_ns(0.25 * S) == 2 * S
    allowed.spend(S // 20)
    assert allowed.wait_ns(0.05 * S) == 0
    assert allowed.wait_ns(0.25 * S) == 3 * S, "0.3 s are 5% of 6"
    allowed.spend(-S)
    assert allowed.wait_ns(0.25 * S) == 3 * S, "a step may have been faster than usual"
    allowed.reserve(0.05 * S)
    assert allowed.wait_ns(0.2 * S) == 3 * S, "other ranks were told of it"


def test_nothing_is_free_with_multiple_ranks():
    clock = Clock()
    allowed = budget_of(clock, is_alone=False)
    assert allowed.wait_ns(0.05 * S) == S
    clock.now += S
    assert allowed.wait_ns(0.05 * S) == 0


def test_explicit_requests_do_not_count():
    clock = Clock()
    allowed = budget_of(clock)
    allowed.begin()
    clock.now += S // 10
    with allowed.asked_for(by_name=True):
        clock.now += 100 * S
    with allowed.asked_for(by_name=False):
        clock.now += S // 10
    clock.now += S // 10
    assert allowed.wait_ns(0) == 0, "5% of 100.3 s"
    assert allowed.wait_ns(5 * S) == pytest.approx(5.7 * S)
    allowed.end()
    clock.now += 7 * S
    assert allowed.wait_ns(5.06 * S) == 0, "0.3 s were ours"


def test_time_without_cpu_counts_for_neither_side():
    """With four times as much load, everything takes four times as long."""
    clock = Clock()
    allowed = budget_of(clock, cpu_wait=lambda: clock.waited)
    clock.now, clock.waited = clock.now + 40 * S, 30 * S
    assert allowed.elapsed_ns == 10 * S
    assert allowed.wait_ns(0.6 * S) == 2 * S, "0.6 s are 5% of 12"
    allowed.begin()
    clock.now, clock.waited = clock.now + 2 * S, clock.waited + 1.5 * S
    allowed.end()
    assert allowed.wait_ns(0) == 0
    assert allowed.wait_ns(0.1 * S) == 1.5 * S, "0.5 s were ours: 0.6 s are 5% of 12, and 10.5 have passed"


def test_wall_clock_counts_if_cpu_wait_is_unknown():
    clock, said = Clock(), [5 * S, None]
    allowed = budget_of(clock, cpu_wait=lambda: said[0])
    said[0] = None  # the file has disappeared
    clock.now += S
    assert allowed.elapsed_ns == S
    never = budget_of(clock, cpu_wait=lambda: None)
    clock.now += S
    assert never.elapsed_ns == S


# A loop in which everything has a cost


class Ranges:
    def open(self, name): ...
    def push(self, phase): ...
    def pop(self): ...
    def close_all(self): ...


class Window(Capture):
    """Opens and closes like the real one, but records nothing."""

    def __init__(self, plan, options, owner, clock, *, rank):
        size = SimpleNamespace(begin=int, end_step=int, with_another_step=int)
        super().__init__(plan, SimpleNamespace(make_size=lambda: size), owner, clock)
        self._of = rank

    def _prepare(self):
        self._of.take("window", budget.WINDOW_NS + 10 * 15_000 * budget.NS_PER_OPERATOR)
        self._profiler = object()

    def _start(self):
        self.ranges = Ranges()
        self._of.opened.append(self._of.ledger.steps_ended)

    def _records_still(self):
        return True

    def _is_replaced(self):
        return False

    def _why_full(self):
        return ""

    def _close(self, status, reason=""):
        self._of.pay(self._of.costs["window"] - 10 * MS)  # its steps already took the other 10 ms
        self._owner.take_window(self._record(status, reason), None)
        self._next_window()
        self._profiler = self.ranges = None


class Count(Inspection):
    """Selects steps like the real one, but inspects nothing."""

    def __init__(self, *args, rank, **options):
        super().__init__(*args, **options)
        self._of = rank

    def begin_step(self, step):
        is_first = self.steps.may_wait
        if not super().begin_step(step):
            return False
        costs, steps_ns = self._of.costs, self._of.step_ns * budget.COUNT_STEPS
        num_modules = len(list(self._of.loop.module.modules()))
        expected = budget.COUNT_NS + min(steps_ns, num_modules * budget.NS_PER_MODULE)
        if not is_first:  # like the previous inspected step
            expected = costs["times" if self._of.taken_of("times") else "count"]
        self._of.take("count" if is_first else "times", expected)
        self._of.slowed = costs["count"] if is_first else costs["times"]
        return True

    def _begin_watch(self): ...
    def _take_rest(self): ...
    def end_step(self):
        self._step = None


class Board:
    """Announcements of the first rank to the others, some of which may not hear them in time."""

    def __init__(self):
        self.said = {}

    def of(self, rank, deaf=False):
        def announced(what):
            return None if deaf else self.said.get(what)

        return SimpleNamespace(is_first=rank == 0, announce=self.said.__setitem__, announced=announced)


class Phases:
    """Phase source of a loop without phases."""

    inner = None

    def __init__(self, ledger):
        self.arm, self.disarm = ledger.restart, int

    choose_table = staticmethod(int)
    callback_times = staticmethod(tuple)


class Logger:
    def __init__(self, rank):
        self._rank = rank

    def log_metrics(self, metrics, step):
        self._rank.log(metrics)


class OneRank(Loop):
    """Loop over a model with twenty layers, with a logger that takes time."""

    log_every_n_steps = 1
    make_phase_source = staticmethod(Phases)

    def __init__(self, rank, number, world_size):
        self.rank, self.world_size, self.is_first = number, world_size, number == 0
        self.module = nn.Sequential(*(nn.Identity() for _ in range(20)))
        self.loggers = [Logger(rank)] if self.is_first else []


class NoSampling(Instrument):
    """Replaces the sampling thread."""

    def __init__(self, *parts):
        self.pause = self.resume = int


class Rank:
    """A rank's session, whose windows and inspected steps only take time."""

    def __init__(self, costs, step_ns, config, board, number=0, world_size=1, deaf=False):
        self.costs, self.step_ns, self.config = costs, step_ns, config
        self.clock, self.number = Clock(), number
        self.began_ns, self.ours_ns, self.asked_ns = self.clock.now, 0, 0
        self.opened, self.taken, self.logged = [], [], []
        self.slowed = self.surprise_ns = 0
        self.is_over = False
        self.free_ns = FREE_NS if world_size == 1 else 0
        self.loop = OneRank(self, number, world_size)
        session = self.session = Session(
            config,
            self.loop,
            clock=self.clock,
            warn=pytest.fail,
            guard=lambda work: work(),
            samples_note=str,
        )
        self.ledger = session.ledger
        session.announcements = board.of(number, deaf) if world_size > 1 else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "_MIN_INTERVAL_NS", 10**18)
            patch.setattr(plan, "_MAX_INTERVAL_NS", 10**18)
            patch.setattr(windows, "Capture", partial(Window, rank=self))
            patch.setattr(inspection_control, "Inspection", partial(Count, rank=self))
            patch.setattr(sessions, "Sampling", NoSampling)
            session.arm(None)
        self.ledger.begin_epoch()

    @property
    def record(self):
        """Measurements so far."""
        return self.session._measured()

    @property
    def windows(self):
        return self.record.windows

    def finish(self):
        self.session.stop("finished")
        self.session.finish("finished", {}, {})

    @property
    def allowed_ns(self):
        return max(self.free_ns, 0.05 * (self.clock.now - self.began_ns))

    def take(self, what, expected_ns):
        """Start something, whose expected cost must fit the budget."""
        self.taken.append((what, self.ledger.steps_ended))
        if not self.asked(what):
            # With multiple ranks, announced work starts even if another cost has surprised a rank since.
            surprise_ns = 0 if self.free_ns else self.surprise_ns
            assert self.ours_ns + expected_ns <= self.allowed_ns + surprise_ns + 1, what
            self.surprise_ns += max(0, self.costs[what] - expected_ns)

    def taken_of(self, what):
        return [step for one, step in self.taken if one == what]

    def asked(self, what):
        config = self.config
        return {
            "window": config.asks_for_window,
            "count": config.flops,
            "times": config.flops,
            "logger": config.log_every_n_steps,
        }[what]

    def pay(self, ns, what="window"):
        self.clock.now += ns
        if self.asked(what):
            self.asked_ns += ns
        else:
            self.ours_ns += ns

    def log(self, metrics):
        if not self.is_over:
            self.take("logger", self.costs["logger"] if self.logged else self.costs["user_logger"])
        self.pay(self.costs["logger"], "logger")
        self.logged.append(metrics)

    def step(self):
        ledger = self.ledger
        inspected, slowed = ledger.inspection, self.slowed
        ledger.batch_began = ledger.batch_ended = True
        self.clock.now += self.step_ns
        ledger.charge()
        self.clock.now += self.costs["user_logger"]
        ledger.charge(LOGGING)
        if inspected is not None:
            self.slowed = 0
            self.pay(slowed, self.taken[-1][0])
        if ledger.ranges is not None:
            self.pay(1 * MS)
        ledger.charge()
        ledger.end_step()


def run(costs, step_ns, num_steps, *, world_size=1, deaf=(), **options):
    """The ranks after a loop in which all wait for the slowest at the end of each step."""
    board, config = Board(), ProfileConfig(**options)
    ranks = [
        Rank(costs, step_ns, config, board, number, world_size, number in deaf)
        for number in range(world_size)
    ]
    for _ in range(num_steps):
        for rank in reversed(ranks):  # the others look before the first rank announces anything
            rank.step()
        latest = max(rank.clock.now for rank in ranks)
        for rank in ranks:
            rank.clock.now = latest
    return ranks


def costs_of(window=300, count=20, times=10, logger=0, user_logger=0):
    names = {"window": window, "count": count, "times": times, "logger": logger, "user_logger": user_logger}
    return {name: round(ms * MS) for name, ms in names.items()}


STEPS = st.sampled_from([1, 30, 100, 500, 2_000])
STEP_NS = st.sampled_from([1, 7, 40, 300]).map(lambda ms: ms * MS)
COSTS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([20, 300, 3_100, 20_000]),
        "count": st.sampled_from([0, 5, 17, 150, 900]),
        "times": st.sampled_from([0, 5, 30, 500]),
        "logger": st.sampled_from([0, 1, 20, 400]),
        "user_logger": st.sampled_from([0, 1, 20, 400]),
    }
).map(lambda costs: costs_of(**costs))


@given(COSTS, STEP_NS, STEPS, st.sampled_from([1, 1, 2, 3]))
@settings(max_examples=20)
def test_nothing_starts_beyond_budget(costs, step_ns, num_steps, world_size):
    """The overhead is at most 5% or 0.1 s, plus unexpected costs."""
    ranks = run(costs, step_ns, num_steps, world_size=world_size)
    assert len(ranks) == world_size
    for rank in ranks:
        assert rank.ours_ns <= rank.allowed_ns + rank.surprise_ns + 1


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("costs", "step_ms", "num_steps"),
    [
        ({"logger": 20, "user_logger": 20}, 20, 300),
        ({"logger": 400, "user_logger": 400}, 40, 100),
        ({"logger": 50, "user_logger": 50}, 7, 2_000),
        ({"window": 3_100}, 120, 850),
        ({"window": 3_100, "logger": 5, "user_logger": 5}, 120, 1_000),
        ({"count": 31, "times": 31}, 40, 80),
        ({"count": 31, "times": 31, "window": 3_100, "logger": 1, "user_logger": 1}, 300, 400),
        ({"count": 7, "times": 7}, 1, 100),
    ],
)
def test_expected_costs_stay_within_5_percent(costs, step_ms, num_steps, world_size):
    ranks = run(costs_of(**costs), step_ms * MS, num_steps, world_size=world_size)
    for rank in ranks:
        assert rank.surprise_ns == 0
        assert rank.ours_ns <= rank.allowed_ns
    assert ranks[0].logged, "a logger that the loop has time for is used"


@pytest.mark.parametrize(
    ("options", "costs", "num_steps", "asked_ns"),
    [
        ({"log_every_n_steps": 1}, {"logger": 400}, 60, 49 * 400 * MS),
        ({"active": 10, "flops": False}, {"window": 9_000}, 60, 9_000 * MS),
        ({"active": 0, "flops": True}, {"count": 900, "times": 500}, 60, 2_400 * MS),
    ],
)
def test_explicit_requests_do_not_use_up_budget(options, costs, num_steps, asked_ns):
    [rank] = run(costs_of(**costs), 40 * MS, num_steps, **options)
    assert rank.asked_ns >= asked_ns * 0.95
    assert rank.ours_ns <= FREE_NS
    assert len(rank.logged) >= 35, "figures go on"


def test_slow_logger_gets_fewer_points():
    """Logging at each step takes as long as the step, so each point covers all steps since the last."""
    [rank] = run(costs_of(logger=20, user_logger=20), 20 * MS, 400, flops=False, active=0, skip_first=0)
    assert 30 <= len(rank.logged) <= 41, "5% of 16 s are 0.8 s, or 40 calls"
    assert rank.ours_ns <= rank.allowed_ns
    # The remaining steps are logged once, when the loop ends.
    before, rank.costs["logger"], rank.costs["user_logger"] = len(rank.logged), 0, 0
    rank.is_over = True
    rank.finish()
    rank.finish()
    assert len(rank.logged) == before + 1


def test_fast_logger_gets_all_points_and_none_twice():
    [rank] = run(costs_of(logger=0.1), 20 * MS, 400, flops=False, active=0, skip_first=0)
    assert len(rank.logged) == 399
    rank.is_over = True
    rank.finish()
    assert len(rank.logged) == 399


def test_expensive_count_uses_up_short_fits_budget():
    """As with a forward that runs autograd: modules aren't timed, and a note says how to request it."""
    [rank] = run(costs_of(count=150, times=150), 40 * MS, 80)
    assert rank.taken[:1] == [("count", 6)]
    assert "times" not in dict(rank.taken)
    assert rank.ours_ns == 150 * MS <= 0.05 * 80 * 40 * MS
    assert rank.record.model_cost.times_note == (
        "timing modules would have taken more than 5% of training; set flops=True to do it anyway"
    )


def test_modules_are_timed_later_in_longer_fit():
    [rank] = run(costs_of(count=150, times=50), 40 * MS, 600, active=0)
    steps = rank.taken_of("times")
    assert len(steps) == 3
    assert steps[0] >= 150, "0.15 s and as much again are 5% of 6 s"


def test_all_ranks_open_window_at_same_step():
    ranks = run(costs_of(), 120 * MS, 1_000, world_size=3)
    opened = {tuple(rank.opened) for rank in ranks}
    [(first,)] = opened
    assert 0.05 * first * 120 * MS >= 3_100 * MS, "not before there is time for it"
    assert {tuple(step for what, step in rank.taken if what == "count") for rank in ranks} != {()}
    assert len({tuple(one for one in rank.taken if one[0] != "logger") for rank in ranks}) == 1
    for rank in ranks:
        [window] = rank.windows
        assert window.status is WindowStatus.COMPLETE
        assert len(window.recorded_steps) == 10


def test_short_fit_with_multiple_ranks_has_no_window():
    """100 steps of 3 ms. A window once took a fifth of their time."""
    ranks = run(costs_of(count=17), 3 * MS, 100, world_size=2)
    assert len(ranks) == 2
    for rank in ranks:
        rank.finish()
        [window] = rank.windows
        assert window.status is WindowStatus.NOT_REACHED
        assert window.note == (
            "a profiler window would have taken more than 5% of training; set active=10 to do it anyway"
        )
        assert rank.ours_ns <= 0.05 * 300 * MS


def test_rank_without_announcement_has_no_window():
    ranks = run(costs_of(), 120 * MS, 1_000, world_size=3, deaf=(1,))
    assert [len(rank.opened) for rank in ranks] == [1, 0, 1]


def test_rank_notes_late_announcement(monkeypatch):
    heard = []
    board_of = Board.of

    def late(self, rank, deaf=False):
        told = board_of(self, rank)
        if rank == 1:

            def announced(what):
                heard.append(what)
                start = self.said.get(what)
                return start if start is not None and len(heard) > 18 else None

            told.announced = announced
        return told

    monkeypatch.setattr(Board, "of", late)
    first, second = run(costs_of(), 120 * MS, 1_500, world_size=2, flops=False)
    assert (len(first.opened), len(second.opened)) == (1, 0)
    second.finish()
    assert second.windows[-1].note == (
        "this rank learned too late at which step the other ranks did it; set active=10 to do it anyway"
    )


def test_unconnected_ranks_have_only_requested_windows(monkeypatch):
    monkeypatch.setattr(Board, "of", lambda *_: None)
    ranks = run(costs_of(), 120 * MS, 1_000, world_size=2)
    assert [rank.opened for rank in ranks] == [[], []]
    for rank in ranks:
        rank.finish()
        assert rank.windows[-1].note == (
            "the ranks couldn't agree on a step for a profiler window; set active=10 to do it anyway"
        )
    assert [rank.opened for rank in run(costs_of(), 40 * MS, 60, world_size=2, active=10)] == [[12], [12]]


def test_ranks_rarely_query_store():
    """The store is in another process or on another machine."""
    asked = []
    told = SimpleNamespace(is_first=False, announced=asked.append, announce=None)
    board = SimpleNamespace(of=lambda *_: told)
    rank = Rank(costs_of(), 40 * MS, ProfileConfig(flops=False), board, 1, 2)
    for _ in range(10_000):
        rank.step()
    assert 10 <= len(asked) <= 40


def test_validation_in_inspected_step_is_not_overhead():
    config = ProfileConfig(active=0)
    rank = Rank(costs_of(count=20, times=20), 40 * MS, config, Board())
    for _ in range(60):
        if rank.ledger.inspection is not None:
            rank.ledger.tags |= StepTag.VALIDATION
            rank.clock.now += 90 * S
        rank.step()
    assert [what for what, _ in rank.taken if what != "logger"] == ["count", *["times"] * 3]
    assert rank.session._budget._spent_ns <= 4 * 31 * MS


def test_defaults_match_docs():
    assert (budget.SHARE, budget.LEAST_NS) == (0.05, FREE_NS)
    assert ProfileConfig().schedule == Schedule(skip_first=10, wait=1, warmup=1, active=10, repeat=1)
