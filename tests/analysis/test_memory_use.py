"""Memory over a run: reading it, telling growth from noise, and the report's findings."""

from __future__ import annotations

import math
import mmap
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import theil_sen
from lightning_modelprof.analysis.steps.memory import grown, memory_use
from lightning_modelprof.measure.resources import memory as measured
from lightning_modelprof.measure.resources.memory import (
    MOST_POINTS,
    DeviceBytes,
    MemoryCurve,
    ProcessMemory,
    device_memory,
    host_total_bytes,
    peak_rss_bytes,
    process_memory,
    total_bytes,
)
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.charts.model import memory_curve
from lightning_modelprof.report.model import Severity, Status, Unit
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.memory import (
    memory_creep,
    memory_fragmentation,
    memory_near_capacity,
)
from lightning_modelprof.report.tables.run.memory_by_phase import MEMORY_BY_PHASE, MEMORY_PEAKS
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.memory import (
    CATEGORIES,
    GrowingAttribute,
    MemoryPoint,
    MemoryRecord,
    PhasePeak,
    StepMemory,
)
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.units import size
from tests.support.diagnosed import SETUP, only, steps_of
from tests.support.facts import tables_of, why_not
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, run_fit, run_script

pytestmark = pytest.mark.slow

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


def run_with(record, steps=None, **info):
    steps = steps_of(100, forward=100) if steps is None else steps  # 100 ms per step
    return Run(
        info=RunInfo(created="now", **info),
        ranks=(RankRecord(rank=0, steps=steps, setup=SETUP, memory=record),),
    )


def analysis_with(record, **info):
    return Facts(run_with(record, **info))


def curve_of(sizes, kind="anonymous_bytes", every=1):
    empty = MemoryPoint(step=0, rss_bytes=None, allocated_bytes=None, reserved_bytes=None)
    return tuple(
        replace(empty, **{"step": every * step, kind: int(one)}) for step, one in enumerate(np.asarray(sizes))
    )


# Reading


def test_memory_of_this_process():
    """Allocating and touching 64 MiB raises the process's memory and its peak."""
    before = process_memory()
    # Map fresh memory: memory freed by earlier tests may be reused.
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(64):  # one piece at a time, so that nothing else grows
        held.write(bytes([1]) * MIB)
    now, peak = process_memory(), peak_rss_bytes()
    assert 60 * MIB < now.rss - before.rss < 70 * MIB
    assert peak >= now.rss - MIB  # the system's own counters lag behind by some pages
    if now.anonymous is not None:
        assert 60 * MIB < now.anonymous - before.anonymous < 70 * MIB
        assert now.anonymous <= now.rss
    assert len(held) == 64 * MIB
    assert peak < host_total_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_mapped_files_are_not_private_memory(tmp_path):
    path = tmp_path / "data"
    np.ones(64 * MIB, np.uint8).tofile(path)
    before = process_memory()
    mapped = np.memmap(path, mode="r")
    assert int(mapped.sum()) == 64 * MIB
    now = process_memory()
    assert now.rss - before.rss > 60 * MIB
    assert now.anonymous - before.anonymous < 8 * MIB


def test_peak_without_linux(monkeypatch, tmp_path):
    """ru_maxrss is in KiB on Linux and in bytes on macOS."""
    monkeypatch.setattr(measured, "_STATUS", tmp_path / "none")
    usage = SimpleNamespace(ru_maxrss=3000)
    monkeypatch.setattr(
        measured, "resource", SimpleNamespace(getrusage=lambda who: usage, RUSAGE_SELF=0), raising=False
    )
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_rss_bytes() == 3000 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_rss_bytes() == 3000


