"""Row-by-row table comparison: by hand, and against a second implementation on generated tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.reading_traces import analyze_files
from lightning_modelprof.report.compare.changed_figures import comparable, num_steps
from lightning_modelprof.report.compare.row_changes import changed_rows, row_changes, row_paths
from lightning_modelprof.report.model import Column, Report, Table, Unit
from lightning_modelprof.report.summary import RunSummary, Summary, TraceSummary
from lightning_modelprof.report.tables.run.all_tables import TRACE_TABLES
from tests.support.facts import table_of
from tests.support.traces import real_file

OPERATOR_COLUMNS = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT),
    Column("host_self_ns", "Self", Unit.DURATION_NS, "CPU"),
    Column("device_total_ns", "Total", Unit.DURATION_NS, "GPU"),
    Column("called_from", "Called from"),
)


def table(table_id, columns, *rows, depths=(), units=(), title="A table"):
    return Table(
        id=table_id,
        title=title,
        columns=columns,
        rows=rows,
        depths=depths,
        row_units=units,
        absent_reason=None if rows else "nothing was there",
    )


def operators(*rows, **arguments):
    return table("operators", OPERATOR_COLUMNS, *rows, **arguments)


def report(*tables, **figures):
    return Report(title="t", facts=(), tables=tables, notes=(), summary=Summary(**figures))


def keyed(changes):
    """Cells by row name and column."""
    keys = [column.key for column in changes.columns]
    return {row[0]: dict(zip(keys[1:], row[1:], strict=True)) for row in changes.rows}


def cells(before, after, difference, ratio, calls_before, calls_after, state=""):
    return {
        "before": before,
        "after": after,
        "difference": difference,
        "ratio": ratio,
        "calls_before": calls_before,
        "calls_after": calls_after,
        "state": state,
    }


# By hand


def test_windows_of_different_length_compare_per_step():
    """Figures are divided by 2 steps before and 4 after."""
    before = operators(("mm", 4, 8, 20, "a.py(1)"), ("relu", 2, 2, 2, None), ("old", 2, 1, 12, None))
    after = operators(("relu", 4, 8, 8, None), ("mm", 8, 8, 20, "a.py(9)"), ("new", 4, 4, 28, None))
    changes = row_changes(before, after, (2, 4))
    assert list(keyed(changes)) == ["new", "old", "mm", "relu"]
    assert keyed(changes) == {
        "new": cells(None, 7.0, None, None, None, 1.0, "new"),
        "old": cells(6.0, None, None, None, 1.0, None, "removed"),
        "mm": cells(10.0, 5.0, -5.0, -0.5, 2.0, 2.0),  # the calling line isn't part of the name
        "relu": cells(1.0, 2.0, 1.0, 1.0, 1.0, 1.0),
    }
    assert changes.title == "A table: GPU Total per step"
    assert changes.id == "operators_changes"
    assert "2 before and 4 after" in changes.notes[0]


def test_operators_compare_by_cpu_without_device_time():
    before = operators(("mm", 1, 8, 20, None))
    after = operators(("mm", 1, 6, None, None))
    changes = row_changes(before, after, (1, 1))
    assert keyed(changes)["mm"] == cells(8.0, 6.0, -2.0, -0.25, 1.0, 1.0)
    assert changes.title.endswith("CPU Self per step")


@pytest.mark.parametrize(
    ("steps", "words"), [((None, 3), "before"), ((3, None), "after"), ((None, None), "before and after")]
)
def test_sums_over_unknown_step_counts_are_not_compared(steps, words):
    changes = row_changes(operators(("mm", 1, 8, 20, None)), operators(("mm", 1, 6, 9, None)), steps)
    assert changes.rows == ()
    assert changes.absent_reason == f"the number of steps {words} is unknown"


def test_no_common_figure_is_explained():
    changes = row_changes(operators(("mm", 1, None, None, None)), operators(("mm", 1, 6, 9, None)), (1, 1))
    assert changes.absent_reason == "the two sides have no figure in common"


def test_means_are_not_divided():
    columns = (
        Column("label", "Phase"),
        Column("num_steps", "Steps", Unit.COUNT),
        Column("avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    )
    changes = row_changes(
        table("phases", columns, ("Forward", 10, 4.0)),
        table("phases", columns, ("Forward", 30, 6.0)),
        (10, 30),
    )
    assert keyed(changes) == {"Forward": cells(4.0, 6.0, 2.0, 0.5, 10, 30)}
    assert [column.label for column in changes.columns[-3:-1]] == ["steps before", "steps after"]


def test_zero_before_has_no_ratio():
    changes = row_changes(
        operators(("mm", 1, 8, 0, None), ("x", 1, 0, 5, None)), operators(("mm", 1, 8, 3, None)), (1, 1)
    )
    assert keyed(changes)["mm"] == cells(0.0, 3.0, 3.0, None, 1.0, 1.0)


TREE = (Column("name", "Name"), Column("total_ns", "Total", Unit.DURATION_NS))


def test_tree_stays_a_tree():
    """The same name below two rows is two entries; a new row is below its own parent."""
    before = table("calls", TREE, ("a", 10), ("x", 4), ("y", 6), ("b", 50), ("x", 50), depths=(0, 1, 1, 0, 1))
    after = table(
        "calls",
        TREE,
        ("b", 70),
        ("x", 30),
        ("z", 40),
        ("a", 11),
        ("x", 4),
        ("y", 7),
        depths=(0, 1, 1, 0, 1, 1),
    )
    changes = row_changes(before, after)
    assert [(depth, *row[:4], row[-1]) for depth, row in zip(changes.depths, changes.rows, strict=True)] == [
        (0, "b", 50, 70, 20, ""),
        (1, "z", None, 40, None, "new"),
        (1, "x", 50, 30, -20, ""),
        (0, "a", 10, 11, 1, ""),
        (1, "y", 6, 7, 1, ""),
        (1, "x", 4, 4, 0, ""),
    ]


def test_rows_without_figure_are_dropped_unless_parents():
    before = table("calls", TREE, ("a", None), ("x", 4), ("b", None), depths=(0, 1, 0))
    after = table("calls", TREE, ("a", None), ("x", 9), ("b", None), depths=(0, 1, 0))
    changes = row_changes(before, after)
    assert [row[:4] for row in changes.rows] == [("a", None, None, None), ("x", 4, 9, 5)]
    assert changes.depths == (0, 1)


def test_repeated_row_keeps_its_own_children():
    """Children of the second row with a name don't belong to the first."""
    tree = table("calls", TREE, ("a", 1), ("x", 2), ("a", 3), ("x", 4), depths=(0, 1, 0, 1))
    assert row_paths(tree) == {("a",): 0, ("a", "x"): 1, ("a (2)",): 2, ("a (2)", "x"): 3}
    later = replace(tree, rows=(("a", 1), ("x", 2), ("a", 30), ("x", 40)))
    assert [row[:3] for row in row_changes(tree, later).rows] == [
        ("a", 3, 30),
        ("x", 4, 40),
        ("a", 1, 1),
        ("x", 2, 2),
    ]


