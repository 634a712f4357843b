"""Worker tables, flame graph and finding, from hand-made records."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.source.worker_stacks import busiest, worker_stacks
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
from lightning_modelprof.analysis.steps.loader_queue import loader_queue
from lightning_modelprof.analysis.steps.step_costs import SlowFacts
from lightning_modelprof.analysis.steps.worker_curve import worker_curve
from lightning_modelprof.analysis.steps.workers import Cause, WaitCause, measured_workers
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.owners import Owner
from lightning_modelprof.report.advice.predicted import predicted_call
from lightning_modelprof.report.advice.workers import cause_advice, costliest, told_of
from lightning_modelprof.report.build import build_report, diagnose
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.cpus import busy_cpus
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.input import (
    input_bound,
    repeated_work,
    synchronous_loader,
    worker_startup,
)
from lightning_modelprof.report.rules.steps import _advice as slow_steps_advice
from lightning_modelprof.run.batches import RepeatedSamples
from lightning_modelprof.run.setup import LoaderSetup
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from lightning_modelprof.run.steps import SlowSteps, StepTag
from lightning_modelprof.run.workers import CallTimes, LoaderWorkers, WorkerBatches, WorkerTimes
from tests.analysis.test_fetch_queue import used
from tests.support.diagnosed import MS, SETUP, analysis_of, only, steps_of, with_loader

DATA = "/home/me/data.py"


def call(name, kind, depth, calls, total_ms, inner_ms=0, *, cpu_ms=None, error_ms=None, file=DATA, line=1):
    return CallTimes(
        name=name,
        kind=kind,
        depth=depth,
        calls=calls,
        total_ns=None if total_ms is None else total_ms * MS,
        inner_ns=inner_ms * MS,
        error_ns=None if error_ms is None else error_ms * MS,
        cpu_ns=None if cpu_ms is None else cpu_ms * MS,
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
        python_module=module,
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
    """This many samples of 5 ms in each transform."""
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
        call(
            "Compose", "compose", 1, 0, 720, 700, error_ms=8, file="/lib/torchvision/transforms.py", line=90
        ),
        call("Crop", "transform", 2, 0, 400, error_ms=40, line=20),
        call("Blur", "transform", 2, 0, 300, error_ms=20, line=30),
        call("collate", "collate", 0, 20, 200, line=50),
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


def test_calls_show_shares_of_worker_time():
    """The workers made batches during 500 + 120 + 300 + 80 = 1000 ms."""
    one = table(report_of(LOADER), "worker_transforms")
    assert cells(one, "name") == ["Images.__getitem__", "Compose", "Crop", "Blur", "collate"]
    assert one.depths == (0, 1, 2, 2, 0)
    assert cells(one, "avg_ns") == [10 * MS, 9 * MS, 5 * MS, 3.75 * MS, 10 * MS]
    assert cells(one, "error_ns") == [None, 0.1 * MS, 0.5 * MS, 0.25 * MS, None]
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
    assert one.notes == ("Paths of your files are relative to /home/me.",)


def test_unmeasured_transforms_are_dashes_with_reason():
    small = replace(LOADER, calls=(*LOADER.calls[:3], call("Flip", "transform", 2, 0, None), LOADER.calls[4]))
    one = table(report_of(small), "worker_transforms")
    row = dict(zip([column.key for column in one.columns], one.rows[3], strict=True))
    assert {key for key, value in row.items() if value is not None} == {"name", "kind", "place"}
    assert one.notes[-1].startswith("Transforms with dashes take less than 5% of the time")
    nothing = replace(LOADER, calls=(LOADER.calls[0], call("Flip", "transform", 1, 0, None)))
    one = table(report_of(nothing), "worker_transforms")
    assert one.notes[-1].startswith("Transforms have no times because there are too few samples")


def test_each_worker_has_a_row():
    one = table(report_of(LOADER), "workers")
    assert cells(one, "name") == ["worker 0", "worker 1"]
    assert cells(one, "fetch_ns") == [500 * MS, 300 * MS]
    assert cells(one, "wait_ns") == [7 * MS, 0]
    assert cells(one, "threads") == [None, 9]
    assert "loader" not in [column.key for column in one.columns]


def test_several_loaders_are_told_apart():
    report = report_of(LOADER, replace(LOADER, loader=1))
    for name, rows in (("worker_transforms", 5), ("workers", 2)):
        assert cells(table(report, name), "loader") == ["0"] * rows + ["1"] * rows


def test_loader_with_changed_settings_has_a_table_per_setting():
    report = report_of(LOADER, replace(LOADER, num_workers=1))
    titles = {one.id: one.title for one in report.tables if one.id.startswith("num_workers")}
    assert titles == {
        "num_workers": "Number of workers for loader 0 with the current num_workers=2",
        "num_workers_1": "Number of workers for loader 0 with the current num_workers=1",
    }


def test_no_worker_tables_without_records_or_loader():
    for workers in (None, ()):
        report = build_report(analysis_of(steps_of(forward=5), workers=workers))
        assert not [one for one in report.tables if one.id in ("worker_transforms", "workers")]
        assert not [one for one in report.flames if one.id == "worker_stacks"]


def test_missing_workers_are_explained_once():
    why = "The workers were alive before."
    empty = LoaderWorkers(num_workers=2, notes=(why,))
    report = report_of(empty)
    for name in ("worker_transforms", "workers"):
        assert table(report, name).absent_reason == "The workers were alive before"
    assert report.notes.count(f"Workers of the DataLoader: {why}") == 1
    # With several loaders, notes name theirs.
    both = report_of(LOADER, replace(empty, loader=1))
    assert f"Workers of the DataLoader 1: {why}" in both.notes


# The flame graph


def test_worker_functions_form_flame_graph():
    """100 samples of 5 ms: 300 ms in Crop and 200 ms in Blur, below one dataset."""
    flame = next(one for one in report_of(LOADER).flames if one.id == "worker_stacks")
    assert [(one.name, one.depth, one.total, one.own) for one in flame.frames] == [
        ("Dataloader", 0, 500 * MS, 0),
        ("Images.__getitem__", 1, 500 * MS, 0),
        ("Compose.__call__", 2, 500 * MS, 0),
        ("Crop.__call__", 3, 300 * MS, 300 * MS),
        ("Blur.__call__", 3, 200 * MS, 200 * MS),
    ]
    assert flame.notes[0].startswith("100 samples of the workers, ")


def test_busiest_loader_has_most_work_per_worker():
    """1000 ms over two workers are 500 each; 700 ms for one worker are more."""
    alone = replace(LOADER, loader=1, num_workers=1, workers=(WorkerTimes(worker=0, fetch_ns=700 * MS),))
    assert busiest((LOADER, alone)) is alone
    assert busiest((LOADER, replace(alone, num_workers=2))) is LOADER
    assert busiest(()) is None
    flame = next(one for one in report_of(LOADER, alone).flames if one.id == "worker_stacks")
    assert flame.notes[0] == "Loader 1, the one with the busiest workers."


def test_missing_worker_samples_are_not_measured():
    for nothing in (None, StackSamples()):
        with pytest.raises(NotMeasured):
            analysis_of(steps_of(), workers=(replace(LOADER, stacks=nothing),)).read(worker_stacks)


# The finding


def places(*loaders, **run):
    """Places of ``input_bound`` as (line, line it calls)."""
    run.setdefault("setup", with_loader(num_workers=2, prefetch_factor=2, batch_size=4))
    steps = steps_of(forward=5, dataloader=45)
    one = only(diagnose(analysis_of(steps, workers=loaders, **run), [input_bound])[1])
    assert one.status is Status.FOUND
    return [(place.line, place.inner and place.inner.line) for place in one.locations]


def test_place_is_statement_in_worker():
    """60 of 100 samples are in Crop, which the dataset's line calls."""
    assert places(LOADER) == [(12, 21)]


