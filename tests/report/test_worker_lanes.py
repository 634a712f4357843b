"""Lanes of DataLoader workers: batches at known times on another clock, and the steps that used them."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.worker_batches import find_worker_batches
from lightning_modelprof.engine.session import Session
from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.report.timeline.worker_lanes import GROUP
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.run.workers import WorkerBatches
from lightning_modelprof.show.tensorboard.timeline_columns import (
    check_timeline,
    pack_timeline,
    unpack_timeline,
)
from tests.support.fits import (
    Net,
    Numbers,
    fit_quietly,
    make_callback,
    make_trainer,
    run_fit,
    trace_of,
    windows_of,
)
from tests.support.traces import event, make_trace
from tests.support.worker_windows import batches, loader, window

pytestmark = pytest.mark.slow


def drawn(*loaders, **kwargs):
    return timeline_of(window(*loaders, **kwargs))


def lanes(found):
    """(lane, depth, name, start, end in microseconds) of the workers' slices."""
    return [
        (found.lanes[lane].label, depth, found.names[name], begin / 1000, (begin + duration) / 1000)
        for lane, depth, name, begin, duration in zip(
            found.lane.tolist(), found.depth.tolist(), found.name.tolist(),
            found.slice_begin_ns.tolist(), found.slice_duration_ns.tolist(), strict=True,
        )
        if found.lanes[lane].group == GROUP
    ]  # fmt: skip


