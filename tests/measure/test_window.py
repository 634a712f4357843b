"""The profiler window in real fits: the steps it records, how it ends and when it is refused."""

from __future__ import annotations

import json
import signal
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from isal import igzip
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_modelprof.engine import trace_work
from lightning_modelprof.engine.outputs import NOWHERE, Outputs
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.trace_work import Setting
from lightning_modelprof.engine.traces import Traces
from lightning_modelprof.engine.windows import Windows
from lightning_modelprof.measure.window.torch_profiler import CaptureOptions
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.report.tables.run.all_tables import TRACE_TABLES
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.run.steps import StepTag
from tests.support.documents import raw_rows
from tests.support.fits import (
    Fetching,
    Manual,
    Net,
    Numbers,
    fit_quietly,
    is_profiling,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    phase_ranges,
    report_of,
    run_fit,
    run_script,
    step_ranges,
    steps_of,
    table_of,
    trace_of,
    windows_of,
)
from tests.support.traces import summarize

pytestmark = pytest.mark.slow

CORE = ("dataloader", "forward", "backward", "optimizer")
_IF_SLOW = ("worst_step", "num_workers")
"""Tables that a run has only if a step or its batches were slow."""


class Failure(Exception):
    """The exception that tests raise in training."""


def notes_on_windows(callback):
    """Notes on windows only: on a busy machine others report gaps between steps in traces."""
    return [note for note in callback.report.notes if note.startswith("Profiler window")]


def fail_at(batch, error=Failure):
    def at_batch(batch_idx):
        if batch_idx == batch:
            raise error

    return at_batch


def assert_sums(summary):
    """The parts of a Model Summary sum to the whole, to the nanosecond."""
    whole = sum(row.host_total_ns for row in summary.rows if row.depth == 0)
    assert sum(row.host_total_ns for row in summary.rows if row.depth == 1) == whole
    (others,) = (row.host_total_ns for row in summary.rows if row.key == "others")
    assert sum(row.host_total_ns for row in summary.rows if row.depth == 2) == others


def assert_nested(trace):
    """Steps follow each other; phase ranges nest like calls and don't cross step boundaries."""
    steps = step_ranges(trace)
    for (_, _, end), (_, begin, _) in pairwise(steps):
        assert end <= begin
    open_ranges = []
    events = sorted([*steps, *phase_ranges(trace)], key=lambda event: (event[1], -event[2]))
    for name, begin, end in events:
        while open_ranges and open_ranges[-1][2] <= begin:
            open_ranges.pop()
        assert not open_ranges or end <= open_ranges[-1][2], (name, open_ranges[-1])
        assert open_ranges or name.isdecimal(), f"{name} lies outside of the steps"
        open_ranges.append((name, begin, end))


