"""Reports in terminals of many kinds and widths, pipes and notebooks."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lightning_modelprof.report.model import Report, apply_options
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.show.terminal import screen
from lightning_modelprof.show.terminal.screen import wrap
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.show.text import render_text
from lightning_modelprof.units import DASH
from tests.support.fits import ROOT
from tests.support.golden import check_golden
from tests.support.sample_reports import (
    ALL_REPORTS,
    cpu_report,
    gpu_report,
    hostile_report,
    long_report,
    wide_report,
)

ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(report: Report, width: int, monkeypatch, **options) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    print_report(report, terminal, **options)
    return terminal.getvalue()


def without_colour(text: str) -> str:
    return "\n".join(line.rstrip() for line in ESCAPE_SEQUENCE.sub("", text).split("\n"))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["empty", "cpu", "gpu", "hostile"])
def test_report_matches_golden_file(name, width, monkeypatch):
    text = without_colour(printed(ALL_REPORTS[name](), width, monkeypatch))
    check_golden(f"terminal/{name}_{width}.txt", text)


@pytest.mark.parametrize("width", [80, 110, 160])
def test_wide_table_matches_golden_file(width, monkeypatch):
    check_golden(f"terminal/wide_{width}.txt", without_colour(printed(wide_report(), width, monkeypatch)))


@pytest.mark.parametrize("width", [80, 110, 160])
def test_names_in_wide_table_are_readable(width, monkeypatch):
    lines = without_colour(printed(wide_report(), width, monkeypatch)).split("\n")
    operators = lines[: next(index for index, line in enumerate(lines) if line.startswith("Memory"))]
    kernels = {line[4:].split("  ")[0] for line in operators if line.startswith("    vectorized")}
    assert min(map(len, kernels)) >= 24
    assert len([line for line in operators if line.startswith("aten::linear")]) >= 2, "continued below"
    assert "Memcpy HtoD (Pageable -> Device)" in "\n".join(lines), "there is room"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("name", ALL_REPORTS)
def test_report_fits_terminal(name, width, monkeypatch):
    text = printed(ALL_REPORTS[name](), width, monkeypatch)
    assert max(cell_len(line) for line in without_colour(text).split("\n")) <= width
    assert "\x1b" not in ESCAPE_SEQUENCE.sub("", text), "only colours"


def test_absent_table_keeps_notes(monkeypatch):
    text = without_colour(printed(cpu_report(), 120, monkeypatch))
    assert "· A note of a table that has no rows." in text


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_very_narrow_terminal_does_not_raise(name, monkeypatch):
    assert printed(ALL_REPORTS[name](), 10, monkeypatch)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_number_is_shown_at_any_width(width, monkeypatch):
    text = without_colour(printed(gpu_report(), width, monkeypatch))
    expected = re.findall(r"\d+\.\d+", " ".join(map(str, render_text(gpu_report()).split())))
    shown = re.findall(r"\d+\.\d+", text)
    assert sorted(set(expected)) == sorted(set(shown))


def test_groups_stay_whole_at_80_columns(monkeypatch):
    lines = without_colour(printed(gpu_report(), 80, monkeypatch)).split("\n")
    [gpu] = [line for line in lines if line.split()[:1] == ["GPU"]]
    assert lines[lines.index(gpu) + 1].split() == ["Name", "Total", "Avg", "Max", "Min", "Ratio(%)"]


def test_missing_group_is_one_column_of_dashes(monkeypatch):
    text = without_colour(printed(cpu_report(), 120, monkeypatch))
    [row] = [line for line in text.split("\n") if line.startswith("ProfileStep")]
    assert row.split()[-2:] == ["100.00", DASH]


def test_markup_in_names_is_printed(monkeypatch):
    text = without_colour(printed(hostile_report(), 200, monkeypatch))
    assert "[Callback]EarlyStopping" in text
    assert "[bold red]not markup[/bold red] :smile: [/]" in text


def test_long_table_is_cut_with_note(monkeypatch):
    text = printed(long_report(), 80, monkeypatch, max_rows=3)
    assert text.count("aten::operator") == 3
    assert "Shows the first 3 of 1,000 rows" in text


def test_row_limit_applies(monkeypatch):
    report = long_report()
    table = apply_options(report.tables[0], TableOptions(row_limit=5, time_unit="s"))
    text = without_colour(printed(replace(report, tables=(table,)), 100, monkeypatch))
    assert text.count("aten::operator") == 5
    assert "time in s\n" in text
    assert "Raise row_limit (--row-limit) to see more" in text


def test_no_color_turns_colours_off(monkeypatch):
    assert re.search(r"\x1b\[[0-9;]*36", printed(gpu_report(), 80, monkeypatch)), "cyan"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", printed(gpu_report(), 80, monkeypatch))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_non_terminal_gets_plain_text(name):
    stream = io.StringIO()
    print_report(ALL_REPORTS[name](), stream)
    assert stream.getvalue() == render_text(ALL_REPORTS[name]())


def test_stdout_is_default(capsys):
    print_report(gpu_report())
    assert capsys.readouterr().out == render_text(gpu_report())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("name", ["gpu", "hostile"])
def test_old_encoding_does_not_raise(name, encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_report(ALL_REPORTS[name](), stream)
    stream.flush()
    assert b"Names" in raw.getvalue() or b"Perf Summary" in raw.getvalue()


def test_dumb_terminal_gets_no_escape_sequences(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = printed(gpu_report(), 80, monkeypatch)
    assert "\x1b" not in text
    assert "─" in text


def test_force_color_colours_pipe(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_report(gpu_report(), stream := io.StringIO())
    assert "\x1b[1;36m" in stream.getvalue()


def test_notebook_gets_plain_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does

    class OutStream(Terminal):
        pass

    OutStream.__module__ = "ipykernel.iostream"
    print_report(gpu_report(), stream := OutStream())
    assert stream.getvalue() == render_text(gpu_report())


def test_old_windows_console_gets_plain_text(monkeypatch):
    for name in ("WT_SESSION", "ANSICON", "TERM_PROGRAM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(screen.os, "name", "nt")
    text = printed(gpu_report(), 80, monkeypatch)
    monkeypatch.undo()
    assert text == render_text(gpu_report())


@given(st.text(st.sampled_from("ab 数é\u0301"), max_size=60), st.integers(2, 20))
def test_wrapped_lines_keep_text_and_fit(text, width):
    lines = wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(cell_len(line) <= width for line in lines)
    assert all(line for line in lines) or not text.strip()


def test_rich_is_not_a_dependency():
    """Lightning switches to RichProgressBar wherever rich is installed."""
    needs = re.findall(r'"(\w[\w-]*)', (ROOT / "pyproject.toml").read_text().split("[project.optional")[0])
    assert "tqdm" in needs
    assert "rich" not in needs


def test_report_in_file_starts_below_bar(capsys):
    print("Epoch 0: 100%", end="")
    print_report(cpu_report(), is_below_a_bar=True)
    assert capsys.readouterr().out == f"Epoch 0: 100%\n{render_text(cpu_report())}"