def test_container_limit(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(measured, "_CONTAINER_LIMITS", (limit, tmp_path / "none"))
    whole = host_total_bytes()
    limit.write_text("max\n")
    assert host_total_bytes() == whole
    limit.write_text("123456\n")
    assert host_total_bytes() == 123456


def test_cpu_has_no_counters_and_device_is_not_initialized():
    assert device_memory(CPU) == DeviceBytes()
    assert total_bytes(CPU) is None
    assert device_memory(torch.device("cuda:0")) == DeviceBytes()
    assert total_bytes(torch.device("cuda:0")) is None
    assert not torch.cuda.is_initialized()


NESTED = {
    "allocated_bytes": {"all": {"current": 5, "peak": 7}, "small_pool": {"current": 1}},
    "reserved_bytes": {"all": {"current": 8, "peak": 9}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}
FLAT = {
    "allocated_bytes.all.current": 5,
    "allocated_bytes.all.peak": 7,
    "reserved_bytes.all.current": 8,
    "reserved_bytes.all.peak": 9,
    "num_alloc_retries": 2,
    "num_ooms": 1,
}
COUNTED = DeviceBytes(allocated=5, reserved=8, peak_allocated=7, peak_reserved=9, num_retries=2, num_ooms=1)


class FakeBackend:
    """torch.cuda as far as we read it; any other access fails, such as resets and synchronization."""

    def __init__(self, stats, name="memory_stats_as_nested_dict"):
        self.devices = []
        setattr(self, name, lambda device: self.devices.append(device) or stats)

    def is_initialized(self):
        return True

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=100)


@pytest.mark.parametrize(
    ("kind", "stats", "name"),
    [
        ("cuda", NESTED, "memory_stats_as_nested_dict"),
        ("cuda", FLAT, "memory_stats"),
        ("xpu", FLAT, "memory_stats"),
        ("xpu", {k: v for k, v in FLAT.items() if not k.startswith("num")}, "memory_stats"),
    ],
)
def test_device_counters(monkeypatch, kind, stats, name):
    backend = FakeBackend(stats, name)
    monkeypatch.setattr(torch, kind, backend)
    device = torch.device(kind, 1)
    expected = COUNTED if "num_ooms" in stats else COUNTED._replace(num_retries=None, num_ooms=None)
    assert device_memory(device) == expected
    assert total_bytes(device) == 100
    assert backend.devices == [device]


def test_mps_counters(monkeypatch):
    """MPS has no peaks."""
    fake = SimpleNamespace(
        current_allocated_memory=lambda: 5,
        driver_allocated_memory=lambda: 8,
        recommended_max_memory=lambda: 90,
    )
    monkeypatch.setattr(torch, "mps", fake)
    assert device_memory(torch.device("mps", 0)) == DeviceBytes(allocated=5, reserved=8)
    assert total_bytes(torch.device("mps", 0)) == 90


# The curve


def curve(**kwargs):
    return MemoryCurve(CPU, **({"read_process": lambda: ProcessMemory(10, 8)} | kwargs))


def test_each_step_is_read_once():
    one = curve(read_device=lambda device: DeviceBytes(allocated=3, reserved=4))
    for step in (0, 0, 1, 5, 5, 6):
        one.look(step)
    assert one.record().curve == tuple(
        MemoryPoint(step=step, rss_bytes=10, allocated_bytes=3, reserved_bytes=4, anonymous_bytes=8)
        for step in (0, 1, 5, 6)
    )


@pytest.mark.parametrize("num_steps", [999, 1000, 1001, 5000])
def test_points_stay_few_and_evenly_spaced(num_steps):
    one = curve()
    for step in range(num_steps):
        one.look(step)
    steps = [point.step for point in one.record().curve]
    assert len(steps) < MOST_POINTS
    assert num_steps < MOST_POINTS or len(steps) >= MOST_POINTS // 2
    distances = set(np.diff(steps).tolist())
    assert distances == {2 ** math.ceil(math.log2((num_steps + 1) / MOST_POINTS)) if num_steps > 999 else 1}
    assert steps[0] == 0


def test_read_error_is_noted_once():
    def fail(*device):
        raise OSError("no such driver")

    one = curve(read_process=fail, read_device=fail)
    for step in range(5):
        one.look(step)
    record = one.record()
    assert [point.rss_bytes for point in record.curve] == [None] * 5
    assert record.notes == (
        "The process's memory couldn't be read: OSError: no such driver.",
        "The device's memory couldn't be read: OSError: no such driver.",
    )
    assert record.peak_rss_bytes is not None


def test_record_round_trip(tmp_path):
    peak = PhasePeak(phase="forward", num_bytes=3, by_category={"batch": 3}, operator="aten::mm", module="a")
    record = MemoryRecord(
        curve=curve_of([1, 2]),
        num_ooms=0,
        step_memory=StepMemory(
            step=1, device="cpu", begin_bytes=3, begin_by_category={"batch": 3}, peaks=(peak,)
        ),
    )
    path = tmp_path / "run.json"
    save_run(run_with(record), path)
    assert load_run(path).ranks[0].memory == record


# Growth


def test_theil_sen_by_hand():
    """Slopes of (0, 0), (1, 1), (2, 4) are 1, 3 and 2; of five points on a line with an outlier, the line's.

    Interval for n = 5: C = 1.96 √(5 4 15 / 18) = 8.0, so it spans all 10 slopes from the first (rank 1) up.
    """
    assert theil_sen(np.array([0.0, 1, 2]), np.array([0.0, 1, 4]))[0] == 2
    x = np.arange(5.0)
    y = np.array([0.0, 3, 6, 1000, 12])
    slope, low, high = theil_sen(x, y)
    slopes = [(y[j] - y[i]) / (j - i) for i in range(5) for j in range(i + 1, 5)]
    assert slope == 3
    assert (low, high) == (min(slopes), max(slopes))


def test_theil_sen_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(3)
    x = np.sort(generator.uniform(0, 100, 40))
    y = 0.3 * x + generator.normal(0, 2, 40)
    theirs = stats.theilslopes(y, x, 0.95)
    ours = theil_sen(x, y)
    assert ours[0] == pytest.approx(theirs.slope)
    # SciPy rounds the ranks; we take the wider ones.
    assert ours[1] <= theirs.low_slope <= ours[0] <= theirs.high_slope <= ours[2]
    assert ours[2] - ours[1] <= 1.1 * (theirs.high_slope - theirs.low_slope)


def test_interval_contains_slope():
    """The 95% interval contains the true slope for at least 180 of 200 noisy lines."""
    generator = np.random.default_rng(1)
    x = np.arange(40.0)
    inside = 0
    for _ in range(200):
        _, low, high = theil_sen(x, 2 * x + generator.normal(0, 10, 40))
        inside += low <= 2 <= high
    assert inside >= 180


def sizes(growth_per_step=0.0, *, num=200, noise=MIB, level=500 * MIB, seed=0):
    return level + growth_per_step * np.arange(num) + np.random.default_rng(seed).normal(0, noise, num)


def test_growth_is_measured_in_second_half():
    found = grown(curve_of(sizes(0.5 * MIB), every=3), "anonymous_bytes", "anonymous")
    assert found.bytes_per_step == pytest.approx(0.5 * MIB / 3, rel=0.05)
    assert found.low < 0.5 * MIB / 3 < found.high
    assert (found.first_step, found.last_step) == (300, 597)
    assert grown(curve_of(sizes(num=30)), "anonymous_bytes", "anonymous") is None


def evaluate(sizes, kind="anonymous_bytes", **record):
    return judge(memory_creep, analysis_with(MemoryRecord(curve=curve_of(sizes, kind), **record)))


@pytest.mark.parametrize("seed", range(5))
def test_leak_is_found(seed):
    """0.1 MiB per step is 100 MiB in 1,000 steps, with noise of 1 MiB."""
    finding = only(evaluate(sizes(0.1 * MIB, seed=seed)))
    assert finding.status is Status.FOUND
    assert finding.severity is Severity.INFO, "it was looked at for 20 s, and no attribute tells of it"
    assert finding.evidence[0].value == pytest.approx(100 * MIB, rel=0.25)
    assert "losses.append" in finding.action


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_leak(seed):
    assert only(evaluate(sizes(seed=seed))).status is Status.CLEAN


def test_large_noise_is_not_leak():
    """Random slopes are far above the thresholds; in 39 of 40 cases the interval includes 0."""
    noisy = [sizes(noise=200 * MIB, level=10 * GIB, seed=seed) for seed in range(40)]
    slopes = [grown(curve_of(one), "anonymous_bytes", "anonymous").bytes_per_step for one in noisy]
    assert sum(slope * 1000 >= 102.4 * MIB for slope in slopes) >= 10
    assert sum(only(evaluate(one)).status is Status.FOUND for one in noisy) <= 3


def test_warm_up_that_levels_off_is_not_leak():
    """Fills by 1 - e^(-t/τ), τ being a twentieth, an eighth or a fifth of the run; or stops; or jumps."""
    step = np.arange(200)
    noise = np.random.default_rng(0).normal(0, MIB / 4, 200)
    for part in (20, 8, 5):
        full = 500 * MIB + 300 * MIB * (1 - np.exp(-step / (200 / part))) + noise
        assert only(evaluate(full)).status is Status.CLEAN, part
    stops = 500 * MIB + np.minimum(step, 90) * MIB + noise
    assert only(evaluate(stops)).status is Status.CLEAN
    for at in (110, 150, 190):
        jumps = 500 * MIB + np.where(step > at, 200 * MIB, 0) + noise
        assert only(evaluate(jumps)).status is Status.CLEAN, at


def test_sawtooth_is_leak_only_if_it_rises():
    """The garbage collector runs every 23 steps."""
    step = np.arange(400)
    teeth = 500 * MIB + (step % 23) * MIB
    assert only(evaluate(teeth)).status is Status.CLEAN
    assert only(evaluate(teeth + 0.2 * MIB * step)).status is Status.FOUND


def in_epochs(sizes, length, kind="anonymous_bytes"):
    """The rule's findings for a curve with a point per step, in epochs of the given length."""
    steps = steps_of(len(sizes), [0, *(int(n % length == 0) for n in range(1, len(sizes)))], forward=100)
    return judge(memory_creep, Facts(run_with(MemoryRecord(curve=curve_of(sizes, kind)), steps=steps)))


@pytest.mark.parametrize("num_epochs", [2, 3, 5, 12])
@pytest.mark.parametrize("kind", ["anonymous_bytes", "allocated_bytes"])
def test_growth_within_epochs_is_found(num_epochs, kind):
    """2 MiB per step are kept for the 60 steps of an epoch, with noise of 1 MiB."""
    step = np.arange(60 * num_epochs)
    noise = np.random.default_rng(num_epochs).normal(0, MIB, len(step))
    finding = only(in_epochs(500 * MIB + step % 60 * 2 * MIB + noise, 60, kind))
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.WARNING)
    values = {one.label: one.value for one in finding.evidence}
    assert values["growth per step"] == pytest.approx(2 * MIB, rel=0.05)
    # From the first to the last group of neighbors: at most an epoch without its first step.
    assert 0.75 * 118 * MIB < finding.evidence[0].value < 118 * MIB
    assert values["freed at the end of an epoch"] == pytest.approx(finding.evidence[0].value, rel=0.1)
    assert values["epochs"] == num_epochs
    assert "within each epoch" in finding.summary
    assert "detach" in finding.action


