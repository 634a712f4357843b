"""Limits of windows: trace size, kept traces, recording ranks and listed windows."""

from __future__ import annotations

import gc
import gzip
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import record_function

from lightning_modelprof.config.options import Bounds, ProfileConfig
from lightning_modelprof.engine import windows
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.outputs import NOWHERE, Outputs
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.trace_work import Setting
from lightning_modelprof.engine.traces import Traces
from lightning_modelprof.engine.windows import FIRST_LISTED, NEWEST_LISTED, Windows, why_no_window
from lightning_modelprof.measure.window import torch_profiler as trace_size
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.measure.window.schedule import Schedule, WindowAction
from lightning_modelprof.measure.window.torch_profiler import CaptureOptions, TraceSize, heap_bytes
from lightning_modelprof.measure.window.window_plan import NEVER, WindowPlan
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.run.steps import NOT_CLEAN, StepTag
from tests.support.fits import (
    is_profiling,
    loader,
    our_warnings,
    report_of,
    run_fit,
    run_script,
    step_ranges,
    steps_of,
    trace_of,
    windows_of,
)

pytestmark = pytest.mark.slow

WARMUP, PROFILED, STOP = StepTag.PROFILER_WARMUP, StepTag.PROFILED, StepTag.PROFILER_STOP
NONE = StepTag(0)
MB = 1_000_000

# The steps of a schedule, on every rank


def tags_of(steps, num_steps):
    """Tags by step number; as in the loop, only the next due step asks the plan."""
    tags = [NONE] * num_steps
    plan = getattr(steps, "plan", steps)
    for step in range(num_steps):
        if step == plan.next_step:
            tags[step] = steps.begin_step(step)
            assert plan.next_step > step
    return tags


TWICE = Schedule(skip_first=2, wait=1, warmup=1, active=2, repeat=2)
"""Steps 0 and 1 skipped, 2 wait, 3 warm-up, 4 and 5 active, 6 wait, 7 warm-up, 8 and 9 active."""


def watching(schedule, lag=0):
    """The plan of a rank that records nothing."""
    return WindowPlan(schedule, records=False, lag=lag)


def test_scheduled_steps_are_tagged():
    expected = [NONE] * 3 + [WARMUP, PROFILED, PROFILED, STOP, WARMUP, PROFILED, PROFILED, STOP] + [NONE] * 5
    assert tags_of(watching(TWICE), 16) == expected


def test_lag_extends_tags_after_window():
    """With three batches per optimizer step, other ranks may wait for the closing two steps later."""
    first = [NONE] * 3 + [WARMUP, PROFILED, PROFILED, STOP, STOP | WARMUP, STOP | PROFILED, PROFILED]
    assert tags_of(watching(TWICE, lag=2), 16) == first + [STOP] * 3 + [NONE] * 3


@pytest.mark.parametrize("repeat", [0, 1, 3])
@pytest.mark.parametrize("wait", [0, 2])
@pytest.mark.parametrize("warmup", [0, 1])
def test_tags_match_action_of_each_step(repeat, wait, warmup):
    schedule = Schedule(skip_first=1, wait=wait, warmup=warmup, active=2, repeat=repeat)
    tag = {
        WindowAction.WAIT: NONE,
        WindowAction.WARMUP: WARMUP,
        WindowAction.ACTIVE: PROFILED,
        WindowAction.ACTIVE_LAST: PROFILED,
    }
    expected = [
        tag[schedule.action(step)]
        | (STOP if step and schedule.action(step - 1) is WindowAction.ACTIVE_LAST else NONE)
        for step in range(25)
    ]
    assert tags_of(watching(schedule), 25) == expected


def test_empty_schedule_has_no_steps():
    steps = watching(Schedule(active=0))
    assert (steps.next_step, steps.is_done) == (NEVER, True)


