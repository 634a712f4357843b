"""Reports as plain text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_modelprof.report.model import Column, Report, Table, Unit, apply_options
from lightning_modelprof.report.options import TIME_UNITS, TableOptions
from lightning_modelprof.show.text import render_text
from lightning_modelprof.units import DASH, UNIT_NAMES
from tests.support.golden import GOLDEN_DIR, check_golden
from tests.support.sample_reports import (
    ALL_REPORTS,
    copies,
    gpu_report,
    hostile_report,
    long_report,
    model_summary,
    operators,
    phases,
)


def report_of(*tables: Table) -> Report:
    return Report(title="t", facts=(), tables=tables, notes=())


@pytest.mark.parametrize("name", ["empty", "cpu", "gpu", "hostile", "wide"])
def test_report_matches_golden_file(name):
    check_golden(f"text/{name}.txt", render_text(ALL_REPORTS[name]()))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_text_is_plain_and_stable(name):
    text = render_text(ALL_REPORTS[name]())
    assert text == render_text(ALL_REPORTS[name]())
    assert text.endswith("\n")
    assert not re.search(r"[^\S\n]$", text, re.MULTILINE), "trailing spaces"
    assert all(line.isprintable() for line in text.split("\n"))


def parse_ruled(text: str, title: str) -> list[list[str]]:
    """Rows of a table between its second and third rule, split at the columns of the rules."""
    lines = text.split("\n")
    start = next(index for index, line in enumerate(lines) if re.fullmatch(f"-+{re.escape(title)}-+", line))
    rules = [index for index in range(start + 1, len(lines)) if re.fullmatch("-+(  -+)*", lines[index])]
    spans = [match.span() for match in re.finditer("-+", lines[rules[0]])]
    return [[line[a:b] for a, b in spans] for line in lines[rules[1] + 1 : rules[2]]]


def read_number(text: str) -> float | None:
    text = text.strip()
    return None if text == DASH else float(text.replace(",", ""))


def rounding(text: str) -> float:
    """Half of the last printed digit."""
    return 0.5001 * 10.0 ** -len(text.strip().partition(".")[2])


def assert_is_rounded(text: str, raw: float | None) -> None:
    number = read_number(text)
    if raw is None:
        assert number is None
    else:
        assert number == pytest.approx(raw, abs=rounding(text))


def test_golden_model_summary_matches_raw_numbers():
    text = (GOLDEN_DIR / "text" / "gpu.txt").read_text(encoding="utf-8")
    table = model_summary(gpu=True)
    parsed = parse_ruled(text, table.title)
    assert len(parsed) == len(table.rows)
    scales = (1e-6, 1e-6, 1e-6, 1e-6, 100.0)
    for (name, calls, *groups), row, depth in zip(parsed, table.rows, table.depths, strict=True):
        assert name.rstrip() == "  " * depth + str(row[0])
        assert_is_rounded(calls, row[1])
        for group, raws in zip(groups, (row[2:7], row[7:12]), strict=True):
            for part, raw, scale in zip(group.split("/"), raws, scales, strict=True):
                assert_is_rounded(part, None if raw is None else raw * scale)


def test_golden_phases_add_up_to_printed_step():
    text = (GOLDEN_DIR / "text" / "gpu.txt").read_text(encoding="utf-8")
    rows = parse_ruled(text, phases().title)
    for column in (2, 4):
        cells = [(row[column], depth) for row, depth in zip(rows, phases().depths, strict=True)]
        [step] = [cell for cell, depth in cells if depth == 0]
        parts = [cell for cell, depth in cells if depth == 1]
        slack = sum(map(rounding, [step, *parts]))
        assert sum(map(read_number, parts)) == pytest.approx(read_number(step), abs=slack)


def test_golden_box_has_known_cells():
    text = (GOLDEN_DIR / "text" / "gpu.txt").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line[:1] == "|"]
    assert rows[0] == ["", "avg", "max", "min", "p50", "p90", "p99"]
    assert rows[2] == ["batch_cost (ms)", "12.80", "13.25", "12.46", "12.79", "13.16", "13.24"]
    assert rows[5] == ["Reader Ratio (%)", "38.75", *[DASH] * 5]


def test_model_summary_has_paddle_heading_and_fits_120_columns():
    text = render_text(report_of(model_summary(gpu=True)))
    assert "CPU Total / Avg / Max / Min / Ratio(%)" in text
    assert "\nTime unit: ms\n" in text
    assert max(map(len, text.split("\n"))) <= 120


def test_missing_columns_are_dashes():
    rows = parse_ruled(render_text(report_of(model_summary(gpu=False))), "Model Summary")
    assert len(rows) > 1
    for *_, gpu in rows:
        assert gpu.strip() == DASH


def test_decimal_points_are_aligned():
    rows = parse_ruled(render_text(gpu_report()), "Phases of a Step")
    assert len({row[2].index(".") for row in rows}) == 1


def test_long_table_is_cut_with_note():
    text = render_text(long_report(), max_rows=7)
    assert "aten::operator_6 " in text
    assert "aten::operator_7 " not in text
    assert "Shows the first 7 of 1,000 rows" in text


def test_absent_table_is_one_line():
    assert "\nKernel Summary: the profiler window was never reached" in render_text(gpu_report())


def test_absent_table_keeps_notes():
    lines = render_text(gpu_report()).split("\n")
    at = next(index for index, line in enumerate(lines) if line.startswith("Kernel Summary: "))
    assert lines[at + 1 : at + 3] == ["Note:", "A note of a table that has no rows."]


def test_time_unit_fits_durations():
    columns = (Column("name", "Name"), Column("ns", "Total", Unit.DURATION_NS))
    short, long = (Table(id="t", title="T", columns=columns, rows=(("a", ns),)) for ns in (1_500, 2 * 10**12))
    assert "Time unit: µs" in render_text(report_of(short))
    assert "Time unit: s\n" in render_text(report_of(long))


@pytest.mark.parametrize("unit", TIME_UNITS)
def test_requested_time_unit_applies(unit):
    """From 12.5 ms to 1.3 us in one table: no number becomes zero in any unit."""
    scale = {"s": 1e-9, "ms": 1e-6, "us": 1e-3, "ns": 1.0}[unit]
    table = apply_options(operators(), TableOptions(time_unit=unit))
    text = render_text(report_of(table))
    assert f"\nTime unit: {UNIT_NAMES[unit]}\n" in text
    for (_, _, group, *_), row in zip(parse_ruled(text, table.title), table.rows, strict=True):
        if row[2] is None:
            assert group.strip() == DASH
            continue
        for part, raw in zip(group.split("/")[:4], row[2:6], strict=True):
            assert read_number(part) == pytest.approx(raw * scale, rel=0.005)
            assert read_number(part) > 0


def test_row_limit_overrides_max_rows():
    [table] = long_report().tables
    text = render_text(report_of(apply_options(table, TableOptions())), max_rows=7)
    assert "aten::operator_19 " in text
    assert "aten::operator_20 " not in text
    note = "Shows the first 20 of 1,000 rows. Raise row_limit (--row-limit) to see more; the JSON report has"
    assert note in " ".join(text.split())
    whole = render_text(report_of(apply_options(table, TableOptions(row_limit=10_000))))
    assert "aten::operator_999 " in whole
    assert "Note" not in whole


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_row_limit_applies_below_each_tree_row(limit):
    """ProfileStep alone would be no table: it keeps its first phases, and an operator its children."""
    table = apply_options(model_summary(gpu=True), TableOptions(row_limit=limit))
    names = [row[0].strip() for row in parse_ruled(render_text(report_of(table)), table.title)]
    assert names == ["ProfileStep", "Dataloader", "Forward", "Backward", "Optimization"][: 1 + limit]
    detail = apply_options(operators(), TableOptions(row_limit=limit))
    names = [row[0] for row in parse_ruled(render_text(report_of(detail)), detail.title)]
    assert sum(name.startswith("aten::") for name in names) == min(limit, 3)
    assert sum(name.startswith("  cuda") for name in names) == min(limit, 3), "each with its child"


def test_bandwidth_is_in_powers_of_1000():
    rows = parse_ruled(render_text(report_of(copies())), copies().title)
    assert [row[3].strip() for row in rows] == ["2.94 GB/s", "1.23 TB/s", DASH]
    assert [row[2].strip() for row in rows] == ["16.50 MiB", "1.00 MiB", "512 B"]


def test_kernel_names_omit_common_parts():
    names = [row[0].strip() for row in parse_ruled(render_text(report_of(operators())), operators().title)]
    assert names[2::3] == [
        "vectorized_elementwise_kernel<4, CUDAFunctor_add<…>, Array<…>>",
        "vectorized_elementwise_kernel<4, MulFunctor<…>, Array<…>>",
        "sm90_xmma_gemm_f32f32_tf32f32_f3…x1_execute_segment_k_off_kernel",
    ]


def test_arguments_stay_if_they_distinguish_functions():
    names = ("void sum(int)", "void sum(float)", "void only(int)", "void sum(int)", "fn (a, b)")
    table = Table(id="t", title="T", columns=(Column("name", "Name"),), rows=tuple((name,) for name in names))
    shown = [row[0].strip() for row in parse_ruled(render_text(report_of(table)), "T")]
    assert shown == ["void sum(int)", "void sum(float)", "only", "void sum(int)", "fn (a, b)"]


def test_names_only_table_and_split_groups_are_printed():
    names = Table(id="names", title="Names", columns=(Column("name", "Name"),), rows=(("a",), (None,)))
    split = Table(
        id="split",
        title="Split",
        columns=(
            Column("name", "Name"),
            Column("a", "A", Unit.COUNT, "G"),
            Column("b", "B", Unit.COUNT),
            Column("c", "C", Unit.COUNT, "G"),
        ),
        rows=(("x", 1, 2, 3),),
    )
    text = render_text(report_of(names, split))
    assert [row[0].strip() for row in parse_ruled(text, "Names")] == ["a", DASH]
    assert [cell.strip() for cell in parse_ruled(text, "Split")[0]] == ["x", "1", "2", "3"]


def test_long_names_are_cut_in_middle():
    text = render_text(hostile_report())
    assert "__init__ *args **kwargs `code` ~… [link](http://example.com) {x}" in text


def test_golden_files_have_no_escape_sequences():
    files = list(Path(GOLDEN_DIR).rglob("*.txt"))
    assert files
    for path in files:
        assert b"\x1b" not in path.read_bytes()


def absent(name, reason, notes=()):
    return Table(
        id=name, title=name, columns=(Column("name", "Name"),), rows=(), absent_reason=reason, notes=notes
    )


def test_tables_absent_for_one_reason_share_line():
    tables = (
        absent("Kernel", "there is no device"),
        absent("Memory", "it was not recorded"),
        absent("Idle", "there is no device"),
        absent("Perf", "there is no device", notes=("Train for longer.",)),
    )
    text = render_text(Report(title="t", facts=(), tables=tables, notes=()))
    assert "- Kernel, Idle: there is no device.\n" in text
    assert "Memory: it was not recorded\n" in text
    assert "Perf: there is no device\nNote:\nTrain for longer." in text
    assert text.count("there is no device") == 2


def test_reason_in_full_sentences_ends_with_one_period():
    tables = tuple(absent(title, "can't read a.json. Check the path.") for title in ("Kernel", "Idle"))
    text = render_text(Report(title="t", facts=(), tables=tables, notes=()))
    assert "- Kernel, Idle: can't read a.json. Check the path.\n" in text
