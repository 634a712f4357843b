"""Ranks side by side: hand-made steps with a known late rank, cause and confidence."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.ranks import LEAST_STEPS, rank_skew
from lightning_modelprof.analysis.statistics import t_quantile
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.reading import read_report
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import Severity
from lightning_modelprof.run.archive import save_run
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.ranks import (
    MAX_SHARED,
    pack_rank_steps,
    rank_file,
    rank_steps,
    side_by_side,
    unpack_rank_steps,
    with_other_ranks,
)
from lightning_modelprof.run.records import RankRecord, RankSteps, Run, RunInfo
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings
from tests.support import warm
from tests.support.documents import raw_rows
from tests.support.facts import why_not

pytestmark = pytest.mark.slow

MS = 1_000_000


def steps_of(num_steps, first=0, tags=0, **times):
    """Steps with these times in milliseconds: one number for all, or one per step."""
    phases_ns = np.zeros((num_steps, len(PHASES)), np.int64)
    for key, values in times.items():
        phases_ns[:, PHASE_INDEX[key]] = np.round(np.broadcast_to(values, num_steps) * MS)
    return StepTimings(
        step=np.arange(first, first + num_steps),
        duration_ns=np.where(phases_ns == NOT_MEASURED, 0, phases_ns).sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=np.full_like(phases_ns, NOT_MEASURED),
        samples=np.full(num_steps, 4),
        tags=np.full(num_steps, tags),
    )


def run_of(rank, steps, world_size=2, host="here"):
    info = RunInfo(created="2026-01-01T00:00:00+00:00", status="finished", world_size=world_size, host=host)
    return Run(info=info, ranks=(RankRecord(rank=rank, steps=steps),))


def skew_of(*steps):
    return rank_skew(
        [rank_steps(run_of(rank, one, len(steps))) for rank, one in enumerate(steps)], len(steps)
    )


def synchronous(own, **named):
    """Ranks that meet in backward: early ranks wait there, so all take the same time.

    Args:
        own: milliseconds of dataloader, shape (ranks, steps).
        named: further phases of a rank's own work: key → array of the same shape.
    """
    whole = own + sum(named.values())
    wait = whole.max(axis=0) - whole
    return [
        steps_of(
            own.shape[1],
            dataloader=own[rank],
            backward=5 + wait[rank],
            **{"optimizer": 1} | {key: values[rank] for key, values in named.items()},
        )
        for rank in range(len(own))
    ]


def report_of(*steps, device_type="cpu"):
    told = [rank_steps(run_of(rank, one, len(steps))) for rank, one in enumerate(steps)]
    run = run_of(0, steps[0], len(steps))
    run = replace(run, info=replace(run.info, device_type=device_type), rank_steps=tuple(told))
    return build_report(Facts(run))


def finding_of(report):
    [finding] = [one for one in report.findings if one.kind == "straggler_rank"]
    return finding


def is_hint(report):
    """Whether the finding is only a hint, which blames no rank for certain."""
    finding = finding_of(report)
    is_info = finding.severity is Severity.INFO
    assert is_info == (finding.saving_ns_per_step is None)
    assert is_info == (report.verdict.kind != "straggler_bound"), "each of these costs most of a step"
    if report.verdict.kind == "balanced":
        assert report.verdict.summary.endswith("Ranks differ (see straggler_rank).")
    return is_info


def noise(shape, seed, scale=0.5):
    return np.random.default_rng(seed).gamma(2, scale, shape)


def test_one_slow_loader_of_two():
    own = noise((2, 60), 1)
    own[1] += 20
    skew = skew_of(*synchronous(own))
    late = skew.straggler
    assert (late.rank, late.phase, late.waiting_phase, late.others) == (1, "dataloader", "backward", ())
    expected = (own[1] - own[0]).mean() * MS
    assert late.late_ns == pytest.approx(expected, rel=1e-6)
    assert late.waited_ns == pytest.approx(expected, rel=1e-6), "by the other rank's backward"
    assert late.awaited_ns == pytest.approx(expected, rel=1e-6)
    assert (late.phase_ns, late.usual_ns) == pytest.approx((own[1].mean() * MS, own[0].mean() * MS), rel=1e-6)
    assert [pace.slowest_share for pace in skew.ranks] == [0.0, 1.0]
    assert skew.imbalance_ns == pytest.approx(expected / 2, rel=1e-6)
    assert skew.step_ns == pytest.approx((own.max(axis=0).mean() + 6) * MS, rel=1e-6)


@pytest.mark.parametrize("late", [0, 3, 7])
def test_late_rank_of_eight(late):
    own = noise((8, 100), 2)
    own[late] += 3
    skew = skew_of(*synchronous(own))
    assert skew.straggler.rank == late
    truth = (own[late] - np.delete(own, late, axis=0).mean(axis=0)).mean() * MS
    assert skew.straggler.late_ns == pytest.approx(truth, rel=1e-6)
    assert skew.ranks[late].late_ns == pytest.approx(truth, rel=1e-6)


def test_slow_machine_with_several_ranks():
    own = noise((8, 100), 3)
    own[4:6] += np.array([[9.0], [10.0]])
    late = skew_of(*synchronous(own)).straggler
    assert (late.rank, late.others) == (5, (4,))
    usual = np.delete(own, (4, 5), axis=0).mean()
    assert late.late_ns == pytest.approx((own[5].mean() - usual) * MS, rel=1e-6), "than those not late"


@pytest.mark.parametrize(
    "phase", ["callbacks", "logging", "checkpoint", "transfer", "module_hooks", "forward"]
)
def test_cause_is_longer_phase(phase):
    extra = np.zeros((4, 50))
    extra[0] = 4  # like rank 0's logging
    skew = skew_of(*synchronous(noise((4, 50), 4, 0.1), **{phase: extra + 1}))
    assert (skew.straggler.rank, skew.straggler.phase) == (0, phase)
    assert ("forward" in skew.own_phases) is (phase == "forward")


def test_waiting_in_forward_hides_no_late_rank():
    """Buffers are broadcast in forward, so the early rank waits there."""
    own = noise((2, 50), 5)
    own[1] += 10
    wait = own.max(axis=0) - own
    ranks = [steps_of(50, dataloader=own[rank], forward=2 + wait[rank], backward=3) for rank in (0, 1)]
    late = skew_of(*ranks).straggler
    assert (late.rank, late.phase, late.waiting_phase) == (1, "dataloader", "forward")


def test_small_delay_does_not_hide_large_delay_in_forward():
    """Rank 1 is certainly 0.4 ms late in its loader, and 20 ms in forward."""
    own = np.array([noise(60, 5, 0.01), 0.4 + noise(60, 6, 0.01)])
    forward = np.array([noise(60, 7, 0.1), 20 + noise(60, 8, 0.1)])
    late = skew_of(*synchronous(own, forward=forward)).straggler
    assert (late.rank, late.phase) == (1, "forward")
    assert late.cost_ns == pytest.approx(20.2 * MS, rel=0.05)


def waiting_for_the_optimizer(num_ranks, late, where):
    """One rank takes 10 ms longer in the optimizer step, and the others wait for it in another phase."""
    steps = []
    for rank in range(num_ranks):
        times = dict.fromkeys(("dataloader", "forward", "backward", "optimizer", "rank_wait", where), 1)
        times |= {key: value + noise(50, 10 * rank + len(key), 0.02) for key, value in times.items()}
        times["optimizer" if rank == late else where] += 10
        steps.append(steps_of(50, **times))
    return steps


def test_late_optimizer_is_found_if_others_can_only_wait():
    """Rank wait isn't work."""
    steps = waiting_for_the_optimizer(2, 1, "rank_wait")
    late = skew_of(*steps).straggler
    assert (late.rank, late.phase, late.waiting_phase, late.is_ambiguous) == (
        1,
        "optimizer",
        "rank_wait",
        False,
    )
    assert late.late_ns == pytest.approx(10 * MS, rel=0.02)
    assert late.cost_ns == pytest.approx(10 * MS, rel=0.02)
    report = report_of(*steps)
    assert not is_hint(report)
    assert report.verdict.summary.endswith("a slower rank (rank 1 in Optimization).")


