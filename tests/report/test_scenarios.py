"""Each injected fault gets the right verdict, the right line and a saving that matches its cost.

The tolerance is 15% plus 0.3 ms, which covers Lightning's own work in the same phase. The clocks of these
fits don't see other load on the machine; see ``tests/support/scenarios.py``.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from lightning_modelprof.measure.steps import slow_steps
from lightning_modelprof.report.model import Severity, Status
from tests.support import bench
from tests.support.adds_up import wrong_sums
from tests.support.bench import UndisturbedClock, thread_clock
from tests.support.fits import fit_quietly, make_callback, make_trainer
from tests.support.scenarios import FILE, SCENARIOS, Costs

RELATIVE = 0.15
SAMPLED = 0.5
ALLOWANCE_NS = 300_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torch"),
]


def run(scenario, folder):
    """One fit; returns the report and the injected nanoseconds per step."""
    costs = Costs()
    training = scenario.make(costs, folder)
    # A given peak, because measuring it takes longer than the whole fit.
    defaults = {"active": 0, "skip_first": 5, "flops": True, "peak_flops_per_s": 1e12, "files": False}
    defaults["sampling"] = True
    callback = make_callback(folder, **(defaults | training.profile))
    callback._clock = costs.clock = UndisturbedClock() if training.waits else thread_clock()
    trainer = make_trainer(folder, *training.before, callback, *training.after, **training.trainer)
    # The clocks see no other load, so there is no CPU wait.
    with patch.object(slow_steps, "cpu_wait_ns", return_value=0):
        fit_quietly(trainer, training.module, training.data, training.val)
    return callback.report, costs.per_step_ns(len(callback.run.ranks[0].steps))


def faults(scenario, report, cost_ns):
    """Yield what is wrong with a report."""
    found = [one for one in report.findings if one.status is Status.FOUND]
    # The test suite limits torch to one thread, which is a real finding if a CPU happens to be free.
    true_here = {"single_cpu_thread"} - {scenario.finding}
    loud = [
        one
        for one in found
        if one.severity in (Severity.WARNING, Severity.CRITICAL)
        and one.kind not in true_here
        and not _is_of_our_clock(one)
    ]
    kinds = {scenario.verdict}
    if scenario.verdict == "balanced":  # in short steps, Lightning's loop is above 5%
        kinds.add("compute_bound")
    if report.verdict.kind not in kinds:
        yield f"verdict {report.verdict}, findings {found}"
    unexpected = {one.kind for one in loud} - ({scenario.finding} if scenario.severe else set())
    if unexpected:
        yield f"warnings of {unexpected}: {loud}"
    yield from wrong_sums(report)
    if scenario.finding is None:
        return
    mine = [one for one in found if one.kind == scenario.finding]
    if len(mine) != 1 or (scenario.severe and mine != loud[:1]):
        yield f"{scenario.finding} is not there once, or not the most expensive one: {found}"
        return
    if scenario.placed:
        yield from wrong_place(scenario, mine[0])
    saving_ns = mine[0].saving_ns_per_step
    if scenario.is_estimated:
        if not saving_ns:
            yield "no saving"
        return
    if not scenario.saving:
        if saving_ns is not None:
            yield f"a saving of {saving_ns} that nobody measured"
        return
    # Workers save less than the wait; tests/report/test_loader_advice.py covers that.
    waits_ns = [one.value for one in mine[0].evidence if one.label == "data wait per step"]
    if waits_ns:
        if not 0 < saving_ns <= waits_ns[0]:
            yield f"a saving of {saving_ns} ns, of {waits_ns[0]} that are waited for"
        saving_ns = waits_ns[0]
    relative = SAMPLED if scenario.sampled else RELATIVE
    if saving_ns is None or abs(saving_ns - cost_ns) > relative * cost_ns + ALLOWANCE_NS:
        yield f"a saving of {saving_ns} ns, not {cost_ns}"


def _is_of_our_clock(finding):
    """On a busy machine these tests' clock reads itself many times and looks like user code."""
    return any(place.file == bench.__file__ for place in finding.locations[:1])


def wrong_place(scenario, finding):
    """Yield a message unless the finding points at the marked line, the innermost of the user's."""
    if not finding.locations:
        yield "no place"
        return
    first = finding.locations[0]
    place = first.inner or first
    if (place.file, place.line, first.is_exact) != (str(FILE), scenario.line, scenario.exact):
        yield f"line {scenario.line} of {FILE}, not {first}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_scenario_is_diagnosed(scenario, tmp_path):
    report, cost_ns = run(scenario, tmp_path)
    assert list(faults(scenario, report, cost_ns)) == []


def test_at_least_25_scenarios_are_covered():
    assert len(SCENARIOS) >= 25
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


def test_short_run_has_no_severities(tmp_path):
    """The fault of slow_loss is found in a run of a few steps, but gets no severity."""
    [scenario] = [one for one in SCENARIOS if one.name == "too_few_steps"]
    report, _ = run(scenario, tmp_path)
    assert all(one.severity is None for one in report.findings)
    assert report.verdict.kind == "cannot_tell"