@pytest.mark.parametrize("seed", range(10))
def test_no_growth_within_epochs(seed):
    """Noise; memory that fills up early in each epoch; 0.1 MiB per step, which is 6 MiB per epoch."""
    step = np.arange(300)
    level = 500 * MIB + np.random.default_rng(seed).normal(0, MIB, 300)
    for more in (0 * step, np.minimum(step % 60, 20) * 3 * MIB, step % 60 * 0.1 * MIB):
        assert only(in_epochs(level + more, 60)).status is Status.CLEAN


def test_leak_across_epochs_is_still_leak():
    """Memory kept across epochs is a leak with or without half as much that each epoch clears."""
    step = np.arange(600)
    for cleared in (0, 0.5):
        finding = only(in_epochs(500 * MIB + step * MIB + cleared * (step % 60) * MIB, 60))
        assert "per 1,000 steps" in finding.summary
        assert finding.evidence[0].value == pytest.approx(1000 * MIB, rel=0.5 if cleared else 0.1)


def test_interval_of_strata_contains_slope():
    """The 95% interval contains the true slope for at least 180 of 200 noisy sawtooth curves."""
    generator = np.random.default_rng(2)
    x, strata = np.arange(40.0), np.arange(40) // 8
    noisy = (2 * (x % 8) + generator.normal(0, 10, 40) for _ in range(200))
    intervals = [theil_sen(x, y, strata)[1:] for y in noisy]
    assert sum(low <= 2 <= high for low, high in intervals) >= 180