def arrows(found):
    """(batch, start of the fetch that got it in microseconds)."""
    ends = []
    for place in np.flatnonzero(found.launch >= 0).tolist():
        batch = int(found.launch[place])
        if found.lanes[found.lane[batch]].group == GROUP:
            assert found.names[found.name[place]] == "modelprof: dataloader"
            assert found.depth[batch] == 0
            ends.append((found.names[found.name[batch]], int(found.slice_begin_ns[place]) // 1000))
    return ends


def details(found):
    """Detail lines by batch name."""
    return {
        found.names[name]: found.details[detail].splitlines()
        for lane, depth, name, detail in zip(
            found.lane.tolist(), found.depth.tolist(), found.name.tolist(), found.detail.tolist(), strict=True
        )
        if found.lanes[lane].group == GROUP and depth == 0
    }


def test_batches_are_placed_where_they_were_made():
    """The best clock reading was 3 us late, so all slices are 3 us early; clocks aren't known better."""
    found = drawn(
        loader((0, 6, 1_003, 8_003, 9_003), (1, 7, 2_003, 15_003, 15_503), (0, 8, 12_003, 20_003, 20_003))
    )
    assert lanes(found) == [
        ("worker 0", 0, "batch 6", 1_000, 9_000),
        ("worker 0", 0, "batch 8", 12_000, 20_000),
        ("worker 0", 1, "samples", 1_000, 8_000),
        ("worker 0", 1, "collate", 8_000, 9_000),
        ("worker 0", 1, "samples", 12_000, 20_000),  # collating took no time
        ("worker 1", 0, "batch 7", 2_000, 15_500),
        ("worker 1", 1, "samples", 2_000, 15_000),
        ("worker 1", 1, "collate", 15_000, 15_500),
    ]
    assert [lane.group for lane in found.lanes[-2:]] == [GROUP] * 2
    kinds = {found.categories[kind] for lane, kind in zip(found.lane, found.category, strict=True)
             if found.lanes[lane].group == GROUP}  # fmt: skip
    assert kinds == {"batch"}
    assert found.notes == timeline_of(window(workers=[])).notes
    check_timeline(pack_timeline(found))
    assert arrows(unpack_timeline(pack_timeline(found))) == arrows(found)


def test_arrow_links_batch_to_fetch_of_its_step():
    found = drawn(
        loader((0, 6, 1_003, 8_003, 9_003), (1, 7, 2_003, 15_003, 15_503), (0, 8, 12_003, 20_003, 20_003))
    )
    assert arrows(found) == [("batch 6", 10_100), ("batch 7", 20_100)]
    known = details(found)
    assert known["batch 6"] == ["4 samples", "CPU 1.50 ms of 8.00 ms", "used by step 21"]
    assert known["batch 7"][2:] == ["used by step 22"]
    assert known["batch 8"][2:] == ["the worker waited 3.00 ms before this batch"]


def test_worker_lanes_come_last():
    more = [
        event("cuda_runtime", "cudaLaunchKernel", 4_000, 4_010, correlation=1),
        event("kernel", "gemm", 4_100, 8_900, 7, 0, device=0, stream=7, correlation=1),
        event("cuda_runtime", "cudaDeviceSynchronize", 4_020, 8_950),
    ]
    found = drawn(loader((0, 6, 1_003, 8_003, 9_003), (1, 7, 2_003, 15_003, 15_503)), more=more)
    assert [lane.label for lane in found.lanes] == [
        "critical path", "GPU 0 stream 7", "main thread 1", "worker 0", "worker 1",
    ]  # fmt: skip
    is_path = np.array([found.lanes[lane].label == "critical path" for lane in found.lane.tolist()])
    launched = {
        (found.names[found.name[place]], found.names[found.name[found.launch[place]]])
        for place in np.flatnonzero((found.launch >= 0) & ~is_path).tolist()
    }
    assert launched == {
        ("gemm", "cudaLaunchKernel"),
        ("modelprof: dataloader", "batch 6"),
        ("modelprof: dataloader", "batch 7"),
    }  # fmt: skip
    of_path = found.launch[is_path & (found.launch >= 0)]
    assert {found.lanes[lane].group for lane in found.lane[of_path].tolist()} <= {"GPU 0", "host"}
    check_timeline(pack_timeline(found))


def test_batches_are_clipped_to_trace():
    found = drawn(
        loader((0, 3, -9_000, -8_000, -7_000), (0, 5, -5_000, -1_000, 1_003), (1, 9, 25_003, 33_000, 34_000),
               (0, 10, 31_000, 32_000, 33_000))
    )  # fmt: skip
    assert lanes(found) == [
        ("worker 0", 0, "batch 5", 0, 1_000),
        ("worker 0", 1, "collate", 0, 1_000),
        ("worker 1", 0, "batch 9", 25_000, 30_000),
        ("worker 1", 1, "samples", 25_000, 30_000),
    ]
    assert details(found)["batch 5"][-2:] == ["used by step 20", "starts before the trace"]
    assert details(found)["batch 9"][-1] == "ends after the trace"


def test_repeated_batch_numbers_go_to_first_possible_step():
    found = drawn(loader((0, 0, 100, 200, 300), (1, 1, 100, 8_000, 9_000), (0, 0, 5_000, 15_000, 16_000)),
                  in_epoch=(0, 1, 0))  # fmt: skip
    assert arrows(found) == [("batch 0", 100), ("batch 1", 10_100), ("batch 0", 20_100)]


def test_batch_ready_too_late_has_no_arrow():
    """This happens with the second of two loaders that run one after the other."""
    found = drawn(loader((0, 5, 100, 9_000, 9_500)))
    assert len(lanes(found)) == 3
    assert arrows(found) == []


def test_steps_that_fetch_twice_have_no_arrows():
    found = drawn(loader((0, 5, 50, 60, 70)), fetches=2)
    assert (len(lanes(found)), arrows(found)) == (3, [])


def test_arrow_starts_at_last_ready_batch_of_several_loaders():
    early, late = (0, 6, 100, 5_000, 6_000), (0, 6, 200, 7_000, 8_000)
    for first, second in ((early, late), (late, early)):
        found = drawn(loader(first), loader(second, number=1))
        labels = {label for label, *_ in lanes(found)}
        assert labels == {"loader 0 worker 0", "loader 1 worker 0"}
        (place,) = (at for at in np.flatnonzero(found.launch >= 0).tolist()
                    if found.lanes[found.lane[found.launch[at]]].group == GROUP)  # fmt: skip
        batch = int(found.launch[place])
        end_ns = int(found.slice_begin_ns[batch] + found.slice_duration_ns[batch])
        assert end_ns == (8_000 - 3) * 1000


def test_clock_mismatch_gives_reason_instead_of_lanes():
    found = drawn(loader((0, 6, 1_000, 8_000, 9_000)), late_us=(3, 204))
    assert lanes(found) == []
    assert [note for note in found.notes if "worker" in note] == [
        "No lanes for DataLoader workers: worker clocks can't be matched to the trace's, because readings of"
        " both differ by more than 200 µs."
    ]
    assert len(lanes(drawn(loader((0, 6, 1_000, 8_000, 9_000)), late_us=(3, 203)))) == 3


def test_occasional_late_clock_readings_are_harmless():
    trace = window(loader((0, 6, 1_003, 8_003, 9_003)))
    marks = trace.metadata[TRACE_METADATA_KEY]["step_marks"]
    marks[0][1] += 50_000_000
    marks[2][2] += 90_000_000
    assert lanes(timeline_of(trace))[0][3:] == (1_000, 9_000)


def test_no_records_give_no_lanes_and_no_note():
    for trace in (window(workers=[]), make_trace([event("cpu_op", "aten::mm", 0, 5)])):
        found = timeline_of(trace)
        assert (lanes(found), [note for note in found.notes if "worker" in note]) == ([], [])


GOOD = msgspec.to_builtins(batches((0, 6, 1_000, 8_000, 9_000)))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 3},
        {"workers": [["first", GOOD]]},
        {"workers": [[0, GOOD | {"worker": []}]]},
        {"workers": [[0, GOOD | {"worker": [-1]}]]},
        {"workers": [[0, GOOD | {"ready_ns": [0]}]]},
        {"workers": [[0, GOOD]], "step_marks": []},
        {"workers": [[0, GOOD]], "step_marks": [[0]]},
        {"workers": [[0, GOOD]], "recorded_steps": ["20"]},
    ],
)  # fmt: skip
def test_damaged_records_are_noted(changes):
    found = find_worker_batches(build_timeline(window(**changes)))
    assert len(found) == 0
    assert "damaged" in found.problem


