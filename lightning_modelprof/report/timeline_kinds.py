"""What kind of slice each event of a timeline is, in plain words."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.names import is_collective_call, is_module, is_place
from lightning_modelprof.analysis.timeline.tally import distinct
from lightning_modelprof.analysis.timeline.timeline import Timeline as TraceTimeline
from lightning_modelprof.analysis.trace.dataloader import is_fetch
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX
from lightning_modelprof.trace.model import Category

_OF_CATEGORY: Final = {
    Category.OTHER: "other",
    Category.CPU_OP: "operator",
    Category.USER_ANNOTATION: "user range",
    Category.RUNTIME: "runtime call",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "memcpy",
    Category.MEMSET: "memset",
    Category.DEVICE_ANNOTATION: "device range",
    Category.PYTHON_FUNCTION: "python function",
    Category.DEVICE_SYNC: "synchronization",
    Category.OVERHEAD: "profiler overhead",
}
_STEP, _PHASE, _MODULE, _FETCH = "step", "phase", "module", "data loading"
_COMMUNICATION: Final = "communication"
WORDS: Final = (*_OF_CATEGORY.values(), _STEP, _PHASE, _MODULE, _FETCH, _COMMUNICATION)
"""All kinds that there are."""


def find_kinds(shared: TraceTimeline) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The kinds that occur, and for each event the position of its kind, shape (n,).

    Ranges are told apart by their names: a step, a phase or hook (of this package, of Lightning), a module, a
    fetch of a batch; all others are user ranges. Communication goes before everything else.
    """
    trace = shared.trace
    kind_of = np.zeros(256, np.int64)
    for category, word in _OF_CATEGORY.items():
        kind_of[category] = WORDS.index(word)
    kind: NDArray[np.int64] = kind_of[trace.category]
    kind[shared.is_annotation] = WORDS.index("user range")
    for test, word in (
        (is_place, _PHASE),
        (is_module, _MODULE),
        (is_fetch, _FETCH),
        (lambda name: name.startswith(STEP_RANGE_PREFIX), _STEP),
    ):
        kind[shared.is_annotation & trace.is_named(test)] = WORDS.index(word)
    on_host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    asks = on_host & trace.is_named(is_collective_call)
    kind[shared.is_communication | asks] = WORDS.index(_COMMUNICATION)
    used, place = distinct(kind, len(WORDS))
    return tuple(WORDS[index] for index in used.tolist()), place