def test_lateness_after_backward_may_cost_nothing_on_device():
    """Rank 0's host may arrive early while its device is as late as ever."""
    report = report_of(*waiting_for_the_optimizer(2, 1, "rank_wait"), device_type="cuda")
    assert is_hint(report)
    assert "if the CPU only waits for its own GPU in" in finding_of(report).summary


def test_slow_loader_is_late_on_device_too():
    own = noise((2, 50), 5)
    own[1] += 20
    assert not is_hint(report_of(*synchronous(own), device_type="cuda"))


def test_rank_that_is_slow_everywhere_is_late_by_total():
    """The others wait 4 ms for its forward in backward, and 8 ms for its optimizer before the next step."""
    steps = [
        steps_of(
            50,
            forward=2 + 4 * is_slow + noise(50, 2 * is_slow, 0.02),
            backward=9 - 4 * is_slow,
            optimizer=1 + 8 * is_slow + noise(50, 2 * is_slow + 1, 0.02),
            rank_wait=8.1 - 8 * is_slow,
        )
        for is_slow in (0, 1)
    ]
    skew = skew_of(*steps)
    late = skew.straggler
    assert (late.rank, late.phase, late.waiting_phase) == (1, "optimizer", "rank_wait")
    assert late.cost_ns == pytest.approx(12 * MS, rel=0.02)
    assert {"forward", "optimizer", "clip"} < set(skew.own_phases)


