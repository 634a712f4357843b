"""Simulate a DataLoader to predict the step time with another number of workers.

Service times and the rest of a step are drawn from the measured ones. No step is shorter than the CPU time of
a batch and of the rest of the step, divided by the CPUs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.simulated_loader import simulate_loader
from lightning_modelprof.record import Record
from lightning_modelprof.run.workers import WorkerBatches

_Ints = NDArray[np.int64]


_Floats = NDArray[np.floating[Any]]


WITHIN: Final = 0.02
"""How much slower than the best the advised worker count may be."""


FEWEST_BATCHES: Final = 20
"""Fewest service times for a prediction."""


PREFETCH_FACTORS: Final = (1, 2, 4)


WAITING_WORKERS: Final = 8
"""Largest worker count to try, at least, if making a batch mostly waits, however few CPUs there are."""


_ALL_NUMBERS_TO: Final = 16


_BATCHES: Final = 256


_REPLICATIONS: Final = 32


ASSUMED_HANDOVER_NS: Final = 150_000.0
"""Hand-over of a small batch, if too few batches were ready to observe one."""


_SEEN: Final = 0.05


_SURELY: Final = 0.9


_LONGEST_TURN_NS: Final = 500_000
"""In a longer gap, the worker or the machine did something else."""


_SHORT_OF_CPUS: Final = 0.05
"""Share of their time that workers were ready without a CPU; beyond it, all CPUs were in use."""


_MOSTLY: Final = 0.5


_SEED: Final = 20_240_717


class PredictedStep(Record, frozen=True, kw_only=True):
    """Mean step time with a worker count.

    Attributes:
        workers, prefetch_factor: of the loader; the factor is meaningless without workers.
        step_ns: mean over all replications.
        low_ns, high_ns: 95% of the replications' means are in between.
    """

    workers: int
    prefetch_factor: int
    step_ns: float
    low_ns: float
    high_ns: float

    @property
    def steps_per_s(self) -> float:
        return 1e9 / self.step_ns


class LoaderQueue(Record, frozen=True, kw_only=True):
    """Predictions of the loader model.

    Attributes:
        num_batches: batches whose service times were drawn.
        service_ns: mean measured time per batch in a worker, with ``turn_ns``.
        turn_ns: time between two batches when the next index is ready.
        step_ns: mean measured step time; ``present`` is the model's.
        rest_ns: part of it without the wait for a batch.
        handover_ns: part of the wait that remains when the batch is ready.
        ready: share of present steps whose batch is ready when requested; 0 without workers.
        computing: share of the service time that would compute without competition for CPUs.
        cpus: available to the training and its workers; ``None`` if unknown.
        present: with the loader's current settings.
        best: shortest step; of equal ones, the one with the fewest workers.
        advised: fewest workers whose step is at most 2% longer than the best one, with the present prefetch
            factor if that is enough.
        order_cost_ns: how much shorter the present step would be with batches delivered as they get ready;
            ``None`` if they are, and without workers.
    """

    num_batches: int
    service_ns: float
    turn_ns: float
    step_ns: float
    rest_ns: float
    handover_ns: float
    ready: float
    computing: float
    cpus: float | None
    predictions: tuple[PredictedStep, ...]
    present: PredictedStep
    best: PredictedStep
    advised: PredictedStep
    order_cost_ns: float | None

    @property
    def gain(self) -> float:
        """Share of the present step that the advised settings save; negative if they only save workers."""
        return 1 - self.advised.step_ns / self.present.step_ns

    @property
    def helps(self) -> bool:
        """Whether other settings make steps shorter by more than 2%."""
        return 1 - self.best.step_ns / self.present.step_ns > WITHIN

    @property
    def left_ns(self) -> float:
        """Remaining wait per step with the best settings, without the hand-over."""
        handover_ns = self.handover_ns if self.best.workers else 0.0
        return max(0.0, self.best.step_ns - self.rest_ns - handover_ns)

    @property
    def needed_factor(self) -> float | None:
        """Factor by which batches must get cheaper for the best settings to be fast enough.

        ``None`` if they are.
        """
        factor = self.best.step_ns / self.rest_ns if self.rest_ns else float("inf")
        return factor if self.left_ns > WITHIN * self.best.step_ns else None


def loader_queue(
    batches: WorkerBatches,
    *,
    num_workers: int,
    prefetch_factor: int | None,
    rests_ns: _Floats,
    waits_ns: _Floats,
    is_ordered: bool = True,
    cpus: float | None = None,
    num_cpus: int | None = None,
    rest_cpu_ns: float = 0.0,
    cpu_wait: float | None = None,
    assumed_handover_ns: float = ASSUMED_HANDOVER_NS,
) -> LoaderQueue:
    """Predict the mean step time for other worker counts and prefetch factors.

    Args:
        batches: measured with the present settings; without workers, those made by the training thread.
        num_workers: present worker count.
        prefetch_factor: present factor; ``None`` without workers.
        rests_ns: time of some steps without the wait for the batch.
        waits_ns: wait for the batch in these steps.
        is_ordered: whether batches are delivered in index order.
        cpus: average CPUs available to training and workers; ``None`` if unknown.
        num_cpus: largest worker count to try; ``cpus`` by default.
        rest_cpu_ns: CPU time of the rest of a step, over all threads.
        cpu_wait: share of the batches' time that their workers lacked a CPU when ready; ``None`` if unknown.
        assumed_handover_ns: if no hand-over was observed.
    """
    factor = prefetch_factor or 2
    service = _service(batches, num_workers, factor, cpu_wait)
    if not len(rests_ns):
        raise NotMeasured("no step is clean")
    if service.times_ns.min() < 0 or min(rests_ns) < 0:
        raise NotMeasured("a clock was set back")
    rest_ns, wait_ns = float(np.mean(rests_ns)), float(np.mean(waits_ns))
    if cpus is not None:
        used = (service.cpu_ns + rest_cpu_ns) / max(1.0, rest_ns + wait_ns)
        cpus = max(1.0, used) if num_workers > 0 and service.is_short_of_cpus else max(cpus, used)
    most = max(1, num_workers, num_cpus or round(cpus or 1))
    if cpus is None or service.computing < _MOSTLY:
        most = max(most, WAITING_WORKERS)
    draws = _Draws.of(service.times_ns, np.asarray(rests_ns), most, max(factor, *PREFETCH_FACTORS))
    ready = _ready((num_workers, factor), draws, is_ordered) if num_workers else 0.0
    model = _Model(
        draws=draws,
        alone=service.alone,
        exposed=1.0 if num_workers else min(1.0, wait_ns / max(1.0, service.mean_ns)),
        handover_ns=_handover_ns(waits_ns, ready, assumed_handover_ns),
        least_ns=(service.cpu_ns + rest_cpu_ns) / cpus if cpus else 0.0,
    )
    found = model.predict(_settings(most, num_workers, factor), is_ordered=is_ordered)
    present = next(one for one in found if (one.workers, one.prefetch_factor) == (num_workers, factor))
    best = min(found, key=lambda one: (one.step_ns, one.workers, one.prefetch_factor))
    order_cost_ns = None
    if is_ordered and num_workers:
        [unordered] = model.predict([(num_workers, factor)], is_ordered=False)
        order_cost_ns = max(0.0, present.step_ns - unordered.step_ns)
    return LoaderQueue(
        num_batches=len(service.times_ns),
        service_ns=service.mean_ns,
        turn_ns=service.turn_ns,
        step_ns=rest_ns + wait_ns,
        rest_ns=rest_ns,
        handover_ns=model.handover_ns,
        ready=ready,
        computing=service.computing,
        cpus=cpus,
        predictions=tuple(found),
        present=present,
        best=best,
        advised=_advised(found, best, factor),
        order_cost_ns=order_cost_ns,
    )


class _Service(Record, frozen=True, kw_only=True):
    """A worker's time per batch.

    Attributes:
        times_ns: of each batch, with ``turn_ns``.
        turn_ns: time between two batches when the next index is ready.
        cpu_ns: mean CPU time.
        waited_ns: mean time in which it's ready to run without a CPU.
    """

    times_ns: _Ints
    turn_ns: float
    cpu_ns: float
    waited_ns: float

    @property
    def mean_ns(self) -> float:
        return float(np.mean(self.times_ns))

    @property
    def alone(self) -> float:
        """Service time with a dedicated CPU, relative to the measured one."""
        return 1.0 - self.waited_ns / max(1.0, self.mean_ns)

    @property
    def computing(self) -> float:
        return self.cpu_ns / max(1.0, self.alone * self.mean_ns)

    @property
    def is_short_of_cpus(self) -> bool:
        return self.computing >= _MOSTLY and self.waited_ns > _SHORT_OF_CPUS * self.mean_ns


def _service(batches: WorkerBatches, num_workers: int, factor: int, cpu_wait: float | None) -> _Service:
    is_steady = _steady(batches, num_workers)
    times_ns = np.asarray(batches.ready_ns, np.int64) - np.asarray(batches.begin_ns, np.int64)
    times_ns, cpu_ns = times_ns[is_steady], np.asarray(batches.cpu_ns, np.int64)[is_steady]
    if len(times_ns) < FEWEST_BATCHES:
        raise NotMeasured(f"only {len(times_ns)} batches were timed (at least {FEWEST_BATCHES})")
    turn_ns = _turn_ns(batches, num_workers * factor, float(np.median(times_ns))) if num_workers else 0.0
    times_ns = times_ns + round(turn_ns)
    mean_ns = float(np.mean(times_ns))
    mean_cpu_ns = min(mean_ns, max(0.0, float(cpu_ns.mean())))
    return _Service(
        times_ns=times_ns,
        turn_ns=turn_ns,
        cpu_ns=mean_cpu_ns,
        waited_ns=min((cpu_wait or 0.0) * mean_ns, mean_ns - mean_cpu_ns),
    )


def _settings(most: int, present: int, factor: int) -> list[tuple[int, int]]:
    """Worker counts and prefetch factors to try; the factor is meaningless without workers."""
    factors = sorted({factor, *PREFETCH_FACTORS})
    numbers = [one for one in _numbers(most, present) if one]
    return [(0, factor), *((workers, each) for workers in numbers for each in factors)]


def _advised(found: list[PredictedStep], best: PredictedStep, factor: int) -> PredictedStep:
    enough = [one for one in found if one.step_ns <= (1 + WITHIN) * best.step_ns]
    return min(enough, key=lambda one: (one.workers, one.prefetch_factor != factor, one.prefetch_factor))


def _steady(batches: WorkerBatches, num_workers: int) -> NDArray[np.bool_]:
    """All but each worker's first batch in an epoch, which opens files, if enough others are left."""
    is_later = ~np.isin(np.asarray(batches.index, np.int64), np.arange(max(1, num_workers)))
    return is_later if int(is_later.sum()) >= FEWEST_BATCHES else np.ones(len(batches), bool)


