"""Change columns: bars, signs and colours."""

from __future__ import annotations

import re

import pytest

from lightning_modelprof.analysis.change import Change
from lightning_modelprof.report.compare.row_changes import row_changes
from lightning_modelprof.report.compare.tables import SPEED
from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.show.html.columns import change_bars
from lightning_modelprof.show.html.table import table_view
from lightning_modelprof.show.text import render_text
from tests.show.test_html_browser import report_of, show

CHANGE = (
    Column("name", "Name"),
    Column("before", "before", Unit.DURATION_NS),
    Column("difference", "difference", Unit.DURATION_NS, change="bar"),
    Column("ratio", "change", Unit.RATIO, change="bar"),
)


def table(*rows, columns=CHANGE):
    return Table(id="a_changes", title="A", columns=columns, rows=rows, row_better=("less",) * len(rows))


SLOWER_AND_FASTER = table(
    ("slower", 1e6, 4e6, 4.0),
    ("faster", 4e6, -2e6, -0.5),
    ("same", 1e6, 0, 0.0),
    ("new", None, None, None),
)


def bars_of(one):
    return {key: (bar.left, bar.width, bar.tone, bar.is_cut) for key, bar in change_bars(one).items()}


def test_bars_match_hand_calculation():
    assert bars_of(SLOWER_AND_FASTER) == {
        (0, 2): (0.5, 0.5, "worse", False),
        (1, 2): (0.25, 0.25, "better", False),
        (2, 2): (0.5, 0.0, "neutral", False),
        (0, 3): (0.5, 0.5, "worse", True),  # +400%, but bars end at 100%
        (1, 3): (0.25, 0.25, "better", False),
        (2, 3): (0.5, 0.0, "neutral", False),
    }
    view = table_view(SLOWER_AND_FASTER)
    assert [word for _, word in view.tones] == ["better", "worse", "neither"]
    assert view.notes == ("1 bar, marked with an arrow, is clipped at 100%.",)


def test_changes_have_sign():
    texts = [[cell.text.strip() for cell in row.cells] for row in table_view(SLOWER_AND_FASTER).rows]
    assert texts == [
        ["1.00", "+4.00", "+400.00"],
        ["4.00", "-2.00", "-50.00"],
        ["1.00", "0", "0"],
        ["–", "–", "–"],
    ]
    assert "+400.00" in render_text(report_of(SLOWER_AND_FASTER))


def test_higher_rate_is_better_and_more_waiting_is_worse():
    figures = (
        Change(key="batch_cost", before=20e6, after=30e6, change=0.5, low=0.4, high=0.6),
        Change(key="steps_per_s", before=50.0, after=33.3, change=-0.334, low=-0.4, high=-0.3),
        Change(key="reader_ratio", before=0.1, after=0.2, change=0.1, low=0.0, high=0.2),
    )
    one = SPEED.table(figures, of={"figure": lambda figure: figure.key})
    tones = {key: bar.tone for key, bar in change_bars(one).items()}
    assert tones == {(0, 3): "worse", (1, 3): "worse", (2, 3): "worse"}
    low = [row.cells[3].text.strip() for row in table_view(one).rows]
    assert low == ["+40.00", "-40.00", "0"]


def test_figure_without_direction_is_neutral():
    def tones(table_id, unit, *rows):
        columns = (Column("name", ""), Column("kind", ""), Column("dtype", ""), Column("value", "", unit))
        columns += (Column("bytes", "", unit), Column("avg", "", unit))
        before, after = (
            Table(
                id=table_id,
                title="A",
                columns=columns,
                rows=tuple((*[name] * 3, *[value] * 3) for name, value in side),
                row_units=(Unit.RATIO, Unit.RATE, Unit.DURATION_NS)[: len(side)],
            )
            for side in ([(name, 1.0) for name in rows], [(name, 2.0) for name in rows])
        )
        changes = row_changes(before, after)
        names = [row[0] for row in changes.rows]
        return {names[row]: bar.tone for (row, _), bar in change_bars(changes).items()}

    assert tones("perf_summary", Unit.BY_ROW, "Reader Ratio", "ips (steps/s)", "batch_cost") == {
        "Reader Ratio": "worse",
        "ips (steps/s)": "better",
        "batch_cost": "worse",
    }
    assert tones("model_size", Unit.BYTES, "Parameters") == {"Parameters": "neutral"}
    assert tones("memory_peaks", Unit.BYTES, "Device memory", "Peak resident memory") == {
        "Device memory": "neutral",
        "Peak resident memory": "worse",
    }


def test_each_row_unit_has_its_own_bar_scale():
    columns = (
        CHANGE[0],
        Column("before", "before", Unit.BY_ROW),
        Column("d", "d", Unit.BY_ROW, change="bar"),
    )
    one = Table(
        id="x",
        title="X",
        columns=columns,
        rows=(("a", 1.0, 5e9), ("b", 1.0, -3.0)),
        row_units=(Unit.BYTES, Unit.RATE),
        row_better=("less", "more"),
    )
    assert bars_of(one) == {(0, 2): (0.5, 0.5, "worse", False), (1, 2): (0.0, 0.5, "worse", False)}


def test_table_without_changes_has_no_legend():
    view = table_view(table(("a", 1e6), columns=CHANGE[:2]))
    assert view.tones == ()


@pytest.mark.slow
def test_bars_start_in_middle(browser, tmp_path):
    show(browser, tmp_path, report_of(SLOWER_AND_FASTER))
    places = browser.execute_script(
        "return [...document.querySelectorAll('td.change')].map(cell => {"
        "  const bar = getComputedStyle(cell, '::before');"
        "  const width = cell.clientWidth;"
        "  return [bar.left, bar.width].map(v => Math.round(100 * parseFloat(v) / width));"
        "})"
    )
    assert places[:4] == [[50, 50], [50, 50], [25, 25], [25, 25]]
    words = browser.execute_script(
        "return [...document.querySelectorAll('td.change')]"
        ".map(cell => getComputedStyle(cell, '::after').content)"
    )
    assert words[:4] == ['" worse"', '" worse"', '" better"', '" better"']


@pytest.mark.slow
def test_better_and_worse_differ_for_colour_blind_readers(browser, tmp_path):
    """Blue and orange in both themes; worse has stripes."""
    show(browser, tmp_path, report_of(SLOWER_AND_FASTER))
    for theme in ("light", "dark"):
        better, worse = browser.execute_script(
            "document.documentElement.dataset.theme = arguments[0];"
            "return ['better', 'worse'].map(kind => {"
            "  const style = getComputedStyle(document.querySelector(`.tones i.${kind}`));"
            "  return style.backgroundImage + style.backgroundColor})",
            theme,
        )
        assert "repeating-linear-gradient" in worse
        assert "gradient" not in better
        blue = [int(one) for one in re.findall(r"\d+", better)[-3:]]
        orange = [int(one) for one in re.findall(r"rgb\((\d+), (\d+), (\d+)\)", worse)[0]]
        assert blue[2] > blue[0]
        assert orange[0] > orange[2]