@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
@pytest.mark.parametrize(("num_ranks", "late"), [(2, 1), (2, 0), (6, 3)])
def test_optimizer_step_that_may_be_wait_is_hint(num_ranks, late, where):
    """It's late, or meets others there (like sharded optimizers) that are late in the other phase."""
    report = report_of(*waiting_for_the_optimizer(num_ranks, late, where))
    assert is_hint(report)
    rank, phase, waiting = late, "Optimization", PHASES[PHASE_INDEX[where]].label
    if where == "forward" and num_ranks == 2:  # equally likely the other way round
        rank, phase, waiting = 1 - late, waiting, phase
    found = finding_of(report)
    assert found.title == f"Ranks differ in {phase} and {waiting}"
    assert (
        f"Either they wait for rank {rank} there, or rank {rank} waits for them in {phase}." in found.summary
    )
    assert f"Rank {rank}" in found.summary


def test_waiting_in_optimizer_hides_no_late_rank():
    """The host waits for its device, and so for other ranks, only in the optimizer."""
    own = noise((2, 50), 5)
    own[1] += 10
    wait = own.max(axis=0) - own
    late = skew_of(
        *(steps_of(50, dataloader=own[rank], backward=3, optimizer=2 + wait[rank]) for rank in (0, 1))
    ).straggler
    assert (late.rank, late.phase, late.waiting_phase) == (1, "dataloader", "optimizer")
    assert not late.is_ambiguous, "who waits for a batch does not wait for a rank"


def test_both_readings_are_named_if_ranks_meet_in_hook():
    """Rank 1 is late in the optimizer, and rank 0 waits for it in a callback where ranks meet."""
    report = report_of(
        steps_of(50, backward=5, optimizer=1, callbacks=9 + noise(50, 1, 0.1)),
        steps_of(50, backward=5, optimizer=9 + noise(50, 2, 0.1), callbacks=1),
    )
    assert is_hint(report)
    assert "waits for them in Callbacks" in finding_of(report).summary


# Time saved per step


def mean_step_ms(own):
    """Step time of ranks that meet in every step, set by the last one; 6 ms are the same on all."""
    return own.max(axis=0).mean() + 6


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_saving_is_time_without_late_rank(num_ranks):
    """With many ranks, some other rank is nearly as late in each step."""
    usual = noise((num_ranks, 400), num_ranks, 0.5)
    slow = usual.copy()
    slow[1] += 3
    truth = mean_step_ms(slow) - mean_step_ms(usual)
    assert (truth < 1) == (num_ranks == 64), "it is another figure than the 3 ms"
    late = skew_of(*synchronous(slow)).straggler
    assert (late.rank, late.phase) == (1, "dataloader")
    assert late.awaited_ns == pytest.approx(3 * MS, rel=0.1)
    assert late.cost_ns == pytest.approx(truth * MS, rel=0.1)
    report = report_of(*synchronous(slow))
    assert finding_of(report).saving_ns_per_step == late.cost_ns
    share = late.cost_ns / (mean_step_ms(slow) * MS)
    assert (finding_of(report).severity is Severity.CRITICAL) == (share >= 0.15)
    assert (report.verdict.kind == "straggler_bound") == (share >= 0.15)


