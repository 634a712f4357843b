"""Row groups: members, names and sums, checked by plain loops over the table."""

from __future__ import annotations

import math
import random

import pytest

from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.report.tables.run import all_tables
from lightning_modelprof.report.tables.trace import copies, distributed, kernels, operators, user_ranges
from lightning_modelprof.show.html.table import NO_NAMESPACE, namespace_of, table_view
from lightning_modelprof.units import DASH

COLUMNS = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT, adds_up=True),
    Column("total_ns", "Total", Unit.DURATION_NS, "CPU"),
    Column("self_ns", "Self", Unit.DURATION_NS, "CPU", adds_up=True),
    Column("ratio", "Ratio(%)", Unit.RATIO, "CPU", adds_up=True),
    Column("module", "Module"),
    Column("num_bytes", "Size", Unit.BYTES, adds_up=True),
)


def operators_of(count=300, seed=0):
    """Operators of four namespaces in seven modules; some values are missing."""
    random.seed(seed)

    def maybe(value):
        return None if random.random() < 0.2 else value

    rows = tuple(
        (
            random.choice(("aten::op", "nccl::op", "void at::native::f<a::b>", "Optimizer.step#"))
            + f"_{row}",
            random.randrange(1000),
            random.randrange(10**9),
            maybe(random.random() * 1e9),
            maybe(random.random()),
            maybe(f"net.layer{random.randrange(7)}"),
            maybe(random.randrange(10**12)),
        )
        for row in range(count)
    )
    return Table(id="t", title="T", columns=COLUMNS, rows=rows)


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("aten::mm", "aten"),
        ("void at::native::sum<float>(int)", "at"),
        ("void (anonymous namespace)::softmax_warp<float>(int)", "(anonymous namespace)"),
        ("autograd::engine::evaluate_function: AddBackward0", "autograd"),
        ("cudaLaunchKernel", None),
        ("void gemv2T<at::half>(int)", None),
        ("Memcpy (a::b -> c::d)", None),
        ("Optimizer.step#SGD.step", None),
        ("::mm", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_known_names_have_expected_namespaces(name, namespace):
    assert namespace_of(name) == namespace


def key_of(label, row):
    if label == "Module":
        return row[5] or DASH
    return {"aten": "aten", "nccl": "nccl", "void": "at", "Opti": NO_NAMESPACE}[row[0][:4]]


def test_sums_match_plain_loop():
    table = operators_of()
    found = table_view(table).groupings
    assert [grouping.label for grouping in found] == ["Namespace", "Module"]
    for grouping in found:
        names = [grouping.groups[number].name for number in grouping.members]
        assert names == [key_of(grouping.label, row) for row in table.rows]
        assert [group.name for group in grouping.groups] == list(dict.fromkeys(names))
        for group in grouping.groups:
            rows = [row for row in table.rows if key_of(grouping.label, row) == group.name]
            assert group.num_rows == len(rows)
            for place, column in enumerate(COLUMNS[1:], 1):
                cell = group.sums[place - 1]
                if not column.adds_up:
                    assert cell is None
                    continue
                known = [row[place] for row in rows if row[place] is not None]
                assert cell.value == pytest.approx(sum(known), rel=1e-12)
                assert group.num_known[place - 1] == len(known)


def test_sums_use_column_format():
    rows = (("a::x", 1_500_000, "m"), ("a::y", 2_250_000, "m"), ("b::z", 4_000_000, "n"))
    columns = (COLUMNS[0], Column("ns", "Time", Unit.DURATION_NS, adds_up=True), COLUMNS[5])
    view = table_view(Table(id="t", title="T", columns=columns, rows=rows))
    assert [cell.sums[0].text for cell in view.groupings[0].groups] == ["3.75", "4.00"]
    assert view.groupings[0].plain() == {
        "label": "Namespace",
        "members": (0, 0, 1),
        "groups": [
            {"name": "a", "num_rows": 2, "sums": [["3.75", 3.75e6], None], "num_known": (2, 0)},
            {"name": "b", "num_rows": 1, "sums": [["4.00", 4e6], None], "num_known": (1, 0)},
        ],
    }


def test_missing_values_are_not_zero_in_sums():
    rows = (("x", 1, "m"), ("y", None, "m"), ("z", None, "n"), ("w", None, "n"))
    columns = (COLUMNS[0], COLUMNS[1], COLUMNS[5])
    (grouping,) = table_view(Table(id="t", title="T", columns=columns, rows=rows)).groupings
    known, unknown = grouping.groups
    assert (known.sums[0].value, known.num_known[0], known.num_rows) == (1.0, 1, 2)
    assert unknown.sums[0] is None


def test_sums_with_nan_or_infinity_are_dashes():
    rows = (("x", float("nan"), "m"), ("y", 1.0, "m"), ("z", float("inf"), "n"), ("w", 1.0, "n"))
    columns = (COLUMNS[0], COLUMNS[3], COLUMNS[5])
    (grouping,) = table_view(Table(id="t", title="T", columns=columns, rows=rows)).groupings
    cells = [group.sums[0] for group in grouping.groups]
    assert [(cell.text.strip(), cell.value) for cell in cells] == [(DASH, None), (DASH, None)]


def test_empty_column_group_has_no_sums():
    columns = (COLUMNS[0], Column("gpu_ns", "Self", Unit.DURATION_NS, "GPU", adds_up=True), *COLUMNS[1:2])
    columns += (Column("gpu_ratio", "Ratio(%)", Unit.RATIO, "Other", adds_up=True),)
    rows = tuple((f"{space}::{n}", None, 1, 0.25) for n, space in enumerate("aabb"))
    view = table_view(Table(id="t", title="T", columns=columns, rows=rows))
    values = [[cell and cell.value for cell in group.sums] for group in view.groupings[0].groups]
    assert values == [[None, 2.0, 0.5], [None, 2.0, 0.5]]
    assert len(view.headers) == 1 + len(values[0])


@pytest.mark.parametrize(
    "modules",
    [
        ("a", "b", "c", "d"),  # no repeats
        ("a", "a", "a", "a"),  # only one group
        (None, None, "a", "b"),  # unknown isn't a repeated name
    ],
)
def test_useless_groupings_are_not_offered(modules):
    rows = tuple((f"row {place}", module) for place, module in enumerate(modules))
    table = Table(id="t", title="T", columns=(COLUMNS[0], COLUMNS[5]), rows=rows)
    assert table_view(table).groupings == ()


def test_trees_are_not_grouped():
    table = operators_of(20)
    tree = Table(id="t", title="T", columns=COLUMNS, rows=table.rows, depths=(0, *[1] * 19))
    assert table_view(tree).groupings == ()


def columns_of(module, name):
    return {column.key: column for column in getattr(module, name)}


def test_only_columns_without_overlap_add_up():
    """Totals of nested operators include each other's time; kernels and collectives don't."""

    def adding(columns):
        return {key for key, column in columns.items() if column.adds_up}

    host = {"calls", "host_self_ns", "host_ratio", "device_self_ns", "device_ratio", "flops"}
    assert adding(columns_of(operators, "_FIGURES")) == host
    assert adding(columns_of(kernels, "_COLUMNS")) == {"calls", "device_total_ns", "device_ratio"}
    device = {"calls", "device_total_ns", "device_ratio", "size_bytes"}
    assert adding(columns_of(copies, "_COLUMNS")) == device
    assert adding(columns_of(distributed, "_COLLECTIVE_COLUMNS")) == {"calls", "total_ns", "size_bytes"}
    assert adding(columns_of(user_ranges, "_COLUMNS")) == {"calls"}


def test_means_extremes_and_rates_do_not_add_up():
    modules = {entry.build.__module__ for entry in all_tables.TABLES}
    modules |= {entry.build.__module__ for entry in all_tables.TRACE_TABLES}
    found = 0
    for name in modules:
        module = __import__(name, fromlist=["_"])
        for value in vars(module).values():
            for column in value if isinstance(value, tuple) else ():
                if isinstance(column, Column) and column.adds_up:
                    found += 1
                    assert column.unit not in (Unit.TEXT, Unit.RATE, Unit.BYTES_PER_S, Unit.FLOPS_PER_S)
                    assert not any(
                        word in column.key for word in ("avg", "max", "min", "mean", "median", "p90")
                    )
    assert found > 20


def test_large_sums_stay_exact():
    rows = tuple((f"a::{n}" if n < 3 else f"b::{n}", 2**60 + n) for n in range(6))
    columns = (COLUMNS[0], COLUMNS[1])
    groups = table_view(Table(id="t", title="T", columns=columns, rows=rows)).groupings[0].groups
    assert groups[0].sums[0].value == float(3 * 2**60 + 3)
    assert math.isfinite(groups[1].sums[0].value)