@pytest.mark.parametrize(
    ("arguments", "num_batches", "expected"),
    [
        pytest.param({"active": 3}, 12, [[2, 3, 4]], id="wait and warmup of 1"),
        pytest.param({"active": 2, "skip_first": 3}, 12, [[5, 6]], id="skip_first"),
        pytest.param({"active": 2, "repeat": 2}, 12, [[2, 3], [6, 7]], id="two windows"),
        pytest.param({"active": 2, "repeat": 0, "wait": 2}, 12, [[3, 4], [8, 9]], id="repeat=0"),
        pytest.param(
            {"active": 2, "repeat": 0, "wait": 0, "warmup": 0},
            6,
            [[0, 1], [2, 3], [4, 5]],
            id="repeat=0 to the end",
        ),
        pytest.param(
            {"active": 2, "repeat": 3, "wait": 0, "warmup": 0},
            12,
            [[0, 1], [2, 3], [4, 5]],
            id="back to back",
        ),
        pytest.param({"active": 1, "repeat": 2, "wait": 0}, 12, [[1], [3]], id="one step"),
        pytest.param({"steps": (3, 14)}, 20, [list(range(3, 14))], id="Paddle's (3, 14)"),
        pytest.param({"steps": (0, 2)}, 6, [[0, 1]], id="from the very first step"),
        pytest.param({"steps": (3, 6)}, 6, [[3, 4, 5]], id="to the very last step"),
    ],
)
def test_window_records_requested_steps(tmp_path, arguments, num_batches, expected):
    callback = run_fit(tmp_path, data=loader(2 * num_batches), **arguments)
    windows = windows_of(callback)
    assert [list(window.recorded_steps) for window in windows] == expected
    assert {window.status for window in windows} == {WindowStatus.COMPLETE}
    files = {str(path.relative_to(tmp_path / "modelprof")) for path in tmp_path.glob("modelprof/traces/*")}
    assert files == {window.trace_file for window in windows}  # no raw file is left
    for window in windows:
        trace = trace_of(tmp_path, window)
        recorded = list(window.recorded_steps)
        assert [int(name) for name, _, _ in step_ranges(trace)] == recorded
        assert trace.metadata["modelprof"]["recorded_steps"] == recorded
        assert_nested(trace)
        summary = summarize(trace)
        assert summary.phase_source == "modelprof ranges"
        assert list(summary.step_numbers) == recorded
        assert_sums(summary)
        calls = {row.key: row.calls for row in summary.rows}
        assert {key: calls[key] for key in ("profile_step", *CORE)} == dict.fromkeys(
            ("profile_step", *CORE), len(recorded)
        )
    assert not is_profiling()
    ids = [table.id for table in callback.report.tables if table.id.startswith("model_summary")]
    assert ids == ["model_summary", *(f"model_summary_{i}" for i in range(1, len(expected)))]


def test_window_across_epoch_boundary(tmp_path):
    callback = run_fit(tmp_path, data=loader(8), trainer={"max_epochs": 3}, steps=(2, 7))
    (window,) = windows_of(callback)
    assert window.recorded_steps == (2, 3, 4, 5, 6)
    trace = trace_of(tmp_path, window)
    assert [int(name) for name, _, _ in step_ranges(trace)] == [2, 3, 4, 5, 6]
    assert_nested(trace)
    tags = steps_of(callback).tags
    assert tags[4] == StepTag.PROFILED | StepTag.FIRST_OF_EPOCH
    summary = summarize(trace)
    assert_sums(summary)
    assert "dataloader_init" in {row.key for row in summary.rows}


def test_phases_lie_inside_their_step_in_order(tmp_path):
    callback = run_fit(tmp_path, steps=(2, 4))
    trace = trace_of(tmp_path, windows_of(callback)[0])
    assert [int(name) for name, _, _ in step_ranges(trace)] == [2, 3]
    for _, begin, end in step_ranges(trace):
        inside = {name: (b, e) for name, b, e in phase_ranges(trace) if begin <= b and e <= end}
        assert inside.keys() >= {*CORE, "zero_grad"}
        fetch, forward, backward, optimizer = (inside[key] for key in CORE)
        assert begin <= fetch[0] <= fetch[1] <= optimizer[0]
        # Lightning's optimizer step calls the closure
        assert optimizer[0] <= forward[0] <= forward[1] <= backward[0] <= backward[1] <= optimizer[1] <= end


class Slow(Net):
    """Spends known time in forward, backward and the optimizer."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.024)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        time.sleep(0.016)
        loss.backward()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: time.sleep(0.012))
        return optimizer


class SlowNumbers(Numbers):
    def __getitem__(self, index):
        time.sleep(0.010)
        return super().__getitem__(index)


def own_ns(name, trace):
    """Own time of one phase's ranges, one per step."""
    ranges = phase_ranges(trace)
    return [
        (end - begin) - sum(e - b for _, b, e in ranges if begin <= b and e <= end and (b, e) != (begin, end))
        for one, begin, end in ranges
        if one == name
    ]


