"""Window comparison: hand-made and generated steps, and real traces with reference measurements."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown, StepParts
from lightning_modelprof.reading_traces import analyze_files
from lightning_modelprof.report.compare.windows import compare_windows
from lightning_modelprof.report.model import Evidence, Finding, Report, Severity, Status, Unit
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.report.summary import PartTimes, Summary, TraceSummary
from lightning_modelprof.report.tables.trace.step_breakdown import STEP_BREAKDOWN
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.text import render_text
from tests.support.facts import table_of
from tests.support.traces import real_file, reference

MS = 1_000_000
NAMES = ("old", "new")


def breakdown(*steps, has_device=True):
    """Breakdown of steps given as the time of each category."""
    return StepBreakdown(
        steps=tuple(
            StepParts(number=number, total_ns=sum(parts), parts_ns=tuple(parts))
            for number, parts in enumerate(steps)
        ),
        has_device=has_device,
        has_runtime=True,
        notes=(),
    )


def window(*ranks, findings=(), num_traces=0):
    """Report of a window with the step time breakdown of these ranks."""
    return Report(
        title="t",
        facts=(),
        tables=(table_of(STEP_BREAKDOWN, dict(enumerate(ranks)), DEFAULT_OPTIONS),),
        notes=(),
        findings=findings,
        summary=Summary(traces=(TraceSummary(source="a", steps=(0,)),) * num_traces),
    )


def parts(**milliseconds):
    return [milliseconds.get(key, 0) * MS for key in STEP_CATEGORIES]


def table(report, table_id):
    return next(one for one in report.tables if one.id == table_id)


def step_rows(report):
    return {row[0]: row[1:] for row in table(report, "comparison_steps").rows}


# By hand


def test_title_names_largest_change():
    """Steps of 100 and 120 ms become 60 and 80 ms: the dataloader takes 45 ms less, the host 5 ms more."""
    before = window(breakdown(parts(kernel=50, dataloader=50), parts(kernel=50, dataloader=70)))
    after = window(
        breakdown(parts(kernel=50, dataloader=5, cpu_exec=5), parts(kernel=50, dataloader=25, cpu_exec=5))
    )
    report = compare_windows(before, after, NAMES)
    assert report.title == "step 110 → 70 ms (-36%); largest change: DataLoader -45 ms"
    assert report.facts == (
        ("Before", "old (2 steps of 100 to 120 ms)"),
        ("After", "new (2 steps of 60 to 80 ms)"),
    )
    rows = step_rows(report)
    assert list(rows)[:3] == ["Step", "DataLoader", "CPU Exec"]
    assert rows["Step"] == (110 * MS, 70 * MS, -40 * MS, -40 / 110, *(ms * MS for ms in (100, 120, 60, 80)))
    assert rows["DataLoader"] == (60 * MS, 15 * MS, -45 * MS, -0.75, 50 * MS, 70 * MS, 5 * MS, 25 * MS)
    assert rows["CPU Exec"] == (0, 5 * MS, 5 * MS, None, 0, 0, 5 * MS, 5 * MS)
    (note,) = report.notes
    assert note.startswith("No confidence interval, because a window has too few steps")
    assert "took 100 to 120 ms before and 60 to 80 ms after" in note
    assert not any(note.startswith("One side") for note in table(report, "comparison_steps").notes)
    assert report.summary.window_comparison.parts["Step"] == PartTimes(before_ns=110 * MS, after_ns=70 * MS)


def test_one_step_has_no_spread():
    report = compare_windows(
        window(breakdown(parts(kernel=2))), window(breakdown(parts(kernel=3), parts(kernel=5))), NAMES
    )
    assert report.title == "step 2 → 4 ms (+100%); largest change: Kernel +2 ms"
    assert step_rows(report)["Step"][-4:] == (None, None, 3 * MS, 5 * MS)
    assert dict(report.facts)["Before"] == "old (1 step)"
    assert "isn't known for both sides" in report.notes[0]


def test_several_ranks_are_compared_by_means():
    one, other = breakdown(parts(kernel=2), parts(kernel=4)), breakdown(parts(kernel=6), parts(kernel=8))
    report = compare_windows(window(one, other), window(one), NAMES)
    assert report.title == "step 5 → 3 ms (-40%); largest change: Kernel -2 ms"
    assert dict(report.facts)["Before"] == "old (rank means)"
    assert step_rows(report)["Kernel"][-4:] == (None, None, 2 * MS, 4 * MS)


def test_category_missing_on_one_side_has_no_difference():
    before = window(breakdown(parts(cpu_exec=7), has_device=False))
    after = window(breakdown(parts(cpu_exec=1, kernel=3)))
    report = compare_windows(before, after, NAMES)
    assert report.title == "step 7 → 4 ms (-43%); largest change: CPU Exec -6 ms"
    assert step_rows(report)["Kernel"][:4] == (None, 3 * MS, None, None)
    note = table(report, "comparison_steps").notes[-1]
    assert note.startswith("One side doesn't record Kernel, Memcpy, Memset,")


def test_identical_windows_show_no_change():
    one = window(breakdown(parts(kernel=2)))
    report = compare_windows(one, one, NAMES)
    assert report.title == "step 2 → 2 ms (0%)"
    assert [one.id for one in report.tables] == ["comparison_steps", "comparison_findings"]


def test_missing_steps_are_explained():
    known = window(breakdown(parts(kernel=2)))
    none = Report(title="t", facts=(), tables=(), notes=())
    report = compare_windows(known, none, NAMES)
    assert report.title == "No steps to compare (after: no step time breakdown was requested)"
    assert [one.id for one in report.tables] == ["comparison_findings"]
    assert report.summary.window_comparison.parts is None
    assert compare_windows(none, none, NAMES).title.count("breakdown was requested") == 2
    empty = window(breakdown(parts()))
    assert (
        compare_windows(empty, known, NAMES).title == "No steps to compare (a step took no measurable time)"
    )


def test_different_trace_counts_are_noted():
    one = window(breakdown(parts(kernel=2)), num_traces=1)
    two = window(breakdown(parts(kernel=2)), num_traces=2)
    assert "Different numbers of traces: 1 before, 2 after." in compare_windows(one, two, NAMES).notes
    assert len(compare_windows(one, one, NAMES).notes) == 1


def test_fixed_finding_is_removed():
    found = Finding(
        kind="input_bound",
        status=Status.FOUND,
        title="The loop waits",
        summary="so it is",
        severity=Severity.WARNING,
        saving_ns_per_step=2.0 * MS,
        evidence=(Evidence(label="x", value=1, unit=Unit.COUNT),),
    )
    clean = Finding(kind="input_bound", status=Status.CLEAN, title="The loop waits", summary="it does not")
    one = breakdown(parts(kernel=2))
    report = compare_windows(window(one, findings=(found,)), window(one, findings=(clean,)), NAMES)
    assert table(report, "comparison_findings").rows == (("The loop waits", "removed", 2.0 * MS, None),)


# Generated


STEPS = st.lists(
    st.lists(st.integers(0, 10**10), min_size=len(STEP_CATEGORIES), max_size=len(STEP_CATEGORIES)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(STEPS, STEPS)
def test_category_differences_sum_to_step_difference(first, second):
    report = compare_windows(window(breakdown(*first)), window(breakdown(*second)), NAMES)
    rows = step_rows(report)
    step = rows.pop("Step")
    assert len(rows) == len(STEP_CATEGORIES)
    for column, whole in enumerate(step[:3]):
        assert sum(row[column] for row in rows.values()) == pytest.approx(whole, abs=1e-3)
    for before, after, difference, *_ in (step, *rows.values()):
        assert difference == after - before
    sizes = [abs(row[2]) for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    for row in (step, *rows.values()):
        for mean, low, high in ((row[0], row[4], row[5]), (row[1], row[6], row[7])):
            assert (low is None) == (high is None)
            assert low is None or low - 1e-3 <= mean <= high + 1e-3
    assert (
        json.loads(render_json(report))["summary"]["window_comparison"]["parts"]["Step"]["after_ns"]
        is not None
    )


# Real traces


@pytest.fixture(scope="module")
def resnets():
    workers = (f"v100_resnet50_workers{number}" for number in (0, 4))
    return [analyze_files([real_file(name)]) for name in workers]


def test_worker_comparison_matches_removed_plugin(resnets):
    """Every category of both mean steps matches torch_tb_profiler."""
    report = compare_windows(*resnets, ("0 workers", "4 workers"))
    assert report.title == "step 177.6 → 141.1 ms (-21%); largest change: DataLoader -58.1 ms"
    rows = step_rows(report)
    labels = {"Step": "Total", "CPU Exec": "CpuOp"}
    for side, number in enumerate((0, 4)):
        steps = reference(f"v100_resnet50_workers{number}", "tb_plugin")["steps"]
        for part, row in rows.items():
            truth = sum(step[labels.get(part, part)] for step in steps) / len(steps)
            assert row[side] == pytest.approx(truth * 1000, abs=1), part
    for part, before_us, after_us in (
        ("Step", 177592.2, 141068.0),
        ("DataLoader", 59261.8, 1186.2),
        ("Kernel", 98588.7, 99144.7),
    ):
        assert [round(cell / 1000, 1) for cell in rows[part][:2]] == [before_us, after_us]
        assert rows[part][2] == rows[part][1] - rows[part][0]
    assert sum(row[2] for part, row in rows.items() if part != "Step") == pytest.approx(rows["Step"][2])


def test_worker_comparison_has_tables_per_step(resnets):
    """Both windows have 6 steps, so each figure is a sixth of the sum in its report."""
    report = compare_windows(*resnets, ("0 workers", "4 workers"))
    ids = [one.id for one in report.tables]
    assert {"device_usage_changes", "operators_changes", "kernels_changes", "copies_changes"} < {*ids}
    assert {"idle_changes", "host_waits_changes", "launches_changes", "runtime_calls_changes"} < {*ids}
    assert "step_breakdown_changes" not in ids
    for table_id in ("kernels", "operators", "copies"):
        column = [column.key for column in table(resnets[0], table_id).columns].index("device_total_ns")
        sums = [sum(row[column] or 0 for row in table(one, table_id).rows) for one in resnets]
        changes = table(report, f"{table_id}_changes")
        at = {column.key: place for place, column in enumerate(changes.columns)}
        for side, whole in zip(("before", "after"), sums, strict=True):
            assert sum(row[at[side]] or 0 for row in changes.rows) == pytest.approx(whole / 6)
    states = {row[0]: row[1] for row in table(report, "comparison_findings").rows}
    assert states["Training waits for data"] == "removed"
    assert render_text(report).startswith(report.title)


def test_two_ranks_and_one_rank_compare_per_step():
    """Sums over two ranks are divided by the steps of both, so the job takes about as long per step."""
    files = [real_file(f"sampled_2rank_rank{rank}") for rank in (0, 1)]
    pooled, alone = analyze_files(files), analyze_files(files[:1])
    report = compare_windows(pooled, alone, ("both", "rank 0"))
    assert "Different numbers of traces: 2 before, 1 after." in report.notes
    changes = table(report, "model_summary_changes")
    at = {column.key: place for place, column in enumerate(changes.columns)}
    step = changes.rows[0]
    assert step[0] == "ProfileStep"
    assert (step[at["calls_before"]], step[at["calls_after"]]) == (1.0, 1.0)
    walls = [
        [one["wall_us"] for one in reference(f"sampled_2rank_rank{rank}", "stdlib")["profiler_steps"]]
        for rank in (0, 1)
    ]
    both = [wall for rank in walls for wall in rank]
    assert step[at["before"]] == pytest.approx(sum(both) / len(both) * 1000)
    assert step[at["after"]] == pytest.approx(sum(walls[0]) / len(walls[0]) * 1000)


def test_different_devices_show_no_speedup():
    names = ("v100_resnet50_workers0", "a100_nccl")
    report = compare_windows(*(analyze_files([real_file(name)]) for name in names), names)
    assert report.facts[0][0] == "Warning"
    assert report.facts[0][1].startswith("Device differs: Tesla V100")
    assert "no speedup shown because device differs" in report.title
    assert "%" not in report.title


def test_trace_without_steps_explains_its_step(resnets):
    """The span from its first to its last operator counts as one step, as in every trace table."""
    whole = analyze_files([real_file("a100_alexnet")])
    report = compare_windows(resnets[0], whole, NAMES)
    assert dict(report.facts)["After"] == "new (1 step)"
    notes = table(report, "comparison_steps").notes
    assert "After: The trace has no ProfilerStep ranges, so step 0 is the span of its CPU operators." in notes
    assert len(notes) == len({*notes})