def test_units_may_differ_by_row():
    columns = (Column("name", ""), Column("avg", "avg", Unit.BY_ROW))
    units = (Unit.DURATION_NS, Unit.BYTES, Unit.DURATION_NS)
    before = table("perf_summary", columns, ("wait", 5), ("size", 100), ("run", 7), units=units)
    after = table("perf_summary", columns, ("wait", 6), ("size", 900), ("run", 17), units=units)
    changes = row_changes(before, after)
    assert [row[:4] for row in changes.rows] == [
        ("run", 7, 17, 10),
        ("wait", 5, 6, 1),
        ("size", 100, 900, 800),
    ]
    assert changes.row_units == (Unit.DURATION_NS, Unit.DURATION_NS, Unit.BYTES)
    other = replace(after, row_units=(Unit.BYTES, Unit.BYTES, Unit.DURATION_NS))
    assert keyed(row_changes(before, other))["wait"]["difference"] is None


def test_very_deep_tree_is_compared():
    """Stored reports come from anywhere; this one has 2,000 rows, each nested in the one before."""
    depths = tuple(range(2_000))
    deep = table("calls", TREE, *[("x", depth) for depth in depths], depths=depths)
    assert row_changes(deep, deep).depths == depths


# Tables and step counts


def overview(num_steps, suffix=""):
    columns = (
        Column("name", "Event Type"),
        Column("calls", "Calls", Unit.COUNT),
        Column("host_total_ns", "Time", Unit.DURATION_NS, "CPU"),
    )
    return table(f"overview{suffix}", columns, ("ProfileStep", num_steps, 100))