def test_model_summary_agrees_with_ledger(tmp_path):
    """Two measurements of the same steps: our clock, and torch's timestamps of our ranges.

    A busy machine may stop the thread between the two timestamps of any step, so the closest of six are
    compared: an error in our arithmetic would show in each.
    """
    data = torch.utils.data.DataLoader(SlowNumbers(24), batch_size=2)
    callback = run_fit(tmp_path, module=Slow(), data=data, steps=(3, 9))
    (window,) = windows_of(callback)
    trace = trace_of(tmp_path, window)
    steps = steps_of(callback)
    recorded = steps.select((steps.step >= 3) & (steps.step < 9))
    assert (recorded.tags == StepTag.PROFILED).all()
    rows = {row.key: row for row in summarize(trace).rows}
    for key, least_ns in zip(CORE, (20e6, 24e6, 16e6, 12e6), strict=True):
        ledger_ns = recorded.phases_ns[:, PHASE_INDEX[key]]
        assert (ledger_ns >= least_ns).all()
        of_ranges_ns = own_ns(key, trace)
        assert rows[key].host_total_ns == sum(of_ranges_ns)
        assert np.sort(np.abs(ledger_ns - of_ranges_ns))[1] < 600_000, key
    # The ledger's first step includes opening the window; the trace doesn't.
    ledger_ns = recorded.duration_ns - recorded.phases_ns[:, PHASE_INDEX["profiler"]]
    of_ranges_ns = [end - begin for _, begin, end in step_ranges(trace)]
    assert rows["profile_step"].host_total_ns == sum(of_ranges_ns)
    assert np.sort(np.abs(ledger_ns - of_ranges_ns))[1] < 1_000_000


def test_report_table_matches_model_summary(tmp_path):
    callback = run_fit(tmp_path, steps=(3, 6))
    summary = summarize(trace_of(tmp_path, windows_of(callback)[0]))
    rows = raw_rows(report_of(tmp_path)["tables"]["model_summary"])
    assert [row["host_total_ns"] for row in rows] == [row.host_total_ns for row in summary.rows]
    assert table_of(callback.report, "model_summary").title == "Model Summary (steps 3 to 5)"


def test_tables_come_in_reading_order(tmp_path):
    callback = run_fit(tmp_path, active=2, repeat=2)
    tables = [table for table in callback.report.tables if table.id not in _IF_SLOW]
    of_the_run = [
        "perf_summary",
        "phases",
        "slow_steps",
        "callbacks",
        "around",
        "memory_peaks",
        "memory_by_phase",
    ]
    assert [table.id for table in tables[:9]] == [*of_the_run, "model_summary", "model_summary_1"]
    of_newest = tables[9:]
    assert all(table.title.endswith(" of window 1") for table in of_newest)
    kinds = [kind for kind in TRACE_TABLES if kind.view != "model"]
    assert len(of_newest) == len(kinds)
    names = ["device_usage", "critical_path", "critical_path_parts", "what_if", "overview", "distributed"]
    assert [table.id.removesuffix("_1") for table in of_newest][:6] == names


def test_no_window_tables_without_window(tmp_path):
    callback = run_fit(tmp_path, active=0)
    ids = [table.id for table in callback.report.tables if table.id not in _IF_SLOW]
    assert ids == [
        "perf_summary",
        "phases",
        "slow_steps",
        "callbacks",
        "around",
        "memory_peaks",
        "memory_by_phase",
    ]


def test_single_window_has_no_number(tmp_path):
    callback = run_fit(tmp_path, steps=(3, 6))
    assert not [table.title for table in callback.report.tables if "of window" in table.title]


# Windows that end early


def test_training_ends_inside_window(tmp_path):
    callback = run_fit(tmp_path, data=loader(16), steps=(3, 14))
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.PARTIAL
    assert window.recorded_steps == (3, 4, 5, 6, 7)
    assert len(steps_of(callback)) == 8
    summary = summarize(trace_of(tmp_path, window))
    assert summary.step_numbers == window.recorded_steps
    assert_sums(summary)
    (note,) = (note for note in callback.report.notes if "partial" in note)
    assert "training ended first" in note
    assert "steps 3 to 13" in note
    table = table_of(callback.report, "model_summary")
    assert "steps 3 to 7" in table.title
    assert any("partial" in note for note in table.notes)


