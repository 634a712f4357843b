"""What a layer of the timeline is: a function that adds lanes to a drawn trace; see ``critical_path.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.report.dashboard_entry import DrawnTimeline

Draw = Callable[[DrawnTimeline, Timeline, NDArray[np.int64]], tuple[DrawnTimeline, NDArray[np.int64]]]
"""Takes the timeline, what all facts of the trace share, and the row of each slice in the trace (other
numbers for what is no event). Gives the timeline and the rows with its own slices added."""


class Layer(NamedTuple):
    """Lanes that are drawn from something other than the events of a trace."""

    draw: Draw
    is_on_top: bool


MADE: Final[list[Layer]] = []
"""All layers of the files that are imported, as they stand there."""


def layer(*, is_on_top: bool = False) -> Callable[[Draw], Draw]:
    """Make a layer of a function; one on top is drawn after all others."""

    def add(draw: Draw) -> Draw:
        MADE.append(Layer(draw, is_on_top))
        return draw

    return add