def make_capture(folder, schedule, *, closed=None, max_trace_mb=None, **plan):
    def take_window(window, path):
        assert closed is not None, f"{window} on a rank that records nothing"
        closed.append(window)

    owner = SimpleNamespace(
        rank=0,
        epoch_step=0,
        why_no_window=str,
        raw_path=lambda window: folder / f"{window.index}.json",
        trace_metadata=lambda begin_ns, end_ns: {},
        take_window=take_window,
    )
    options = CaptureOptions(max_trace_mb=max_trace_mb)
    return Capture(WindowPlan(schedule, **plan), options, owner, lambda: 0)


def test_rank_without_windows_tags_the_same_steps(tmp_path):
    closed = []
    recording = make_capture(tmp_path, TWICE, closed=closed, lag=0)
    other_rank = make_capture(tmp_path, TWICE, records=False, lag=0)
    other = tags_of(other_rank, 16)
    assert not is_profiling()
    assert tags_of(recording, 16) == other == tags_of(watching(TWICE), 16)
    assert [window.status for window in closed] == [WindowStatus.COMPLETE] * 2
    other_rank.finish("training ended first")
    other_rank.abandon()


def grow_by(*growths):
    """Memory in use that grows by these amounts between readings."""
    in_use, growth = 100 * MB, iter(growths)

    def read():
        nonlocal in_use
        in_use += next(growth)
        return in_use

    return read


def growing(monkeypatch, by=8 * MB):
    """Make memory grow steadily; returns the list of readings."""
    readings, grown = [], count(100 * MB, by)
    monkeypatch.setattr(trace_size, "heap_bytes", lambda: readings.append(next(grown)) or readings[-1])
    return readings


def test_ranks_finish_at_same_step_if_window_ends_early(tmp_path, monkeypatch):
    """Lightning asks each rank separately whether to stop, and ranks that disagree wait forever."""
    growing(monkeypatch)
    schedule, closed = Schedule(wait=1, active=6), []
    full = make_capture(tmp_path, schedule, closed=closed, max_trace_mb=1, lag=0)
    other_rank = make_capture(tmp_path, schedule, records=False, lag=0)
    alone = make_capture(tmp_path, schedule, closed=[], max_trace_mb=1)
    done = []
    for capture in (full, other_rank, alone):
        for step in range(12):
            if step == capture.plan.next_step:
                capture.begin_step(step)
            if capture.plan.is_done:
                done.append(step)
                break
    assert closed[0].recorded_steps == (1, 2)
    assert done == [7, 7, 3]


def test_steps_stay_tagged_after_own_window_ends_early(tmp_path, monkeypatch):
    growing(monkeypatch)
    schedule = Schedule(wait=1, active=5)
    capture = make_capture(tmp_path, schedule, closed=[], max_trace_mb=1, lag=0)
    assert tags_of(capture, 8) == [NONE, PROFILED, PROFILED, PROFILED | STOP, PROFILED, PROFILED, STOP, NONE]
    alone = make_capture(tmp_path, schedule, closed=[], max_trace_mb=1)
    assert tags_of(alone, 8) == [NONE, PROFILED, PROFILED, STOP, NONE, NONE, NONE, NONE]


