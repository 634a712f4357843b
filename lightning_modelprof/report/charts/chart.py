"""Charts and flame graphs: a specification plus a function of facts that draws it.

@chart("throughput", title="Throughput", help="Samples per second of each step.", views=("overview",))
def throughput(facts: Facts) -> Chart | None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.steps.phase_times import PhaseTime
from lightning_modelprof.report.specs import LAST, ChartSpec

_DrawT = TypeVar("_DrawT", bound=Callable[..., Any])

CHARTS: Final[list[ChartSpec[Any, Any]]] = []
TRACE_CHARTS: Final[list[ChartSpec[Any, Any]]] = []
FLAMES: Final[list[ChartSpec[Any, Any]]] = []
"""Charts of runs, charts of traces, and flame graphs in the imported files."""


def _adds_to(
    made: list[ChartSpec[Any, Any]],
) -> Callable[..., Callable[[_DrawT], _DrawT]]:
    def decorator(
        id: str,  # noqa: A002  # as the chart calls it
        *,
        title: str,
        help: str,  # noqa: A002  # same
        place: int = LAST,
        views: tuple[str, ...] = (),
    ) -> Callable[[_DrawT], _DrawT]:
        def add(draw: _DrawT) -> _DrawT:
            made.append(ChartSpec(id=id, title=title, draw=draw, help=help, place=place, views=views))
            return draw

        return add

    return decorator


chart = _adds_to(CHARTS)
trace_chart = _adds_to(TRACE_CHARTS)
flame = _adds_to(FLAMES)


MAX_BINS: Final = 400
"""Maximum bars across a chart: about two pixels each, and files don't grow with a run's length."""


def bin_starts(num_steps: int, max_bins: int = MAX_BINS) -> NDArray[np.int64]:
    """Return the index of each bin's first step; all bins but the last have the same size.

    Returns:
        int64, shape (bins,): 0, s, 2 s, ... with the smallest integer s that needs at most ``max_bins`` bins.
    """
    size = max(1, -(-num_steps // max_bins))
    return np.arange(0, num_steps, size, dtype=np.int64)


def bin_sizes(starts: NDArray[np.int64], num_steps: int) -> NDArray[np.int64]:
    """Return the number of steps in each bin; int64, shape (bins,)."""
    return np.diff(np.append(starts, num_steps))


def even_axis(numbers: Sequence[int], name: str, counted: str) -> tuple[int, str]:
    """Return an even axis's start and label; numbers with gaps are renumbered from 1.

    Args:
        numbers: ascending, at least one.
        name: what they number.
        counted: what is renumbered if there are gaps.
    """
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return numbers[0], name
    return 1, f"{counted}, renumbered from 1"


def bin_note(starts: NDArray[np.int64], num_steps: int, step: str, steps: str) -> str:
    size = int(bin_sizes(starts, num_steps)[0])
    return f"One point per {step}." if size == 1 else f"Each point is the mean of {size:,} {steps}."


MAX_LAYERS: Final = 7
"""Number of colors that are easy to tell apart, in addition to gray for the rest."""


def split_layers(phases: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """Split the measured phases into the largest and the rest, each in phase order."""
    measured = [phase for phase in phases if phase.total_ns]
    largest = sorted(measured, key=lambda phase: -(phase.total_ns or 0))[:MAX_LAYERS]
    return [phase for phase in measured if phase in largest], [
        phase for phase in measured if phase not in largest
    ]


def layer_notes(phases: Sequence[PhaseTime], rest: Sequence[PhaseTime]) -> tuple[str, ...]:
    """List the phases in the rest, and those without a measurement."""
    missing = [phase.label for phase in phases if phase.total_ns is None]
    notes = []
    if rest:
        notes.append(f"Other phases: {', '.join(phase.label for phase in rest)}.")
    if missing:
        notes.append(f"Not measured: {', '.join(missing)}.")
    return tuple(notes)
