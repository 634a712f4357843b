"""Rules about the GPU on hand-made figures, in a run's windows and in bare traces."""

from __future__ import annotations

from dataclasses import replace
from itertools import count as count_from

import pytest

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.trace.distributed import Distributed, Overlap
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.device import launch_bound
from lightning_modelprof.report.rules.engine import diagnose, diagnose_traces, judge
from lightning_modelprof.report.rules.host_waits import host_device_sync, host_to_device_copy
from lightning_modelprof.report.rules.input import slow_transfer
from lightning_modelprof.report.rules.ranks import communication_exposed
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.records import Window
from lightning_modelprof.run.sites import (
    BATCH_END,
    BATCH_START,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    PRINT,
    SYNCHRONISATION,
    LineCount,
    SourceSite,
    StepSites,
)
from tests.support.diagnosed import MS, analysis_of, only, steps_of
from tests.support.traces import make_trace

ITEM = ("aten::_local_scalar_dense", "aten::item")
TO = ("aten::copy_", "aten::_to_copy", "aten::to")
EMPTY = TraceFacts(make_trace([]))


def site(line, operator="aten::_local_scalar_dense", phase="forward", kind=SYNCHRONISATION, **changes):
    known = SourceSite(
        kind=kind,
        file="/home/me/net.py",
        line=line,
        function="training_step",
        function_line=30,
        callers=(),
        module="",
        phase=phase,
        operator=operator,
        device="cuda",
        calls=1,
        num_bytes=4,
        is_blocking=True,
        is_pinned=None,
        is_non_blocking=None,
    )
    return replace(known, **changes)


def sites_of(*sites, lines=()):
    return StepSites(step=3, device="cuda", sites=sites, lines=lines)


def wait(saving, operators=ITEM, phase="forward", kind="device_to_host", wait_ms=None, calls=1, **place):
    """A wait in one recorded step of 100 ms, with the milliseconds its fix saves."""
    return HostWait(
        place=WaitPlace(kind=kind, operators=operators, phase=phase, **place),
        calls=calls,
        wait_ns=round((2 * saving if wait_ms is None else wait_ms) * MS),
        saves_ns=round(saving * MS),
    )


def trace(*waits, launch=0.0, late=None, **known):
    """Facts of a trace with one step of 100 ms."""
    facts = HostWaits(
        num_steps=1,
        steps_ns=100 * MS,
        idle_ns=100 * MS,
        fetch_ns=0,
        late_ns=round((launch if late is None else late) * MS),
        launch_ns=round(launch * MS),
        longest_launch_ns=MS,
        num_kernels=1234,
        waits=tuple(sorted(waits, key=lambda one: -one.saves_ns)),
    )
    return EMPTY.replaced(**{"host_waits": facts} | known)


def windows_of(steps, *traces, **known):
    """A GPU run with these windows."""
    windows = tuple(Window(index=index, first_step=0, last_step=0) for index in range(len(traces)))
    known = {"device_type": "cuda"} | known
    return analysis_of(steps, windows=windows, facts=dict(enumerate(traces)), **known)


def run(rule, *traces, sites=None, step_ms=100, device="cuda"):
    """A rule's findings on a GPU run with these windows."""
    cost = None if sites is None else ModelCost(sites=sites)
    return judge(rule, windows_of(steps_of(forward=step_ms), *traces, cost=cost, device_type=device))


def evidence(finding):
    return {one.label: one.value for one in finding.evidence}


# Waits


@pytest.mark.parametrize(
    ("saving", "status", "severity"),
    [
        (2.99, Status.CLEAN, None),
        (3, Status.FOUND, Severity.WARNING),
        (14.9, Status.FOUND, Severity.WARNING),
        (15, Status.FOUND, Severity.CRITICAL),
    ],
)
def test_sync_severity_by_share(saving, status, severity):
    finding = only(run(host_device_sync, trace(wait(saving))))
    assert (finding.status, finding.severity) == (status, severity)
    assert evidence(finding)["could save per step"] == pytest.approx(saving * MS)


def test_short_sync_is_clean():
    """10% of a step of 2 ms."""
    finding = only(run(host_device_sync, trace(wait(10)), step_ms=2))
    assert finding.status is Status.CLEAN
    assert only(run(host_device_sync, trace(wait(10)), step_ms=4)).saving_ns_per_step == 0.4 * MS