def test_other_varying_phases_count_too():
    """Among 64 ranks, one is always nearly as late in forward."""
    usual, forward = noise((64, 400), 1, 0.1), noise((64, 400), 2, 0.7)
    slow = usual.copy()
    slow[1] += 3
    truth = mean_step_ms(slow + forward) - mean_step_ms(usual + forward)
    assert truth < 1
    late = skew_of(*synchronous(slow, forward=forward)).straggler
    assert (late.rank, late.phase) == (1, "dataloader")
    assert late.cost_ns == pytest.approx(truth * MS, rel=0.15)


def test_rank_late_in_few_steps_saves_only_those():
    """20 ms in every tenth step, not 2 ms in each."""
    usual, extra = noise((8, 400), 3, 0.7), np.zeros((8, 400))
    extra[0, ::10] = 20
    truth = mean_step_ms(usual + extra) - mean_step_ms(usual)
    assert truth > 1.5
    late = skew_of(*synchronous(usual, logging=extra)).straggler
    assert (late.rank, late.phase) == (0, "logging")
    assert late.cost_ns == pytest.approx(truth * MS, rel=0.1)


def test_ranks_late_together_are_fixed_together():
    """Fixing only one would save 1 ms."""
    usual = noise((8, 200), 3, 0.2)
    slow = usual + np.array([0, 0, 0, 0, 9, 10, 0, 0])[:, None]
    late = skew_of(*synchronous(slow)).straggler
    assert (late.rank, late.others) == (5, (4,))
    assert late.cost_ns == pytest.approx((mean_step_ms(slow) - mean_step_ms(usual)) * MS, rel=0.1)


def test_rank_hidden_by_later_rank_costs_nothing():
    """Rank 1 is 3 ms late in its loader but waits for rank 2, which is 8 ms late in the loop."""
    own = noise((4, 60), 1, 0.1)
    own[1] += 3
    loop = np.ones((4, 60))
    loop[2] += 8
    steps = synchronous(own, other=loop)
    late = skew_of(*steps).straggler
    assert (late.rank, late.late_ns) == (1, pytest.approx(3 * MS, rel=0.1))
    assert late.cost_ns == 0
    finding = finding_of(report_of(*steps))
    assert finding.status.value == "clean"
    assert "which costs 0 ms." in finding.summary


def test_later_rank_is_named_before_rank_it_hides():
    own = noise((4, 60), 1, 0.1)
    own[1] += 3
    optimizer = np.ones((4, 60))
    optimizer[2] += 8
    late = skew_of(*synchronous(own, optimizer=optimizer)).straggler
    assert (late.rank, late.phase, late.is_ambiguous) == (2, "optimizer", True)


def test_late_rank_without_waiters_costs_nothing():
    """As with a device that lags behind: the other rank's host never waits."""
    ranks = [steps_of(50, dataloader=value + noise(50, 6, 0.1), backward=5) for value in (0, 4)]
    late = skew_of(*ranks).straggler
    assert late.rank == 1
    assert late.late_ns == pytest.approx(4 * MS, rel=0.1)
    assert late.cost_ns == 0


def straggler_of(own):
    """Ranks meet in backward. Their sums say nothing about the straggler, so they are computed once."""
    ranks = synchronous(own)
    totals = StepTotals.of(ranks[0])
    told = [
        RankSteps(rank=rank, host="", num_steps=len(one), totals=totals, steps=one)
        for rank, one in enumerate(ranks)
    ]
    return rank_skew(told, len(ranks)).straggler


def test_straggler_does_not_depend_on_sums():
    own = noise((8, 100), 2)
    own[3] += 3
    late = skew_of(*synchronous(own)).straggler
    assert late.rank == 3
    assert straggler_of(own) == late


@pytest.mark.parametrize(
    ("num_ranks", "num_steps"), [(2, 20), (4, 64), (8, 20), (8, 200), (64, 20), (64, 64)]
)
def test_equal_ranks_rarely_have_straggler(num_ranks, num_steps):
    """200 jobs: 4 false alarms in two tries each are expected; more than 11 have a probability of 0.1%."""
    alarms = 0
    for seed in range(200):
        own = np.random.default_rng(seed).normal(10, 1, (num_ranks, num_steps))
        alarms += straggler_of(own) is not None
    assert alarms <= 11


