"""Worker advice from the CPU time of batches and steps, and from free CPUs."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu, batch_cpu
from lightning_modelprof.engine.loop import batches_made
from lightning_modelprof.measure.resources.cpu import PERIOD
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.loader import places_of_batches, workers_advice
from lightning_modelprof.report.charts.steps import queue_depth
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.input import input_bound, synchronous_loader
from lightning_modelprof.report.verdict import account, give_verdict
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.batches import CpuUse
from tests.support import worker_data
from tests.support.bench import make_trainer
from tests.support.diagnosed import MS, SETUP, analysis_of, only, steps_of, with_loader
from tests.support.fits import loop_of_trainer

pytestmark = pytest.mark.slow


def advice(wait_ms, rest_ms, *, workers=0, cpus=8, cpu=None):
    """Advice for a loader with this many workers."""
    loaders = with_loader(num_workers=workers).loaders
    return workers_advice(loaders, cpus, wait_ms * MS, (wait_ms + rest_ms) * MS, cpu)


def cpu(computing=1.0, batch_ms=10.0, rest_ms=10.0, free=2.0):
    """CPU time of batches and steps."""
    return BatchCpu(
        computing=computing, batch_ns=batch_ms * MS, rest_ns=rest_ms * MS, thread_share=0.5, free_cpus=free
    )


def evidence(one):
    return {item.label: item.value for item in one.evidence}


@pytest.mark.parametrize("package", ["", "replay"])
def test_default_collate_is_no_place_for_library_dataset(package):
    dataset = Place(function="Data.__getitem__", file="d.py", line=3, is_library=True, package=package)
    collate = Place(function="default_collate", file="collate.py", line=9, is_library=True)
    places = places_of_batches(with_loader(dataset=dataset, collate=collate).loaders)
    assert [place.function for place in places] == [dataset.function, collate.function][: 1 if package else 2]


# Without CPU times


def test_workers_hide_batch():
    """A batch takes 30 ms and the rest of the step 8 ms: 30 / 8 = 3.75, so 4 workers hide it."""
    one = advice(30, 8)
    assert one.num_workers == 4
    assert one.saving_ns == 30 * MS, "the wait is what it costs, whatever workers gain"
    assert one.action == "Set num_workers=4, persistent_workers=True (currently num_workers=0)."
    assert one.told == " Workers only help if CPUs are free."


def test_more_workers_if_workers_are_behind():
    """2 workers deliver every 15 ms, so one needs 30 ms per batch; the rest takes 8 ms, so 4 again."""
    one = advice(7, 8, workers=2)
    assert evidence(one)["max batch time per worker"] == 30 * MS
    assert (one.num_workers, one.saving_ns) == (4, 7 * MS)
    assert one.action.startswith("Set num_workers=4, persistent_workers=True (currently num_workers=2).")


def test_no_more_workers_than_cpus():
    """100 ms per batch and 5 ms of work: 3 workers on 4 CPUs deliver a batch every 33 ms."""
    one = advice(100, 5, cpus=4)
    assert one.num_workers == 3
    assert evidence(one)["best step time with these workers"] == pytest.approx((100 / 3 + 0.5) * MS)
    assert one.saving_ns == 100 * MS
    assert one.action.startswith("Pre-decode or pre-transform the data"), "the bigger one comes first"
    assert "This saves up to 100 ms per step. Alternatively, set num_workers=3, persistent" in one.action
    assert one.action.endswith("(currently num_workers=0). Saves at most 71.2 ms per step.")
    assert one.action.count("num_workers=3") == 1
    # All CPUs are taken, so only cheaper batches help.
    one = advice(100, 5, workers=3, cpus=4)
    assert (one.num_workers, one.saving_ns) == (None, 100 * MS)
    assert one.action.startswith("Pre-decode or pre-transform the data")


# With CPU times


def test_cpu_bound_batches_share_cpus_with_step():
    """10 ms of CPU time per batch and 20 for 10 ms of step on two threads: on 2 CPUs 15 ms, not 10."""
    one = advice(10, 10, cpus=2, cpu=cpu(batch_ms=10, rest_ms=20))
    assert one.num_workers == 1
    assert one.saving_ns == 10 * MS
    assert "A batch takes 10 ms of CPU time, and CPUs are free for it." in one.told
    assert "Saves at most 4.5 ms per step." in one.action


def test_no_workers_for_cpu_bound_batches_without_free_cpu():
    """20 ms of CPU time in a step of 20 ms, on one CPU."""
    one = advice(10, 10, cpus=2, cpu=cpu(free=1.0))
    assert (one.num_workers, one.saving_ns) == (None, 10 * MS)
    assert "num_workers" not in one.action
    assert "Workers wouldn't help, since a batch takes 10 ms of CPU time and no CPU is free." in one.told


def test_workers_for_waiting_batches_on_busy_machine():
    """Batches wait for a disk, so the CPU count doesn't limit the workers."""
    one = advice(100, 5, cpus=2, cpu=cpu(computing=0.1, batch_ms=10, free=0.5))
    assert one.num_workers == 20
    assert one.saving_ns == 100 * MS
    assert "mostly waits" in one.told