def test_sync_has_its_exact_line():
    sites = sites_of(
        site(41, calls=2),
        site(50, phase="backward"),
        site(60, "aten::nonzero"),
        site(70, kind=DEVICE_TO_HOST, is_blocking=False),
    )
    finding = only(run(host_device_sync, trace(wait(20, calls=2)), sites=sites))
    assert finding.locations == (
        Place(file="/home/me/net.py", line=41, function="training_step", is_exact=True),
    )
    assert finding.saving_ns_per_step == 20 * MS
    assert finding.summary.startswith(
        "The CPU waits 2 times per step in aten::item in forward, 40 ms in total."
    )
    assert f"would finish {COST} earlier" in finding.summary
    assert "torch._assert_async" in finding.action


def test_indistinguishable_lines_share_a_finding():
    sites = sites_of(site(41), site(45, calls=7))
    finding = only(run(host_device_sync, trace(wait(20)), sites=sites))
    assert [(one.line, one.is_exact) for one in finding.locations] == [(45, True), (41, True)]


def test_stacks_tell_functions_apart():
    """The tracer identifies a function by its first line and the end of its file path."""
    other = site(99, function="validate", function_line=90)
    place = {"function": "me/net.py(30): training_step"}
    finding = only(run(host_device_sync, trace(wait(20, **place)), sites=sites_of(site(41), other)))
    assert [one.line for one in finding.locations] == [41]
    # No site is in this function, because the sites are from another step.
    finding = only(run(host_device_sync, trace(wait(20, **place)), sites=sites_of(other)))
    assert finding.locations == (Place(file="me/net.py", line=30, function="training_step"),)


def test_places_are_found_most_expensive_first():
    waits = (wait(4, phase="forward"), wait(16, phase="backward"), wait(1, phase="optimizer"))
    findings = run(host_device_sync, trace(*waits), sites=sites_of(site(5), site(6, phase="backward")))
    assert [(one.locations[0].line, one.severity) for one in findings] == [
        (6, Severity.CRITICAL),
        (5, Severity.WARNING),
        (None, Severity.INFO),
    ]
    assert findings[2].locations == (Place(function="optimizer"),)
    assert sum(one.saving_ns_per_step for one in findings) == 21 * MS


def test_at_most_five_findings():
    waits = [wait(10 - number, annotation=f"range {number}") for number in range(7)]
    findings = run(host_device_sync, trace(*waits))
    assert [one.saving_ns_per_step for one in findings] == pytest.approx(
        [10 * MS, 9 * MS, 8 * MS, 7 * MS, 15 * MS]
    )
    assert [one.function for one in findings[4].locations] == ["range 4", "range 5", "range 6"]
    assert findings[4].summary.startswith("The CPU waits 3 times per step in 3 places (aten::item in range 4")


def test_many_small_places_are_found_together():
    """Each is below 3%, but their sum isn't."""
    finding = only(run(host_device_sync, trace(wait(2, phase="forward"), wait(2, phase="backward"))))
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.WARNING, 4 * MS)


def test_lightning_wait_is_named():
    own = site(
        None,
        file=None,
        phase=BATCH_END,
        function="",
        function_line=None,
        callers=("torch.Tensor.item", "lightning.pytorch.trainer.connectors.ResultCollection.metrics"),
    )
    finding = only(run(host_device_sync, trace(wait(20, phase="logging")), sites=sites_of(own, site(41))))
    assert finding.locations[0].function == "lightning.pytorch.trainer.connectors.ResultCollection.metrics"
    only_own = only(run(host_device_sync, trace(wait(20, phase="logging")), sites=sites_of(own)))
    assert "log_every_n_steps" in only_own.action
    assert "log_every_n_steps" not in finding.action  # it may also be a line of the user's


@pytest.mark.parametrize(
    ("operators", "word"),
    [
        (ITEM, "torch._assert_async"),
        (("aten::nonzero", "aten::index"), "torch.where"),
        (("aten::_unique2",), "fixed-shape"),
        (TO, "pinned memory"),
        ((), "torch.cuda.synchronize"),
    ],
)
def test_action_depends_on_operator(operators, word):
    assert word in only(run(host_device_sync, trace(wait(20, operators)))).action