def _turn_ns(batches: WorkerBatches, num_ahead: int, median_ns: float) -> float:
    """Time that a worker needs between two batches when the next index is ready.

    At the start of an epoch, indices for all prefetched batches are ready; but processes start then, and gaps
    may be long. No gap is shorter than that time, so the shortest ones bound it. Without such a start, it's
    known only if workers never have to wait, and 0 otherwise.
    """
    index, worker = np.asarray(batches.index, np.int64), np.asarray(batches.worker, np.int64)
    known: list[int] = []
    every: list[int] = []
    for number in np.unique(worker):
        rows = np.flatnonzero(worker == number)
        rows = rows[np.argsort(np.asarray(batches.begin_ns, np.int64)[rows])]
        for before, after in pairwise(rows):
            if 0 <= index[before] < index[after]:
                gap_ns = max(0, batches.begin_ns[after] - batches.ready_ns[before])
                every.append(gap_ns)
                if index[after] < num_ahead and gap_ns <= _LONGEST_TURN_NS:
                    known.append(gap_ns)
    if not every:
        return 0.0
    if known:
        return float(min(np.median(known), np.quantile(every, 0.05)))
    usual_ns = float(np.median(every))
    return usual_ns if usual_ns < 0.05 * median_ns else 0.0


def _numbers(most: int, present: int) -> list[int]:
    """Worker counts to try: all up to 16, then each an eighth larger."""
    numbers = {most, present}
    number = 0
    while number < most:
        numbers.add(number)
        number += max(1, number // 8 if number >= _ALL_NUMBERS_TO else 1)
    return sorted(numbers)


class _Draws(Record, frozen=True):
    """Service times and rests of steps, shape (batches, replications); the first ``warm`` don't count."""

    service_ns: _Ints
    rest_ns: _Ints
    warm: int

    @classmethod
    def of(cls, service_ns: _Ints, rests_ns: _Floats, most: int, most_ahead: int) -> _Draws:
        """Draw each replication from its own resample of the measured times."""
        generator = np.random.default_rng(_SEED)
        warm = 2 * most
        steps = warm + _BATCHES
        return cls(
            _drawn(service_ns, steps + most * most_ahead, generator),
            _drawn(np.rint(rests_ns).astype(np.int64), steps, generator),
            warm,
        )


def _drawn(values: _Ints, rows: int, generator: np.random.Generator) -> _Ints:
    samples = values[generator.integers(0, len(values), (len(values), _REPLICATIONS))]
    chosen = generator.integers(0, len(values), (rows, _REPLICATIONS))
    drawn: _Ints = np.take_along_axis(samples, chosen, axis=0)
    return drawn


def _ready(setting: tuple[int, int], draws: _Draws, is_ordered: bool) -> float:
    """Share of the steps that find their batch ready, if the hand-over takes no time."""
    got_ns = simulate_loader(
        draws.service_ns,
        draws.rest_ns,
        [setting],
        is_ordered=is_ordered,
    )[:, 0]
    waits_ns = np.diff(got_ns, axis=0) - draws.rest_ns[:-1]
    return float((waits_ns[draws.warm :] == 0).mean())


def _handover_ns(waits_ns: _Floats, ready: float, assumed_ns: float) -> float:
    """Mean of the shortest waits, of which there are about as many as ready batches."""
    shortest_ns = np.sort(waits_ns)[: round(_SURELY * ready * len(waits_ns))]
    return float(shortest_ns.mean()) if ready >= _SEEN and len(shortest_ns) else assumed_ns


class _Model(Record, frozen=True, kw_only=True):
    """Inputs of the simulation.

    Attributes:
        alone: factor on the drawn service times.
        exposed: further factor without workers: the part that a device doesn't hide with its work.
        least_ns: lower bound of a step with workers.
    """

    draws: _Draws
    alone: float
    exposed: float
    handover_ns: float
    least_ns: float

    def predict(self, settings: list[tuple[int, int]], *, is_ordered: bool) -> list[PredictedStep]:
        draws, workers = self.draws, np.array([one for one, _ in settings])
        got_ns = simulate_loader(
            draws.service_ns,
            draws.rest_ns,
            settings,
            handover_ns=round(self.handover_ns),
            is_ordered=is_ordered,
            factors=self.alone * np.where(workers > 0, 1.0, self.exposed),
        )
        # Count whole rounds of the workers: with equal batches, each round's arrive together.
        last = len(got_ns) - 1
        rounds = np.minimum(np.maximum(workers, 1), last - draws.warm)
        counted = (last - draws.warm) // rounds * rounds
        steps: _Floats = (got_ns[-1] - got_ns[last - counted, np.arange(len(settings))]) / counted[:, None]
        steps = np.maximum(steps, np.where(workers > 0, max(self.least_ns, 1e-3), 1e-3)[:, None])
        ends = np.quantile(steps, (0.025, 0.975), axis=1)
        return [
            PredictedStep(
                workers=setting[0],
                prefetch_factor=setting[1],
                step_ns=float(steps[place].mean()),
                low_ns=float(ends[0, place]),
                high_ns=float(ends[1, place]),
            )
            for place, setting in enumerate(settings)
        ]
