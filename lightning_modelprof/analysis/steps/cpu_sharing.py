"""Workers that share CPUs with each other and with the training: how much longer they take for a batch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Record

_Floats = NDArray[np.floating[Any]]


_LEAST_CPUS: Final = 0.05
"""That workers always get, whatever the rest of a step needs."""


_HARDLY: Final = 1.05
"""Times as long as with a CPU of its own: no sign that CPUs were short."""


def stretched(busy: _Floats, waiting: float, cpus: _Floats) -> _Floats:
    """How many times as long the computing part of a batch takes when workers share CPUs.

    Each busy worker computes and waits in turn; those that compute share the CPUs evenly. The mean holds
    whatever the distribution of the times: this is a closed network with a delay and processor sharing.

    Args:
        busy: workers that are at a batch; between whole numbers the rate of work is interpolated.
        waiting: of a batch, time that waits by time that computes.
        cpus: that they may use, which need not be whole.

    Source: Baskett, Chandy, Muntz and Palacios, Open, Closed, and Mixed Networks of Queues with Different
    Classes of Customers, Journal of the ACM 22 (1975).
    """
    below = np.floor(busy)
    share = busy - below
    rate = (1 - share) * _rate(below, waiting, cpus) + share * _rate(below + 1, waiting, cpus)
    return np.maximum(1.0, busy / np.maximum(rate, 1e-12) - waiting)


def _rate(busy: _Floats, waiting: float, cpus: _Floats) -> _Floats:
    """Mean number of CPUs at work with a whole number of busy workers."""
    computing = np.arange(1, int(busy.max(initial=1)) + 1)
    used = np.minimum(computing, cpus[:, None])
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(busy[:, None] - computing + 1, 0) / (max(waiting, 1e-9) * used)).cumsum(
            axis=1
        )
    highest = np.maximum(logs.max(axis=1, keepdims=True), 0)
    weights = np.exp(logs - highest)
    rate: _Floats = (weights * used).sum(axis=1) / (weights.sum(axis=1) + np.exp(-highest[:, 0]))
    return rate


def _cpus_for(busy: _Floats, waiting: float, stretch: float, guess: float) -> float:
    """How many CPUs make batches take so long, one at least; as was guessed where none were short."""
    if stretch <= _HARDLY:
        return guess
    low, high = 1.0, max(guess, float(busy[0]), 1.0)
    for _ in range(40):
        middle = (low + high) / 2
        if float(stretched(busy, waiting, np.array([middle]))[0]) > stretch:
            low = middle
        else:
            high = middle
    return high


class Interference(Record, frozen=True, kw_only=True):
    """How workers and the rest of a step are in each other's way.

    Attributes:
        waiting: of a batch, time that waits by time that computes; ``None`` where nothing computes, or
            nothing is known of the CPUs.
        computing: share of the batch that computes.
        stretch: of the computing part, as measured.
        compute_ns: time that a batch computes.
        cpus: that all may use.
        rest_cpu_ns: CPU time of the rest of a step.
    """

    waiting: float | None
    computing: float
    stretch: float
    compute_ns: float
    cpus: float | None
    rest_cpu_ns: float

    @classmethod
    def measured(
        cls,
        service_ns: float,
        cpu_ns: float,
        *,
        busy: float,
        cpus: float | None,
        rest_cpu_ns: float,
        step_ns: float,
        cpu_wait_ns: float | None = None,
    ) -> Interference:
        """What of a batch waits by itself, and what for a CPU, by the law for the present number of workers.

        Where batches compute faster than the law allows, there are more CPUs than was thought. With 0 workers
        ``busy`` nothing of the training computes beside a batch, so that it has a CPU of its own. Where it
        was measured how long a batch was ready and had no CPU, that is no guess, and what computes had as
        many CPUs as the law needs for it.
        """
        cpu_ns = min(cpu_ns, service_ns)
        if cpus is None or cpu_ns <= 0:
            computing = cpu_ns / service_ns
            return cls(
                waiting=None,
                computing=computing,
                stretch=1.0,
                compute_ns=cpu_ns,
                cpus=cpus,
                rest_cpu_ns=rest_cpu_ns,
            )
        rest_cpus = rest_cpu_ns / max(1.0, step_ns)
        total = service_ns / cpu_ns
        cpus = max(cpus, rest_cpus + (busy / total if busy else cpu_ns / max(1.0, step_ns)))
        free, working = np.array([max(_LEAST_CPUS, cpus - rest_cpus)]), np.array([busy])
        if busy and cpu_wait_ns is not None:
            low = high = max(0.0, total - 1 - cpu_wait_ns / cpu_ns)
            if low <= 1:
                cpus = rest_cpus + _cpus_for(working, low, total - low, float(free[0]))
        else:
            low, high = (0.0, total) if busy else (total - 1, total - 1)
        for _ in range(40):
            middle = (low + high) / 2
            if middle + float(stretched(working, middle, free)[0]) > total:
                high = middle
            else:
                low = middle
        return cls(
            waiting=low,
            computing=1 / (1 + low),
            stretch=total - low,
            compute_ns=cpu_ns,
            cpus=cpus,
            rest_cpu_ns=rest_cpu_ns,
        )

    def factor(self, stretch: _Floats) -> _Floats:
        """Of the measured service times, with another stretch."""
        if self.waiting is None:
            return np.ones(len(stretch))
        factors: _Floats = (self.waiting + stretch) / (self.waiting + self.stretch)
        return factors

    def at(self, stretch: _Floats, workers: NDArray[np.integer[Any]], steps_ns: _Floats) -> _Floats:
        """The stretch by the law, where the stretch that was played made such steps."""
        if self.waiting is None or self.cpus is None:
            return np.ones(len(stretch))
        busy = np.minimum(workers, self.compute_ns * (self.waiting + stretch) / steps_ns)
        free = np.maximum(_LEAST_CPUS, self.cpus - self.rest_cpu_ns / steps_ns)
        return np.where(workers > 0, stretched(np.maximum(busy, 1.0), self.waiting, free), 1.0)

    def most(self, workers: NDArray[np.integer[Any]]) -> _Floats:
        """No stretch is more than this."""
        if self.waiting is None or self.cpus is None:
            return np.ones(len(workers))
        shortest_ns = np.full(len(workers), max(1.0, self.rest_cpu_ns / self.cpus))
        free = np.maximum(_LEAST_CPUS, self.cpus - self.rest_cpu_ns / shortest_ns)
        return np.where(workers > 0, stretched(np.maximum(workers, 1.0), self.waiting, free), 1.0)