def test_printed_tensor_gets_its_line_and_advice():
    """Torch hides the operators of a print from our inspection, but not from the trace."""
    finding = only(run(host_device_sync, trace(wait(20)), sites=sites_of(site(41, PRINT))))
    assert finding.locations[0].line == 41
    assert "Print tensors only every N steps" in finding.action


def test_copies_to_device_belong_to_copy_rule():
    waits = (wait(4), wait(20, TO, kind="host_to_device", memory="pageable"))
    assert only(run(host_device_sync, trace(*waits))).saving_ns_per_step == 4 * MS
    assert only(run(host_to_device_copy, trace(*waits))).saving_ns_per_step == 20 * MS


@pytest.mark.parametrize(("wait_ms", "left_ms"), [(10, 5), (14, None)])
def test_batch_copies_are_counted_once(wait_ms, left_ms):
    """Transfer takes 15 ms, 10 or 14 of which wait for copies; without them a step is 3 ms shorter."""
    batch = wait(3, TO, phase="transfer", kind="host_to_device", memory="pageable", wait_ms=wait_ms)
    steps, rules = steps_of(forward=85, transfer=15), [slow_transfer, host_to_device_copy]
    _, findings = diagnose(windows_of(steps, trace(batch)), rules)
    found = {one.kind: one for one in findings}
    copies, transfer = found["host_to_device_copy"], found["slow_transfer"]
    assert copies.saving_ns_per_step == pytest.approx(3 * MS)
    assert "at least 3 ms per step" in copies.summary
    assert copies.phases == ("transfer",)
    assert transfer.saving_ns_per_step == (None if left_ms is None else pytest.approx(left_ms * MS))
    assert (transfer.severity is Severity.INFO) is (left_ms is None)
    assert "host_to_device_copy" in transfer.summary
    # Copies in forward aren't part of transfer.
    other = trace(replace(batch, place=replace(batch.place, phase="forward")))
    _, findings = diagnose(windows_of(steps, other), rules)
    [transfer] = [one for one in findings if one.kind == "slow_transfer"]
    assert transfer.saving_ns_per_step == 15 * MS


def test_batch_and_tensors_made_on_cpu_get_different_advice():
    sites = sites_of(
        site(None, "aten::_to_copy", BATCH_START, HOST_TO_DEVICE, file=None, callers=("lightning.x",)),
        site(55, "aten::lift_fresh", "forward", HOST_TO_DEVICE),
    )
    waits = (
        wait(20, TO, phase="transfer", kind="host_to_device", memory="pageable"),
        wait(10, TO, kind="host_to_device", memory="pageable"),
    )
    batch, made = run(host_to_device_copy, trace(*waits), sites=sites)
    assert "pin_memory=True" in batch.action
    assert "register_buffer" not in batch.action
    assert "register_buffer" in made.action
    assert "pin_memory" not in made.action
    assert made.locations[0].line == 55
    assert made.locations[0].is_exact


def test_bare_trace_gets_general_copy_advice():
    facts = trace(wait(20, TO, kind="host_to_device", function="bench.py(44): <module>"))
    finding = only(judge(host_to_device_copy, JobFacts([facts])))
    assert finding.saving_ns_per_step == 20 * MS  # per recorded step
    assert "Set pin_memory=True and use .to(device, non_blocking=True) for batches." in finding.action
    assert finding.locations == (Place(file="bench.py", line=44, function="<module>"),)


@pytest.mark.parametrize(
    ("rule", "sites", "lines"),
    [
        (
            host_device_sync,
            (site(41, calls=3), site(44), site(55, "aten::to", kind=HOST_TO_DEVICE)),
            [41, 44],
        ),
        (host_to_device_copy, (site(41), site(55, "aten::to", kind=HOST_TO_DEVICE)), [55]),
    ],
)
def test_lines_without_window_are_a_hint(rule, sites, lines):
    finding = only(run(rule, sites=sites_of(*sites)))
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.INFO)
    assert finding.saving_ns_per_step is None
    assert [(one.line, one.is_exact) for one in finding.locations] == [(line, True) for line in lines]
    assert "Set active=10 to record a profiler window" in finding.summary