DDP = """
import sys
from itertools import count
from pathlib import Path
import torch
from lightning.pytorch.callbacks import Callback
from lightning_modelprof.measure.window import torch_profiler as trace_size
from tests.support.fits import *

class FillsRankZero(Callback):
    # On one rank alone the window is full after two steps.
    def on_train_start(self, trainer, module):
        if trainer.global_rank == 0:
            grown = count(0, 10**9)
            trace_size.heap_bytes = lambda: next(grown)

def fit(folder, *others, **arguments):
    torch.manual_seed(1)
    callback = make_callback(Path(folder), steps=(3, 8), **arguments)
    trainer = make_trainer(
        Path(folder), *others, callback, strategy="ddp_fork", devices=2, enable_progress_bar=False
    )
    fit_quietly(trainer, Net(), loader())

if __name__ == "__main__":
    torch.set_num_threads(1)
    fit("second", ranks=[1])
    fit("full", FillsRankZero(), stop_after_profile=True)
    print("both ended")
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    result = run_script(DDP, cwd=folder, timeout=100)
    assert result.returncode == 0, result.stderr[-5000:]
    assert "both ended" in result.stdout
    return folder


def ranks_of(folder):
    files = [folder / "modelprof" / name for name in ("run.json", "run_rank1.json")]
    return [load_run(file).ranks[0] for file in files]


def test_one_rank_of_two_records(ddp):
    first, second = ranks_of(ddp / "second")
    assert first.windows == ()
    assert [window.recorded_steps for window in second.windows] == [(3, 4, 5, 6, 7)]
    traces = {path.name for path in (ddp / "second" / "modelprof" / "traces").iterdir()}
    assert traces == {"rank1_steps_3-7.pt.trace.json.gz"}
    profiler = int(WARMUP | PROFILED)
    for rank in (first, second):
        assert [int(tags) & profiler for tags in rank.steps.tags] == [0, 0, 4, 8, 8, 8, 8, 8] + [0] * 8
        assert rank.steps.tags[8] & STOP
    assert first.notes[-1] == (
        "Rank 0 records no profiler window (ranks=[1]). Steps in other ranks' windows don't count"
        " as clean here either, because ranks wait for each other."
    )
    assert not [note for note in second.notes if "no profiler window" in note]


def test_window_ending_early_on_one_rank_does_not_block(ddp):
    first, second = ranks_of(ddp / "full")
    assert [window.recorded_steps for window in first.windows] == [(3, 4)]
    assert [window.recorded_steps for window in second.windows] == [(3, 4, 5, 6, 7)]
    assert first.num_steps == second.num_steps == 9
    assert first.steps.tags[5:8].tolist() == [PROFILED | STOP, PROFILED, PROFILED]


def test_accumulation_extends_profiler_stop():
    config = ProfileConfig(skip_first=0, wait=0, warmup=0, active=1, bounds=Bounds(ranks=[0]))
    loop = Loop()
    loop.rank, loop.world_size = 1, 2

    def tags(accumulate):
        loop.accumulate = accumulate
        return tags_of(windows.make_capture(config, loop, None, None), 4)

    assert tags(1) == [PROFILED, STOP, NONE, NONE]
    assert tags(2) == [PROFILED, STOP, STOP, NONE]


@pytest.mark.parametrize(
    ("ranks", "rank", "part"),
    [
        ("all", 1, ""),
        ([1], 1, ""),
        ((0, 1), 1, ""),
        ([0, 5], 1, "Rank 1 records no profiler window (ranks=[0, 5])"),
        ([5], 1, "no profiler window is recorded, because ranks=[5] includes none of the 2 ranks"),
    ],
    ids=str,
)
def test_missing_window_is_explained(ranks, rank, part):
    found = why_no_window(ProfileConfig(bounds=Bounds(ranks=ranks)), rank, 2)
    assert found.startswith(part)
    assert bool(found) == bool(part)
    assert why_no_window(ProfileConfig(bounds=Bounds(ranks=ranks), active=0), rank, 2) == ""


def test_nonexistent_ranks_are_warned_about(tmp_path):
    with our_warnings() as messages:
        callback = run_fit(tmp_path, steps=(3, 5), ranks=[5])
    (message,) = messages
    assert "ranks=[5] includes none of the 1 ranks" in message
    assert windows_of(callback) == ()
    assert any("ranks=[5] includes none" in note for note in callback.report.notes)
    assert not any(steps_of(callback).tags & int(PROFILED))


# Trace size


def test_size_is_estimated_from_mean_growth():
    """Memory grows by 8, 30, 8 and 8 MB; 30 isn't counted, and each byte of it becomes 1.25 bytes of JSON."""
    size = TraceSize(bytes_in_use=grow_by(0, 8 * MB, 30 * MB, 8 * MB, 8 * MB))
    size.begin()
    found = []
    for _ in range(4):
        size.end_step()
        found.append(size.with_another_step())
    assert found == [None, 3 * 10 * MB, 4 * 10 * MB, 5 * 10 * MB]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 30 * MB),
        ({"with_stack": True}, 40.8 * MB),
        ({"profile_memory": True}, 45.6 * MB),
        ({"record_shapes": True}, 20.16 * MB),
        ({"record_shapes": True, "with_stack": True, "profile_memory": True}, 31.92 * MB),
    ],
    ids=str,
)
def test_size_depends_on_recorded_data(options, expected):
    size = TraceSize(bytes_in_use=grow_by(0, 8 * MB, 8 * MB), **options)
    size.begin()
    size.end_step()
    size.end_step()
    assert size.with_another_step() == pytest.approx(expected)