def test_window_is_not_reached(tmp_path):
    callback = run_fit(tmp_path, data=loader(16), steps=(30, 40))
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.NOT_REACHED
    assert window.trace_file is None
    assert not window.recorded_steps
    table = table_of(callback.report, "model_summary")
    assert table.rows == ()
    assert table.absent_reason == "not recorded: training ended before step 30"
    assert any("not reached" in note and "steps 30 to 39" in note for note in callback.report.notes)
    assert "not reached" in (tmp_path / "modelprof" / "report.txt").read_text()
    assert report_of(tmp_path)["summary"]["windows"][0]["status"] == "not_reached"


def test_second_window_is_not_reached(tmp_path):
    callback = run_fit(tmp_path, data=loader(12), active=2, repeat=2, wait=2, warmup=1)
    first, second = windows_of(callback)
    assert first.status is WindowStatus.COMPLETE
    assert second.status is WindowStatus.NOT_REACHED
    assert (second.first_step, second.last_step) == (8, 9)
    # The tables show the newest window that has a trace.
    assert table_of(callback.report, "operators").title == "Operator Summary of window 0"
    assert table_of(callback.report, "operators").rows
    assert not table_of(callback.report, "model_summary_1").rows


def test_training_ends_in_warmup(tmp_path):
    callback = run_fit(tmp_path, data=loader(8), active=3, wait=2, warmup=6)
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.EMPTY
    assert window.trace_file is None
    assert any("empty" in note and "training ended first" in note for note in callback.report.notes)
    assert (
        table_of(callback.report, "model_summary").absent_reason
        == "not recorded: training ended before the end of step 8"
    )
    assert steps_of(callback).tags[2:].tolist() == [StepTag.PROFILER_WARMUP] * 2


@pytest.mark.parametrize("length", [4, 5, 6, 7])
def test_repeat_0_notes_no_last_window_without_step(tmp_path, length):
    """Cycles of four steps (wait, warmup, two active) may end at any step."""
    callback = run_fit(tmp_path, data=loader(2 * length), active=2, repeat=0)
    recorded = [window.recorded_steps for window in windows_of(callback)]
    assert recorded == ([(2, 3)] if length < 7 else [(2, 3), (6,)])
    assert len(notes_on_windows(callback)) == (length == 7)
    assert not is_profiling()


@pytest.mark.parametrize(
    ("batch", "status", "recorded"),
    [
        pytest.param(6, WindowStatus.PARTIAL, (4, 5), id="inside"),
        pytest.param(4, WindowStatus.EMPTY, (), id="in its first step"),
        pytest.param(3, WindowStatus.EMPTY, (), id="in warm-up"),
        pytest.param(1, WindowStatus.NOT_REACHED, (), id="before"),
    ],
)
def test_exception_ends_window(tmp_path, batch, status, recorded):
    arguments = {"wait": 2, "warmup": 2, "active": 6}
    callback = make_callback(tmp_path, **arguments)
    trainer = make_trainer(tmp_path, callback)
    profiler = trainer.profiler
    with pytest.raises(Failure):
        fit_quietly(trainer, Net(fail_at(batch)), loader())
    assert not is_profiling()
    assert trainer.profiler is profiler
    (window,) = windows_of(callback)
    assert window.status is status
    assert window.recorded_steps == recorded
    assert window.note == "training failed first"
    assert len(steps_of(callback)) == batch
    assert callback.run.ranks[0].unfinished_steps == 1
    assert callback.run.info.status == "failed"
    report = report_of(tmp_path)
    assert report["summary"]["run"]["num_steps"] == batch
    assert (tmp_path / "modelprof" / "run.json").exists()
    if recorded:
        summary = summarize(trace_of(tmp_path, window))
        assert summary.step_numbers == recorded
        assert_sums(summary)

    again = run_fit(tmp_path / "again", **arguments)
    assert windows_of(again)[0].status is WindowStatus.COMPLETE