def in_runs(num_ranks, num_steps, alike, seed):
    """Steps that resemble the previous one by ``alike``: an autoregression with deviation 1."""
    steps = np.random.default_rng(seed).normal(0, 1, (num_ranks, num_steps + 100))
    for step in range(1, num_steps + 100):
        steps[:, step] = alike * steps[:, step - 1] + np.sqrt(1 - alike**2) * steps[:, step]
    return steps[:, 100:] - steps.min()


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "alike", "most"),
    [(2, 400, 0.8, 4), (8, 100, 0.8, 5), (8, 60, 0.9, 9), (8, 100, 0.9, 7), (8, 400, 0.9, 4)],
)
def test_slow_periods_prove_no_straggler(num_ranks, num_steps, alike, most):
    """Some rank's machine was slow for a while: mean and deviation alone would blame it."""
    alarms = without = 0
    for seed in range(100):
        own = in_runs(num_ranks, num_steps, alike, seed)
        alarms += straggler_of(own) is not None
        late = own - (own.sum(axis=0) - own) / (num_ranks - 1)
        errors = late.std(axis=1, ddof=1) / np.sqrt(num_steps)
        without += bool((late.mean(axis=1) > t_quantile(1 - 0.01 / num_ranks, num_steps - 1) * errors).any())
    assert alarms <= most
    assert without > 40, "standard errors of independent steps would accuse in half of the jobs"


def test_rank_that_becomes_slow_halfway_is_late():
    own = noise((8, 400), 4, 0.2)
    own[1, 200:] += 6
    late = skew_of(*synchronous(own)).straggler
    assert (late.rank, late.others) == (1, ())
    assert late.late_ns == pytest.approx(3 * MS, rel=0.05)


def test_rank_late_at_regular_steps_is_late():
    """Like rank 0 logging every fiftieth step: its mean is more certain than with randomly chosen steps."""
    extra = np.zeros((8, 400))
    extra[0, ::50] = 100
    late = skew_of(*synchronous(noise((8, 400), 4, 0.2), logging=extra)).straggler
    assert (late.rank, late.phase) == (0, "logging")


def test_large_delay_is_found_even_if_it_changes_slowly():
    """Each step resembles the previous one, so there are few independent steps."""
    own = noise((2, LEAST_STEPS), 4, 0.1)
    own[1] += np.linspace(15, 25, LEAST_STEPS)
    assert skew_of(*synchronous(own)).straggler.rank == 1


def test_student_quantile():
    stats = pytest.importorskip("scipy.stats")
    for degrees in (4, 6.5, 13.5, 100):
        for probability in (0.99, 0.995, 0.99875, 0.9998):
            expected = stats.t.ppf(probability, degrees)
            assert expected * 0.97 < t_quantile(probability, degrees) < expected * 1.001
    assert t_quantile(0.99, 4) == pytest.approx(stats.t.ppf(0.99, 4), rel=0.003)


def test_small_difference_needs_many_steps():
    def of(num_steps):
        own = noise((2, num_steps), 9)
        own[1] += 0.25
        return skew_of(*synchronous(own)).straggler

    assert of(20) is None
    assert of(1_000).rank == 1


def test_too_few_common_steps():
    early, late = steps_of(20, dataloader=1), steps_of(20, first=20 - LEAST_STEPS + 1, dataloader=30)
    skew = skew_of(early, late)
    assert (skew.num_common, skew.straggler, skew.imbalance_ns) == (LEAST_STEPS - 1, None, None)
    assert [pace.step_ns for pace in skew.ranks] == [MS, 30 * MS]
    assert [pace.late_ns for pace in skew.ranks] == [None, None]


def test_only_steps_clean_on_all_ranks_are_compared():
    """One rank was profiled in some steps, which are left out for all ranks."""
    one = steps_of(40, dataloader=1, backward=5)
    other = steps_of(40, dataloader=1, backward=5)
    other.phases_ns[10:20, PHASE_INDEX["dataloader"]] = 500 * MS
    other.tags[10:20] = int(StepTag.PROFILED)
    skew = skew_of(one, other)
    assert (skew.num_common, skew.straggler) == (30, None)
    assert [pace.num_clean for pace in skew.ranks] == [40, 30]