@pytest.mark.parametrize("rule", [host_device_sync, host_to_device_copy])
def test_runs_without_waits_are_clean_or_not_evaluated(rule):
    on_host = sites_of(site(41, device="cpu", is_blocking=None), site(42, kind=HOST_TO_DEVICE, device="cpu"))
    assert only(run(rule, sites=on_host, device="cpu")).status is Status.NOT_EVALUATED
    assert only(run(rule)).status is Status.NOT_EVALUATED
    assert only(run(rule, trace(host_waits=NotMeasured(NO_DEVICE)))).summary == NO_DEVICE
    asked = (site(41, is_blocking=False), site(42, kind=HOST_TO_DEVICE, is_blocking=False))
    assert only(run(rule, sites=sites_of(*asked))).status is Status.CLEAN
    assert only(run(rule, trace())).status is Status.CLEAN


def test_windows_are_pooled():
    """The CPU waits in one of two steps of 100 ms."""
    finding = only(run(host_device_sync, trace(wait(20)), trace()))
    assert finding.saving_ns_per_step == 10 * MS


# Launches


@pytest.mark.parametrize(
    ("late", "status", "severity"),
    [
        (9.99, Status.CLEAN, None),
        (10, Status.FOUND, Severity.WARNING),
        (29.9, Status.FOUND, Severity.WARNING),
        (30, Status.FOUND, Severity.CRITICAL),
    ],
)
def test_launch_severity_by_share(late, status, severity):
    finding = only(run(launch_bound, trace(wait(50), launch=late)))
    assert (finding.status, finding.severity) == (status, severity)
    assert evidence(finding)["GPU idle per step while the CPU is late"] == pytest.approx(late * MS)
    assert evidence(finding)["kernels per step"] == 1234


def test_late_launches_name_lines_with_most_operators():
    def line(number, calls, views=0, phase="forward", **changes):
        known = LineCount(
            file="/home/me/net.py",
            line=number,
            function="loss",
            function_line=1,
            module="",
            phase=phase,
            calls=calls,
            views=views,
            operators=3,
            elements=1,
            num_bytes=1,
        )
        return replace(known, **changes)

    lines = (
        line(10, 500, views=495),
        line(11, 400),
        line(12, 900, phase="backward"),
        line(13, 300),
        line(None, 200, file=None, module="encoder"),
    )
    finding = only(run(launch_bound, trace(launch=20), sites=sites_of(lines=lines)))
    assert [(one.line, one.module, one.is_exact) for one in finding.locations] == [
        (11, "", True),
        (13, "", True),
        (None, "encoder", False),
    ]


@pytest.mark.parametrize("rule", [launch_bound, communication_exposed])
def test_windows_are_required(rule):
    assert only(run(rule)).summary.startswith("no profiler window")
    assert only(run(rule, device="cpu")).summary == "only checked on a GPU"
    nothing = NotMeasured(NO_DEVICE)
    absent = only(run(rule, trace(host_waits=nothing, distributed=nothing)))
    assert (absent.status, absent.summary) == (Status.NOT_EVALUATED, NO_DEVICE)


# Communication


def communication(exposed, total=50, steps_ms=100, **changes):
    known = Distributed(
        source="device",
        is_asynchronous=False,
        whole=Overlap(communication_ns=1, computation_ns=1, overlap_ns=0, exposed_ns=1),
        in_steps=Overlap(
            communication_ns=round(total * MS),
            computation_ns=60 * MS,
            overlap_ns=round((total - exposed) * MS),
            exposed_ns=round(exposed * MS),
        ),
        num_steps=1,
        base="steps",
        base_ns=steps_ms * MS,
        in_base=None,
        collectives=(),
        notes=(),
    )
    return replace(known, **changes)


@pytest.mark.parametrize(
    ("exposed", "status", "severity"),
    [
        (9.99, Status.CLEAN, None),
        (10, Status.FOUND, Severity.WARNING),
        (30, Status.FOUND, Severity.CRITICAL),
    ],
)
def test_communication_severity_by_share(exposed, status, severity):
    finding = only(run(communication_exposed, trace(distributed=communication(exposed))))
    assert (finding.status, finding.severity) == (status, severity)
    assert evidence(finding)["exposed share of communication"] == pytest.approx(exposed / 50)