def test_step_count_of_report():
    mm = operators(("mm", 1, 8, 20, None))
    trace, later = (
        TraceSummary(source="a", steps=(5, 6, 7)),
        TraceSummary(source="b", steps=(1,), tables_suffix="_1"),
    )
    assert num_steps(report(overview(4), mm), mm) == 4
    assert num_steps(report(overview(4), mm, traces=(trace,)), mm) == 3
    assert num_steps(report(mm, traces=(trace, trace, later)), mm) == 6
    assert num_steps(report(mm), mm) is None
    without = TraceSummary(source="c")
    assert num_steps(report(mm, traces=(without,)), mm) is None
    assert num_steps(report(overview(4), mm, traces=(trace, without)), mm) is None
    second = replace(mm, id="operators_1")
    assert num_steps(report(overview(4), overview(2, "_1"), second), second) == 2
    assert num_steps(report(overview(4)), table("phases", TREE, ("Forward", 1))) is None  # not a sum
    callbacks = table("callbacks", TREE, ("Saver", 9))
    assert num_steps(report(callbacks, run=RunSummary(created="", num_steps=30)), callbacks) == 30
    assert num_steps(report(callbacks, run=RunSummary(created="")), callbacks) is None
    window = replace(overview(3), id="model_summary_7")
    assert num_steps(report(overview(4), window), window) == 3


def test_changed_tables_are_found():
    same = table(
        "kernels", (Column("name", "Name"), Column("device_total_ns", "Total", Unit.DURATION_NS)), ("k", 4)
    )
    before = report(overview(1), same, operators(("mm", 1, 8, 20, None)), table("idle", TREE, ("Idle", 3)))
    after = report(overview(2), replace(same, rows=(("k", 8),)), operators(("mm", 2, 8, 42, None)))
    found = changed_rows(before, after)
    # Kernels take as long per step as before, and Idle is only on one side.
    assert [one.id for one in found] == ["overview_changes", "operators_changes"]
    assert keyed(found[1])["mm"]["difference"] == 1.0


def test_titles_drop_what_differs():
    before = operators(("mm", 1, 8, 20, None), title="Model Summary (steps 5 to 10)")
    after = replace(before, title="Model Summary (step 3)")
    assert row_changes(before, after, (1, 1)).title == "Model Summary: GPU Total per step"
    assert row_changes(before, before, (1, 1)).title == "Model Summary (steps 5 to 10): GPU Total per step"


def test_device_summary_has_one_figure_per_row():
    columns = (
        Column("name", "Device"),
        Column("busy", "Busy (%)", Unit.RATIO),
        Column("model", "Model"),
        Column("memory_bytes", "Memory", Unit.BYTES),
    )
    before = table("device_usage", columns, ("GPU 0", 0.5, "A", 100))
    changes = row_changes(comparable(before), comparable(replace(before, rows=(("GPU 0", 0.75, "B", 90),))))
    assert [row[:6] for row in changes.rows] == [
        ("GPU 0", "Busy", 0.5, 0.75, 0.25, 0.5),
        ("GPU 0", "Memory", 100, 90, -10, -0.1),
    ]
    assert changes.row_units == (Unit.RATIO, Unit.BYTES)
    assert "For percentages, the difference is in percentage points." in changes.notes


def test_step_breakdown_means_are_compared():
    columns = (
        Column("name", "Step"),
        Column("total_ns", "Total", Unit.BY_ROW),
        Column("kernel_ns", "Kernel", Unit.BY_ROW),
    )
    units = (Unit.DURATION_NS, Unit.RATIO, Unit.DURATION_NS)
    before = table(
        "step_breakdown", columns, ("Mean", 10.0, 4.0), ("Share", 1.0, 0.4), ("step 0", 10, 4), units=units
    )
    after = replace(before, rows=(("Mean", 8.0, 5.0), ("Share", 1.0, 0.6), ("step 0", 8, 5)))
    changes = row_changes(comparable(before), comparable(after))
    assert [row[:4] for row in changes.rows] == [("Step", 10.0, 8.0, -2.0), ("Kernel", 4.0, 5.0, 1.0)]


# Against a second implementation


NAMES = st.sampled_from("abc")
TREES = st.lists(
    st.tuples(NAMES, st.none() | st.integers(-(10**15), 10**15), st.integers(0, 3)), min_size=1, max_size=12
)


def tree_of(rows):
    depths: list[int] = []
    for _, _, depth in rows:
        depths.append(min(depth, depths[-1] + 1) if depths else 0)
    return table("calls", TREE, *[(name, value) for name, value, _ in rows], depths=tuple(depths))


