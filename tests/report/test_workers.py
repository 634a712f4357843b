"""What the report says of workers: tables, the flame graph and the finding, of records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.source.worker_stacks import busiest, worker_stacks
from lightning_modelprof.report.build import build_report, diagnose
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.input import InputBound
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from lightning_modelprof.run.workers import CallTimes, LoaderWorkers, WorkerTimes
from tests.support.diagnosed import MS, analysis_of, only, steps_of, with_loader

DATA = "/home/me/data.py"


def call(name, kind, depth, calls, total_ms, inner_ms=0, *, samples=None, cpu_ms=None, file=DATA, line=1):
    """Of one call; its percentiles are its mean."""
    each = total_ms * MS // calls
    return CallTimes(
        name=name,
        kind=kind,
        depth=depth,
        calls=calls,
        samples=samples or calls,
        total_ns=total_ms * MS,
        inner_ns=inner_ms * MS,
        cpu_ns=None if cpu_ms is None else cpu_ms * MS,
        p50_ns=each,
        p99_ns=2 * each,
        max_ns=3 * each,
        file=file,
        line=line,
        is_users=file == DATA,
    )


def frame(function, line, *, users=True, file=DATA, module="data"):
    return StackFrame(
        file=file,
        line=line,
        function=function,
        function_line=line - 1,
        module=module,
        is_users=users,
    )


GET = frame("Images.__getitem__", 12)
COMPOSE = frame(
    "Compose.__call__", 95, users=False, file="/lib/torchvision/transforms.py", module="torchvision"
)
CROP, BLUR, FLIP = (
    frame("Crop.__call__", 21),
    frame("Blur.__call__", 31),
    frame("Flip.__call__", 41),
)


def stacks(**samples):
    """So many samples of 5 ms each in each transform."""
    frames = {"crop": CROP, "blur": BLUR, "flip": FLIP}
    return StackSamples(
        frames=(GET, COMPOSE, *frames.values()),
        stacks=tuple(
            SampledStack(
                phase="dataloader",
                frames=(0, 1, 2 + list(frames).index(name)),
                samples=count,
                time_ns=5 * MS * count,
            )
            for name, count in samples.items()
        ),
        samples=sum(samples.values()),
    )


LOADER = LoaderWorkers(
    num_workers=2,
    prefetch_factor=2,
    batch_size=4,
    start_method="fork",
    calls=(
        call("Images.__getitem__", "sample", 0, 80, 800, 720, cpu_ms=200, line=10),
        call("Compose", "compose", 1, 80, 720, 700, file="/lib/torchvision/transforms.py", line=90),
        call("Crop", "transform", 2, 80, 400, line=20),
        call("Blur", "transform", 2, 40, 300, line=30),
        call("collate", "collate", 0, 20, 200, samples=80, line=50),
    ),
    workers=(
        WorkerTimes(worker=0, batches=12, samples=48, fetch_ns=500 * MS, collate_ns=120 * MS, wait_ns=7 * MS),
        WorkerTimes(worker=1, batches=8, samples=32, fetch_ns=300 * MS, collate_ns=80 * MS, threads=9),
    ),
    stacks=stacks(crop=60, blur=40),
)


def report_of(*loaders, **run):
    run.setdefault("setup", with_loader(num_workers=2, prefetch_factor=2, batch_size=4))
    return build_report(analysis_of(steps_of(forward=5, dataloader=45), workers=loaders, **run))


def table(report, name):
    return next(one for one in report.tables if one.id == name)


def cells(one, key):
    at = [column.key for column in one.columns].index(key)
    return [row[at] for row in one.rows]


# Tables


def test_calls_with_their_shares_of_the_workers_time():
    """The workers made batches for 500 + 120 + 300 + 80 = 1000 ms."""
    one = table(report_of(LOADER), "worker_transforms")
    assert cells(one, "name") == ["Images.__getitem__", "Compose", "Crop", "Blur", "collate"]
    assert one.depths == (0, 1, 2, 2, 0)
    assert cells(one, "avg_ns") == [10 * MS, 9 * MS, 5 * MS, 7.5 * MS, 10 * MS]
    assert cells(one, "own_ns") == [80 * MS, 20 * MS, 400 * MS, 300 * MS, 200 * MS]
    assert cells(one, "ratio") == pytest.approx([0.8, 0.72, 0.4, 0.3, 0.2])
    assert cells(one, "own_ratio") == pytest.approx([0.08, 0.02, 0.4, 0.3, 0.2])
    assert sum(cells(one, "own_ratio")) == pytest.approx(1.0)
    assert cells(one, "cpu_ratio") == [0.25, None, None, None, None]
    assert cells(one, "place") == [
        "data.py:10",
        "torchvision/transforms.py:90",
        *("data.py:20", "data.py:30", "data.py:50"),
    ]
    assert one.notes == ("Your files are in /home/me.",)


def test_each_worker():
    one = table(report_of(LOADER), "workers")
    assert cells(one, "name") == ["worker 0", "worker 1"]
    assert cells(one, "fetch_ns") == [500 * MS, 300 * MS]
    assert cells(one, "wait_ns") == [7 * MS, 0]
    assert cells(one, "threads") == [None, 9]
    assert "loader" not in [column.key for column in one.columns]


def test_loaders_are_told_apart_where_there_are_several():
    report = report_of(LOADER, replace(LOADER, loader=1))
    for name, rows in (("worker_transforms", 5), ("workers", 2)):
        assert cells(table(report, name), "loader") == ["0"] * rows + ["1"] * rows


def test_no_table_where_nobody_looked_or_there_is_no_loader():
    for workers in (None, ()):
        report = build_report(analysis_of(steps_of(forward=5), workers=workers))
        assert not [one for one in report.tables if one.id in ("worker_transforms", "workers")]
        assert not [one for one in report.flames if one.id == "worker_stacks"]


def test_the_reason_why_nothing_was_seen_and_notes_of_the_report():
    why = "The workers were alive before."
    empty = LoaderWorkers(num_workers=2, notes=(why,))
    report = report_of(empty)
    for name in ("worker_transforms", "workers"):
        assert table(report, name).absent_reason == "The workers were alive before"
    assert report.notes.count(why) == 1
    # Of several loaders the notes say of which they are.
    both = report_of(LOADER, replace(empty, loader=1))
    assert f"Loader 1: {why}" in both.notes


# The flame graph


def test_the_workers_functions_as_a_flame_graph():
    """100 samples of 5 ms: 300 ms in Crop and 200 ms in Blur, below one data set."""
    flame = next(one for one in report_of(LOADER).flames if one.id == "worker_stacks")
    assert [(one.name, one.depth, one.total, one.own) for one in flame.frames] == [
        ("Dataloader", 0, 500 * MS, 0),
        ("Images.__getitem__", 1, 500 * MS, 0),
        ("Compose.__call__", 2, 500 * MS, 0),
        ("Crop.__call__", 3, 300 * MS, 300 * MS),
        ("Blur.__call__", 3, 200 * MS, 200 * MS),
    ]
    assert flame.notes[0].startswith("100 samples of the workers;")


def test_the_busiest_loader_is_the_one_whose_workers_have_most_to_do_each():
    """1000 ms for two workers are 500 each; 700 ms for one are more."""
    alone = replace(LOADER, loader=1, num_workers=1, workers=(WorkerTimes(worker=0, fetch_ns=700 * MS),))
    assert busiest((LOADER, alone)) is alone
    assert busiest((LOADER, replace(alone, num_workers=2))) is LOADER
    assert busiest(()) is busiest(None) is None
    flame = next(one for one in report_of(LOADER, alone).flames if one.id == "worker_stacks")
    assert flame.notes[0] == "Of loader 1, whose workers have most to do."


def test_no_samples_of_the_workers():
    assert isinstance(worker_stacks((replace(LOADER, stacks=None),)), Absent)
    assert isinstance(worker_stacks((replace(LOADER, stacks=StackSamples()),)), Absent)


# The finding


def places(*loaders, **run):
    """The places of ``input_bound`` as (line, line of what it calls)."""
    run.setdefault("setup", with_loader(num_workers=2, prefetch_factor=2, batch_size=4))
    steps = steps_of(forward=5, dataloader=45)
    one = only(diagnose(analysis_of(steps, workers=loaders, **run), [InputBound()])[1])
    assert one.status is Status.FOUND
    return [(place.line, place.inner and place.inner.line) for place in one.locations]


def test_the_place_is_the_statement_in_the_worker():
    """60 of 100 samples are in Crop, which the line of the data set calls."""
    assert places(LOADER) == [(12, 21)]


def test_where_no_transform_takes_half_the_line_with_most_comes_first():
    """40, 35 and 25 samples: none holds half of the data set's line."""
    even = replace(LOADER, stacks=stacks(flip=25, crop=40, blur=35))
    assert places(even) == [(21, None), (12, None)]


def test_too_few_samples_put_no_line_first():
    assert places(replace(LOADER, stacks=stacks(flip=2, crop=4, blur=3))) == [(12, None)]


def test_without_samples_of_the_workers_the_place_is_the_data_set():
    assert places(replace(LOADER, stacks=None)) == [(7, None)]
    library = StackSamples(
        frames=(COMPOSE,),
        stacks=(SampledStack(phase="dataloader", frames=(0,), samples=50, time_ns=MS),),
    )
    assert places(replace(LOADER, stacks=library)) == [(7, None)]


def test_a_slow_sampler_is_sought_in_the_training_process():
    sampler = (
        frame("_next_index", 9, users=False, module="torch.utils.data.dataloader"),
        frame("Shuffled.__iter__", 71),
    )
    slow = StackSamples(
        frames=sampler,
        stacks=(SampledStack(phase="dataloader", frames=(0, 1), samples=50, time_ns=900 * MS),),
        samples=50,
    )
    assert places(LOADER, stacks=slow) == [(71, None)]
