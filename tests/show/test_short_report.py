"""The short report, of 20 lines and 100 columns, and the card for many kinds of runs."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len

from lightning_modelprof import read_report
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.model import Status
from lightning_modelprof.run.records import IGNORED_CALLBACK, Window, WindowStatus
from lightning_modelprof.show.notebook import report_card
from lightning_modelprof.show.terminal.screen import Screen
from lightning_modelprof.show.terminal.short import short_lines
from lightning_modelprof.show.terminal.terminal import print_report
from tests.analysis.test_rank_skew import report_of as report_of_ranks
from tests.analysis.test_rank_skew import synchronous
from tests.report.test_rules import cpu_of, waited
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, steps_of
from tests.support.fits import Manual, Net, fit_quietly, loader, make_callback, make_trainer, run_fit
from tests.support.traces import event, make_trace

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b(?:\[[0-9;]*m|\]8;;.*?\x1b\\)")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def found(tmp_path):
    return build_report(analysis_of(steps_of(dataloader=23, forward=13, backward=12, other=2.8)))


def healthy(tmp_path):
    return build_report(analysis_of(steps_of(dataloader=0.1, forward=20, backward=20, optimizer=2)))


def busy(tmp_path):
    setup = replace(SETUP, num_threads=1)
    steps = steps_of(forward=20, dataloader=10)
    return build_report(analysis_of(steps, setup=setup, slow=waited(0.3), cpu=cpu_of(10)))


def two_ranks(tmp_path):
    own = np.zeros((2, 40))
    own[1] = 20
    return report_of_ranks(*synchronous(own))


def validation_only(tmp_path):
    callback = make_callback(tmp_path, active=0, files=True)
    make_trainer(tmp_path, callback).validate(Net(), loader(64), verbose=False)
    return callback.report


def crash(tmp_path):
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 20:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = make_callback(tmp_path, active=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit_quietly(make_trainer(tmp_path, callback), Breaks(), loader(64))
    return callback.report


def no_steps(tmp_path):
    return build_report(analysis_of(steps_of(0)))


def manual(tmp_path):
    return run_fit(tmp_path, module=Manual(), active=0).report


def imported_trace(tmp_path):
    """Three steps of 100 ms: a batch arrives after 60, then a kernel runs for 30."""
    events = []
    for step in range(3):
        begin = step * 100_000
        fetch = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        events += [
            event("user_annotation", f"ProfilerStep#{step}", begin, begin + 100_000),
            event("user_annotation", fetch, begin, begin + 60_000),
            event("cpu_op", "aten::addmm", begin + 60_000, begin + 99_000),
            event("cuda_runtime", "cudaLaunchKernel", begin + 61_000, begin + 61_010, correlation=step + 1),
            event("kernel", "gemm", begin + 62_000, begin + 92_000, pid=0, tid=7, device=0, stream=7)
            | {"args": {"device": 0, "stream": 7, "correlation": step + 1}},
        ]
    return build_trace_report([TraceFacts(make_trace(events))])


def with_window(tmp_path):
    callback = run_fit(tmp_path, active=3, flops=True, peak_flops_per_s=1e12)
    return read_report(callback.run and tmp_path / "modelprof")


def many_findings(tmp_path):
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 3, 0))
    steps = steps_of(
        forward=30, dataloader=10, transfer=9, logging=9, lr_scheduler=9, clip=9, zero_grad=9, optimizer=9
    )
    return build_report(analysis_of(steps, cost=cost, outside_ms={"checkpoint": 200, "validation": 300}))


def by_hooks_alone(tmp_path):
    return build_report(analysis_of(steps_of(forward=5, dataloader=None)))


KINDS = {
    one.__name__: one
    for one in (
        *(found, healthy, busy, two_ranks, validation_only, crash, no_steps, manual, imported_trace),
        *(with_window, many_findings, by_hooks_alone),
    )
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    return request.param, KINDS[request.param](tmp_path_factory.mktemp(request.param))


def printed(report, monkeypatch, width=100, **environment):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM_PROGRAM", "VTE_VERSION", "WT_SESSION", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"COLUMNS": str(width), "TERM": "xterm-256color"} | environment).items():
        monkeypatch.setenv(name, value)
    print_report(report, drawn := Terminal(), last_words=("page: out/report.html", "dashboard: tensorboard"))
    return drawn.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_report_fits_in_20_lines_and_100_columns(kind, width, monkeypatch):
    name, report = kind
    lines = ESCAPES.sub("", printed(report, monkeypatch, width)).splitlines()
    assert len(lines) <= 20, name
    assert max(map(cell_len, lines)) <= min(width, 100), name
    assert lines[1].startswith(report.verdict.kind.upper().replace("_", "-").split("-")[0])
    loud = [one for one in report.findings if one.status is Status.FOUND]
    text = "\n".join(lines)
    shown = len(re.findall(r"^\d [■▲●○]", text, re.MULTILINE))
    assert shown >= min(1, len(loud)), text
    # How many fit depends on their wording, which is longer on a busy machine.
    more = re.search(r"(\d+) more findings? in the full report", text)
    assert shown + (int(more[1]) if more else 0) == len(loud), text
    assert (report.step_card is None) == ("█" not in text and "▌" not in text)
    assert lines[-2:] == ["page: out/report.html", "dashboard: tensorboard"]


def test_card_shows_step_and_details(kind):
    name, report = kind
    html = report_card(report)
    assert report._repr_html_() == html
    assert len(repr(report)) < 200
    assert ("<svg" in html) == (report.step_card is not None), name
    assert "<details" in html
    assert html.partition("srcdoc")[0].count("<svg") <= 1


def test_input_bound_report_names_cause_and_fix(monkeypatch):
    text = ESCAPES.sub("", printed(found(None), monkeypatch))
    assert text.startswith("\nINPUT-BOUND  45% of each step is spent waiting for data.\n")
    assert "data 23" in text
    assert "/home/me/train.py:7" in text
    assert "Set num_workers=" in text
    assert "steps/s" in text


def test_verdict_names_busy_machine(monkeypatch):
    assert "CPU contention: training spent" in printed(busy(None), monkeypatch).replace("\n", " ")


def test_bar_is_to_scale(monkeypatch):
    """A cell is the same time in every part and in both bars."""
    report = found(None)
    lines = ESCAPES.sub("", printed(report, monkeypatch)).splitlines()
    bar = next(line for line in lines if "data " in line and "█" in line)
    cells = {re.search("[a-z]+", words)[0]: words.count("█") for words in bar.split("│")}
    times = {"data": 23, "forward": 13, "backward": 12}
    per_ms = cells["data"] / 23
    for name, ms in times.items():
        assert abs(cells[name] - ms * per_ms) <= 1.5, bar


def test_best_case_subtracts_saving_from_its_phase():
    card = found(None).step_card
    [finding] = [one for one in found(None).findings if one.kind == "input_bound"]
    before = {part.key: part.ns for part in card.host}
    after = {part.key: part.ns for part in card.better}
    assert before["dataloader"] - after["dataloader"] == pytest.approx(finding.saving_ns_per_step)
    assert {key: ns for key, ns in before.items() if key != "dataloader"} == pytest.approx(
        {key: ns for key, ns in after.items() if key != "dataloader"}
    )
    assert card.wall_ns == pytest.approx(50.8 * MS)


def test_overlapping_savings_are_subtracted_once():
    """Savings that add up to more than their phase leave 0 of it and don't shrink other phases."""
    report = found(None)
    [finding] = [one for one in report.findings if one.kind == "input_bound"]
    from lightning_modelprof.report.step_card import step_card  # noqa: PLC0415

    large = replace(finding, saving_ns_per_step=40 * MS)
    analysis = analysis_of(steps_of(dataloader=23, forward=13, backward=12, other=2.8))
    card = step_card(analysis, [large, large])
    assert card.better_ns == pytest.approx((13 + 12 + 2.8) * MS)