def slow_paths(one):
    """Paths found by walking up from each row; a repeated path gets the next number, as do rows above."""
    labels: list[str] = []
    found: dict[tuple[str, ...], int] = {}
    for index, row in enumerate(one.rows):
        above, depth = [], one.depths[index]
        for earlier in range(index - 1, -1, -1):
            if one.depths[earlier] < depth:
                above.insert(0, labels[earlier])
                depth = one.depths[earlier]
        numbered = [row[0], *(f"{row[0]} ({number})" for number in range(2, len(one.rows) + 1))]
        label = next(text for text in numbered if (*above, text) not in found)
        labels.append(label)
        found[(*above, label)] = index
    return found


@given(TREES, TREES)
def test_rows_match_second_implementation(first, second):
    before, after = tree_of(first), tree_of(second)
    changes = row_changes(before, after)
    olds, news = ({path: one.rows[at][1] for path, at in slow_paths(one).items()} for one in (before, after))
    if all(value is None for value in olds.values()) or all(value is None for value in news.values()):
        assert changes.absent_reason == "the two sides have no figure in common"
        return
    expected = []
    for path in olds.keys() | news.keys():
        old, new = olds.get(path), news.get(path)
        has_figure = any(
            side.get(other) is not None
            for side in (olds, news)
            for other in side
            if other[: len(path)] == path
        )
        if has_figure:
            state = "removed" if path not in news else "new" if path not in olds else ""
            difference = None if old is None or new is None else new - old
            ratio = difference / old if difference is not None and old else None
            name = path[-1].partition(" ")[0]
            expected.append((len(path) - 1, (name, old, new, difference, ratio, state)))
    depths = changes.depths or (0,) * len(changes.rows)
    assert sorted(zip(depths, changes.rows, strict=True), key=repr) == sorted(expected, key=repr)
    # Nothing is lost: new, removed and changed rows add up to the difference of the sums.
    sums = [sum(value or 0 for value in side.values()) for side in (olds, news)]
    assert sum((row[2] or 0) - (row[1] or 0) for row in changes.rows) == sums[1] - sums[0]


@given(TREES, TREES)
def test_siblings_are_sorted_by_difference(first, second):
    changes = row_changes(tree_of(first), tree_of(second))
    depths = changes.depths or (0,) * len(changes.rows)
    weights: list[list[float]] = []
    assert bool(changes.rows) == (not changes.absent_reason)
    for depth, row in zip(depths, changes.rows, strict=True):
        assert depth <= len(weights)
        sizes = [abs(cell) for cell in row[1:3] if cell is not None]
        weight = abs(row[3]) if row[3] is not None else max(sizes, default=-1.0)
        del weights[depth + 1 :]
        weights += [[]] * (depth == len(weights))
        weights[depth] = [*weights[depth], weight]
        assert weights[depth] == sorted(weights[depth], reverse=True)


@given(TREES, TREES, st.integers(1, 9), st.integers(1, 9))
def test_per_step_figure_is_sum_divided_by_steps(first, second, steps_before, steps_after):
    before, after = (replace(tree_of(rows), id="idle") for rows in (first, second))
    plain = row_changes(replace(before, id="calls"), replace(after, id="calls"))
    changes = row_changes(before, after, (steps_before, steps_after))
    assert len(changes.rows) == len(plain.rows)

    def divided(row):
        old = None if row[1] is None else row[1] / steps_before
        new = None if row[2] is None else row[2] / steps_after
        return row[0], old, new, None if old is None or new is None else new - old

    assert sorted((row[:4] for row in changes.rows), key=repr) == sorted(map(divided, plain.rows), key=repr)


# Built tables


def test_every_trace_table_names_its_compared_figure():
    """A new table must say what is compared, because undivided sums are misleading."""
    assert TRACE_TABLES
    for entry in TRACE_TABLES:
        built = table_of(entry.kind, {0: "nothing was recorded"})
        figure = entry.kind.compared
        assert built.id == entry.kind.id
        keys = {column.key for column in built.columns}
        if built.id not in ("step_breakdown", "device_usage"):  # compared by their rows' figures
            assert keys >= {*figure.keys, *(figure.names or ())}, built.id


@pytest.mark.parametrize("name", ["a100_nccl", "v100_ns_resolution"])
def test_report_does_not_differ_from_itself(name):
    one = analyze_files([real_file(name)])
    assert changed_rows(one, one) == ()