@pytest.mark.parametrize(
    ("ranks", "world_size", "reason"),
    [
        ([steps_of(20, dataloader=1)], 1, "one rank"),
        ([], 4, "are unknown"),
        ([steps_of(20, dataloader=1)], 4, "are unknown"),
        ([steps_of(20, dataloader=1), steps_of(20, tags=int(StepTag.PROFILED))], 2, "clean steps"),
        ([steps_of(20, dataloader=1), steps_of(20, dataloader=-1 / MS)], 2, "weren't recorded"),
    ],
)
def test_ranks_that_cannot_be_compared(ranks, world_size, reason):
    steps = [rank_steps(run_of(rank, one)) for rank, one in enumerate(ranks)]
    assert reason in why_not(rank_skew, steps, world_size)


# Messages and files


def test_message_round_trip():
    sent = rank_steps(run_of(3, steps_of(50, dataloader=noise(50, 1), forward=2), host="häst"))
    found = unpack_rank_steps(pack_rank_steps(sent))
    assert (found.rank, found.host, found.num_steps) == (3, "häst", 50)
    for name, column in sent.steps.columns().items():
        assert (found.steps.columns()[name] == column).all()
    for name, column in sent.totals.columns().items():
        assert (found.totals.columns()[name] == column).all()


@pytest.mark.parametrize(
    "message", [b"", b"nothing", pack_rank_steps(rank_steps(run_of(0, steps_of(3))))[:-9]]
)
def test_damaged_message_is_rejected(message):
    with pytest.raises(ArchiveError, match="expected a rank's step record"):
        unpack_rank_steps(message)


@pytest.mark.parametrize("world_size", [2, 16, 128, 1024])
def test_messages_of_many_ranks_are_small(world_size):
    steps = steps_of(4_000, dataloader=noise(4_000, 1), forward=noise(4_000, 2), backward=noise(4_000, 3))
    told = rank_steps(run_of(0, steps, world_size))
    assert 32 <= len(told.steps) <= 1_024
    assert len(told.steps) * world_size <= max(MAX_SHARED, 64 * world_size)
    assert len(pack_rank_steps(told)) < 80_000
    if world_size == 1024:
        assert len(pack_rank_steps(told)) < 8_000
    assert len(told.totals) == told.num_steps == 4_000, "the means are of all clean steps"


def test_missing_ranks_have_rows_with_reason():
    run = run_of(0, steps_of(20, dataloader=1), 4)
    third = pack_rank_steps(rank_steps(run_of(2, steps_of(20, dataloader=1), 4)))
    run = side_by_side(run, {2: third, 3: b"damaged"}, {1: "no ModelProfCallback joined there"})
    assert [one.rank for one in run.rank_steps] == [0, 2]
    assert [(one.rank, one.reason) for one in run.absent_ranks] == [
        (1, "no ModelProfCallback joined there"),
        (3, "its message was damaged"),
    ]
    tables = {table.id: table for table in build_report(Facts(run)).tables}
    ranks = tables["rank_phases"]
    assert [row[0] for row in ranks.rows] == [
        "rank 0",
        "rank 2",
        "rank 1: no ModelProfCallback joined there",
        "rank 3: its message was damaged",
    ]
    assert set(ranks.rows[2][1:]) == {None}
    assert not any("missing" in note for note in ranks.notes)
    assert tables["all_ranks"].title == "2 of 4 ranks"
    figures = {row[0]: row[1] for row in tables["all_ranks"].rows}
    assert figures["clean steps"] == 40


def test_single_rank_has_row_for_each_missing_rank():
    run = side_by_side(run_of(0, steps_of(20, dataloader=1), 2), {}, {1: "left the loop early"})
    report = build_report(Facts(run))
    tables = {table.id: table for table in report.tables}
    assert [row[0] for row in tables["rank_phases"].rows] == ["rank 1: left the loop early"]
    assert tables["rank_phases"].absent_reason is None
    assert "Steps of other ranks are unknown." in tables["rank_phases"].notes
    assert "all_ranks" not in tables
    assert report.summary.run.all_ranks is None


def test_files_of_late_ranks_are_added(tmp_path):
    """The first rank here is rank 1, whose file has the first rank's usual name."""
    first = run_of(1, steps_of(20, dataloader=1), 3)
    run = side_by_side(first, {}, {0: "no ModelProfCallback joined there", 2: "sent nothing within 30 s"})
    save_run(run, tmp_path / "run.json")
    save_run(run_of(2, steps_of(20, dataloader=1), 3), tmp_path / rank_file(2))
    found = with_other_ranks(run, tmp_path / "run.json")
    assert [one.rank for one in found.rank_steps] == [1, 2]
    assert [one.rank for one in found.absent_ranks] == [0]