def test_trace_has_device_lane():
    """30 of 100 ms are busy; the rest is idle, mostly waiting for the batch."""
    card = imported_trace(None).step_card
    assert card.wall_ns == pytest.approx(100 * MS)
    lane = {part.key: part.ns / MS for part in card.device}
    assert sum(lane.values()) == pytest.approx(100, rel=0.02)
    assert lane["computing"] == pytest.approx(30, rel=0.02)
    assert lane["idle_input"] == pytest.approx(60, abs=4)
    assert {label: value for label, value, _ in card.figures}["GPU busy"] == pytest.approx(0.3, abs=0.01)
    assert card.better_ns < 50 * MS


def test_step_card_excludes_time_between_steps():
    """400 ms of validation after 20 steps of 10 ms are only in the finding, as a share of the loop."""
    report = build_report(analysis_of(steps_of(forward=10), outside_ms={"validation": 400}))
    assert {part.key: part.ns for part in report.step_card.host} == {"forward": 10 * MS}
    finding = next(one for one in report.findings if one.kind == "validation_share")
    assert (finding.share_of, finding.share) == ("loop", pytest.approx(2 / 3))


def test_unmet_requests_are_on_first_screen():
    windows = (
        Window(index=0, first_step=100, last_step=110, status=WindowStatus.NOT_REACHED, note="it ended"),
    )
    config = {"active": 11, "fvcore": True}
    analysis = analysis_of(steps_of(forward=10), windows=windows, config=config, notes=(IGNORED_CALLBACK,))
    lines = short_lines(build_report(analysis), None, "utf-8")
    text = "\n".join(lines[:8])
    assert "Not done: Profiler window: asked for steps 100–110, training ended at step 19" in text
    assert "Not done: fvcore: " in text
    assert "Not done: A second ModelProfCallback was ignored" in text