def test_shrinking_memory_counts_as_zero():
    size = TraceSize(bytes_in_use=grow_by(0, -8 * MB, 2 * MB, -9 * MB))
    size.begin()
    for _ in range(3):
        size.end_step()
    assert size.with_another_step() == 0


def test_each_window_starts_its_own_estimate():
    size = TraceSize(bytes_in_use=grow_by(0, 50 * MB, 50 * MB, -3 * MB, 4 * MB, 4 * MB))
    for _ in range(2):
        size.begin()
        size.end_step()
        size.end_step()
    assert size.with_another_step() == 3 * 5 * MB


@pytest.mark.parametrize(
    ("growth", "written", "ratio"),
    [
        pytest.param(8 * MB, 32 * MB, 2, id="two bytes for each"),
        pytest.param(8 * MB, 10 * MB, 1.25, id="less than of the CPU: the training took memory"),
        pytest.param(8 * MB, 200 * MB, 5, id="at most four times that of the CPU"),
        pytest.param(400_000, 4 * MB, 1.25, id="too little to tell"),
    ],
)
def test_written_file_corrects_size_estimate(growth, written, ratio):
    size = TraceSize(bytes_in_use=grow_by(0, growth, growth, 0, 10 * MB, 10 * MB))
    size.begin()
    size.end_step()
    size.end_step()
    size.learn(written)
    size.begin()
    size.end_step()
    size.end_step()
    assert size.with_another_step() == pytest.approx(ratio * 30 * MB)


def test_missing_readings_use_size_of_last_window():
    size = TraceSize(bytes_in_use=lambda: None)
    size.begin()
    for _ in range(4):
        size.end_step()
        assert size.with_another_step() is None
    size.learn(20 * MB)
    size.begin()
    size.end_step()
    assert size.with_another_step() == 2 * 5 * MB


def test_partial_readings_give_no_size():
    readings = iter([100 * MB, None, 200 * MB])
    size = TraceSize(bytes_in_use=lambda: next(readings))
    size.begin()
    size.end_step()
    size.end_step()
    assert size.with_another_step() is None


needs_heap = pytest.mark.skipif(heap_bytes() is None, reason="glibc's malloc is not in use")


@needs_heap
def test_heap_bytes_follow_held_memory():
    before = heap_bytes()
    held = torch.ones(3_000_000, dtype=torch.uint8)  # its own mapping
    small = [torch.ones(1_000, dtype=torch.uint8) for _ in range(3_000)]
    assert 6 * MB < heap_bytes() - before < 9 * MB  # each small one has a header too
    del held, small
    assert abs(heap_bytes() - before) < MB


def test_other_allocators_give_no_heap_bytes(monkeypatch):
    info = trace_size._MallocInfo(uordblks=20 * MB, hblkhd=13 * MB)
    monkeypatch.setattr(trace_size, "_mallinfo2", lambda: lambda: info)
    assert heap_bytes() is None
    info.hblkhd = 14 * MB
    assert heap_bytes() == 34 * MB
    monkeypatch.setattr(trace_size, "_mallinfo2", lambda: None)
    assert heap_bytes() is None


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(8, 16)

    def forward(self, inputs):
        hidden = torch.zeros(len(inputs), 16)
        for column in inputs.split(8, dim=1):
            hidden = self.cell(column, hidden)
        return hidden


def convolutional():
    layers = [
        (torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()) for _ in range(4)
    ]
    return torch.nn.Sequential(*(layer for group in layers for layer in group))


MODELS = {
    "mlp": (lambda: torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(30))), (4, 32)),
    "cnn": (convolutional, (2, 8, 8, 8)),
    "transformer": (lambda: torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True), (2, 8, 32)),
    "recurrent": (Recurrent, (4, 80)),
}