def test_no_workers_if_handover_takes_as_long():
    one = advice(0.6, 5, cpu=cpu(computing=0.2, batch_ms=0.1))
    assert (one.num_workers, one.saving_ns) == (None, 0.6 * MS)
    assert "Handing a batch over from a worker would take about as long." in one.told
    # Any DataLoader takes this long, so it's only a hint where it is a tenth of the step.
    analysis = analysis_of(steps_of(forward=5.4, dataloader=0.6))
    assert only(judge(input_bound, analysis)).severity is Severity.INFO
    analysis = analysis_of(steps_of(forward=1.4, dataloader=0.6))
    assert only(judge(input_bound, analysis)).severity is Severity.WARNING


def simulated_step(batch_ms, rest_ms, rest_cpus, workers, cpus):
    """Step time in a queue of batches; when CPUs run short, everything slows down alike.

    Args:
        rest_cpus: CPUs kept busy by the rest of the step.
    """
    ready, making, rest, steps, now, begun = 0, [], 0.0, 0, 0.0, 0.0
    while steps < 60:
        if rest == 0 and ready:
            ready, rest = ready - 1, rest_ms
        while len(making) < workers and ready + len(making) < 2 * workers:
            making.append(batch_ms)
        passed = min([*making, rest] if rest else making)
        demand = len(making) + (rest_cpus if rest else 0.0)
        now += passed / min(1.0, cpus / demand)
        making = [left - passed for left in making]
        ready += sum(left < 1e-9 for left in making)
        making = [left for left in making if left >= 1e-9]
        if rest:
            rest = rest - passed if rest - passed >= 1e-9 else 0.0
            if rest == 0:
                steps += 1
                begun = now if steps == 20 else begun
    return (now - begun) / 40


@pytest.mark.parametrize("seed", range(60))
def test_predicted_saving_matches_simulated_machine(seed):
    """The predicted best case is never below the simulated gain, and at most 30% of the step above it."""
    draw = random.Random(f"workers-{seed}")
    batch, rest = draw.uniform(1, 40), draw.uniform(1, 40)
    cpus, rest_cpus = draw.choice([1, 2, 4, 8]), draw.choice([0.5, 1.0, 2.0])
    rest_cpus = min(rest_cpus, cpus)
    known = cpu(batch_ms=batch, rest_ms=rest * rest_cpus, free=float(cpus))
    one = advice(batch, rest, cpus=cpus, cpu=known)
    gain = (
        batch
        + rest
        - min(simulated_step(batch, rest, rest_cpus, workers, cpus) for workers in range(1, 2 * cpus + 1))
    )
    if one.num_workers is None:
        assert gain < 0.3 * batch + 1
        return
    simulated = batch + rest - simulated_step(batch, rest, rest_cpus, one.num_workers, cpus)
    said = batch + rest - evidence(one)["best step time with these workers"] / MS
    assert said >= simulated - 0.6
    assert said <= simulated + 0.3 * (batch + rest)
    assert one.saving_ns == batch * MS


# CPU measurements


def use(**changes):
    """10 steps of 20 ms on 2 CPUs: 10 ms of fetch that computes, 10 ms of step on one thread."""
    base = CpuUse(
        num_steps=10,
        steps_ns=200 * MS,
        fetches_ns=100 * MS,
        fetches_thread_ns=100 * MS,
        rest_thread_ns=100 * MS,
        rest_process_ns=100 * MS,
        loop_ns=1_000 * MS,
        process_ns=1_000 * MS,
        workers_ns=0,
        busy_ns=1_000 * MS,
        cpus_ns=2_000 * MS,
    )
    return replace(base, **changes)


def facts(record, workers=0, cpus=2, waited=0.0):
    return batch_cpu(record, num_workers=workers, usable_cpus=cpus, cpu_wait_share=waited)


def test_free_cpus_exclude_other_processes():
    assert facts(use()) == cpu()  # derived by hand
    # Another process takes one CPU, so one is free. If it takes turns with us on both, what we had is free.
    assert facts(use(busy_ns=2_000 * MS)).free_cpus == 1.0
    assert facts(use(busy_ns=2_000 * MS, process_ns=700 * MS)).free_cpus == pytest.approx(0.7)
    # 40 of 64 CPUs are busy, and this process may use two.
    big = use(busy_ns=40_000 * MS, cpus_ns=64_000 * MS)
    assert facts(big).free_cpus == 2.0
    assert facts(use(busy_ns=None, cpus_ns=None)).free_cpus is None