@pytest.fixture
def interrupt_handler():
    """Restore the handler for later tests: Lightning ignores Ctrl-C after the first one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupt_handler")
def test_keyboard_interrupt_ends_window(tmp_path):
    callback = make_callback(tmp_path, steps=(2, 9))
    with pytest.raises(SystemExit):
        fit_quietly(make_trainer(tmp_path, callback), Net(fail_at(5, KeyboardInterrupt)), loader())
    assert not is_profiling()
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.PARTIAL
    assert window.recorded_steps == (2, 3, 4)
    assert window.note == "training was interrupted first"
    assert report_of(tmp_path)["summary"]["run"]["status"] == "interrupted"


# Stopping after the window


@pytest.mark.parametrize(
    ("arguments", "trainer", "num_steps"),
    [
        # The window closes when the next batch is fetched; that batch is still trained.
        pytest.param({"steps": (2, 5)}, {}, 6, id="one window"),
        pytest.param({"active": 1, "repeat": 2, "wait": 0}, {}, 5, id="after the last of two"),
        pytest.param({"steps": (2, 8)}, {"limit_train_batches": 8}, 8, id="at the end of an epoch"),
        pytest.param({"steps": (2, 5)}, {"min_steps": 12, "min_epochs": 0}, 12, id="not before min_steps"),
        # In Lightning min_steps alone implies min_epochs=1, so the epoch's 32 batches are trained.
        pytest.param({"steps": (2, 5)}, {"min_steps": 12}, 32, id="min_steps alone"),
        pytest.param(
            {"steps": (2, 5)}, {"min_epochs": 2, "limit_train_batches": 7}, 14, id="not before min_epochs"
        ),
    ],
)
def test_stop_after_profile_ends_training(tmp_path, arguments, trainer, num_steps):
    callback = run_fit(tmp_path, trainer={"max_epochs": 4} | trainer, stop_after_profile=True, **arguments)
    assert len(steps_of(callback)) == num_steps
    assert {window.status for window in windows_of(callback)} == {WindowStatus.COMPLETE}
    assert callback.run.info.status == "finished"
    assert callback.report is not None


# Trace contents


def raw_trace(folder, window):
    return json.loads(igzip.decompress((folder / "modelprof" / window.trace_file).read_bytes()))


def events_of(folder, callback):
    return raw_trace(folder, windows_of(callback)[0])["traceEvents"]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    ("argument", "is_there"),
    [
        ("record_shapes", lambda event: "Input Dims" in event.get("args", {})),
        ("with_stack", lambda event: event.get("cat") == "python_function"),
        ("profile_memory", lambda event: event["name"] == "[memory]"),
    ],
    ids=["record_shapes", "with_stack", "profile_memory"],
)
def test_options_reach_trace(tmp_path, argument, is_there, asked):
    callback = run_fit(tmp_path, steps=(1, 2), **{argument: asked})
    assert any(is_there(event) for event in events_of(tmp_path, callback)) == asked


def test_cpu_activity_is_recorded(tmp_path):
    callback = run_fit(tmp_path, steps=(1, 3), activities=["cpu"])
    assert any(event.get("cat") == "cpu_op" for event in events_of(tmp_path, callback))
    assert not notes_on_windows(callback)


@pytest.mark.filterwarnings("ignore:.*is not available")
@pytest.mark.parametrize("names", [["cpu"], ["cuda"], ["cpu", "xpu"]])
def test_activities_match_torch_profiler(names):
    profiler = CaptureOptions(activities=names).make_profiler()
    assert {activity.name.lower() for activity in profiler.activities} == set(names)


# Kinds of training


def test_window_with_manual_optimization(tmp_path):
    callback = run_fit(tmp_path, module=Manual(), steps=(2, 5))
    trace = trace_of(tmp_path, windows_of(callback)[0])
    assert_nested(trace)
    summary = summarize(trace)
    assert_sums(summary)
    assert {row.key: row.calls for row in summary.rows if row.key in CORE} == dict.fromkeys(CORE, 3)


def test_training_step_with_dataloader_iter(tmp_path):
    callback = run_fit(tmp_path, module=Fetching(), steps=(2, 5))
    (window,) = windows_of(callback)
    assert window.recorded_steps == (2, 3, 4)
    trace = trace_of(tmp_path, window)
    assert [int(name) for name, _, _ in step_ranges(trace)] == [2, 3, 4]
    assert_nested(trace)
    summary = summarize(trace)
    assert_sums(summary)
    assert {row.key: row.calls for row in summary.rows if row.key in CORE} == dict.fromkeys(CORE, 3)


def test_validation_inside_window(tmp_path):
    callback = run_fit(
        tmp_path, val=loader(8), trainer={"val_check_interval": 4, "num_sanity_val_steps": 1}, steps=(2, 6)
    )
    (window,) = windows_of(callback)
    assert window.recorded_steps == (2, 3, 4, 5)
    assert steps_of(callback).tags[3] == StepTag.PROFILED | StepTag.VALIDATION
    trace = trace_of(tmp_path, window)
    assert_nested(trace)
    steps = {name: (begin, end) for name, begin, end in step_ranges(trace)}
    ((_, begin, end),) = (event for event in phase_ranges(trace) if event[0] == "validation")
    assert steps["3"][0] <= begin <= end <= steps["3"][1]
    summary = summarize(trace)
    assert_sums(summary)
    (row,) = (row for row in summary.rows if row.key == "validation")
    assert row.depth == 2
    ledger_ns = int(steps_of(callback).phases_ns[3, PHASE_INDEX["validation"]])
    assert row.host_total_ns == pytest.approx(ledger_ns, rel=0.1, abs=500_000)


def test_tags_exclude_steps_from_benchmark(tmp_path):
    callback = run_fit(tmp_path, data=loader(24), steps=(5, 8), skip_first=2)
    first, skip = StepTag.FIRST_OF_EPOCH, StepTag.SKIP_FIRST
    warm, on, stop = StepTag.PROFILER_WARMUP, StepTag.PROFILED, StepTag.PROFILER_STOP
    assert steps_of(callback).tags.tolist() == [first | skip, skip, 0, 0, warm, on, on, on, stop, 0, 0, 0]
    benchmark = report_of(tmp_path)["summary"]["benchmark"]
    clean = [2, 3, 9, 10, 11]
    assert benchmark["num_steps"] == len(clean)
    steps = steps_of(callback)
    ours = steps.phases_ns[clean, PHASE_INDEX["profiler"]]  # work between steps
    net_ns = steps.duration_ns[clean] - ours
    assert benchmark["batch_cost_ns"]["max"] == net_ns.max()
    assert benchmark["batch_cost_ns"]["avg"] == net_ns.sum() / len(clean)
    assert sum(left["num_steps"] for left in report_of(tmp_path)["summary"]["run"]["excluded_steps"]) == 7


def test_back_to_back_windows_share_step(tmp_path):
    callback = run_fit(tmp_path, data=loader(12), active=2, repeat=2, wait=0, warmup=0)
    on, stop = StepTag.PROFILED, StepTag.PROFILER_STOP
    assert steps_of(callback).tags.tolist() == [on | StepTag.FIRST_OF_EPOCH, on, on | stop, on, stop, 0]


# Other torch profilers


def test_timing_works_with_lightning_pytorch_profiler(tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="theirs")
    callback = run_fit(tmp_path, data=loader(16), trainer={"profiler": profiler}, active=0)
    assert len(steps_of(callback)) == 8
    assert callback.report is not None
    assert list(tmp_path.glob("*.pt.trace.json*"))


def test_recording_profiler_refuses_window_not_training(tmp_path):
    callback = make_callback(tmp_path, active=3)
    trainer = make_trainer(tmp_path, callback)
    with torch.profiler.profile() as theirs, our_warnings() as messages:
        fit_quietly(trainer, Net(), loader())
    assert len(messages) == 1
    assert trainer.global_step == 32
    assert windows_of(callback)[0].status is WindowStatus.REFUSED
    assert theirs.events() is not None

    timing = make_callback(tmp_path, active=0)
    with torch.profiler.profile():
        fit_quietly(make_trainer(tmp_path, timing), Net(), loader())
    assert timing.report is not None


# torch 2.13 can crash the process when two profilers meet, so each case runs in a process forked from one
# that has done the imports.
FOREIGN = """
import json, os, sys
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from tests.support.fits import *