@needs_heap
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "recorded",
    [
        (),
        ("record_shapes",),
        ("with_stack", "profile_memory"),
        ("record_shapes", "with_stack", "profile_memory"),
    ],
    ids="-".join,
)
def test_estimate_is_close_to_file_size(tmp_path, model, recorded):
    make, shape = MODELS[model]
    module, inputs = make(), torch.rand(shape)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)

    def train():
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()

    train()
    options = CaptureOptions(**dict.fromkeys(recorded, True))
    profiler, size, num_steps = options.make_profiler(), options.make_size(), 4
    gc.collect()  # garbage of other tests would be freed while the trace grows
    gc.disable()
    profiler.prepare_trace()
    profiler.start_trace()
    size.begin()
    for step in range(num_steps):
        with record_function(f"ProfilerStep#{step}"):
            train()
        size.end_step()
    gc.enable()
    expected = size.with_another_step() * num_steps / (num_steps + 1)
    profiler.stop_trace()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert 0.6 < expected / (tmp_path / "trace.json").stat().st_size < 1.6


def test_window_ends_before_it_is_too_large(tmp_path, monkeypatch):
    """At 10 MB per step, the fifth would make it 50 MB; the next window starts as scheduled."""
    readings = growing(monkeypatch)
    callback = run_fit(tmp_path, wait=1, warmup=1, active=8, repeat=2, max_trace_mb=45)
    first, second = windows_of(callback)
    assert first.recorded_steps == (2, 3, 4, 5)
    assert second.recorded_steps == (12, 13, 14, 15)
    assert first.status is second.status is WindowStatus.PARTIAL
    assert first.note == (
        "it ended after 4 of 8 steps, because another step would have made its trace about 50 MB"
        ' (bounds={"max_trace_mb": 45})'
    )
    assert f"Profiler window 0 (steps 2 to 9): partial: {first.note}." in callback.report.notes
    assert [int(name) for name, _, _ in step_ranges(trace_of(tmp_path, first))] == [2, 3, 4, 5]
    tags = steps_of(callback).tags
    expected = [0, WARMUP, PROFILED, PROFILED, PROFILED, PROFILED, STOP, 0, 0, 0, 0, WARMUP, PROFILED]
    assert [int(tag) & int(NOT_CLEAN & ~StepTag.FIRST_OF_EPOCH) for tag in tags[:13]] == expected
    assert len(readings) == 2 * (1 + 4)  # at each window's start and after its steps only


def test_window_of_exactly_allowed_size_continues(tmp_path, monkeypatch):
    growing(monkeypatch)
    callback = run_fit(tmp_path, wait=0, warmup=0, active=5, max_trace_mb=50)
    assert windows_of(callback)[0].status is WindowStatus.COMPLETE


@pytest.mark.parametrize("limit", [None, 500])
def test_no_limit_and_default_limit(tmp_path, monkeypatch, limit):
    growing(monkeypatch, by=60 * MB)
    callback = run_fit(tmp_path, wait=0, warmup=0, active=8, max_trace_mb=limit)
    assert len(windows_of(callback)[0].recorded_steps) == (8 if limit is None else 6)  # 75 MB per step


def test_training_stops_after_window_ended_early(tmp_path, monkeypatch):
    growing(monkeypatch)
    callback = run_fit(tmp_path, steps=(3, 20), max_trace_mb=45, stop_after_profile=True)
    assert windows_of(callback)[0].recorded_steps == (3, 4, 5, 6)
    assert len(steps_of(callback)) == 8


@needs_heap
def test_real_window_ends_before_it_is_too_large(tmp_path):
    whole = run_fit(tmp_path / "whole", data=loader(160), steps=(5, 75))
    (window,) = windows_of(whole)
    per_step = len(_unpacked(tmp_path / "whole", window)) / 70
    callback = run_fit(tmp_path / "part", data=loader(160), steps=(5, 75), max_trace_mb=per_step * 40 / MB)
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.PARTIAL
    assert 25 < len(window.recorded_steps) < 65  # within the estimate's accuracy


