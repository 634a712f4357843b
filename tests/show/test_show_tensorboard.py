"""Reports in TensorBoard: Markdown tables, text and the layout of scalars."""

from __future__ import annotations

import html.parser
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import Column, Report, Table, Unit
from lightning_modelprof.show.layout import shown_rows
from lightning_modelprof.show.tensorboard.scalars import (
    escape_markdown,
    markdown_report,
    markdown_summary,
    markdown_table,
    write_layout,
    write_report,
)
from tests.support.golden import check_golden
from tests.support.sample_reports import (
    ALL_REPORTS,
    HOSTILE_NAMES,
    gpu_report,
    hostile_report,
    long_report,
    model_summary,
    wide_report,
)

SummaryWriter = pytest.importorskip("torch.utils.tensorboard").SummaryWriter


class TableReader(html.parser.HTMLParser):
    """The cells of all tables in a page, as a browser shows them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.in_cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True
        elif self.in_cell:
            self.tables[-1][-1][-1] += f"<{tag}>"

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data):
        if self.in_cell:
            self.tables[-1][-1][-1] += data


def shown_tables(markdown: str) -> list[list[list[str]]]:
    return TableReader(markdown_to_safe_html(markdown)).tables


def test_report_matches_golden_file():
    report = gpu_report()
    texts = [markdown_summary(report), *map(markdown_table, report.tables)]
    check_golden("tensorboard/gpu.md", "\n".join(texts))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_tables_have_at_most_six_columns_and_every_row(name):
    tables = ALL_REPORTS[name]().tables
    assert bool(tables) == (name not in ("empty", "flame"))
    for table in tables:
        shown = shown_tables(markdown_table(table, max_rows=100))
        if not table.rows:
            assert shown == []
            continue
        assert shown
        for rows in shown:
            assert {len(row) for row in rows} == {len(rows[0])}
            assert len(rows[0]) <= 6
            assert len(rows) == 1 + len(shown_rows(table, table.row_limit or 100))


def test_hostile_names_are_shown_literally():
    table = hostile_report().tables[0]
    [rows] = shown_tables(markdown_table(table))
    assert len(rows) == 1 + len(HOSTILE_NAMES)
    for row, name in zip(rows[1:], HOSTILE_NAMES, strict=True):
        if len(name) <= 64:
            assert row[0].strip() == " ".join(printable(name).split())


@given(st.text(st.characters(codec="utf-8"), max_size=6))
@settings(max_examples=50, deadline=None)
def test_any_name_is_shown_literally(name):
    table = Table(
        id="t",
        title=name,
        columns=(Column("name", "Name"), Column("n", "Calls", Unit.COUNT)),
        rows=((name, 1), ("b", 2)),
    )
    [rows] = shown_tables(markdown_table(table))
    assert rows[1] == [" ".join(printable(name).split()), "1"] or not name.strip()
    assert rows[2] == ["b", "2"]


def test_indentation_survives():
    [rows] = shown_tables(markdown_table(model_summary(gpu=True)))
    assert rows[2][0] == "\xa0\xa0Dataloader"
    assert rows[1][2] == "138.99 / 12.64 / 17.91 / 10.65 / 100.00"


def test_wide_table_continues_below():
    first, second = shown_tables(markdown_table(gpu_report().tables[0]))
    assert first[0] == ["Name", "avg", "max", "min"]
    assert second[0] == ["Name", "p50", "p90", "p99"]
    assert [row[0] for row in first] == [row[0] for row in second]


def test_long_table_is_cut_with_note():
    text = markdown_table(long_report().tables[0], max_rows=3)
    assert "Shows the first 3 of 1,000 rows" in text
    assert text.count("aten::operator") == 3


def test_requested_unit_and_row_limit_apply():
    text = markdown_table(wide_report().tables[0])
    assert "\nTime unit: µs\n" in text
    assert "Shows 6 of 9 rows" in text
    [rows] = shown_tables(text)
    assert [row[0].strip("\xa0") for row in rows[1::3]] == ["aten::convolution_backward", "aten::linear"]


def test_absent_table_gives_reason():
    text = markdown_table(gpu_report().tables[-1])
    assert "the profiler window was never reached" in text
    assert text.endswith("\n\n- A note of a table that has no rows.\n")


def test_escape_markdown_escapes_special_characters():
    assert escape_markdown("[a](b) *_`|<&\n x") == r"\[a\](b) \*\_\`\|&lt;&amp; x"


def read_back(path) -> EventAccumulator:
    events = EventAccumulator(str(path), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def read_text(events: EventAccumulator, tag: str) -> str:
    [event] = events.Tensors(f"{tag}/text_summary")
    [text] = event.tensor_proto.string_val
    assert event.step == 99
    return text.decode("utf-8")


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_report_round_trips_through_event_file(tmp_path, name):
    report = ALL_REPORTS[name]()
    with SummaryWriter(tmp_path) as writer:
        write_report(writer, report, 99)
    events = read_back(tmp_path)
    text = read_text(events, "modelprof/report")
    assert events.Tags()["tensors"] == ["modelprof/report/text_summary"]
    assert text.startswith(markdown_summary(report))
    places = [text.index(markdown_table(table, max_rows=table.row_limit or 50)) for table in report.tables]
    assert places == sorted(places)  # the reading order


def test_layout_round_trips_through_event_file(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        write_layout(writer, {"Speed": ["modelprof/ips (steps/s)"]})
    events = read_back(tmp_path)
    [event] = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    [category] = layout.category
    [chart] = category.chart
    assert (category.title, chart.title) == ("modelprof", "Speed")
    [pattern] = chart.multiline.tag
    assert re.match(pattern, "modelprof/ips (steps/s)")


def test_summary_joins_tables_absent_for_one_reason():
    def absent(name, reason):
        return Table(id=name, title=name, columns=(Column("name", "Name"),), rows=(), absent_reason=reason)

    tables = (absent("kernels", "no device"), absent("memory", "not recorded"), absent("idle", "no device"))
    report = Report(title="t", facts=(), tables=tables, notes=("a note",))
    assert "- kernels, idle: no device.\n" in markdown_summary(report)
    text = markdown_report(report)
    assert "### memory\n\nnot recorded" in text
    assert "### kernels" not in text