class Foreign(Callback):
    def __init__(self, begin, end):
        self.begin, self.end = begin, end
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.begin:
            self.profiler = torch.profiler.profile()
            self.profiler.__enter__()
        if batch_idx == self.end:
            self.profiler.__exit__(None, None, None)

def case(name, begin, end):
    with our_warnings() as messages:
        # wait 0 to 1, warm-up 2 to 4, active 5 to 7, then the same again from step 8 on
        callback = run_fit(
            Path(name), others=[Foreign(begin, end)], wait=2, warmup=3, active=3, repeat=2, data=loader(40)
        )
    windows = [[w.status.value, list(w.recorded_steps), w.note] for w in windows_of(callback)]
    result = dict(windows=windows, steps=len(steps_of(callback)), messages=messages,
                  notes=callback.report.notes, is_profiling=is_profiling())
    Path(name + ".json").write_text(json.dumps(result))

for argument in sys.argv[1:]:
    name, begin, end = argument.split(":")
    child = os.fork()
    if child == 0:
        try:
            case(name, int(begin), int(end))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if Path(name + ".json").exists() else 3)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""

FOREIGN_CASES = {"before": (1, 9), "in_warmup": (3, 7), "in_warmup_until_end": (3, 19), "over_before": (0, 1)}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    arguments = [f"{name}:{begin}:{end}" for name, (begin, end) in FOREIGN_CASES.items()]
    result = run_script(FOREIGN, *arguments, cwd=folder)
    files = {name: folder / f"{name}.json" for name in FOREIGN_CASES}
    return {
        name: json.loads(path.read_text()) if path.exists() else result.stderr for name, path in files.items()
    }


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("before", ["refused", "complete"]),
        ("in_warmup", ["refused", "complete"]),
        ("in_warmup_until_end", ["refused", "refused"]),
        ("over_before", ["complete", "complete"]),
    ],
)
def test_foreign_profiler_that_starts_later(foreign, name, statuses):
    result = foreign[name]
    assert isinstance(result, dict), result
    assert [status for status, _, _ in result["windows"]] == statuses
    assert result["steps"] == 20
    assert not result["is_profiling"]
    num_refused = statuses.count("refused")
    assert len([note for note in result["notes"] if "refused" in note]) == num_refused
    assert len(result["messages"]) == min(num_refused, 1), result["messages"]
    for message in result["messages"]:
        assert "another torch profiler" in message