@pytest.mark.parametrize("encoding", ["ascii", "cp437", "cp1252", "latin-1"])
def test_windows_console_gets_text_it_can_show(encoding, kind):
    _, report = kind
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    print_report(report, stream)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "\\u" not in text
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_no_line_is_wider_than_terminal(encoding, kind):
    for width in range(40, 101):
        screen = Screen(width=width, has_styles=False, has_colours=False)
        lines = short_lines(kind[1], screen, encoding)
        assert max(map(cell_len, lines)) <= width


def test_pipe_gets_no_escape_sequences(kind):
    print_report(kind[1], drawn := io.StringIO())
    assert "\x1b" not in drawn.getvalue()
    assert len(drawn.getvalue().splitlines()) <= 20


def test_colours_and_links_appear_only_if_supported(monkeypatch):
    report = found(None)
    assert "\x1b" not in printed(report, monkeypatch, TERM="dumb")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", printed(report, monkeypatch, NO_COLOR="1"))
    assert "\x1b]8;;" not in printed(report, monkeypatch)
    assert "\x1b]8;;file:///home/me/train.py\x1b\\" in printed(report, monkeypatch, TERM_PROGRAM="iTerm.app")
    assert "vscode://file/home/me/train.py:7" in printed(report, monkeypatch, TERM_PROGRAM="vscode")
    assert "\x1b]8;;" not in printed(report, monkeypatch, TERM_PROGRAM="vscode", TMUX="1")


def test_full_prints_all_tables(monkeypatch):
    print_report(found(None), short := io.StringIO())
    print_report(found(None), full := io.StringIO(), full=True)
    assert "Perf Summary" in full.getvalue()
    assert "Perf Summary" not in short.getvalue()


# Tables and the card from Python


def test_table_is_found_by_id():
    report = found(None)
    assert report.table("phases").id == "phases"
    with pytest.raises(KeyError, match="Did you mean 'phases'"):
        report.table("phase")


def test_table_exports_to_dataframe_csv_and_markdown():
    pandas = pytest.importorskip("pandas")
    table = found(None).table("phases")
    frame = table.to_dataframe()
    assert list(frame.columns)[-len(table.columns) :] == [column.key for column in table.columns]
    assert [
        tuple(row[-len(table.columns) :])
        for row in frame.astype(object).where(frame.notna(), None).values.tolist()
    ] == list(table.rows)
    again = pandas.read_csv(io.StringIO(table.to_csv()))
    assert list(again.columns) == list(frame.columns)
    assert len(again) == len(table.rows)
    assert table.to_markdown().count("\n| ") >= len(table.rows)


def test_step_card_exports_to_svg():
    svg = found(None).step_card_svg()
    assert svg.startswith("<svg")
    assert "50.8 →" in svg
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    with pytest.raises(ValueError, match="no step was measured"):
        no_steps(None).step_card_svg()


def test_card_escapes_hostile_names():
    report = found(None)
    [finding] = [one for one in report.findings if one.kind == "input_bound"]
    place = replace(finding.locations[0], function="<script>alert(1)</script>")
    harmful = replace(finding, title="<img src=x onerror=alert(1)>", locations=(place,))
    card = replace(report.step_card, step="<b>&")
    html = report_card(replace(report, findings=(harmful,), step_card=card))
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "<b>&<" not in html
    assert "<b>&amp;" not in html


def test_torch_prints_no_notices_during_windows(tmp_path):
    from tests.support.fits import run_script  # noqa: PLC0415

    script = (
        "import os, sys\nfrom pathlib import Path\nfrom tests.support.fits import *\n"
        "run_fit(Path(sys.argv[1]), active=2)\nprint('KINETO_LOG_LEVEL' in os.environ)\n"
    )
    result = run_script(script, str(tmp_path), cwd=tmp_path)
    assert "USDT" not in result.stderr
    assert "False" in result.stdout