def test_files_of_killed_job_are_combined(tmp_path):
    ranks = synchronous(noise((3, 40), 1) + np.array([[0], [0], [15]]))
    for rank, steps in enumerate(ranks):
        run = run_of(rank, steps, world_size=4, host=f"node{rank}")
        save_run(replace(run, info=replace(run.info, status="running")), tmp_path / rank_file(rank))
    (tmp_path / rank_file(3)).write_text("{")  # killed before its first save
    report = read_report(tmp_path)
    skew = report.summary.ranks
    assert [pace.rank for pace in skew.ranks] == [0, 1, 2]
    assert skew.straggler.rank == 2
    [finding] = [one for one in report.findings if one.kind == "straggler_rank"]
    assert "Rank 2 (on node2) takes" in finding.summary
    table = next(table for table in report.tables if table.id == "rank_phases")
    assert table.notes[0].startswith("1 of 4 ranks are missing")
    assert report.verdict.kind == "straggler_bound"
    assert report.verdict.summary.endswith("a slower rank (rank 2 in Dataloader).")
    run = with_other_ranks(run_of(0, ranks[0], world_size=1), tmp_path / "run.json")
    assert run.rank_steps == (), "one process is no job of ranks"


def test_report_of_one_rank_has_no_rank_tables():
    report = build_report(Facts(run_of(0, steps_of(20, dataloader=1), 1)))
    assert report.summary.ranks is None
    assert not {table.id for table in report.tables} & {"rank_phases", "rank_spread", "all_ranks"}
    assert not {chart.id for chart in report.charts} & {"rank_phases"}


def test_tables_and_chart():
    own = noise((20, 30), 8)
    own[13] += 30
    steps = [rank_steps(run_of(rank, one, 20)) for rank, one in enumerate(synchronous(own))]
    run = replace(run_of(0, synchronous(own)[0], 20), rank_steps=tuple(steps))
    report = build_report(Facts(run))
    tables = {table.id: table for table in report.tables}
    ranks = tables["rank_phases"]
    assert len(ranks.rows) == 20
    assert ranks.rows[0][0] == "rank 13", "of many ranks the latest come first"
    columns = [column.key for column in ranks.columns]
    row = dict(zip(columns, ranks.rows[0], strict=True))
    assert row["dataloader_ns"] == pytest.approx(own[13].mean() * MS)
    assert row["slowest"] == 1.0
    spread = {row[0]: row[1:] for row in tables["rank_spread"].rows}
    mean_ns, least_ns, least, most_ns, most, apart_ns = spread["Dataloader"]
    means = own.mean(axis=1) * MS
    assert (least, most) == (int(means.argmin()), 13)
    assert (mean_ns, least_ns, most_ns) == pytest.approx((means.mean(), means.min(), means.max()))
    assert apart_ns == pytest.approx(most_ns - least_ns)
    chart = next(chart for chart in report.charts if chart.id == "rank_phases")
    assert chart.x == tuple(float(rank) for rank in range(20))
    for rank, one in enumerate(steps):
        height = sum(series.values[rank] for series in chart.series)
        assert height == pytest.approx(one.steps.duration_ns.mean())


def test_ranks_without_steps_do_not_fail():
    """Empty messages and ranks without steps aren't errors."""
    nothing = RankSteps(
        rank=1, host="", num_steps=0, totals=StepTotals.of(StepTimings.empty()), steps=steps_of(0)
    )
    run = replace(
        run_of(0, steps_of(20, dataloader=1)), rank_steps=(rank_steps(run_of(0, steps_of(20))), nothing)
    )
    report = build_report(Facts(run))
    table = next(table for table in report.tables if table.id == "rank_phases")
    assert table.absent_reason == "fewer than two ranks have clean steps"


# Real ranks