def test_waiting_for_cpu_counts_as_computing():
    """The fetch had a CPU half of its time, and the thread waited for one during half of the loop."""
    busy = use(fetches_thread_ns=50 * MS, rest_thread_ns=50 * MS)
    assert facts(busy).computing == pytest.approx(0.5)
    assert facts(busy, waited=0.5).computing == pytest.approx(1.0)
    assert facts(busy).thread_share == pytest.approx(0.25)
    assert facts(busy, waited=0.5).thread_share == pytest.approx(0.5)
    asleep = use(fetches_thread_ns=2 * MS)
    assert facts(asleep).computing == pytest.approx(0.02 * 200 / 102 * 102 / 200)
    assert not facts(asleep).is_computing


def test_worker_batches_use_worker_cpu_time():
    """Two workers share one CPU: 20 ms per step, half of their time."""
    both = facts(use(workers_ns=1_000 * MS, process_ns=500 * MS, busy_ns=1_500 * MS), workers=2)
    assert (both.computing, both.batch_ns, both.free_cpus) == (0.5, 20 * MS, 2.0)
    unknown = facts(use(workers_ns=None), workers=2)
    assert (unknown.computing, unknown.is_computing, unknown.batch_ns) == (None, None, None)
    for record in (None, use(num_steps=0, steps_ns=0), use(rest_thread_ns=-1)):
        with pytest.raises(NotMeasured):
            facts(record)


def test_verdict_uses_wait_rather_than_gain():
    """Training waits 7 of 15 ms, of which workers save 2.5 at best; it's input-bound at 47%."""
    setup = replace(SETUP, usable_cpus=2)
    record = use(
        fetches_ns=70 * MS,
        fetches_thread_ns=70 * MS,
        rest_process_ns=180 * MS,
        steps_ns=150 * MS,
        rest_thread_ns=80 * MS,
    )
    analysis = analysis_of(steps_of(forward=8, dataloader=7), setup=setup, cpu=record)
    finding = only(judge(input_bound, analysis))
    assert finding.saving_ns_per_step == 7 * MS
    verdict = give_verdict(analysis, [finding], [input_bound], account(analysis))
    assert verdict.kind == "input_bound"
    assert verdict.summary.startswith("47% of each step")


def test_no_worker_hint_without_saving():
    steps, one_cpu = steps_of(forward=100, dataloader=3), replace(SETUP, usable_cpus=1)
    computes = use(
        fetches_ns=30 * MS, fetches_thread_ns=30 * MS, steps_ns=1_030 * MS, rest_thread_ns=1_000 * MS
    )
    computes = replace(computes, rest_process_ns=1_000 * MS, cpus_ns=1_000 * MS)
    found = only(judge(synchronous_loader, analysis_of(steps)))
    assert (found.status, found.severity) == (Status.FOUND, Severity.INFO)
    nothing = only(judge(synchronous_loader, analysis_of(steps, setup=one_cpu, cpu=computes)))
    assert nothing.status is Status.CLEAN


# Ready batches


def test_no_more_workers_if_they_keep_up():
    """The handover from the worker takes a tenth of the step: a hint that doesn't point at the dataset."""
    setup, steps = with_loader(num_workers=2), steps_of(forward=36, dataloader=4)

    def of(num_asked, num_ready):
        record = use(num_asked=num_asked, num_ready=num_ready, workers_ns=100 * MS)
        return only(judge(input_bound, analysis_of(steps, setup=setup, cpu=record)))

    finding = of(40, 38)
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.INFO, 3.5 * MS)
    assert finding.action == (
        "Build each batch from fewer, larger tensors, or fewer bytes. Alternatively, try num_workers=0 if"
        " loading a batch takes less than 4 ms."
    )
    assert "95% of batches were ready when fetched" in finding.summary
    assert "More workers wouldn't help." in finding.summary
    assert finding.locations == ()
    assert evidence(finding)["batches ready when fetched"] == 0.95
    for asked, ready in [(40, 35), (6, 6), (0, 0)]:
        behind = of(asked, ready)
        assert behind.severity is Severity.WARNING
        assert behind.locations


def test_queue_depth_chart_counts_ready_batches():
    """Of 10 observed fetches, 6 found no batch, 1 found one and 3 found three."""

    def chart_of(**read):
        return queue_depth(analysis_of(steps_of(forward=36), cpu=use(**read)))

    chart = chart_of(num_asked=10, num_ready=4, depths=(6, 1, 0, 3))
    assert chart.x == (0, 1, 2, 3)
    assert chart.series[0].values == (0.6, 0.1, 0, 0.3)
    assert chart_of(num_asked=6, num_ready=4, depths=(2, 4)) is None, "too few"
    assert chart_of(num_asked=40, num_ready=38) is None, "saved by an older version"


# In a real fit