def test_communication_is_averaged_over_ranks():
    """10 of 100 and 50 of 200 ms are a fifth of the mean step of 150 ms. The best rank spends a tenth; more
    than that may be waiting for slower ranks."""
    ranks = (
        trace(distributed=communication(10)),
        trace(distributed=communication(50, steps_ms=200)),
        trace(distributed=NotMeasured("none")),
    )
    finding = only(judge(communication_exposed, JobFacts(ranks).replaced(step_ns=150 * MS)))
    assert evidence(finding)["exposed share of the step on the best rank"] == pytest.approx(0.1)
    assert finding.saving_ns_per_step == 30 * MS  # 60 ms in two steps


@pytest.mark.parametrize(
    "changes",
    [
        {"is_asynchronous": True},
        {"in_steps": None},
        {"base": "operators"},
        {"in_steps": Overlap(communication_ns=5, computation_ns=None, overlap_ns=None, exposed_ns=None)},
    ],
)
def test_unclear_communication_is_not_evaluated(changes):
    finding = only(run(communication_exposed, trace(distributed=communication(50, **changes))))
    assert finding.status is Status.NOT_EVALUATED


# From a trace to the verdict


def hand_made_window(num_steps=4):
    """A window with steps of 20 ms: busy in [0, 10), ``loss.item()`` in forward until 10, next launch at 14.

    So the GPU is idle for 4 ms per step, and the next launch is queued before the step ends.
    """
    ids = count_from(1)
    events = [event("user_annotation", "modelprof: forward", 0, 20 * num_steps)]
    for number in range(num_steps):
        at = 20 * number
        copy, before, after = next(ids), next(ids), next(ids)
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, at + 20),
            event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, correlation=before),
            event("kernel", "k", at, at + 9.9, 7, 0, stream=7, device=0, correlation=before),
            event("cpu_op", "aten::item", at + 1, at + 10.2),
            event("cpu_op", "aten::_local_scalar_dense", at + 1.1, at + 10.1),
            event("cuda_runtime", "cudaMemcpyAsync", at + 1.2, at + 1.3, correlation=copy),
            event(
                "gpu_memcpy",
                "Memcpy DtoH (Device -> Pinned)",
                at + 9.9,
                at + 10,
                7,
                0,
                stream=7,
                device=0,
                correlation=copy,
            ),
            event("cuda_runtime", "cudaStreamSynchronize", at + 1.4, at + 10),
            event("cuda_runtime", "cudaLaunchKernel", at + 14, at + 14.1, correlation=after),
            event("kernel", "k", at + 14, at + 20, 7, 0, stream=7, device=0, correlation=after),
        ]
    return TraceFacts(make_trace(events))


def event(cat, name, begin_ms, end_ms, tid=1, pid=1, **args):
    known = {"ts": round(begin_ms * 1e3), "dur": round((end_ms - begin_ms) * 1e3)}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "args": args, **known}


def test_window_leads_to_verdict_and_line():
    """The run's steps take 15 ms and recorded ones 20 ms; a fifth of 15 ms is 3 ms."""
    cost = ModelCost(sites=sites_of(site(41), site(50, phase=BATCH_END)))
    verdict, findings = diagnose(windows_of(steps_of(forward=15), hand_made_window(), cost=cost))
    assert (verdict.kind, verdict.summary.split()[3]) == ("sync_bound", "20%")
    assert findings[0].kind == "host_device_sync"
    assert findings[0].severity is Severity.CRITICAL
    assert findings[0].saving_ns_per_step == pytest.approx(3 * MS)
    assert [(one.line, one.is_exact) for one in findings[0].locations] == [(41, True)]
    late = next(one for one in findings if one.kind == "launch_bound")
    assert late.status is Status.CLEAN


def test_bare_trace_leads_to_verdict():
    verdict, findings = diagnose_traces(JobFacts([hand_made_window()]))
    assert verdict.kind == "sync_bound"
    assert findings[0].saving_ns_per_step == pytest.approx(4 * MS)
    assert findings[0].locations == (Place(function="forward"),)