class Order(Callback):
    """Records whether a profiler is active when other callbacks run."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, *args):
        self.seen.append(is_profiling())


def test_torch_records_only_in_window(tmp_path):
    order = Order()
    run_fit(tmp_path, data=loader(16), others=[order], steps=(3, 5))
    assert order.seen == [False] * 3 + [True] * 2 + [False] * 3


def test_no_warning_in_normal_fit(tmp_path):
    with our_warnings() as messages:
        run_fit(tmp_path, steps=(3, 5))
    assert messages == []


# A foreign profiler inside our window runs in its own process, because torch may crash it.

FOREIGN_INSIDE = """
import sys
from pathlib import Path
import torch
from tests.support.fits import *

def at_batch(batch_idx):
    if batch_idx == 3:
        with torch.profiler.profile():
            torch.ones(2).sum()
        if sys.argv[1] == "raise":
            raise ValueError("the user's own error")

run_fit(Path("."), module=Net(at_batch), steps=(2, 7))
"""


@pytest.mark.parametrize("outcome", ["go on", "raise"])
def test_foreign_profiler_inside_window_loses_only_window(tmp_path, outcome):
    result = run_script(FOREIGN_INSIDE, outcome, cwd=tmp_path)
    assert result.returncode == (1 if outcome == "raise" else 0), result.stderr[-3000:]
    assert ("the user's own error" in result.stderr) == (outcome == "raise")
    (window,) = load_run(tmp_path / "modelprof").ranks[0].windows
    assert window.status is WindowStatus.REFUSED
    assert "another torch profiler ran during this window" in window.note
    assert window.trace_file is None


class SlowBatchEnd(Net):
    def on_train_batch_end(self, *args):
        time.sleep(0.016)


def test_batch_end_hook_agrees_in_trace_and_ledger(tmp_path):
    callback = run_fit(tmp_path, module=SlowBatchEnd(), steps=(3, 6))
    steps = callback.run.ranks[0].steps
    of_ledger = steps.phases_ns[3:6, PHASE_INDEX["module_hooks"]].sum()
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    rows = {row[0]: row for row in table.rows}
    assert of_ledger >= 12_000_000
    assert rows["Module hooks"][2] == pytest.approx(of_ledger, rel=0.05)


def test_many_windows_are_reported_rarely_and_in_part(tmp_path, monkeypatch):
    reports = []
    build_report = trace_work.build_report
    monkeypatch.setattr(trace_work, "build_report", lambda *given: reports.append(1) or build_report(*given))
    callback = run_fit(tmp_path, active=1, wait=1, warmup=0, repeat=0, skip_first=0)
    windows = callback.run.ranks[0].windows
    assert len(windows) > 10
    assert all((tmp_path / "modelprof" / window.trace_file).exists() for window in windows)
    assert len(reports) == 2  # at the first window and at the end
    tables = [table for table in callback.report.tables if table.id.startswith("model_summary")]
    assert len(tables) == 3
    assert f"{len(windows) - 3} earlier windows" in tables[0].notes[-1]
    assert len(callback.report.summary.windows) == len(windows)


def test_facts_of_newest_windows_are_kept(tmp_path):
    """A long run has thousands of windows, and each window's facts take memory."""
    warnings = []
    outputs = Outputs(RunFolder(path=None, created=""), [], NOWHERE, warnings.append)
    setting = Setting(folder=outputs.folder, loop="fit", options=DEFAULT_OPTIONS)
    results = Traces(Windows(outputs, warnings.append), outputs, setting)
    for index in range(5):
        raw = tmp_path / "raw.json"
        raw.write_text("no trace" if index == 3 else '{"traceEvents": []}')
        steps = {"first_step": index, "last_step": index, "recorded_steps": (index,)}
        window = Window(index=index, status=WindowStatus.COMPLETE, **steps)
        results.add(window, raw, lambda: 0)
        assert not raw.exists()
        results.poll()
    assert list(results._helper.facts()) == [1, 2, 4]
    assert list(results.windows.trace_notes) == [3]
    assert [window.index for window in results.windows.listed] == [0, 1, 2, 3, 4]
    assert warnings == []


def test_no_place_for_trace_loses_only_window(tmp_path, monkeypatch):
    """As if the temporary folder was deleted."""

    def nowhere(self, window):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(Windows, "raw_path", nowhere)
    with our_warnings() as messages:
        callback = run_fit(tmp_path, steps=(3, 5))
    assert len(messages) == 1
    assert "window 0 was not recorded: there is no place for its trace: No usable temporary" in messages[0]
    assert (callback.run.info.status, len(steps_of(callback))) == ("finished", 32)
    assert not is_profiling()
