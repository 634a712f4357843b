"""What is known of how long a model or a stage of a pipeline took."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

Method = Literal["event", "synchronize", "wall"]

METHODS: Final = get_args(Method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How long something took that happened several times, in ns.

    Attributes:
        avg_ns: mean.
        p50_ns: median; percentiles are interpolated linearly between the two nearest values.
        p90_ns: nine of ten took no longer.
        p99_ns: 99 of 100 took no longer.
        min_ns: the shortest.
        max_ns: the longest.
    """

    avg_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    min_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTimes(Spread):
    """What ``benchmark_inference`` measured; the spread is that of single runs.

    Attributes:
        method: ``event``, ``synchronize`` or ``wall``.
        device: where the model ran.
        runs: runs that were timed.
        samples_per_s: samples of a run divided by ``avg_ns``; ``None`` if their number is unknown, and by
            ``wall`` on a device, where ``avg_ns`` is only the time of the launches.
        tokens_per_s: the same of ``tokens``.
        real_ns: host clock over all timed runs, with the wait for the device at their end.
        user_ns: CPU time of all threads of this process in its own code meanwhile.
        system_ns: CPU time of all threads of this process in the operating system meanwhile.
    """

    method: Method
    device: str
    runs: int
    samples_per_s: float | None
    tokens_per_s: float | None
    real_ns: int
    user_ns: int
    system_ns: int

    @property
    def fps(self) -> float | None:
        """Frames per second: ``samples_per_s`` where a sample is an image."""
        return self.samples_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What ``EventTimer`` measured of all calls of one stage, with what was nested in it.

    Attributes:
        name: as given.
        calls: how often the stage ran.
        real: host clock from entering to leaving the stage. Where a device works this is the time of the
            launches and of the CPU work, not the model's.
        device: elapsed time on the device's stream between the stage's two marks, with the time in which the
            device waited for the host. ``None`` on the CPU, or if no call could be measured.
        device_calls: the calls that ``device`` is of.
        user_ns: CPU time of all threads of this process in its own code, all calls together.
        system_ns: CPU time of all threads of this process in the operating system, all calls together.
    """

    name: str
    calls: int
    real: Spread
    device: Spread | None
    device_calls: int
    user_ns: int
    system_ns: int


def spread_of(times_ns: array[int]) -> dict[str, Any]:
    """The fields of ``Spread``."""
    values = np.array(times_ns, dtype=np.int64)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return {
        "avg_ns": float(values.mean()),
        "p50_ns": p50,
        "p90_ns": p90,
        "p99_ns": p99,
        "min_ns": int(values.min()),
        "max_ns": int(values.max()),
    }


def per_second(count: int | None, avg_ns: float) -> float | None:
    """``count`` in ``avg_ns``, as a rate; ``None`` if it is unknown or no time passed."""
    return None if count is None or avg_ns <= 0 else count * 1e9 / avg_ns