def _unpacked(folder, window):
    return gzip.decompress((folder / "modelprof" / window.trace_file).read_bytes())


class SeesReadings(Callback):
    """Records at each memory reading whether torch was profiling."""

    def __init__(self, monkeypatch):
        self.readings = []
        monkeypatch.setattr(trace_size, "heap_bytes", lambda: self.readings.append(is_profiling()))


def test_memory_is_read_only_in_windows(tmp_path, monkeypatch):
    seen = SeesReadings(monkeypatch)
    run_fit(tmp_path / "without", active=0)
    assert seen.readings == []
    run_fit(tmp_path / "with", steps=(10, 13))
    assert seen.readings == [True] * 4


def test_memory_of_window_is_freed_immediately(tmp_path):
    """torch's profiler refers to itself and holds four times the trace until Python collects it."""
    gc.collect()
    gc.disable()
    try:
        run_fit(tmp_path, active=2, wait=0, warmup=1, repeat=3)
        left = [one for one in gc.get_objects() if type(one) is torch.autograd.profiler.profile]
    finally:
        gc.enable()
    assert left == []


# Traces that are too large after one step


def window_of(index, status=WindowStatus.COMPLETE):
    return Window(index=index, first_step=index, last_step=index, recorded_steps=(index,), status=status)


def make_results(directory, warnings, *, max_trace_mb=None, keep_windows=None):
    outputs = Outputs(RunFolder.claimed_now(directory, created=""), [], NOWHERE, warnings.append)
    setting = Setting(folder=outputs.folder, loop="fit", options=DEFAULT_OPTIONS)
    return Traces(Windows(outputs, warnings.append, keep=keep_windows), outputs, setting, max_trace_mb)


@pytest.mark.parametrize(("size", "is_analyzed"), [(200, True), (201, False)])
def test_trace_above_twice_the_limit_is_saved_not_analyzed(tmp_path, size, is_analyzed):
    results = make_results(tmp_path, [], max_trace_mb=100 / MB)
    raw = tmp_path / "raw.json"
    raw.write_text('{"traceEvents": []}'.ljust(size))
    results.add(window_of(0), raw, lambda: 0)
    results.poll()
    assert (0 not in results.windows.trace_notes) == is_analyzed
    assert (tmp_path / results.windows.listed[0].trace_file).exists()
    assert not raw.exists()
    if not is_analyzed:
        assert results.windows.trace_notes[0] == (
            "its trace of 0.000201 MB wasn't analyzed during training, because it's larger than 2 ×"
            ' bounds={"max_trace_mb": 0.0001}; read it with lightning-modelprof analyze'
        )


def test_report_explains_missing_tables(tmp_path):
    callback = run_fit(tmp_path, wait=0, warmup=0, active=1, max_trace_mb=0.001)
    (window,) = windows_of(callback)
    assert window.status is WindowStatus.COMPLETE  # one step is recorded, however large it is
    (table,) = (table for table in callback.report.tables if table.id == "model_summary")
    assert 'larger than 2 × bounds={"max_trace_mb": 0.001}' in table.absent_reason
    assert trace_of(tmp_path, window)


# Number of kept traces


def test_first_and_newest_traces_are_kept(tmp_path):
    arguments = {"wait": 1, "warmup": 0, "active": 1, "repeat": 0}  # windows at steps 1, 3, ..., 31
    callback = run_fit(tmp_path, keep_windows=3, **arguments)
    found = windows_of(callback)
    assert [window.recorded_steps for window in found] == [(step,) for step in range(1, 32, 2)]
    files = {path.name for path in (tmp_path / "modelprof" / "traces").iterdir()}
    assert files == {f"rank0_steps_{step}-{step}.pt.trace.json.gz" for step in (1, 27, 29, 31)}
    note = 'its trace was removed (bounds={"keep_windows": 3} keeps the first and the newest 3)'
    assert [window.trace_file is None for window in found] == [False, *[True] * 12, *[False] * 3]
    assert [window.note for window in found] == ["", *[note] * 12, *[""] * 3]
    assert {window.status for window in found} == {WindowStatus.COMPLETE}
    assert load_run(tmp_path / "modelprof").ranks[0].windows == found
    tables = [table for table in callback.report.tables if table.id.startswith("model_summary")]
    assert len(tables) == 3
    assert all(table.rows for table in tables)