def test_slopes_of_strata_by_hand():
    """(0, 0), (1, 1) | (2, 0), (3, 3), (4, 4): slopes 1 and 3, 1, 2; no pair crosses the bar."""
    strata = np.array([0, 0, 1, 1, 1])
    slope, low, high = theil_sen(np.arange(5.0), np.array([0.0, 1, 0, 3, 4]), strata)
    assert (slope, low, high) == (1.5, 1, 3)


def test_small_growth_is_not_leak():
    """10 MiB per 1,000 steps; 100 MiB, below 1% of 20 GiB; 20 MiB, of which 2 MiB were measured."""
    assert only(evaluate(sizes(0.01 * MIB, noise=0))).status is Status.CLEAN
    assert only(evaluate(sizes(0.1 * MIB, noise=0, level=20 * GIB))).status is Status.CLEAN
    assert only(evaluate(sizes(0.02 * MIB, noise=0, level=100 * MIB))).status is Status.CLEAN


def test_short_measurement_of_process_memory_is_not_critical():
    """1 MiB per step of 100 ms: over 200 steps, alone or with a growing attribute, and over 1,000."""
    kept = GrowingAttribute(
        owner="Net", name="losses", first_step=1, last_step=9, first_size=1, last_size=9, lines=()
    )
    for number, growing, severity in (
        (200, (), Severity.INFO),
        (200, (kept,), Severity.WARNING),
        (1000, (), Severity.CRITICAL),
    ):
        found = only(evaluate(sizes(MIB, noise=0, num=number), host_total_bytes=80 * GIB, growing=growing))
        assert found.severity is severity
        assert ("may still be warm-up" in found.summary) == (number == 200)
        assert ("Net.losses" in found.action) == bool(growing)


