"""Timeline layers: functions that add lanes to a drawn trace; see ``critical_path.py`` for an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.report.dashboard_entry import DrawnTimeline

Draw = Callable[[DrawnTimeline, Timeline, NDArray[np.int64]], tuple[DrawnTimeline, NDArray[np.int64]]]
"""Takes the timeline, the trace's shared facts, and each slice's row in the trace (other numbers for slices
that aren't events). Returns the timeline and the rows with its own slices added."""


class Layer(NamedTuple):
    """Lanes drawn from something other than a trace's events."""

    draw: Draw
    is_on_top: bool


MADE: Final[list[Layer]] = []
"""All layers of the imported files, in definition order."""


def layer(*, is_on_top: bool = False) -> Callable[[Draw], Draw]:
    """Register a layer; one on top is drawn after all others."""

    def add(draw: Draw) -> Draw:
        MADE.append(Layer(draw, is_on_top))
        return draw

    return add