def test_impossible_times_are_harmless():
    largest = 2**62
    huge = GOOD | {"begin_ns": [-largest], "fetched_ns": [largest], "ready_ns": [largest]}
    check_timeline(pack_timeline(timeline_of(window(workers=[[0, huge]]))))


def test_unreadable_workers_are_noted():
    found = timeline_of(window(workers="what they made could not be read: OSError"))
    assert found.notes[-1] == "No lanes for DataLoader workers: what they made could not be read: OSError."


def test_window_records_step_times(tmp_path):
    """Epochs have 7 batches, and the second epoch starts in the window."""
    callback = run_fit(tmp_path, active=6, wait=2, trainer={"max_epochs": 2, "limit_train_batches": 7})
    (one,) = windows_of(callback)
    noted = trace_of(tmp_path, one).metadata[TRACE_METADATA_KEY]
    assert noted["recorded_steps"] == list(one.recorded_steps) == [3, 4, 5, 6, 7, 8]
    assert [mark[0] for mark in noted["step_marks"]] == [3, 4, 5, 6, 0, 1]
    times = [time for mark in noted["step_marks"] for time in mark[1:]]
    assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize("with_stack", [False, True])
def test_batches_made_during_window_are_placed_correctly(tmp_path, monkeypatch, with_stack):
    """Each training step is recorded as a worker's batch, whose slice must lie within the step's forward."""
    rows, asked = [], []

    def at_batch(batch_idx):
        begin_ns = time.perf_counter_ns()
        time.sleep(0.002)
        end_ns = time.perf_counter_ns()
        rows.append((batch_idx, begin_ns, end_ns))

    def made(begin_ns, end_ns):
        asked.append((begin_ns, end_ns))
        index, begin, end = zip(*(row for row in rows if begin_ns <= row[1]), strict=True)
        columns = {"worker": (0,) * len(index), "samples": (2,) * len(index), "cpu_ns": (0,) * len(index)}
        times = {"begin_ns": begin, "fetched_ns": end, "ready_ns": end}
        return {"workers": ((0, WorkerBatches(index=index, **columns, **times)),)}

    monkeypatch.setattr(Session, "trace_metadata", lambda _, begin_ns, end_ns: made(begin_ns, end_ns))
    callback = run_fit(
        tmp_path, module=Net(at_batch), active=4, with_stack=with_stack, trainer={"limit_train_batches": 12}
    )
    ((begin_ns, end_ns),) = asked
    (one,) = windows_of(callback)
    found = timeline_of(trace_of(tmp_path, one))
    own = [row for row in lanes(found) if row[1] == 0]
    assert [name for _, _, name, _, _ in own] == [f"batch {number}" for number in (2, 3, 4, 5)]
    is_forward = np.array([found.names[name] == "modelprof: forward" for name in found.name.tolist()])
    begins = found.slice_begin_ns[is_forward] / 1000
    ends = begins + found.slice_duration_ns[is_forward] / 1000
    for (_, _, _, begin, end), first, last in zip(own, np.sort(begins), np.sort(ends), strict=True):
        assert first - 200 <= begin < end <= last + 200
    assert end_ns - begin_ns >= 4 * 2_000_000


class Slow(Numbers):
    """Each sample takes 2 ms and contains its index."""

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), float(index)), torch.tensor(float(index))


class SlowStream(IterableDataset):
    """The same samples; two workers make alternate batches."""

    def __iter__(self):
        samples = Slow(48)
        own = get_worker_info().id
        return (samples[index] for index in range(48) if index // 4 % 2 == own)


class Had(Net):
    """Records the first sample of each batch."""

    def __init__(self):
        super().__init__()
        self.first = []

    def training_step(self, batch, batch_idx):
        self.first.append(int(batch[0][0, 0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("with_stack", [False, True])
@pytest.mark.parametrize("is_iterable", [False, True])
def test_fit_records_worker_batches_and_their_steps(tmp_path, with_stack, is_iterable):
    """Two epochs of 12 batches of 4 samples; the second starts in the window."""
    module = Had()
    data = DataLoader(SlowStream() if is_iterable else Slow(48), batch_size=4, num_workers=2)
    callback = make_callback(tmp_path, active=10, wait=4, with_stack=with_stack)
    fit_quietly(make_trainer(tmp_path, callback, max_epochs=2), module, data)
    (one,) = windows_of(callback)
    trace = trace_of(tmp_path, one)
    shared = build_timeline(trace)
    made = find_worker_batches(shared)
    assert made.problem == ""
    used = np.flatnonzero(made.step >= 0)
    assert len(used) >= 4
    for place in used.tolist():
        assert module.first[made.step[place]] == 4 * made.index[place]
        assert made.ready_ns[place] <= trace.end_ns[made.fetch[place]] + 200_000
        assert made.fetched_ns[place] - made.begin_ns[place] >= 4 * 2_000_000