@pytest.mark.parametrize(
    ("element_bytes", "is_named"),
    [(40, False), (MIB // 2, True), (None, True)],
    ids=["small", "large", "any"],
)
def test_attribute_is_cause_only_if_its_elements_are_large_enough(element_bytes, is_named):
    """One element per step, while memory grows by 1 MiB per step."""
    kept = GrowingAttribute(
        owner="Stopwatch",
        name="marks",
        first_step=1,
        last_step=199,
        first_size=1,
        last_size=199,
        element_bytes=element_bytes,
    )
    found = only(evaluate(sizes(MIB, noise=0), host_total_bytes=80 * GIB, growing=(kept,)))
    assert found.action.startswith("Replace Stopwatch.marks") == is_named
    assert ("The cause isn't known: Stopwatch.marks" in found.summary) != is_named
    assert found.severity is (Severity.WARNING if is_named else Severity.INFO)


@pytest.mark.parametrize("at", [150, 185])
def test_single_jump_is_not_growth(at):
    """Memory jumps by 60 MiB at one step and keeps 30 of them; growth in addition to that is found."""
    jump = np.where(np.arange(200) >= at, 30 * MIB, 0) + np.where(np.arange(200) // 2 == at // 2, 30 * MIB, 0)
    assert only(evaluate(sizes(0, noise=2 * MIB) + jump)).status is Status.CLEAN
    assert only(evaluate(sizes(0.5 * MIB, noise=2 * MIB) + jump)).status is Status.FOUND


def test_leak_on_device_predicts_when_memory_is_full():
    """1 MiB per step of 100 ms is 36,000 MiB an hour. From 0.7 GiB to 80 GiB takes 2.25 hours."""
    found = only(evaluate(sizes(MIB, noise=0), "allocated_bytes", total_bytes=80 * GIB))
    assert found.severity is Severity.CRITICAL
    assert "llocated GPU memory" in found.summary
    [full] = [one for one in found.evidence if one.label == "time until memory is full"]
    assert full.unit is Unit.DURATION_NS
    assert full.value == pytest.approx((80 * 1024 - 675) * 1e8, rel=0.01)
    slow = only(evaluate(sizes(0.1 * MIB, noise=0, num=1000), host_total_bytes=10_000 * GIB))
    assert slow.severity is Severity.WARNING


def test_rss_is_used_only_without_private_memory():
    assert only(evaluate(sizes(MIB), "rss_bytes")).status is Status.FOUND
    files = tuple(
        replace(point, rss_bytes=int(500 * MIB + point.step * MIB)) for point in curve_of(sizes(noise=0))
    )
    assert only(judge(memory_creep, analysis_with(MemoryRecord(curve=files)))).status is Status.CLEAN


def test_not_evaluated():
    assert only(judge(memory_creep, analysis_with(None))).status is Status.NOT_EVALUATED
    short = only(evaluate(sizes(MIB, num=39)))
    assert short.status is Status.NOT_EVALUATED
    assert "fewer than 40 times" in short.summary
    with pytest.raises(NotMeasured, match="memory wasn't recorded"):
        memory_use(None)


# Fragmentation and capacity


@pytest.mark.parametrize(
    ("allocated", "reserved", "retries", "status"),
    [
        (7 * GIB, 10 * GIB, 0, Status.FOUND),  # 30% and 3 GiB
        (7.1 * GIB, 10 * GIB, 0, Status.CLEAN),  # 29%
        (1.4 * GIB, 2.3 * GIB, 0, Status.CLEAN),  # 39% but 0.9 GiB
        (9.9 * GIB, 10 * GIB, 1, Status.FOUND),
        (9.9 * GIB, 10 * GIB, None, Status.CLEAN),
        (None, None, None, Status.NOT_EVALUATED),
    ],
)
def test_fragmentation(allocated, reserved, retries, status):
    record = MemoryRecord(
        peak_allocated_bytes=None if allocated is None else int(allocated),
        peak_reserved_bytes=None if reserved is None else int(reserved),
        num_retries=retries,
    )
    finding = only(judge(memory_fragmentation, analysis_with(record)))
    assert finding.status is status
    if status is Status.FOUND:
        assert finding.severity is Severity.WARNING


def test_capacity_from_record():
    record = MemoryRecord(peak_reserved_bytes=97, total_bytes=100)
    assert only(judge(memory_near_capacity, analysis_with(record))).severity is Severity.CRITICAL
    assert only(judge(memory_near_capacity, analysis_with(None))).status is Status.NOT_EVALUATED


def test_sizes_in_words():
    assert [size(n) for n in (0, 1023, 1024, 1.5 * MIB, 1234 * MIB, 3 * 2**50)] == [
        "0 B",
        "1020 B",
        "1 KiB",
        "1.5 MiB",
        "1.21 GiB",
        "3 PiB",
    ]


# The report


def whole_record():
    sums = dict.fromkeys(CATEGORIES, 0)
    forward = PhasePeak(
        phase="forward",
        num_bytes=70,
        by_category=sums | {"parameters": 30, "activations": 40},
        operator="aten::relu",
        module="1",
    )
    step = StepMemory(
        step=6,
        device="cpu",
        begin_bytes=30,
        begin_by_category=sums | {"parameters": 30},
        peaks=(forward,),
        dropped=("tensors of torch.sparse_coo, whose memory torch does not show (2 times)",),
    )
    return MemoryRecord(curve=curve_of([5, 6], "rss_bytes"), peak_rss_bytes=8, num_ooms=0, step_memory=step)


def test_tables():
    peaks, phases = tables_of(analysis_with(whole_record()), MEMORY_PEAKS, MEMORY_BY_PHASE)
    assert peaks.rows == (("Peak resident memory", 8), ("Allocator out-of-memory errors", 0))
    assert peaks.row_units == (Unit.BYTES, Unit.COUNT)
    assert phases.id == "memory_by_phase"
    assert phases.rows == (
        ("Start", 30, 30, 0, 0, 0, 0, 0, 0, None, None),
        ("Forward", 70, 30, 0, 0, 0, 0, 40, 0, "aten::relu", "1"),
    )
    assert "torch.sparse_coo" in phases.notes[-1]
    assert tables_of(analysis_with(None), MEMORY_PEAKS, MEMORY_BY_PHASE) == []
    [without] = tables_of(analysis_with(MemoryRecord(notes=("Because.",))), MEMORY_BY_PHASE)
    assert (without.rows, without.notes) == ((), ("Because.",))
    assert without.absent_reason


def test_chart_has_measured_values():
    chart = memory_curve(analysis_with(whole_record()))
    assert (chart.kind, chart.unit, chart.x) == ("line", Unit.BYTES, (0.0, 1.0))
    assert [(one.key, one.values) for one in chart.series] == [("rss", (5, 6))]
    assert why_not(memory_curve, analysis_with(None))
    assert memory_curve(analysis_with(MemoryRecord(curve=curve_of([1])))) is None


def test_summary_omits_curve():
    memory = build_report(analysis_with(whole_record())).summary.memory
    assert (memory.peak_rss_bytes, memory.num_points) == (8, 2)
    assert memory.step_memory.peaks[0].by_category["activations"] == 40
    assert not hasattr(memory, "curve")
    assert build_report(analysis_with(None)).summary.memory is None


def test_reading_memory_does_not_start_cuda(tmp_path):
    """Runs in its own process, where nothing else can start CUDA."""
    script = (
        "import torch\n"
        "from lightning_modelprof.measure.resources.memory import MemoryCurve\n"
        "curve = MemoryCurve(torch.device('cuda', 0))\n"
        "curve.look(0); record = curve.record()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert record.peak_allocated_bytes is None and record.curve[0].rss_bytes > 0\n"
        "assert record.notes == (), record.notes\n"
    )
    done = run_script(script, cwd=tmp_path, has_ours=False)
    assert done.returncode == 0, done.stderr


# Real fits: Net has 161 parameters in two layers; its batch is 2 rows of 8 numbers and 2 targets.

PARAMETERS, BATCH = 4 * 161, 4 * (2 * 8 + 2)


class Evaluated(Net):
    def test_step(self, batch, batch_idx):
        self.loss(batch)


def memory_of(callback):
    return callback.run.ranks[0].memory


def test_fit_with_profile_memory(tmp_path):
    """Lightning clears gradients after the forward, so those of the previous step exist when it starts.

    SGD with momentum holds as many bytes as the parameters. The optimizer sees gradients again.
    """
    callback = run_fit(tmp_path, flops=True, profile_memory=True, active=0, skip_first=10)
    step = memory_of(callback).step_memory
    assert (step.step, step.device, step.dropped) == (6, "cpu", ())
    held = {"parameters": PARAMETERS, "optimizer state": PARAMETERS, "batch": BATCH}
    assert {k: v for k, v in step.begin_by_category.items() if v} == held | {"gradients": PARAMETERS}
    assert [peak.phase for peak in step.peaks] == ["forward", "backward", "optimizer"]
    forward, _, optimizer = step.peaks
    assert forward.by_category["activations"] >= 4 * 2 * 16 * 2  # of the first layer and its ReLU
    assert held.items() <= optimizer.by_category.items()
    assert optimizer.by_category["gradients"] == PARAMETERS
    table = next(one for one in callback.report.tables if one.id == "memory_by_phase")
    assert [row[0] for row in table.rows] == ["Start", "Forward", "Backward", "Optimization"]
    assert callback.report.summary.memory.peak_rss_bytes > 50 * MIB
    assert load_run(tmp_path / "modelprof").ranks[0].memory == memory_of(callback)


def test_fit_without_profile_memory_explains_why(tmp_path):
    counted = memory_of(run_fit(tmp_path / "a", flops=True, active=0))
    assert counted.step_memory is None
    assert "profile_memory=True" in counted.notes[0]
    assert "flops=True" in memory_of(run_fit(tmp_path / "b", active=0)).notes[0]


def test_accumulation_and_evaluation(tmp_path):
    """Accumulation keeps the previous batch's gradients; a test loop has none, and no optimizer."""
    kwargs = {"flops": True, "profile_memory": True, "active": 0}
    callback = run_fit(tmp_path, **kwargs, trainer={"accumulate_grad_batches": 2})
    assert memory_of(callback).step_memory.begin_by_category["gradients"] == PARAMETERS
    tested = make_callback(tmp_path, **kwargs)
    make_trainer(tmp_path, tested).test(Evaluated(), loader(), verbose=False)
    step = memory_of(tested).step_memory
    assert {k: v for k, v in step.begin_by_category.items() if v} == {
        "parameters": PARAMETERS,
        "batch": BATCH,
    }
    assert [peak.phase for peak in step.peaks] == ["forward"]


@pytest.mark.parametrize("profile_memory", [True, False])
def test_training_is_bitwise_unchanged(tmp_path, profile_memory):
    torch.manual_seed(1)
    watched = Net(dropout=0.2)
    torch.manual_seed(1)
    plain = Net(dropout=0.2)
    torch.manual_seed(2)
    run_fit(tmp_path, module=watched, flops=True, profile_memory=profile_memory, sampling=True)
    torch.manual_seed(2)
    fit_quietly(make_trainer(tmp_path), plain, loader())
    weights = [torch.nn.utils.parameters_to_vector(module.parameters()) for module in (watched, plain)]
    assert torch.equal(*weights)


def test_leak_in_fit_is_found(tmp_path):
    """1 MiB is kept in each of 150 steps of at least 5 ms; nothing is found without it."""

    def kept(batch_idx):
        # Map fresh memory: memory freed by earlier tests may be reused.
        block = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(bytes([1]) * MIB)
        blocks.append(block)
        time.sleep(0.005)

    blocks = []
    arguments = {"data": loader(300), "log_every_n_steps": 1, "active": 0}
    callback = run_fit(tmp_path / "leak", module=Net(kept), **arguments)
    found = [one for one in callback.report.findings if one.kind == "memory_creep"]
    assert found[0].status is Status.FOUND, found
    assert found[0].evidence[0].value == pytest.approx(1000 * MIB, rel=0.15)
    healthy = run_fit(tmp_path / "healthy", module=Net(lambda batch_idx: time.sleep(0.005)), **arguments)
    assert only([one for one in healthy.report.findings if one.kind == "memory_creep"]).status is Status.CLEAN


def test_outputs_kept_until_epoch_end_are_found_in_fit(tmp_path):
    """1 MiB is kept per step and freed after 50 steps; mmap, since freed CPU tensors may stay allocated."""

    class Collects(Net):
        def on_train_epoch_end(self):
            blocks.clear()

    def kept(batch_idx):
        block = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(bytes([1]) * MIB)
        blocks.append(block)
        time.sleep(0.005)

    blocks = []
    callback = run_fit(
        tmp_path,
        module=Collects(kept),
        data=loader(100),
        log_every_n_steps=1,
        active=0,
        trainer={"max_epochs": 3},
    )
    finding = only([one for one in callback.report.findings if one.kind == "memory_creep"])
    assert finding.status is Status.FOUND
    assert "within each epoch" in finding.summary
    values = {one.label: one.value for one in finding.evidence}
    assert values["growth per step"] == pytest.approx(MIB, rel=0.15)
    assert values["epochs"] == 3