@pytest.mark.parametrize(("keep", "num_left"), [(None, 10), (20, 10), (9, 10), (8, 9), (1, 2)])
def test_number_of_kept_traces(tmp_path, keep, num_left):
    results = make_results(tmp_path, [], keep_windows=keep)
    for index in range(10):
        raw = tmp_path / "raw.json"
        raw.write_text('{"traceEvents": []}')
        results.add(window_of(index), raw, lambda: 0)
        results.poll()
        results.add(window_of(index, WindowStatus.REFUSED), None, lambda: 0)  # has no trace and doesn't count
    left = {int(path.name.split("_")[2].split("-")[0]) for path in (tmp_path / "traces").iterdir()}
    assert left == {0, *range(10 - num_left + 1, 10)}
    assert {window.index for window in results.windows.listed if window.trace_file} == left


def test_trace_that_cannot_be_removed_stays_listed(tmp_path, monkeypatch):
    warnings = []
    results = make_results(tmp_path, warnings, keep_windows=1)
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path.parent.name == "traces":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for index in range(5):
        raw = tmp_path / "raw.json"
        raw.write_text('{"traceEvents": []}')
        results.add(window_of(index), raw, lambda: 0)
        results.poll()
    assert all(window.trace_file for window in results.windows.listed)
    assert len(warnings) == 1


def test_deleted_trace_is_not_an_error(tmp_path):
    warnings = []
    results = make_results(tmp_path, warnings, keep_windows=1)
    for index in range(3):
        raw = tmp_path / "raw.json"
        raw.write_text('{"traceEvents": []}')
        results.add(window_of(index), raw, lambda: 0)
        results.poll()
        if index == 1:
            (tmp_path / results.windows.listed[1].trace_file).unlink()
    assert [window.trace_file is None for window in results.windows.listed] == [False, True, False]
    assert warnings == []


# Number of listed windows


@pytest.mark.parametrize(("keep", "num_newest"), [(20, NEWEST_LISTED), (None, NEWEST_LISTED), (100, 100)])
def test_first_and_newest_of_many_windows_are_listed(keep, num_newest):
    results = make_results(None, [], keep_windows=keep)
    num_windows = 5_000
    for index in range(num_windows):
        assert results.windows.notes == () or index > FIRST_LISTED + num_newest
        status = WindowStatus.REFUSED if index % 1_000 == 500 else WindowStatus.COMPLETE
        results.windows.trace_notes[index] = "a reason"
        results.add(window_of(index, status), None, lambda: 0)
    expected = [*range(FIRST_LISTED), *range(num_windows - num_newest, num_windows)]
    assert [window.index for window in results.windows.listed] == expected
    assert sorted(results.windows.trace_notes) == expected
    num_complete = num_windows - FIRST_LISTED - num_newest - 5
    assert results.windows.notes == (
        f"The list shows the first 16 and the newest {num_newest} of 5,000 profiler windows. The rest:"
        f" {num_complete:,} complete, 5 refused.",
    )
    assert len(msgspec.json.encode(results.windows.listed)) < 250 * len(expected)


def test_report_notes_unlisted_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "NEWEST_LISTED", 4)
    callback = run_fit(
        tmp_path, data=loader(96), wait=1, warmup=0, active=1, repeat=0, keep_windows=2
    )  # 24 windows
    assert len(windows_of(callback)) == 20
    (note,) = (note for note in callback.report.notes if "The rest: " in note)
    assert note == (
        "The list shows the first 16 and the newest 4 of 24 profiler windows. The rest: 4 complete."
    )
    assert len(report_of(tmp_path)["summary"]["windows"]) == 20
    assert (
        json.loads((tmp_path / "modelprof" / "run.json").read_text())["ranks"][0]["windows"][19]["index"]
        == 23
    )