class Small(LightningModule):
    def __init__(self, sleep_s=0.0):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.sleep_s = sleep_s

    def training_step(self, batch):
        time.sleep(self.sleep_s)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path, *, cpu_s=0.0, sleep_s=0.0, step_s=0.0, size=80, **loader):
    callback = ModelProfCallback(
        dirpath=tmp_path / "run", flops=False, report={"terminal": False, "tensorboard": False}
    )
    trainer = make_trainer(callbacks=[callback], default_root_dir=tmp_path)
    trainer.fit(Small(step_s), DataLoader(worker_data.Slow(cpu_s, sleep_s, size), batch_size=1, **loader))
    return load_run(tmp_path / "run" / "run.json").ranks[0]


def test_fetch_cpu_time_matches_known_cost(tmp_path):
    """It's CPU time, so this holds on a busy machine."""
    record = fit(tmp_path, cpu_s=0.004, sleep_s=0.0)
    found = record.cpu
    assert 5 <= found.num_steps <= 80 / PERIOD + 1
    assert 4.0 <= found.fetches_thread_ns / found.num_steps / MS < 6.0
    assert found.fetches_thread_ns <= 1.05 * found.fetches_ns
    waited = record.slow.cpu_wait_share
    assert facts(found, waited=waited).is_computing


def test_sleeping_fetch_is_not_computing(tmp_path):
    record = fit(tmp_path, cpu_s=0.0, sleep_s=0.008)
    assert record.cpu.fetches_thread_ns < 0.3 * record.cpu.fetches_ns
    assert not facts(record.cpu, waited=record.slow.cpu_wait_share).is_computing


def test_worker_cpu_time_is_measured(tmp_path):
    """40 rows of 10 ms in one worker, whose startup takes some CPU time too."""
    record = fit(tmp_path, cpu_s=0.01, sleep_s=0.0, num_workers=1, size=40)
    assert 0.4e9 <= record.cpu.workers_ns < 4e9


@pytest.fixture
def often(monkeypatch):
    """Read one step of three, so that fewer rows are enough."""
    monkeypatch.setattr("lightning_modelprof.measure.resources.cpu.PERIOD", 3)


# Without a worker_init_fn of the user's, Lightning's own imports Lightning in each worker.
SPAWN = {"multiprocessing_context": "spawn", "worker_init_fn": worker_data.draw_more}


@pytest.mark.parametrize("loader", [{}, SPAWN], ids=["fork", "spawn"])
def test_ready_batches_are_counted(tmp_path, often, loader):
    """Steps of 20 ms, and rows that take no time."""
    found = fit(tmp_path, step_s=0.02, num_workers=1, size=40, **loader).cpu
    assert found.num_asked == found.num_steps >= 5
    assert found.num_ready >= 0.8 * found.num_asked
    assert sum(found.depths) == found.num_asked
    assert found.depths[2] >= 0.8 * found.num_asked, "one worker makes two ahead"


def test_late_batches_are_counted(tmp_path, often):
    """Rows of 60 ms, and steps that take almost no time unless the machine is very busy."""
    found = fit(tmp_path, sleep_s=0.06, num_workers=1, size=40).cpu
    assert found.num_asked >= 5
    assert found.num_ready <= 0.5 * found.num_asked
    assert found.depths[0] >= 0.5 * found.num_asked


def test_no_batches_are_asked_for_without_workers(tmp_path):
    assert fit(tmp_path).cpu.num_asked == 0


def test_several_loaders_and_out_of_order_batches():
    """A batch is ready when each loader with workers has one."""

    def loader(waiting=0, *, early=(), size=None):
        queue = SimpleNamespace(empty=lambda: not waiting, qsize=size or (lambda: waiting))
        tasks = {place: ("worker", "batch") if place in early else ("worker",) for place in (3, 4, 5)}
        return SimpleNamespace(_data_queue=queue, _rcvd_idx=3, _task_info=tasks)

    def asked(*iterators):
        combined = SimpleNamespace(_iterator=SimpleNamespace(iterators=iterators))
        return batches_made(
            loop_of_trainer(SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=combined)))
        )

    def unknown():
        raise NotImplementedError

    assert asked(loader(2)) == (True, 2)
    assert asked(loader(early=(3,))) == (True, 1)
    assert asked(loader(early=(4, 5))) == (False, 2), "which come behind the next one"
    assert asked(loader(1, early=(4, 5))) == (True, 3)
    assert asked(loader()) == (False, 0)
    assert asked(loader(3, size=unknown)) == (True, 1)
    assert asked(loader(2), loader()) == (False, 0)
    assert asked(loader(2), loader(1)) == (True, 1)
    assert asked(loader(1), object()) == (True, 1)
    assert asked(object()) is None
    assert batches_made(loop_of_trainer(SimpleNamespace())) is None
