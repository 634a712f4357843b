"""The page as a parser sees it: its contents, names as text and no external links."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_modelprof.errors import printable
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import (
    Chart,
    Column,
    Evidence,
    Finding,
    Report,
    Series,
    Severity,
    Status,
    Table,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import FlopsSummary, RunSummary, Summary
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import Window
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.html.page import render_html
from lightning_modelprof.show.html.table import MAX_ROWS
from lightning_modelprof.show.layout import build_layout
from lightning_modelprof.units import DASH
from tests.support.page_document import document_of, tables_of, texts, values
from tests.support.sample_flames import hostile_flame
from tests.support.sample_reports import (
    ALL_REPORTS,
    HOSTILE_NAMES,
    benchmark_of,
    gpu_report,
    statistics,
    wide_report,
)

ATTACKS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "</style><style>body{display:none}",
)
NAMES = (*HOSTILE_NAMES, *ATTACKS)
VOID = {"meta", "link", "input", "hr", "img", "br"}


class Page(HTMLParser):
    """A page as a list of elements, each with its ancestors."""

    def __init__(self, data: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements = []
        self._stack = []
        self.feed(data.decode("utf-8"))
        self.close()
        assert self._stack == []
        for element in self.elements:
            element["text"] = "".join(element["text"])

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes)
        element = {"tag": tag, "attributes": dict(attributes), "text": [], "inside": list(self._stack)}
        self.elements.append(element)
        if tag not in VOID:
            self._stack.append(element)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._stack.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._stack:
            element["text"].append(data)

    def all(self, tag, **attributes):
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and all(
                value in (element["attributes"].get(name.rstrip("_")) or "").split()
                for name, value in attributes.items()
            )
        ]

    def within(self, element, *tags):
        return [
            one
            for one in self.elements
            if one["tag"] in tags and any(outer is element for outer in one["inside"])
        ]

    def one(self, tag, **attributes):
        (element,) = self.all(tag, **attributes)
        return element


def page_of(report):
    data = render_html(report)
    assert data == render_html(report)
    return Page(data)


def drawn_of(report):
    return document_of(render_html(report))


def tables_in(report):
    return tables_of([drawn_of(report)])


def report_of(*tables, **fields):
    return Report(**({"title": "t", "facts": (), "tables": tables, "notes": ()} | fields))


def expected_rows(table, limit):
    """The terminal's cells: the same grid, with one dash for an empty group."""
    shown = build_layout(table, max_rows=limit)
    grid = build_layout(replace(table, row_limit=None, time_unit=shown.time_unit), max_rows=MAX_ROWS)
    columns = [grid.names.cells]
    for block in grid.blocks:
        columns += [strip.cells for strip in (block.strips[:1] if block.is_empty_group else block.strips)]
    return [[cell.strip() for cell in row] for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_cells_match_terminal(name):
    report = ALL_REPORTS[name]()
    drawn = tables_in(report)
    assert set(drawn) == {table.id for table in report.tables if table.rows}
    for table in report.tables:
        if table.rows:
            assert texts(drawn[table.id]) == expected_rows(table, 100)


def test_model_summary_has_known_cells():
    rows = texts(tables_in(gpu_report())["model_summary"])
    assert rows[0] == [
        "ProfileStep",
        "11",
        *["138.99", "12.64", "17.91", "10.65", "100.00", "8.81", "0.801", "0.800", "0.800", "100.00"],
    ]
    assert rows[5][1:4] == [DASH, "29.55", DASH]


def test_rows_beyond_limit_keep_time_unit():
    """The first two rows are in microseconds, so the third is too, as in the terminal."""
    rows = (("a", 3_000), ("b", 2_000), ("c", 9_000_000))
    columns = (Column("name", "Name"), Column("ns", "Time", Unit.DURATION_NS))
    drawn = tables_in(report_of(Table(id="t", title="T", columns=columns, rows=rows, row_limit=2)))["t"]
    assert texts(drawn) == [["a", "3.00"], ["b", "2.00"], ["c", "9000.00"]]
    assert drawn["limit"] == 2


def test_page_has_raw_values():
    table = gpu_report().tables[1]
    assert values(tables_in(report_of(table))[table.id]) == [list(row[1:]) for row in table.rows]


def test_columns_of_mixed_units_are_not_sortable():
    table = gpu_report().tables[0]
    headers = tables_in(report_of(table))[table.id]["headers"]
    assert [header["is_sortable"] for header in headers] == [True] + [False] * 6


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_page_has_no_external_links(name):
    page = page_of(ALL_REPORTS[name]())
    for element in page.elements:
        for key, value in element["attributes"].items():
            assert not key.startswith("on"), (element["tag"], key)
            if key in ("href", "src", "action", "data", "poster", "srcset", "formaction", "xlink:href"):
                assert value.startswith("#") or value == "data:,", (element["tag"], key, value)
    styles = "".join(one["text"] for one in page.all("style"))
    assert not re.search(r"url\(|@import|https?:|//[a-z]", styles)
    own = page.all("script")[-1]["text"].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|WebSocket|import\(|eval\(", own)
    assert "innerHTML" not in own
    policies = [one for one in page.all("meta") if "http-equiv" in one["attributes"]]
    policy = policies[0]["attributes"]["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert page.all("iframe") + page.all("object") + page.all("img") + page.all("base") == []


def hostile_everywhere():
    columns = (Column("name", NAMES[10]), Column("where", NAMES[12], group=NAMES[13]))
    rows = tuple((name, name[::-1]) for name in NAMES)
    tree = Table(
        id="tree", title=NAMES[10], columns=columns, rows=rows * 5, depths=(0, *([1] * (len(rows) * 5 - 1)))
    )
    findings = tuple(
        Finding(
            kind=f"kind_{number}",
            status=tuple(Status)[number % 3],
            severity=Severity.WARNING,
            title=name,
            summary=name,
            action=name,
            locations=(Place(file=name, line=3, function=name, module=name, inner=Place(file=name, line=1)),),
            evidence=(Evidence(label=name, value=name, unit=Unit.TEXT),),
        )
        for number, name in enumerate(NAMES)
    )
    charts = tuple(
        Chart(
            id=f"chart_{number}",
            title=name,
            kind=kind,
            x_label=name,
            x=(0.0, 1.0),
            unit=Unit.COUNT,
            series=(Series(key=name, label=name, values=(1.0, None)),),
            notes=(name,),
        )
        for number, name in enumerate(NAMES)
        for kind in ("stacked", "line", "histogram")[number % 3 :][:1]
    )
    absent = Table(
        id="absent", title=NAMES[11], columns=columns, rows=(), absent_reason=NAMES[10], notes=NAMES
    )
    return Report(
        title=NAMES[12],
        facts=tuple((name, name) for name in NAMES),
        tables=(tree, replace(tree, id="flat", depths=(), is_detail=True, notes=NAMES), absent),
        notes=NAMES,
        summary=Summary(
            run=RunSummary(created="", model=NAMES[0]),
            windows=tuple(Window(index=0, first_step=0, last_step=1, trace_file=name) for name in NAMES),
        ),
        verdict=Verdict(kind=NAMES[11], summary=NAMES[10], accounted_ratio=0.5),
        findings=findings,
        charts=charts,
        flames=(hostile_flame(NAMES),),
    )


def test_hostile_names_are_text_everywhere():
    page = page_of(hostile_everywhere())
    known = page_of(gpu_report())
    assert not page.all("img")
    scripts = [one["attributes"].get("type") for one in page.all("script")]
    assert scripts == ["application/json", "module"]
    assert {key for one in page.elements for key in one["attributes"] if key.startswith("on")} == set()
    assert len(page.all("style")) == len(known.all("style"))
    drawn = drawn_of(hostile_everywhere())
    flat = tables_of([drawn])["flat"]
    assert {printable(name).strip() for name in ATTACKS} <= {row[0] for row in texts(flat)}
    notes = {one["text"] for one in page.all("li")}
    assert {printable(name) for name in ATTACKS} <= notes
    assert "49" not in page.one("title")["text"]
    assert {printable(name) for name in ATTACKS} <= {chart["title"] for chart in drawn["charts"]}
    names = {group["name"] for grouping in flat["groupings"] for group in grouping["groups"]}
    assert {printable(name[::-1]) for name in ATTACKS} <= names


def finding(**fields):
    usual = {"kind": "k", "status": Status.FOUND, "title": "Title", "summary": "Summary."}
    return Finding(**(usual | fields))


_LOSS = Place(file="losses.py", line=5, function="nll")
_STEP = Place(file="train.py", line=42, function="make", module="net.a", is_exact=True, inner=_LOSS)


def test_finding_shows_all_details():
    page = page_of(
        report_of(
            verdict=Verdict(kind="input_bound", summary="17.5 of 43.5 ms wait.", accounted_ratio=0.993),
            findings=(
                finding(
                    severity=Severity.CRITICAL,
                    action="num_workers=2",
                    saving_ns_per_step=17_500_000,
                    locations=(_STEP,),
                    evidence=(
                        Evidence(label="Reader Ratio", value=0.4022, unit=Unit.RATIO),
                        Evidence(label="reader_cost", value=17_500_000, unit=Unit.DURATION_NS),
                        Evidence(label="workers", value=0, unit=Unit.COUNT),
                        Evidence(label="cores", value=None, unit=Unit.COUNT),
                    ),
                ),
            ),
        )
    )
    verdict = page.one("p", class_="verdict")
    assert verdict["text"] == "INPUT-BOUND 17.5 of 43.5 ms wait."
    article = page.one("article")
    assert page.one("span", class_="severity")["text"] == "■ Critical"  # a symbol and a word
    assert page.one("span", class_="saving")["text"] == "−17.5 ms/step"
    assert [one["text"] for one in page.within(article, "code")] == ["train.py:42", "losses.py:5"]
    assert [one["text"] for one in page.within(page.one("ul", class_="places"), "li")] == [
        "train.py:42 in make, module net.a → losses.py:5 in nll (where most of the time goes)"
    ]
    assert [one["text"] for one in page.within(article, "dd")] == ["40%", "17.5 ms", "0", DASH]


def test_finding_without_severity_is_not_judged():
    page = page_of(report_of(findings=(finding(severity=None),)))
    assert page.one("span", class_="severity")["text"] == "○ Not judged"


def test_finding_without_details_shows_none():
    page = page_of(report_of(findings=(finding(severity=Severity.INFO, locations=(Place(module="net"),)),)))
    assert not page.all("span", class_="saving")
    assert page.all("code") == []
    assert page.all("p", class_="verdict") == []


def test_passed_and_unchecked_rules_take_one_line_each():
    findings = (
        finding(status=Status.CLEAN, title="Alpha"),
        finding(status=Status.CLEAN, title="Beta"),
        finding(status=Status.NOT_EVALUATED, title="Gamma", summary="No GPU."),
    )
    page = page_of(report_of(findings=findings))
    lines = [
        " ".join(page.within(one, "summary")[0]["text"].split())
        for one in page.all("details", class_="rules")
    ]
    assert lines == ["Passed 2 Alpha · Beta", "Not checked 1 Gamma"]
    assert page.all("article") == []


def test_top_figures_match_benchmark():
    summary = Summary(
        run=RunSummary(created="", sample_unit="images"),
        benchmark=benchmark_of(
            43_512_345.0,
            batch_cost_ns=statistics(43_512_345.0, p50=43_400_000.0, p99=50_800_000.0),
            steps_per_s=statistics(22.982),
            samples_per_s=statistics(7354.6),
            reader_ratio=statistics(0.40221),
            reader_cost_ns=statistics(17_500_000.0),
        ),
        flops=FlopsSummary(flops_per_s=18.9e9, mfu=0.1833),
    )
    texts = [" ".join(one["text"].split()) for one in page_of(report_of(summary=summary)).all("dd")]
    assert texts == [
        "43.5 msp50 43.4 ms, p99 50.8 ms",
        "23.0 steps/s7,355 images/s",
        "40%17.5 ms waiting for data",
        "18.9 GFLOP/sMFU 18%",
    ]
    assert page_of(report_of(summary=Summary(run=RunSummary(created="")))).all("dd") == []


def test_mfu_above_100_percent_is_hidden():
    """A peak rate that was too low once gave 742.74%."""
    summary = Summary(flops=FlopsSummary(flops_per_s=15.6e9, mfu=7.4274))
    texts = [" ".join(one["text"].split()) for one in page_of(report_of(summary=summary)).all("dd")]
    assert texts == ["15.6 GFLOP/s"]


def chart(kind="stacked", x=(0.0, 1.0, 2.0), unit=Unit.DURATION_NS, **values):
    values = values or {"a": (1e6, 2e6, 3e6), "b": (1e6, None, 1e6)}
    return Chart(
        id="c",
        title="C",
        kind=kind,
        x_label="step",
        x=x,
        unit=unit,
        series=tuple(Series(key=key, label=key.upper(), values=value) for key, value in values.items()),
    )


def test_chart_values_are_formatted_in_python():
    view = chart_view(chart())
    assert view.hover == {
        "points": ["step 0", "step 1", "step 2"],
        "values": [["1.00", "2.00", "3.00"], ["1.00", DASH, "1.00"]],
        "totals": ["2.00", "2.00", "4.00"],
    }
    assert view.y_label == "ms"
    assert [tick.label for tick in view.y_ticks] == ["0", "1", "2", "3", "4"]
    assert [tick.label for tick in view.x_ticks] == ["0", "1", "2"]


def heights(path):
    """(bottom, top) of each rectangle."""
    return [(float(low), float(high)) for low, high in re.findall(r"M\S+ (\S+?)H\S+?V(\S+?)H", path)]


def test_layers_are_stacked():
    """The axis ends 4% above the largest total of 4 ms; missing values have no bar."""
    top = 4.16e6
    view = chart_view(chart())
    lower, upper = (heights(layer.path) for layer in view.layers)
    assert lower == [(1000, pytest.approx(1000 * (1 - ms * 1e6 / top), abs=0.06)) for ms in (1, 2, 3)]
    assert [bottom for bottom, _ in upper] == [lower[0][1], lower[2][1]]
    assert upper[1][1] == pytest.approx(1000 * (1 - 4e6 / top), abs=0.06)


def test_one_very_long_step_does_not_flatten_chart():
    values = (*([1e6] * 99), 5e9)
    view = chart_view(chart(x=tuple(map(float, range(100))), a=values))
    assert view.notes == ("One value is above the chart: 5.00 s.",)
    assert heights(view.layers[0].path)[-1][1] == 0
    assert heights(view.layers[0].path)[0][1] == pytest.approx(1000 * (1 - 1 / 1.3), abs=0.06)
    assert view.hover["values"][0][-1] == "5000.00"


def test_few_points_are_not_clipped():
    view = chart_view(chart(x=(0.0, 1.0), a=(1e6, 5e9)))
    assert view.notes == ()
    assert heights(view.layers[0].path)[1][1] == pytest.approx(1000 * (1 - 1 / 1.04), abs=0.06)


def test_missing_values_interrupt_curve():
    view = chart_view(chart("line", (0.0, 1.0, 2.0, 3.0), Unit.RATE, a=(1.0, None, 2.0, 3.0)))
    assert re.findall("[ML]", view.layers[0].path) == ["M", "M", "L"]


def test_lone_point_of_curve_is_stroke():
    view = chart_view(chart("line", (7.0,), Unit.BYTES, a=(2.0**31,)))
    assert view.form == "line"
    assert re.fullmatch(r"M250\.0 (\S+)H750\.0", view.layers[0].path), "a quarter of its place on either side"
    gaps = chart_view(chart("line", tuple(map(float, range(5))), a=(1.0, None, 2.0, 3.0, None)))
    assert re.findall("[MLH]", gaps.layers[0].path) == ["M", "H", "M", "L"]
    mark = chart_view(chart("line", (0.0, 1.0), a=(10.0, 10.0), b=(None, 5.0))).layers[1].path
    low, high = re.fullmatch(r"M\S+ \S+H\S+M750\.0 (\S+)V(\S+)", mark).groups()
    assert float(high) - float(low) == pytest.approx(140), "seen where it lies on another curve"


def test_byte_axis_uses_unit_of_largest_value():
    """1.5 GiB is 1536 MiB, so there's a tick every 0.5 GiB."""
    view = chart_view(chart("line", (0.0, 1.0), Unit.BYTES, a=(1.5 * 2**30, 2.0**20)))
    assert view.y_label == "GiB"
    assert [tick.label for tick in view.y_ticks] == ["0", "0.5", "1.0", "1.5"]
    assert view.y_ticks[1].at == pytest.approx(100 * 0.5 / (1.5 * 1.04))
    assert view.hover["values"] == [["1.50 GiB", "1.00 MiB"]]


def test_curves_have_distinct_colours_and_none_is_pale():
    colours = [
        one.color for one in chart_view(chart("line", a=(1.0,) * 3, b=(2.0,) * 3, c=(3.0,) * 3)).layers
    ]
    assert len(set(colours)) == 3
    assert not {"c6", "c7"} & set(colours)


def test_single_point_is_a_bar_with_shares():
    view = chart_view(chart("stacked", (9.0,), Unit.FLOPS, forward=(1e9,), backward=(3e9,)))
    assert view.form == "bar"
    assert [(one.value, one.percent) for one in view.layers] == [("1.00 GFLOP", 25.0), ("3.00 GFLOP", 75.0)]


@pytest.mark.parametrize("kind", ["stacked", "line", "histogram"])
@pytest.mark.parametrize("heights_of", [(0.0, 0.0), (None, None), (float("nan"), float("inf")), (1e-9, 1e15)])
def test_odd_values_are_drawn_or_omitted(kind, heights_of):
    units = (Unit.DURATION_NS, Unit.RATIO, Unit.COUNT, Unit.RATE, Unit.BYTES)
    charts = tuple(chart(kind, (0.0, 1.0), unit, a=heights_of) for unit in units)
    drawn = drawn_of(report_of(charts=charts))["charts"]
    assert len(drawn) == len(units)
    assert "nan" not in str([layer["path"] for one in drawn for layer in one["layers"]])


def test_chart_without_points_is_omitted():
    assert chart_view(chart(x=(), a=())) is None


def test_colours_are_consistent_and_distinct():
    keys = ("dataloader", "forward", "backward", "optimizer", "validation", "callbacks", "logging", "rest")
    colours = [one.color for one in chart_view(chart(x=(0.0,), **dict.fromkeys(keys, (1.0,)))).layers]
    assert len(set(colours)) == len(colours)
    flops = chart_view(chart(x=(0.0,), forward=(1.0,), backward=(1.0,), recompute=(1.0,)))
    assert [one.color for one in flops.layers[:2]] == colours[1:3]


def test_phases_keep_colours_between_runs():
    """Whichever phases are large enough for a layer, in any order."""

    def colours(*keys):
        core = ("dataloader", "forward", "backward", "optimizer")
        layers = chart_view(chart(x=(0.0,), **dict.fromkeys((*core, *keys, "rest"), (1.0,)))).layers
        return dict(zip((*core, *keys), (one.color for one in layers), strict=False))

    first, second = colours("callbacks", "logging", "other"), colours("other", "zero_grad", "callbacks")
    assert {key: first[key] for key in first.keys() & second.keys()} == {
        key: second[key] for key in first.keys() & second.keys()
    }
    both = colours("validation", "other")  # if two prefer the same colour, one gets another
    assert both["other"] == first["other"]
    assert both["validation"] != both["other"]


@pytest.mark.parametrize("phase", [phase.key for phase in PHASES])
def test_no_phase_has_colour_of_rest(phase):
    keys = {"dataloader", "forward", "backward", "optimizer", phase, "rest"}
    colours = [one.color for one in chart_view(chart(x=(0.0,), **dict.fromkeys(keys, (1.0,)))).layers]
    assert len(set(colours)) == len(keys)


def test_long_tree_opens_to_depth_that_fits():
    depths = (0, *(depth for _ in range(30) for depth in (1, 2, 2)))
    rows = tuple((f"m{place}", place) for place in range(len(depths)))
    columns = (Column("module", "Module"), Column("n", "N", Unit.COUNT))
    drawn = tables_in(report_of(Table(id="t", title="T", columns=columns, rows=rows, depths=depths)))["t"]
    assert (drawn["is_tree"], drawn["open_depth"]) == (True, 1)
    assert drawn["depths"] == list(depths)


def test_empty_report_has_page():
    page = page_of(report_of())
    assert page.one("h1")["text"] == "t"
    assert page.all("section") == []


def test_absent_tables_give_reason():
    page = page_of(gpu_report())
    text = next(one for one in page.all("section") if one["attributes"].get("id") == "absent")["text"]
    assert "Kernel Summary: the profiler window was never reached" in text
    assert "A note of a table that has no rows." in text


def test_ids_are_unique():
    for report in (hostile_everywhere(), gpu_report(), wide_report()):
        ids = [one["attributes"]["id"] for one in page_of(report).elements if "id" in one["attributes"]]
        assert len(set(ids)) == len(ids)
