"""The three accounts of the steps by cause, which cover the same steps and the same total time."""

from __future__ import annotations

import pytest

import lightning_modelprof.analysis.trace.critical_path as module
from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.trace.host_waits import NO_STEP_RANGES
from lightning_modelprof.analysis.trace.step_breakdown import NO_STEP
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.report.tables.run.all_tables import TRACE_TABLES
from lightning_modelprof.report.tables.trace.critical_path import PATH
from tests.support.traces import FOLDER, event, load, make_trace

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
REAL = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.json.gz"))
RUNNING = ("running_ns", "running_ratio")
IDLE = ("idle_ns", "idle_ratio")
FASTER = ("work_ns", "half_ns", "half_ratio", "none_ns", "none_ratio")


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def kernel(launched, begin, end, correlation):
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=correlation),
        event("kernel", "k", begin, end, 7, device=0, stream=7, correlation=correlation),
    ]


def one_step(number, begin):
    """100 µs: a fetch of 20, a launch at 30, a kernel of 30, a wait for it, and a kernel of 20 at the end."""
    return [
        step(number, begin, begin + 100),
        event("user_annotation", FETCH, begin, begin + 20),
        event("cpu_op", "aten::mm", begin + 20, begin + 31),
        *kernel(begin + 30, begin + 35, begin + 65, 2 * number),
        event("cuda_runtime", "cudaStreamSynchronize", begin + 40, begin + 65),
        *kernel(begin + 75, begin + 80, begin + 100, 2 * number + 1),
    ]


def facts_of(*events):
    return TraceFacts(make_trace(list(events)))


def table_of(*facts):
    [entry] = [one for one in TRACE_TABLES if one.kind is PATH]
    return entry.of(dict(enumerate(facts)), DEFAULT_OPTIONS)


def rows_of(table):
    keys = [column.key for column in table.columns]
    return {row[0]: dict(zip(keys, row, strict=True)) for row in table.rows}


def test_three_steps():
    """Idle 20 + 15 + 15 of 100: in the fetch, until the first kernel, and after the wait for it.

    The wait takes 25. Without it, the next step would launch earlier too, by what its own gap doesn't give.
    """
    facts = facts_of(*one_step(1, 0), *one_step(2, 100), *one_step(3, 200))
    account = facts.step_account
    assert (account.num_steps, account.recorded_ns) == (3, 300 * US)
    assert {cause: ns / US for cause, ns in account.running_ns.items() if ns} == {
        "kernel": 150,
        "data loading": 60,
        "launch": 6,
        "host": 30,
        "other": 54,
    }
    assert {cause: ns / US for cause, ns in account.idle_ns.items() if ns} == {
        "data loading": 60,
        "host": 90,
    }
    assert account.after_waits_ns == (15 + 25 + 25) * US
    table = table_of(facts)
    rows = rows_of(table)
    assert (rows["Step"]["step_ns"], rows["Step"]["running_ns"], rows["Step"]["idle_ns"]) == (
        100 * US,
        100 * US,
        50 * US,
    )
    assert [rows["Step"][key] for key in ("ratio", "running_ratio", "idle_ratio")] == [1, 1, 0.5]
    assert rows["After waits"]["idle_ns"] == pytest.approx(65 * US / 3)
    assert rows["CPU late"]["idle_ns"] == pytest.approx(25 * US / 3)
    loading = next(one for one in facts.critical_path.what_ifs if one.name == "data loading")
    assert rows["Data loading"]["none_ns"] == loading.none_ns / 3
    assert table.notes == (
        "Without the first step of a series, as in CPU waits for the GPU, the mean step is 100 µs.",
    )


def test_with_too_many_events_all_columns_cover_first_steps(monkeypatch):
    monkeypatch.setattr(module, "MOST_EVENTS", 4)
    facts = facts_of(*one_step(1, 0), *one_step(2, 100), *one_step(3, 200), *kernel(300, 320, 900, 9))
    account, whole = facts.step_account, facts.idle.busiest.covered
    assert (account.num_steps, account.recorded_ns) == (2, 200 * US)
    assert sum(account.running_ns.values()) == 200 * US
    assert sum(account.idle_ns.values()) == 100 * US < whole.idle_ns
    assert account.after_waits_ns == (15 + 25) * US
    assert "First 2 steps only, because 1 more has too many events." in table_of(facts).notes


def test_account_without_device_has_running_time():
    facts = facts_of(step(1, 0, 100), event("user_annotation", FETCH, 0, 20), event("cpu_op", "a", 30, 90))
    table = table_of(facts)
    assert [column.key for column in table.columns] == ["name", *RUNNING]
    assert table.rows == (
        ("Step", 100 * US, 1),
        ("Data loading", 20 * US, 0.2),
        ("CPU", 60 * US, 0.6),
        ("Other", 20 * US, 0.2),
    )
    assert table.notes == (f"No critical path or GPU idle time: {NO_DEVICE}.",)


def test_account_without_launches_has_no_path():
    facts = facts_of(step(1, 0, 100), event("kernel", "k", 20, 50, 7, device=0, stream=7))
    table = table_of(facts)
    assert [column.key for column in table.columns] == ["name", *RUNNING, *IDLE]
    rows = rows_of(table)
    assert (rows["Step"]["idle_ns"], rows["Other"]["idle_ns"]) == (70 * US, 70 * US)
    assert "No critical path: the trace doesn't say what launched its GPU events." in table.notes


def test_cost_of_waits_is_unknown_without_marked_steps():
    facts = facts_of(event("cpu_op", "aten::mm", 0, 40), *kernel(10, 12, 40, 1), *kernel(50, 55, 70, 2))
    table = table_of(facts)
    assert "After waits" not in rows_of(table)
    assert f"No After waits and CPU late: {NO_STEP_RANGES}." in table.notes


def test_account_without_steps_is_absent():
    table = table_of(facts_of(event("python_function", "f", 0, 10)))
    assert (table.rows, table.absent_reason) == ((), NO_STEP)


def test_account_uses_rank_with_longest_steps_and_path():
    fast = facts_of(*one_step(1, 0))
    slow = facts_of(step(1, 0, 300), *kernel(10, 20, 290, 1))
    slowest_on_host = facts_of(step(1, 0, 900), event("cpu_op", "a", 0, 900))
    table = table_of(fast, slow, slowest_on_host)
    assert rows_of(table)["Step"]["step_ns"] == 300 * US
    assert "Rank 1, which has the longest steps of those with a critical path." in table.notes
    assert "Rank 1, which has the longest steps." in table_of(fast, slow).notes


@pytest.mark.parametrize("name", REAL)
def test_accounts_of_real_traces(name):
    facts = TraceFacts(load(name))
    account = facts.step_account
    assert sum(account.running_ns.values()) == account.recorded_ns
    assert min(account.running_ns.values()) >= 0
    assert sum(account.path.cause_ns(cause) for cause in module.CAUSES) == account.recorded_ns
    covered = facts.idle.busiest.covered
    assert covered.total_ns == account.recorded_ns
    assert sum(account.idle_ns.values()) == covered.idle_ns
    assert 0 <= (account.after_waits_ns or 0) <= account.idle_ns["host"]