JOB = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    import torch
    from lightning.pytorch import Callback
    from torch.utils.data import DataLoader, Dataset
    from lightning_modelprof.engine import session
    from tests.support.bench import UndisturbedClock
    from tests.support.fits import Net, make_callback, make_trainer
    from tests.support.warm import spawn_from_here

    class Undisturbed(Callback):
        # The time in which a rank waits for a CPU is in no phase.
        def setup(self, trainer, module, stage):
            ours = trainer.callbacks[trainer.callbacks.index(self) + 1]
            ours._clock = UndisturbedClock()

    class SlowOnRankOne(Dataset):
        def __init__(self, case):
            self.case = case

        def __len__(self):
            return 96 if self.case == "loader" else 160

        def __getitem__(self, index):
            if self.case == "loader" and torch.distributed.get_rank() == 1:
                time.sleep(0.030)
            return torch.randn(8), torch.randn(())

    class SlowOnRankZero(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_rank == 0:
                time.sleep(0.010)

    class SlowOptimizer(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            if torch.distributed.get_rank() == 1:
                time.sleep(0.010)
            return loss

    class SlowModule(Net):
        case = ""

        def training_step(self, batch, batch_idx):
            if self.case == "forward" and self.global_rank == 1:
                time.sleep(0.010)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            kind = SlowOptimizer if self.case == "optimizer" else torch.optim.SGD
            return kind(self.parameters(), lr=0.01)

    class BreaksOnRankOne(Callback):
        def on_train_start(self, trainer, module):
            if trainer.global_rank == 1:
                session.pack_rank_steps = lambda steps: 1 / 0

    if __name__ == "__main__":
        strategy, folder, case = sys.argv[1:]
        if strategy == "ddp_spawn":
            spawn_from_here()
        torch.set_num_threads(1)
        callback, module = make_callback(Path(folder), active=0), SlowModule()
        module.case = case
        others = {"callback": [SlowOnRankZero()], "breaks": [BreaksOnRankOne()]}.get(case, [])
        callbacks = [Undisturbed(), callback, *others]
        trainer = make_trainer(
            Path(folder), *callbacks, strategy=strategy, devices=2, enable_progress_bar=False
        )
        trainer.fit(module, DataLoader(SlowOnRankOne(case), batch_size=2))
""")


def run_job(folder, strategy, case):
    """The report of two real ranks."""
    script = folder / "job.py"
    script.write_text(JOB)
    result = warm.start(JOB, strategy, folder / "job", case, cwd=folder, file=script).wait(150)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "job" / "modelprof" / "report.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
@pytest.mark.parametrize(
    ("case", "rank", "phase"),
    [("callback", 0, "callbacks"), ("forward", 1, "forward"), ("optimizer", 1, "optimizer")],
)
def test_slow_rank_is_named_for_other_causes(tmp_path, case, rank, phase):
    """Not the rank that waits for it while Lightning synchronizes signals between ranks."""
    report = run_job(tmp_path, "ddp_fork", case)
    late = report["summary"]["ranks"]["straggler"]
    assert (late["rank"], late["phase"]) == (rank, phase)
    found = next(one for one in report["findings"] if one["kind"] == "straggler_rank")
    assert found["status"] == "found"


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
def test_failing_rank_does_not_block_others(tmp_path):
    report = run_job(tmp_path, "ddp_fork", "breaks")
    (table,) = (one for one in report["tables"].values() if one["title"] == "Ranks")
    assert [row["rank"] for row in raw_rows(table)] == [
        "rank 1: an internal error stopped the profiler there"
    ]
    assert report["summary"]["run"]["status"] == "finished"


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_slow_loader_on_one_rank_is_named(tmp_path, strategy):
    """Two samples of 30 ms per batch: rank 1 is 60 ms late, however the ranks are started."""
    report = run_job(tmp_path, strategy, "loader")
    assert report["verdict"]["kind"] == "straggler_bound"
    assert "rank 1 in Dataloader" in report["verdict"]["summary"]
    finding = report["findings"][0]
    is_busy = any((one["kind"], one["status"]) == ("busy_cpus", "found") for one in report["findings"])
    severity = "warning" if is_busy else "critical"
    assert (finding["kind"], finding["severity"]) == ("straggler_rank", severity)
    assert "Rank 1 takes" in finding["summary"]
    assert "in Dataloader" in finding["summary"]
    assert "mostly in Backward" in finding["summary"]
    place = finding["locations"][0]
    assert (place["function"], place["file"]) == ("SlowOnRankOne.__getitem__", str(tmp_path / "job.py"))
    assert finding["saving"]["value"] > 30 * MS, "sleep never returns early; rank 0 may be slow, too"
    assert len(json.loads((tmp_path / "job" / "modelprof" / "run.json").read_text())["rank_steps"]) == 2
    alone = json.loads((tmp_path / "job" / "modelprof" / "run_rank1.json").read_text())
    assert alone["rank_steps"] == []