def test_slowest_line_comes_first_if_no_transform_has_half():
    """With 40, 35 and 25 samples, no transform has half of the dataset line's."""
    even = replace(LOADER, stacks=stacks(flip=25, crop=40, blur=35))
    assert places(even) == [(21, None), (12, None)]


def test_too_few_samples_put_no_line_first():
    assert places(replace(LOADER, stacks=stacks(flip=2, crop=4, blur=3))) == [(12, None)]


def test_place_without_worker_samples_is_dataset():
    assert places(replace(LOADER, stacks=None)) == [(7, None)]
    library = StackSamples(
        frames=(COMPOSE,),
        stacks=(SampledStack(phase="dataloader", frames=(0,), samples=50, time_ns=MS),),
    )
    assert places(replace(LOADER, stacks=library)) == [(7, None)]


def test_slow_sampler_is_found_in_training_process():
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


# Cause and number of workers


def played(service_ms, *, workers=1, rest_ms=10, count=60, cpu=0.0, **record):
    """A run with constant batch time and workers that are always behind: a step takes a worker's share of it.

    Each worker starts the next batch when the one before is ready; ``cpu`` is its share of CPU time.
    """
    begins = [service_ms * (number // workers) for number in range(count)]
    column = {
        "worker": tuple(number % workers for number in range(count)),
        "index": tuple(range(count)),
        "begin_ns": tuple(begin * MS for begin in begins),
        "fetched_ns": tuple((begin + service_ms) * MS for begin in begins),
        "ready_ns": tuple((begin + service_ms) * MS for begin in begins),
        "cpu_ns": (round(cpu * service_ms * MS),) * count,
        "samples": (4,) * count,
    }
    making_ms = count * service_ms // workers
    collate_ms = record.pop("collate_ms", 0)
    record.setdefault(
        "calls",
        (
            call(
                "Images.__getitem__",
                "sample",
                0,
                4 * count,
                count * service_ms,
                count * service_ms * 9 // 10,
                cpu_ms=round(cpu * count * service_ms),
                line=10,
            ),
            call("Crop", "transform", 1, 4 * count, count * service_ms * 9 // 10, line=20),
        ),
    )
    times = {
        "batches": count // workers,
        "samples": 4 * count // workers,
        "fetch_ns": (making_ms - collate_ms) * MS,
        "collate_ns": collate_ms * MS,
        "cpu_ns": round(cpu * making_ms * MS),
        **record.pop("times", {}),
    }
    loader = LoaderWorkers(
        num_workers=workers,
        prefetch_factor=2,
        batch_size=4,
        workers=tuple(WorkerTimes(worker=number, **times) for number in range(workers)),
        batches=WorkerBatches(**column),
        **record,
    )
    # All workers are ready at the same time, so one step per round waits for all of them.
    wait_ms = max(0, service_ms - workers * rest_ms)
    waits_ms = [0 if number % workers else wait_ms for number in range(24)]
    steps = steps_of(24, forward=rest_ms, dataloader=waits_ms)
    return analysis_of(
        steps,
        workers=(loader,),
        setup=with_loader(num_workers=workers, prefetch_factor=2, batch_size=4),
    )


def finding(analysis):
    return only(diagnose(analysis, [input_bound])[1])


def evidence(one):
    return {item.label: item.value for item in one.evidence}


def test_too_few_workers_get_more():
    """A batch takes 40 ms and the rest of a step 10: four workers hide it, two make steps of 20 ms."""
    one = finding(played(40, workers=2))
    assert one.summary == (
        "Training waits 10 ms per step (50%) for data. In the workers, Crop is slowest (9 ms"
        " per sample, 90% of worker time). Loading a batch mostly waits (0% of its time is CPU time)."
    )
    assert one.action == (
        "Set num_workers=4, persistent_workers=True (currently num_workers=2). Expect about 20 → 10 ms per"
        " step."
    )
    assert one.saving_ns_per_step == 10 * MS
    told = evidence(one)
    assert told["cause"] == "too few workers"
    assert (told["num_workers"], told["recommended num_workers"]) == (2, 4)
    assert told["predicted step time"] == pytest.approx(10 * MS)
    assert (told["slowest call in the workers"], told["its time per sample"]) == ("Crop", 9 * MS)


def test_cheaper_batches_if_no_worker_count_helps():
    """400 ms of CPU time per batch on 8 CPUs are 50 ms per step, five times the other 10 ms."""
    one = finding(played(400, workers=8, cpu=1.0))
    assert one.action == (
        "Make Crop cheaper. Cache results, decode whole batches, or use the GPU. This saves up to 40 ms per"
        " step."
    )
    assert one.summary.endswith(
        " No value of num_workers from 0 to 8 helps; batches must get 5 times cheaper."
        " Loading a batch is CPU-bound (100% of its time is CPU time)."
    )
    assert evidence(one)["cause"] == "samples are CPU-bound"
    assert "recommended num_workers" not in evidence(one)


def test_hopeless_batches_get_no_factor():
    """With 1 ms for the rest of a step, batches would have to be 50 times cheaper, which is unrealistic."""
    said = finding(played(400, workers=8, cpu=1.0, rest_ms=1)).summary
    assert (
        "No value of num_workers from 0 to 8 helps, and training would still wait if batches were 20 times"
        " cheaper." in said
    )


def test_slow_steps_do_not_advise_predicted_prefetch_factor():
    analysis = played(40, workers=2)
    assert "table Number of workers" in slow_steps_advice(analysis, "dataloader")
    assert "prefetch_factor helps" in slow_steps_advice(
        analysis.replaced({measured_workers: ()}), "dataloader"
    )
    assert "prefetch_factor" not in slow_steps_advice(analysis, "checkpoint")


def test_waiting_samples_get_advice_to_wait_less():
    """With at most 8 workers, 400 ms of reading make steps of 50 ms; more workers might be better."""
    said = finding(played(400, workers=2)).action
    assert "200 → 50 ms per step. More than 8 workers may help further." in said
    assert said.startswith("Make Crop wait less. Cache reads, or read fewer, larger pieces."), (
        "190 ms are more than 150"
    )
    assert "GPU" not in said


def test_batches_without_cpu_show_waiting_time():
    """Workers compute for 10 of 40 ms and wait for a CPU in the other 30, so more workers wouldn't help."""
    said = finding(played(40, workers=2, cpu=0.25, times={"cpu_wait_ns": 900 * MS})).summary
    assert "Loading a batch is CPU-bound (25% of its time is CPU time, 75% is waiting for a CPU)" in said


@pytest.mark.parametrize(
    ("share", "said"), [(0.6, "Make DataLoader samples cheaper"), (0.4, "Re-run on an idle machine")]
)
def test_busy_cpu_advice_blames_own_workers_by_share(share, said):
    """The workers take this share of 8 CPUs."""
    slow = SlowFacts(record=SlowSteps(factor=3.0, cpu_wait_share=0.3), causes=(), medians_ns={}, worst=None)
    analysis = played(40, workers=2).replaced(slow=slow)
    cpu = replace(used(10, 10), workers_ns=round(share * 8 * 200 * MS))
    record = replace(analysis.record, cpu=cpu)
    assert only(judge(busy_cpus, analysis.replaced(record=record))).action.startswith(said)


def test_unfinished_run_uses_worker_cpu_times():
    """The loop's CPU times are read at its end. Eight workers on 8 CPUs compute for 90% of their time."""
    slow = SlowFacts(record=SlowSteps(factor=3.0, cpu_wait_share=0.3), causes=(), medians_ns={}, worst=None)
    analysis = played(80, workers=8, cpu=0.9).replaced(slow=slow)
    record = replace(analysis.record, cpu=None)
    assert only(judge(busy_cpus, analysis.replaced(record=record))).action.startswith("Make DataLoader")


def test_slow_collate_comes_before_more_workers():
    """Each worker spends 800 of 1,200 ms in the collate function."""
    one = finding(played(40, workers=2, collate_ms=800))
    assert one.action.startswith("Collate whole arrays (torch.stack, np.stack, pad_sequence)")
    assert one.summary.endswith("Collating takes 67% of worker time.")
    assert " This saves up to 10 ms per step. Alternatively, set num_workers=4" in one.action
    assert one.action.endswith("(currently num_workers=2). Expect about 20 → 10 ms per step.")


BEGINS = {
    Cause.START_UP: "Set persistent_workers=True (currently False).",
    Cause.THREADS: "Use one thread per worker",
    Cause.PICKLING: "Return few tensors from the collate function",
    Cause.COLLATE: "Collate whole arrays",
    Cause.SLOW_SAMPLES: "Make slow samples cheaper, or drop them.",
    Cause.TOO_FEW_WORKERS: "Set num_workers=4, persistent_workers=True (currently num_workers=2).",
    Cause.WAITS: "Set num_workers=4, persistent_workers=True (currently num_workers=2).",
    Cause.COMPUTES: "Set num_workers=4, persistent_workers=True (currently num_workers=2).",
}


@pytest.mark.parametrize("why", [one for one in Cause if one is not Cause.NONE], ids=lambda one: one.value)
def test_each_cause_has_advice(why):
    facts = played(40, workers=2, cpu=0.2, times={"threads": 18}).read(measured_workers)[0]
    facts = replace(facts, why=why, causes=(WaitCause(why=why, share=0.6, saving_ns=9.5 * MS),))
    setup = with_loader(num_workers=2).loaders[0]
    advice = cause_advice(facts, setup, 8)
    assert advice.action.startswith(BEGINS[why])
    assert advice.saving_ns == (9.5 if why is Cause.START_UP else 10) * MS, "the better one of both fixes"
    # Without a prediction no worker count is given.
    alone = cause_advice(replace(facts, queue=None), setup, 8)
    assert "num_workers" not in alone.action
    assert alone.num_workers is None
    assert "saves up to " in alone.action
    # Persistent workers don't get persistent_workers=True again.
    kept = cause_advice(replace(facts, record=replace(facts.record, is_persistent=True)), setup, 8)
    assert "persistent_workers" not in kept.action


def test_slow_samples_are_found_from_batches():
    facts = played(40, workers=2).read(measured_workers)[0]
    cause = WaitCause(why=Cause.SLOW_SAMPLES, share=0.4, saving_ns=10.0 * MS)
    facts = replace(facts, why=cause.why, causes=(cause,))
    advice = cause_advice(replace(facts, batch=replace(facts.batch, slow=0.05)), None, 8)
    assert advice.action.startswith("Make slow samples cheaper, or drop them.")
    assert "5.0% of batches take over 3 times the median" in advice.told
    alone = cause_advice(replace(facts, batch=None, queue=None), None, 8)
    assert "A few samples are much slower than the others." in alone.told
    assert len(advice.action) <= 4 * 77, "four lines of a terminal of 80 columns"
    assert advice.told.startswith(" Ready batches wait behind slow ones")
    assert "DataLoader(in_order=False)" in advice.told
    # Nothing is held back if batches come unordered or from a single worker.
    for changes in ({"is_ordered": False}, {"num_workers": 1}):
        told = cause_advice(replace(facts, record=replace(facts.record, **changes)), None, 8).told
        assert "in_order" not in told
    # The full report has room for it.
    said = finding(played(40, workers=2).replaced({measured_workers: (facts,)})).summary
    assert "DataLoader(in_order=False)" in said


def test_loader_of_library_gets_advice_through_library():
    facts = played(40, workers=2).read(measured_workers)[0]
    owner = Owner(
        package="replay", place=Place(function="build", file="/lib/replay/x.py", line=3, package="replay")
    )
    said = cause_advice(facts, None, 8, owner).action
    assert said.startswith(
        "Set num_workers=4, persistent_workers=True through replay, which makes the DataLoader in build"
    )


def test_slowest_call_has_most_own_time():
    """Of 1,000 ms, 700 ms of the dataset's own are 8.75 ms for 80 samples; 900 ms are 45 for 20 batches."""
    steps = steps_of(forward=5, dataloader=45)
    own = replace(LOADER, calls=(call("Images.__getitem__", "sample", 0, 80, 800, 100), *LOADER.calls[2:]))
    [facts] = analysis_of(steps, workers=(own,)).read(measured_workers)
    assert told_of(facts) == (
        " In the workers, Images.__getitem__ itself is slowest (8.75 ms per sample, 70% of worker time)."
    )
    joined = replace(LOADER, calls=(call("pad", "collate", 0, 20, 900),))
    [facts] = analysis_of(steps, workers=(joined,)).read(measured_workers)
    assert told_of(facts) == " In the workers, pad is slowest (45 ms per batch, 90% of worker time)."
    [facts] = analysis_of(steps, workers=(replace(LOADER, calls=()),)).read(measured_workers)
    assert (costliest(facts), told_of(facts)) == (None, "")


def test_ready_batches_get_handover_advice():
    """Over nine in ten batches are ready when fetched, so training waits for the handover."""
    ready = BatchCpu(computing=1.0, batch_ns=MS, rest_ns=MS, thread_share=0.5, free_cpus=8.0, ready=0.95)
    [facts] = (run := played(40, workers=2, stacks=stacks(crop=90))).read(measured_workers)
    run = run.replaced(batch_cpu=ready)
    queue = replace(facts.queue, ready=0.95)
    one = finding(run.replaced({measured_workers: (replace(facts, queue=queue),)}))
    assert one.action.startswith("Build each batch from fewer, larger tensors")
    assert "95% of batches were ready" in one.summary
    assert "num_workers=0" not in one.action, "a batch takes longer to make"
    assert "In the workers" not in one.summary
    assert one.locations == ()
    # All sampled fetches may find a batch ready; the queue model knows every batch.
    assert facts.queue.ready < 0.9
    assert finding(run).action.startswith("Set num_workers=4")


def idle(**changes):
    """Two workers whose batches of 1 ms are always ready; handing one over takes 5 of a step's 15 ms."""
    ready = BatchCpu(computing=0.1, batch_ns=MS, rest_ns=MS, thread_share=0.5, free_cpus=8.0, ready=1.0)
    [facts] = (run := played(40, workers=2, **changes)).read(measured_workers)
    found = loader_queue(
        WorkerBatches(
            worker=(0,) * 60,
            index=tuple(range(60)),
            begin_ns=tuple(2 * MS * number for number in range(60)),
            fetched_ns=tuple((2 * number + 1) * MS for number in range(60)),
            ready_ns=tuple((2 * number + 1) * MS for number in range(60)),
            cpu_ns=(0,) * 60,
            samples=(4,) * 60,
        ),
        num_workers=2,
        prefetch_factor=2,
        rests_ns=np.full(24, 10.0 * MS),
        waits_ns=np.full(24, 5.0 * MS),
    )
    return run.replaced({measured_workers: (replace(facts, queue=found),)}, batch_cpu=ready)


def test_idle_workers_that_cost_more_are_removed():
    """Making a batch takes 1 ms and handing it over 5, so steps take 11 ms without workers instead of 15."""
    one = finding(idle())
    assert one.action.startswith("Set num_workers=0 (currently 2). Expect about 15 → 11 ms per step or less.")
    assert "100% of batches were ready" in one.summary
    assert (one.saving_ns_per_step, one.severity) == (4 * MS, Severity.CRITICAL)
    assert evidence(one)["recommended num_workers"] == 0
    assert "Build each batch from fewer" not in one.action
    # A DataLoader without workers rejects persistent_workers=True and a prefetch_factor.
    [facts] = idle().read(measured_workers)
    queue = replace(facts.queue, present=replace(facts.queue.present, prefetch_factor=4))
    call = "Set num_workers=0, persistent_workers=False, prefetch_factor=None"
    assert predicted_call(queue, "DataLoader", True, None, 4.0 * MS).startswith(call)


def test_pickling_is_fixed_by_removing_workers():
    """Both fixes end the pickling; removing workers is a single argument, so it comes first."""
    [facts] = idle().read(measured_workers)
    cause = WaitCause(why=Cause.PICKLING, share=3.08, saving_ns=9.0 * MS)
    advice = cause_advice(replace(facts, why=cause.why, causes=(cause,)), None, 8)
    assert advice.action.startswith("Set num_workers=0 (currently 2). Expect about 15 → 11 ms")
    assert " Alternatively, return few tensors from the collate function" in advice.action
    assert advice.saving_ns == 4 * MS


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
def test_saving_is_wait_for_any_worker_count(workers):
    """400 ms per batch and 10 ms of the rest: cheaper batches end the wait, whatever workers gain."""
    run = played(400, workers=workers) if workers else inline(400)
    one = finding(run)
    wait_ns = evidence(one)["data wait per step"]
    handover_ns = run.read(measured_workers)[0].queue.handover_ns if workers else 0
    assert one.saving_ns_per_step == pytest.approx(wait_ns - handover_ns, rel=0.01)


def test_startup_belongs_to_worker_startup():
    """Clean steps don't wait for startup, but for the next cause."""
    [facts] = (run := played(40, workers=2)).read(measured_workers)
    start = WaitCause(why=Cause.START_UP, share=0.6, saving_ns=70.0 * MS)
    facts = replace(facts, why=Cause.START_UP, causes=(start, *facts.causes))
    one = finding(run.replaced({measured_workers: (facts,)}))
    assert one.action.startswith("Set num_workers=4, persistent_workers=True")
    assert "Worker startup costs more (see worker_startup)." in one.summary
    assert one.saving_ns_per_step == 10 * MS
    alone = finding(run.replaced({measured_workers: (replace(facts, causes=(start,)),)}))
    assert alone.saving_ns_per_step == 10 * MS, "never more than a clean step waits"


def test_missing_records_fall_back_to_general_advice():
    one = finding(played(40, workers=2).replaced({measured_workers: NotMeasured("not measured")}))
    assert "In the workers" not in one.summary
    assert one.action.startswith("Set num_workers=4, persistent_workers=True (currently num_workers=2).")
    assert "predicted" not in one.action


# The number of workers


def test_predictions_are_shown_in_table_and_chart():
    """40 ms per batch and 10 ms of the rest: steps of 50 ms without workers, then of 40, 20 and 10 ms."""
    report = build_report(played(40, workers=2))
    one = table(report, "num_workers")
    steps = {row[0]: row[3] for row in one.rows if row[1] in (2, None)}
    for workers, expected in (("0", 50), ("1", 40), ("2", 20), ("4", 10), ("8", 10)):
        assert steps[workers] == pytest.approx(expected * MS, rel=0.01), workers
    assert {row[2]: row[:2] for row in one.rows if row[2]} == {"current": ("2", 2), "recommended": ("4", 2)}
    assert cells(one, "steps_per_s")[0] == pytest.approx(20, rel=0.01)
    assert one.notes[0].startswith("Measured: 20 ms per step; simulated: 20 ms (from")
    chart = next(one for one in report.charts if one.id == "num_workers")
    by_key = {one.key: dict(zip(chart.x, one.values, strict=True)) for one in chart.series}
    assert by_key["predicted"][1.0] == pytest.approx(40 * MS, rel=0.01)
    assert {x: value for x, value in by_key["now"].items() if value} == {2.0: 20 * MS}
    assert [x for x, value in by_key["advised"].items() if value] == [4.0]
    assert (chart.level, chart.level_label) == (10 * MS, "no waiting")


def test_current_worker_count_may_be_recommended():
    one = table(build_report(played(40, workers=4, rest_ms=12)), "num_workers")
    assert [row[:3] for row in one.rows if row[2]] == [("4", 2, "current, recommended")]


def test_missing_prediction_is_explained():
    report = report_of(LOADER)
    assert "batches were timed" in table(report, "num_workers").absent_reason
    assert not [one for one in report.charts if one.id == "num_workers"]


# Without workers


def inline(fetch_ms=40, rest_ms=10, **setup):
    """A run with num_workers=0, whose fetches sleep."""
    steps = steps_of(24, forward=rest_ms, dataloader=fetch_ms)
    return analysis_of(steps, cpu=used(fetch_ms, rest_ms), setup=with_loader(**setup))


UNSEEN = "num_workers is 0, so the predicted step time is extrapolated from fetch times"
EXTRAPOLATED = "extrapolated from fetch times"


def test_predictions_without_workers_use_fetches():
    """40 ms per batch and 10 of the rest: 50, then 40, 20, 13.3 and, including the handover, 10.5 ms."""
    report = build_report(analysis := inline())
    one = table(report, "num_workers")
    steps = {row[0]: row[3] / MS for row in one.rows if row[1] in (2, None)}
    expected = {0: 50, 1: 40, 2: 20, 3: 40 / 3, 4: 10.5, 8: 10.5}
    assert {each: steps[str(each)] for each in expected} == pytest.approx(expected, rel=1e-3)
    assert {row[2]: row[:2] for row in one.rows if row[2]} == {
        "current": ("0", None),
        "recommended": ("4", 2),
    }
    assert one.notes[0].startswith("Measured: 50 ms per step; simulated: 50 ms (from")
    assert one.notes[1].startswith(UNSEEN)
    assert one.notes[1].endswith(", plus 0.5 ms for the transfer.")
    chart = next(one for one in report.charts if one.id == "num_workers")
    by_key = {one.key: dict(zip(chart.x, one.values, strict=True)) for one in chart.series}
    assert {x: value for x, value in by_key["now"].items() if value} == {0.0: 50 * MS}
    assert [x for x, value in by_key["advised"].items() if value] == [4.0]
    assert any(UNSEEN in note for note in chart.notes)
    found = finding(analysis)
    assert found.action == (
        "Set num_workers=4, persistent_workers=True (currently num_workers=0). Expect about 50 → 10.5 ms per"
        " step."
    )
    assert EXTRAPOLATED in found.summary
    assert found.saving_ns_per_step == 40 * MS, "the wait is what it costs"
    told = evidence(found)
    assert (told["num_workers"], told["recommended num_workers"], told["usable CPUs"]) == (0, 4, 8)
    assert told["predicted step time"] == 10.5 * MS
    # There are no tables about single workers.
    assert not [one for one in report.tables if one.id in ("workers", "worker_transforms")]


def test_cpu_bound_batches_promise_best_case_only():
    """The model ignores that computing workers slow down each other and the training."""
    steps = steps_of(24, forward=10, dataloader=40)
    cpu = used(40, 10, computing=1.0, cpus=8, rest_cpu_ms=10)
    found = finding(analysis_of(steps, cpu=cpu, setup=with_loader()))
    assert "saves about" not in found.action
    assert "At best, 50 → 10.5 ms per step; the gain is smaller if workers compete" in found.action
    assert "At best, 20 → " in finding(played(40, workers=2, cpu=0.9)).action, "with workers, too"


def test_measured_workers_are_not_extrapolated():
    report = build_report(played(40, workers=2))
    said = [*table(report, "num_workers").notes, *(one.summary for one in report.findings)]
    said += [note for one in report.charts for note in one.notes]
    assert not [one for one in said if EXTRAPOLATED in one]


def test_rows_in_memory_get_no_prediction():
    """No worker is faster than 64 rows in 2 ms, so there is no table and the finding names no count."""
    report = build_report(analysis := inline(2, 4, batch_size=64))
    assert not [one for one in (*report.tables, *report.charts) if one.id == "num_workers"]
    assert "num_workers" not in finding(analysis).action


def test_worker_hint_needs_more_than_handover():
    """3 of 103 ms are worth a worker; 1 of 41 ms and 0.6 of 5.6 ms aren't, given a handover of 0.5 ms."""
    hint = only(judge(synchronous_loader, inline(3, 100)))
    assert hint.status is Status.FOUND
    assert hint.action.endswith("103 → 100 ms per step.")
    assert EXTRAPOLATED in hint.summary
    assert only(judge(synchronous_loader, inline(1, 40))).status is Status.CLEAN
    short = finding(inline(0.6, 5))
    assert short.summary.endswith("Handing a batch over from a worker would take about as long.")
    assert "num_workers" not in short.action
    assert EXTRAPOLATED not in short.summary
    # 40 ms of CPU time and 10 of the step on two CPUs take at least 25 ms, so batches stay too slow.
    cpu, setup = used(40, 10, computing=1.0, cpus=2, rest_cpu_ms=10), replace(SETUP, usable_cpus=2)
    one = finding(analysis_of(steps_of(24, forward=10, dataloader=40), cpu=cpu, setup=setup))
    assert one.action.startswith("Pre-decode or pre-transform the data")
    assert "This saves up to 40 ms per step. Alternatively, set num_workers=2, persistent_w" in one.action
    cpu = used(40, 10, computing=1.0, cpus=1, rest_cpu_ms=10)
    setup = replace(SETUP, usable_cpus=1)
    one = finding(analysis_of(steps_of(24, forward=10, dataloader=40), cpu=cpu, setup=setup))
    assert "no CPU is free" in one.summary


# Samples that are equal in every epoch


def kept(analysis):
    """The finding about caching, where all compared samples were equal."""
    seen = RepeatedSamples(num_indices=9, num_compared=20, num_equal=20, sample_bytes=8)
    return only(judge(repeated_work, analysis.replaced(repeated=seen)))


def test_cache_is_advised_if_training_waits_for_samples():
    for analysis in (inline(), played(40, workers=2)):
        assert kept(analysis).action.startswith("Cache each sample, in memory or on disk.")


def test_cache_is_not_advised_for_cheap_samples():
    """Rows of a TensorDataset, samples of 10 us in workers, ready batches, and a slow collate function."""
    tensors = Place(function="TensorDataset.__getitem__", file="dataset.py", line=207, is_library=True)
    assert "rows in memory" in kept(inline(batch_size=4, dataset=tensors)).summary
    own = replace(tensors, function="TensorDataset.__getitem__", is_library=False)
    assert kept(inline(batch_size=4, dataset=own)).status is Status.FOUND
    run = played(40, workers=2)
    [facts] = run.read(measured_workers)
    for changes, said in (
        ({"sample_ns": 10_000.0}, "rows in memory"),
        ({"collate": 0.6}, "collating samples"),
    ):
        one = kept(run.replaced({measured_workers: (replace(facts, **changes),)}))
        assert one.status is Status.CLEAN
        assert said in one.summary
    assert "have their batches ready" in kept(idle()).summary


@pytest.mark.parametrize(("samples", "status"), [(60, Status.CLEAN), (40, Status.FOUND)])
def test_cache_is_not_advised_if_collating_dominates(samples, status):
    collate = frame("collate", 51)
    record = StackSamples(
        frames=(GET, collate),
        stacks=tuple(
            SampledStack(phase="dataloader", frames=(which,), samples=count, time_ns=count * MS)
            for which, count in ((0, 100 - samples), (1, samples))
        ),
        samples=100,
    )
    place = Place(function="collate", file=DATA, line=50)
    analysis = inline(collate=place).replaced(hot_lines=HotLines(samples=record))
    assert kept(analysis).status is status


# Over time


def batches_of(*rows):
    """Batches from (worker, index, start, ready) in ms, in the order in which they become ready."""
    worker, index, begin, ready = zip(*rows, strict=True)
    begin_ns, ready_ns = (tuple(one * MS for one in times) for times in (begin, ready))
    return WorkerBatches(
        worker=worker,
        index=index,
        begin_ns=begin_ns,
        fetched_ns=ready_ns,
        ready_ns=ready_ns,
        cpu_ns=(0,) * len(rows),
        samples=(1,) * len(rows),
    )


def test_worker_curve_over_time():
    """Batch 0 takes 90 ms; the other worker has made 1 and 2 after 20 and 40 ms, and these wait for it.

    Of three parts of 30 ms, two workers work for the first, then for 10 of 30 ms, then one. Batch 1 is held
    back from 20 to 90 and batch 2 from 40 to 90: for 10, then 30 + 20, then 60 ms.
    """
    late = replace(LOADER, batches=batches_of((1, 1, 0, 20), (1, 2, 20, 40), (0, 0, 0, 90)))
    curve = worker_curve(late)
    assert curve.part_ns == 30 * MS
    assert curve.making == pytest.approx((2, 4 / 3, 1))
    assert curve.held_back == pytest.approx((1 / 3, 5 / 3, 2))
    assert worker_curve(replace(late, is_ordered=False)).held_back == (0, 0, 0)
    chart = next(one for one in report_of(late).charts if one.id == "worker_queue")
    assert chart.x == (0, 30, 60)
    assert (chart.level, chart.level_label) == (2, "workers")


def test_new_epoch_holds_back_no_earlier_batches():
    """Numbers restart, so batch 0 of the second epoch is ready last, but holds nothing of the first back."""
    rows = [(0, 0, 0, 10), (0, 1, 10, 20), (0, 0, 50, 60)]
    assert sum(worker_curve(replace(LOADER, batches=batches_of(*rows))).held_back) == 0


def test_worker_curve_matches_counting():
    """The curve is compared with counts at many moments."""
    chosen = random.Random(5)
    rows = []
    for worker in range(3):
        now = 0
        for turn in range(20):
            begin = now + chosen.randint(0, 5)
            now = begin + chosen.choice((3, 7, 60))
            rows.append((worker, 3 * turn + worker, begin, now))
    rows.sort(key=lambda row: row[3])
    curve = worker_curve(replace(LOADER, num_workers=3, prefetch_factor=20, batches=batches_of(*rows)))
    first, end = min(row[2] for row in rows), rows[-1][3]
    parts, looks = len(curve.making), 400
    assert parts == len(curve.held_back) > 1
    _, index, begins, ends = np.array(rows).T
    is_later = index[:, None] > index
    for part in range(parts):
        moments = first + (part + (np.arange(looks)[:, None] + 0.5) / looks) * (end - first) / parts
        making = ((begins <= moments) & (moments < ends)).sum() / looks
        is_ready = ends <= moments  # for each moment and row
        held = (is_ready & ((~is_ready[:, None, :] & is_later).any(axis=2))).sum() / looks
        assert curve.making[part] == pytest.approx(making, abs=0.02)
        assert curve.held_back[part] == pytest.approx(held, abs=0.1)


def test_curve_needs_time_between_batches():
    assert worker_curve(replace(LOADER, batches=batches_of((0, 0, 0, 10)))) is None
    assert worker_curve(replace(LOADER, batches=batches_of((0, 0, 5, 5), (1, 1, 5, 5)))) is None


def test_worker_startup_shows_mean_start_time():
    """Three starts of 100 ms and one of 300 ms are 150 ms on average."""
    times = (
        WorkerTimes(worker=0, starts=3, start_ns=100 * MS),
        WorkerTimes(worker=1, starts=1, start_ns=300 * MS),
        WorkerTimes(worker=2),
    )
    tags = [StepTag.FIRST_OF_EPOCH if number % 10 == 0 else 0 for number in range(40)]
    steps = steps_of(
        40, tags, forward=5, dataloader_init=[200 if number % 10 == 0 else 0 for number in range(40)]
    )
    setup = with_loader(num_workers=3, persistent_workers=False)
    for workers, expected in (((replace(LOADER, workers=times),), 150 * MS), (None, None)):
        one = only(judge(worker_startup, analysis_of(steps, setup=setup, workers=workers)))
        assert one.status is Status.FOUND
        assert evidence(one).get("worker startup until its first sample") == expected


@pytest.mark.parametrize(("batch_ms", "saved_ms"), [(40, 280), (300, 200), (0, 320)])
def test_worker_startup_excludes_first_batch(batch_ms, saved_ms):
    """An epoch starts with 200 ms of startup and 120 of waiting, which includes making a batch anyway."""
    first = [number % 10 == 0 for number in range(40)]
    steps = steps_of(
        40,
        [StepTag.FIRST_OF_EPOCH if one else 0 for one in first],
        forward=5,
        dataloader=[120 if one else 0 for one in first],
        dataloader_init=[200 if one else 0 for one in first],
    )
    times = WorkerTimes(worker=0, batches=10, fetch_ns=10 * batch_ms * MS)
    setup = with_loader(num_workers=1, persistent_workers=False)
    record = LoaderWorkers(num_workers=1, workers=(times,))
    one = only(judge(worker_startup, analysis_of(steps, setup=setup, workers=(record,))))
    assert evidence(one)["restart time per epoch"] == pytest.approx(saved_ms * MS)
    assert one.saving_ns_per_step == pytest.approx(evidence(one)["restarts"] * saved_ms * MS / 40)


def test_busiest_loader_is_found_and_others_limit_saving():
    """Loader 1 takes 40 ms with two workers and the other one 30 ms, so steps can't go below 15 ms."""
    [busy], [other] = (
        (run := played(40, workers=2)).read(measured_workers),
        played(30, workers=2).read(measured_workers),
    )
    busy = replace(busy, record=replace(busy.record, loader=1))
    one = finding(run.replaced({measured_workers: (other, busy)}))
    assert " In the workers of DataLoader 1, Crop is slowest (9 ms per sample" in one.summary
    assert one.action.endswith("20 → 15 ms per step.")
    assert "Other DataLoaders limit the saving." in one.summary
    assert one.saving_ns_per_step == pytest.approx(5 * MS, rel=0.01)
    # The same loader with changed settings isn't another loader.
    again = replace(other, record=replace(other.record, loader=1))
    one = finding(run.replaced({measured_workers: (again, busy)}))
    assert " In the workers, Crop is slowest" in one.summary
    assert "Other DataLoaders" not in one.summary


@pytest.mark.parametrize("why", [Cause.TOO_FEW_WORKERS, Cause.START_UP])
def test_combined_loader_passes_advice_to_its_loaders(why):
    """A CombinedLoader contains loaders, which are the ones that need more workers."""
    facts = played(40, workers=2, cpu=0.2).read(measured_workers)[0]
    facts = replace(facts, why=why, causes=(WaitCause(why=why, share=0.6, saving_ns=7.0 * MS),))
    assert cause_advice(facts, LoaderSetup(kind="CombinedLoader"), 8).action.startswith(BEGINS[why])
